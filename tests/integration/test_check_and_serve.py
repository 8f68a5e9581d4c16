"""`check` says before the start what would end `serve`, on a broker that asks for logins and rights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from pipeline.cli.commands import main
from pipeline.local.server import free_port
from pipeline.settings.load import load, route_accepts
from pipeline.transports.registry import limit_notices, parse_url
from tests.conformance.kafka_harness import KafkaHarness
from tests.support.secured_kafka import WORKER, SecuredKafka
from tests.support.servers import ServerInfo

pytestmark = [pytest.mark.kafka, pytest.mark.real_kafka, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    server = SecuredKafka(tmp_path_factory.mktemp("secured"))
    yield server
    server.close()


class Setting:
    """A route whose topics exist, with all the rights that it needs but those that a case leaves out."""

    def __init__(self, secured: SecuredKafka, config: Path) -> None:
        self.secured, self.config = secured, config
        harness = KafkaHarness(ServerInfo(secured.plain, "apache", secured.server), partitions=1)
        self.topic, self.group = harness.topic, harness.group
        self.replies, self.dead = harness.reply_topic, harness.dead_letters
        for topic in (self.topic, self.replies, self.dead):
            asyncio.run(harness.create_topic(topic, 1))

    def allow(self, *, read: bool = True, group: bool = True) -> None:
        for topic in (self.replies, self.dead):
            self.secured.allow(WORKER, "topic", topic, ["WRITE"])
        self.secured.allow(WORKER, "topic", self.topic, ["READ"] if read else ["DESCRIBE"])
        if group:
            self.secured.allow(WORKER, "group", self.group, ["READ"])

    def write(self, route: str = "", **more: Any) -> None:
        options = self.secured.sasl_options(
            group=self.group, reply_topic=self.replies, dead_letter_topic=self.dead, auto_create="false",
            request_timeout_ms=2000, open_timeout_s=6,
        ) | more  # fmt: skip
        bootstrap = options.pop("bootstrap")
        query = urlencode(options).replace("+", "%20")
        self.config.write_text(
            f"[health]\nport = 0\n[models.tiny]\npath = 'no-such-folder'\n[[routes]]\nname = 'k'\n"
            f"source = 'kafka://{bootstrap}/{self.topic}?{query}'\n{route}\n"
        )


def no_right_on_the_topic(it: Setting) -> tuple[str, ...]:
    it.allow(read=False)
    it.write()
    return "READ on", it.topic


def no_right_on_the_group(it: Setting) -> tuple[str, ...]:
    it.allow(group=False)
    it.write()
    return "READ on the group", it.group


def no_right_on_transactions(it: Setting) -> tuple[str, ...]:
    it.allow()
    it.write("delivery = 'exactly_once'")
    return "WRITE", "transactional ids that begin with", it.group


def wrong_password(it: Setting) -> tuple[str, ...]:
    it.allow()
    it.write(sasl_password="guess")
    return "SaslAuthenticationFailed", it.secured.sasl


def unknown_authority(it: Setting) -> tuple[str, ...]:
    it.allow()
    it.write(ssl_cafile=str(it.secured.other_ca))
    return "ssl_cafile", it.secured.sasl


def nobody_there(it: Setting) -> tuple[str, ...]:
    address = f"127.0.0.1:{free_port()}"
    it.write(bootstrap=address)
    return (address, "check")


def registry_down(it: Setting) -> tuple[str, ...]:
    it.allow()
    url = f"http://127.0.0.1:{free_port()}"
    it.write(schema_registry_url=url)
    return (url,)


def destination_gone(it: Setting) -> tuple[str, ...]:
    it.allow()
    address = f"127.0.0.1:{free_port()}"
    it.write(f"destination = 'kafka://{address}/embedstream.elsewhere?open_timeout_s=3'")
    return (address,)


CASES = (
    no_right_on_the_topic,
    no_right_on_the_group,
    no_right_on_transactions,
    wrong_password,
    unknown_authority,
    nobody_there,
    registry_down,
    destination_gone,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_check_fails_where_serve_would_and_says_the_same(
    case: Any,
    secured: SecuredKafka,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """K49: one line each, with the same place and the same right or option in it."""
    config = tmp_path / "service.toml"
    words = case(Setting(secured, config))
    told = {}
    for command in ("check", "serve"):
        assert main([command, "-c", str(config)]) == 1, command
        told[command] = capsys.readouterr().err
    for command, text in told.items():
        lines = [line for line in text.splitlines() if all(word in line for word in words)]
        assert lines, (command, text)
        assert "guess" not in text.replace("guessed", "")


async def test_limits_that_differ_are_told_with_both_numbers(secured: SecuredKafka) -> None:
    """A request that the topic takes and the route refuses, one that the route takes and that cannot
    arrive, and a reply that fits nowhere: each names the setting to change."""
    harness = KafkaHarness(ServerInfo(secured.plain, "apache", secured.server), partitions=1)
    for topic in (harness.topic, harness.reply_topic):
        await harness.create_topic(topic, 1)
    address = f"kafka://{secured.plain}/{harness.topic}?reply_topic={harness.reply_topic}"
    for limit, more, words in (
        (5000, "", (harness.topic, "1048588", "5000", "limits.max_record_bytes")),
        (9_000_000, "", (harness.topic, "1048588", "9000000", "max.message.bytes")),
        (None, "&max_request_size=4096", ("max_request_size (4096)", "limits.max_metadata_bytes")),
        (None, "", ()),
    ):
        given = {"models.m.path": "x", "routes.k.source": address + more}
        if limit is not None:
            given["routes.k.limits.max_record_bytes"] = str(limit)
        settings = load(given, {}, None)
        (route,) = settings.routes
        notes = await limit_notices(parse_url(route.source), route_accepts(settings, route))
        assert len(notes) == (1 if words else 0), notes
        assert all(word in notes[0] for word in words), notes
