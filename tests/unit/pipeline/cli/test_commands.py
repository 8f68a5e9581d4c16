"""The command line: one-line errors, exit statuses, output forms, help that starts quickly."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from rich.console import Console
from typer.testing import CliRunner

import pipeline.demo.fetch
import pipeline.oneoff
from gpu.batch import PackedBatch
from pipeline.cli import commands as cli
from pipeline.cli.ask import MAX_CONCURRENT, MAX_LINE_BYTES
from pipeline.cli.commands import main
from tests.support.fakes import DIMENSIONS, FakeRunner, fake_ids, fake_vector

ROOT = Path(__file__).parents[4]
HEAVY = ("torch", "transformers", "aiokafka", "redis", "rich", "asyncio", "numpy", "structlog")


@pytest.fixture(autouse=True)
def quiet_logging() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    import logging

    root = logging.getLogger()
    for handler in [h for h in root.handlers if type(h).__name__ == "_ForeignHandler"]:
        root.removeHandler(handler)
    root.setLevel(logging.WARNING)
    logging.captureWarnings(False)


@pytest.fixture
def fake_service(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """One-off commands get a fake model; `seen` tells which models were asked for."""
    seen: dict[str, Any] = {"runner": FakeRunner(max_tokens=6, labels=("bad", "good"))}
    real = pipeline.oneoff.run_inproc

    def run_inproc(settings: Any, **kwargs: Any) -> Any:
        seen["settings"] = settings
        name = next(iter(settings.models))
        return real(settings, runner_factories={name: lambda: seen["runner"]}, **kwargs)

    monkeypatch.setattr(pipeline.oneoff, "run_inproc", run_inproc)
    monkeypatch.setattr(
        pipeline.demo.fetch, "resolve_model", lambda name, **kwargs: f"/models/{name}"
    )
    return seen


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[bytes], None]]:
    """Standard input as a regular file; calling it sets the content."""
    opened: list[Any] = []

    def set_content(content: bytes) -> None:
        path = tmp_path / "stdin"
        path.write_bytes(content)
        opened.append(path.open("r"))
        monkeypatch.setattr(sys, "stdin", opened[-1])

    yield set_content
    for file in opened:
        file.close()


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def embedstream(*arguments: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EMBEDSTREAM_")}
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=50, env=environment, **kwargs,
    )  # fmt: skip


# --- start -----------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    """What makes `--help` quick, asserted without a clock."""
    code = (
        "import sys\nfrom pipeline.cli.commands import main\n"
        "status = main(['--help'])\n"
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "print(status, heavy, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    status, heavy = done.stderr.strip().split(" ", 1)
    assert status == "0" and heavy.strip() in ("[]", "['asyncio']"), done.stderr
    assert "embedstream demo" in done.stdout


COMMANDS = [
    "serve",
    "up",
    "demo",
    "embed",
    "rerank",
    "classify",
    "check",
    "config",
    "models",
    "sign",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_teaches(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert len(result.output.splitlines()) > 5
    if command in ("serve", "demo", "embed", "rerank", "classify", "sign"):
        assert f"embedstream {command}" in result.output  # an example to copy
    assert command in CliRunner().invoke(cli.app, ["--help"]).output


def test_the_module_and_the_script_are_the_same() -> None:
    assert embedstream("--version").stdout.startswith("embedstream ")
    assert main(["--version"]) == 0


# --- errors are one line with the remedy -----------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serv"], ["serv", "serve"]),
        (["serve", "--confg", "x"], ["--confg", "--config", "serve --help"]),
        (["embed"], ["TEXT", "embed --help"]),
        (["embed", "a", "--output", "csv"], ["--output", "jsonl"]),
        (["embed", "a", "--output", "npz"], ["--out"]),
        (["embed", "a", "--timeout", "0"], ["--timeout"]),
        (["embed", "a", "--timeout", "nan"], ["--timeout"]),
        (["embed", "a", "--via", "http://localhost"], ["--via", "redis://"]),
        (["embed", "a", "--via", "file:///x"], ["--via", "redis://"]),
        (["rerank", "only a query"], ["query", "document"]),
        (["classify", "a"], ["--model", "--via"]),
        (["demo", "--documents", "0"], ["--documents"]),
        (["demo", "--documents", "many"], ["--documents"]),
        (["up", "--kafka-port", "99999"], ["--kafka-port", "65535"]),
        (["serve"], ["route", "--source"]),
        (["serve", "--set", "nonsense"], ["--set", "nonsense"]),
        (["serve", "--config", "/nowhere.toml"], ["/nowhere.toml", "--config"]),
        (["serve", "-m", "m", "--source", "redis://:hunter2@h/q?x=1"], ["routes.0.source", "x"]),
        (["config", "--set", "batching.linger_ms=-1"], ["batching.linger_ms", "0 to 10000"]),
        (["config", "--set", "publish.split_replies=maybe"], ["publish.split_replies", "true"]),
        (["embed", "a", "--out", "/nowhere/x.jsonl", "-o", "jsonl"], ["/nowhere", "--out"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_wrong_use_is_one_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """G11, C13: exit status 2 (1 for what is no usage), the setting's name, no traceback."""
    status = main(arguments)
    captured = capsys.readouterr()
    assert status == (1 if "/nowhere/x.jsonl" in arguments or "--via" in arguments else 2)
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1, captured.err
    assert captured.err.startswith("embedstream: ")
    assert "Traceback" not in captured.err and "hunter2" not in captured.err
    for word in words:
        assert word in captured.err, captured.err


def test_every_settings_problem_has_its_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "-s", "a.b=1", "-s", "log.level=loud", "-s", "health.port=-1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


@pytest.mark.parametrize("place", [0, 1, 4])
def test_traceback_only_with_debug(place: int, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["config", "--set", "log.level=loud"]
    assert main([*arguments[:place], "--debug", *arguments[place:]]) == 2
    assert "Traceback" in capsys.readouterr().err
    assert main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_unexpected_error_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode() -> int:
        raise KeyError("first\nsecond")

    monkeypatch.setattr("pipeline.cli.models.list_", explode)
    assert main(["models", "list"]) == 1
    captured = capsys.readouterr().err
    assert len(captured.splitlines()) == 1 and "KeyError" in captured and "--debug" in captured


def test_ctrl_c_is_one_line_and_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.cli.models.list_", interrupt)
    assert main(["models", "list"]) == 130
    assert capsys.readouterr().err == "embedstream: interrupted\n"


def test_statuses_of_a_real_process() -> None:
    assert embedstream("--help").returncode == 0
    wrong = embedstream("serve", "--nonsense")
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1
    refused = embedstream("embed", "x", "--via", "redis://127.0.0.1:1/q")
    assert refused.returncode == 1 and len(refused.stderr.splitlines()) == 1
    assert "check that" in refused.stderr
    kafka = embedstream("embed", "x", "--via", "kafka://127.0.0.1:1/q")
    assert kafka.returncode == 1 and len(kafka.stderr.splitlines()) == 1, kafka.stderr


def test_serve_says_in_its_own_words_what_it_cannot_reach() -> None:
    """K47: no library's error line beside ours."""
    done = embedstream(
        *("serve", "--source", "kafka://127.0.0.1:1/q", "--model", "/m", "--health-port", "0"),
        *("--log-format", "json"),
    )
    *logged, told = done.stderr.splitlines()
    assert done.returncode == 1 and told.startswith(
        "embedstream: route kafka: Kafka at 127.0.0.1:1"
    )
    assert [line for line in logged if json.loads(line)["level"] in ("warning", "error")] == []


def test_ctrl_c_while_a_pipe_is_open_ends_at_once() -> None:
    """A reader of stdin that sits in a thread would hang until the next line."""
    code = (
        "import asyncio, sys\n"
        "from pipeline.cli.ask import _stdin_lines\n"
        "async def main():\n"
        "    print('up', flush=True)\n"
        "    async for line in _stdin_lines(): print(line, flush=True)\n"
        "try: asyncio.run(main())\n"
        "except KeyboardInterrupt: sys.exit(130)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.stdin.write(b"one\ntwo")
        process.stdin.flush()
        assert process.stdout.readline() == b"b'one\\n'\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.wait()
        process.stdin.close()  # type: ignore[union-attr]
        process.stdout.close()  # type: ignore[union-attr]


# --- settings --------------------------------------------------------------------------------------


def test_config_prints_values_and_origins_without_secrets(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "s.toml"
    file.write_text(
        '[[routes]]\nname = "r"\nsource = "redis://:hunter2@h/q"\n[models.m]\npath = "x"\n'
    )
    monkeypatch.setenv("EMBEDSTREAM_LOG__LEVEL", "error")
    assert main(["config", "-c", str(file), "-s", "health.port=0"]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out and "redis://:***@h/q" in out
    assert re.search(r"log\.level = error +# EMBEDSTREAM_LOG__LEVEL", out)
    assert re.search(r"health\.port = 0 +# --set health\.port", out)
    assert re.search(rf"routes\.0\.name = r +# {re.escape(str(file))}:2", out)
    monkeypatch.setenv("EMBEDSTREAM_CONFIG", str(file))
    assert main(["config"]) == 0
    assert "routes.0.name = r" in capsys.readouterr().out


def test_serve_flags_become_routes_and_models(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    async def serve(settings: Any) -> int:
        seen.append(settings)
        return 3

    monkeypatch.setattr("pipeline.cli.serve._serve", serve)
    arguments = ["serve", "--source", "redis://a/q", "--source", "redis://b/q", "--source"]
    arguments += ["kafka://c/q", "--model", "/models/mini.lm", "--health-port", "0"]
    assert main(arguments) == 3  # the service's own status
    settings = seen[0]
    assert [r.name for r in settings.routes] == ["redis", "redis-2", "kafka"]
    assert [r.lane for r in settings.routes] == ["interactive", "interactive", "bulk"]
    assert {n: m.path for n, m in settings.models.items()} == {"mini-lm": "/models/mini.lm"}
    assert settings.health.port == 0


@pytest.mark.parametrize("command", [["serve", "--source", "redis://a/q"], ["config"]])
def test_the_demo_models_are_for_commands_that_try_things_out(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A service with a forgotten [models] table must not start on a model that nobody chose."""
    status = main(command)
    captured = capsys.readouterr()
    assert "MiniLM" not in captured.out + captured.err
    if command[0] == "serve":
        assert status == 2 and "models: is empty" in captured.err and "--model" in captured.err


def test_up_and_demo_get_their_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import pipeline.demo.run
    import pipeline.local.up

    seen: list[tuple[Any, dict[str, Any]]] = []

    async def run(options: Any, **kwargs: Any) -> int:
        seen.append((options, kwargs))
        return 0

    monkeypatch.setattr(pipeline.local.up, "run_up", run)
    monkeypatch.setattr(pipeline.demo.run, "run_demo", run)
    monkeypatch.delenv("KAFKA_HOME", raising=False)
    ready = tmp_path / "ready.json"
    assert (
        main(["up", "--kafka-port", "9092", "--ready-file", str(ready), "-s", "log.level=error"])
        == 0
    )
    options, kwargs = seen.pop()
    assert (options.kafka_port, options.redis_port, options.kafka_home) == (9092, 0, None)
    assert options.ready_file == ready and not options.stop_with_parent
    assert kwargs["settings"].log.level == "error" and kwargs["metrics"] is not None
    monkeypatch.setenv("KAFKA_HOME", str(tmp_path))
    assert main(["up", "--stop-with-parent"]) == 0
    options, _ = seen.pop()
    assert options.kafka_home == tmp_path and options.stop_with_parent
    assert main(["demo", "-n", "50", "--in-process", "--no-prompt"]) == 0
    options, _ = seen.pop()
    assert (options.documents, options.in_process, options.prompt) == (50, True, False)
    assert options.has_kafka
    assert main(["demo"]) == 0
    assert seen.pop()[0].prompt is None


# --- one-off questions -----------------------------------------------------------------------------


def test_embed_as_json_lines_is_the_wire_reply_with_floats(
    fake_service: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", "one text", "another", "-o", "jsonl"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    (reply,) = lines_of(captured.out)
    assert [d["index"] for d in reply["data"]] == [0, 1]
    expected = fake_vector(fake_ids("one text"))

    np.testing.assert_allclose(reply["data"][0]["embedding"], expected, rtol=1e-6)
    assert reply["dimensions"] == DIMENSIONS and reply["usage"]["total_tokens"] == 3
    assert list(fake_service["settings"].models) == ["all-MiniLM-L6-v2"]  # not the reranker too


def test_normalize_takes_the_words_that_settings_take(
    fake_service: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """G11: `--normalize False` and `--normalize=0` mean what they say; anything else names it."""
    from pipeline.cli import ask as cli_ask

    seen: list[Any] = []
    monkeypatch.setattr(cli_ask, "run", lambda command: seen.append(command.options) or 0)
    for arguments in (["--normalize", "False"], ["--normalize=0"], ["--normalize", "TRUE"]):
        assert main(["embed", "x", *arguments]) == 0
    assert [options["normalize"] for options in seen] == [False, False, True]
    assert main(["embed", "x", "--normalize", "maybe"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "--normalize" in err and "true or false" in err


def test_tables_for_people(
    fake_service: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", "one [red]text[/red]"]) == 0
    out = capsys.readouterr().out
    assert "one [red]text[/red]" in out and "\x1b" not in out and f" {DIMENSIONS} " in out
    assert main(["rerank", "query", "a", "b c"]) == 0
    out = capsys.readouterr().out
    assert "rank" in out and len(out.splitlines()) == 3
    assert list(fake_service["settings"].models) == ["ms-marco-MiniLM-L-12-v2"]
    assert main(["classify", "a", "--model", "/my/model"]) == 0
    out = capsys.readouterr().out
    assert "good" in out and "bad" in out
    assert fake_service["settings"].models["model"].path == "/models//my/model"


def test_rerank_options_reach_the_service(
    fake_service: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rerank", "q", "a", "b", "c", "--top-n", "2", "-o", "jsonl"]) == 0
    (reply,) = lines_of(capsys.readouterr().out)
    scores = [r["relevance_score"] for r in reply["results"]]
    assert len(scores) == 2 and scores == sorted(scores, reverse=True)


def test_lines_of_stdin_answer_in_order_and_a_bad_one_fails_alone(
    fake_service: dict[str, Any],
    stdin: Callable[[bytes], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    stdin(
        b'{"id": "a", "input": "one"}\n'
        b"not json\n"
        b"\n"
        b'{"id": "a", "input": ["two", "too long for this fake model to take"]}\n'
        b'{"id": 7, "input": "x"}\n'
        b'{"input": "x", "dimensionz": 3}\n'
        b'{"query": "q", "documents": ["d"], "encoding": "float", "metadata": {"k": 1}}\n'
        b'{"task": "cancel", "id": "a"}\n'
        b"[1]"
    )
    assert main(["embed", "-", "-o", "jsonl"]) == 1
    captured = capsys.readouterr()
    replies = lines_of(captured.out)
    assert [r["id"] for r in replies] == [
        "a", "line-2", "a", "line-5", "line-6", "line-7", "line-8", "line-9",
    ]  # fmt: skip
    assert replies[2]["data"][1]["error"]["code"] == "too_long"
    assert "embedding" in replies[2]["data"][0]
    assert replies[4]["error"]["path"] == "$.dimensionz"
    assert replies[5]["results"][0]["index"] == 0 and replies[5]["metadata"] == {"k": 1}
    assert all(r["error"]["code"] == "invalid_request" for r in replies[6:])
    assert len(captured.err.splitlines()) == 6  # the first five, and how many more
    assert "and 1 more failures" in captured.err


def test_many_lines_are_bounded_in_flight(
    fake_service: dict[str, Any],
    stdin: Callable[[bytes], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    n = 10 * MAX_CONCURRENT
    most = 0

    def count(batch: PackedBatch) -> None:
        nonlocal most
        most = max(most, batch.n_items)

    fake_service["runner"] = FakeRunner(max_batch_tokens=100_000, before_forward=count)
    stdin(b"".join(b'{"id": "%d", "input": "text %d"}\n' % (i, i) for i in range(n)))
    assert main(["embed", "-", "-o", "jsonl"]) == 0
    replies = lines_of(capsys.readouterr().out)
    assert [r["id"] for r in replies] == [str(i) for i in range(n)]
    assert 1 < most <= MAX_CONCURRENT + 2
    for i in (0, n // 2, n - 1):
        np.testing.assert_allclose(
            replies[i]["data"][0]["embedding"], fake_vector(fake_ids(f"text {i}")), rtol=1e-6
        )


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_an_endless_line_is_refused_in_bounded_memory(
    kind: str,
    fake_service: dict[str, Any],
    stdin: Callable[[bytes], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = b'{"input": "' + b"a" * (2 * MAX_LINE_BYTES) + b'"}\n{"id": "next", "input": "x"}\n'
    if kind == "file":
        stdin(content)
        assert main(["embed", "-", "-o", "jsonl"]) == 1
    else:
        read, write = os.pipe()
        writer = threading.Thread(target=lambda: _write_all(write, content), daemon=True)
        writer.start()
        with os.fdopen(read, "r") as reader:
            monkeypatch.setattr(sys, "stdin", reader)
            assert main(["embed", "-", "-o", "jsonl"]) == 1
        writer.join(10)
    first, second = lines_of(capsys.readouterr().out)
    assert "longer than" in first["error"]["message"] and second["id"] == "next"


def _write_all(descriptor: int, content: bytes) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def test_npz_holds_arrays_and_lists_failures(
    fake_service: dict[str, Any], stdin: Callable[[bytes], None], tmp_path: Path
) -> None:
    stdin(b'{"id": "a", "input": ["one", "two three"]}\nbad\n{"id": "b", "input": ["", "x"]}\n')
    out = tmp_path / "v.npz"
    assert main(["embed", "-", "-o", "npz", "--out", str(out)]) == 1
    with np.load(out) as archive:
        assert archive["embeddings"].shape == (3, DIMENSIONS)
        assert archive["embeddings"].dtype == np.float32
        np.testing.assert_allclose(archive["embeddings"][1], fake_vector(fake_ids("two three")))
        assert archive["ids"].tolist() == ["a", "a", "b"]
        assert archive["index"].tolist() == [0, 1, 1]
        assert archive["error_ids"].tolist() == ["line-2", "b"]
        assert archive["error_index"].tolist() == [-1, 0]
        assert archive["error_codes"].tolist() == ["invalid_request", "empty_input"]
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


def test_npz_of_scores(fake_service: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "s.npz"
    assert main(["rerank", "q", "a", "b", "-o", "npz", "--out", str(out)]) == 0
    with np.load(out) as archive:
        assert archive["scores"].shape == (2,)
    assert main(["classify", "a", "b", "-m", "/x", "-o", "npz", "--out", str(out)]) == 0
    with np.load(out) as archive:
        assert archive["scores"].shape == (2, 2) and archive["labels"].tolist() == ["bad", "good"]


def test_results_can_go_to_a_file(
    fake_service: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "replies.jsonl"
    assert main(["embed", "x", "-o", "jsonl", "--out", str(out)]) == 0
    assert capsys.readouterr().out == ""
    assert len(lines_of(out.read_text())) == 1
    table = tmp_path / "table.txt"
    assert main(["embed", "x", "--out", str(table)]) == 0
    assert "index" in table.read_text()


def test_a_text_that_is_no_utf8_is_refused(
    fake_service: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", "a\udcff", "-o", "jsonl"]) == 1
    (reply,) = lines_of(capsys.readouterr().out)
    assert reply["error"]["code"] == "invalid_request"


def test_texts_may_begin_with_a_dash(
    fake_service: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", "-o", "jsonl", "--", "--debug", "-x"]) == 0
    (reply,) = lines_of(capsys.readouterr().out)
    assert len(reply["data"]) == 2


def test_a_model_that_cannot_be_had_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", "x", "--model", "no-such-model"]) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "no-such-model" in err and "--model" in err


def test_a_closed_pipe_ends_quietly(fake_service: dict[str, Any]) -> None:
    code = (
        "import sys\nfrom pipeline.cli import commands as cli\n"
        "def flood():\n"
        "    while True: print('x' * 1000)\n"
        "import pipeline.cli.models as m\nm.list_ = flood\n"
        "sys.exit(cli.main(['models', 'list']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(20) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_an_error_of_a_model_does_not_put_user_text_into_the_log(
    fake_service: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """I05: the marker is in the request, in the exception, and nowhere on stderr."""
    marker = "MARKER-8e1"

    def fail(batch: PackedBatch) -> None:
        raise RuntimeError(f"cannot embed {marker}")

    fake_service["runner"] = FakeRunner(before_forward=fail)
    assert main(["embed", marker, "-o", "jsonl"]) == 1
    captured = capsys.readouterr()
    assert marker not in captured.err and marker not in captured.out
    assert "model_error" in captured.out


# --- check, models ---------------------------------------------------------------------------------


@pytest.fixture
def fake_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    import pipeline.model_pool
    from pipeline.lifecycle import OperatorError

    real = pipeline.model_pool.load_models

    async def load_models(settings: Any, **kwargs: Any) -> Any:
        (name,) = settings.models
        if settings.models[name].path == "broken":
            raise OperatorError(f"models.{name} does not load: no weights; name another folder")
        return await real(settings, factories={name: lambda: FakeRunner(name=name)}, **kwargs)

    monkeypatch.setattr(pipeline.model_pool, "load_models", load_models)


def test_check_prints_the_plan(
    fake_loading: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.touch()
    arguments = ["-s", f"routes.files.source=file://{source}?replies={tmp_path}/out.jsonl"]
    arguments += ["-s", "models.m.path=x", "-s", "limits.max_items=77"]
    assert main(["check", *arguments]) == 0
    out = capsys.readouterr().out
    for words in ("Fake", "packed; attention sdpa; linears torch; layers transformers", "max_batch_tokens 64", "files",
                  "embed, rerank, classify, score: m", "reply_to of the request"):  # fmt: skip
        assert words in out, out
    assert re.search(r"limits\.max_items = 77 +# --set limits\.max_items", out)


def test_check_reports_everything_that_is_wrong(
    fake_loading: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """K35: brokers first, and with them all right every model."""
    models = ["-s", "models.m.path=broken", "-s", "models.n.path=broken"]
    routes = ["-s", "routes.a.source=redis://127.0.0.1:1/q"]
    routes += ["-s", "routes.b.source=file:///nowhere.jsonl"]
    assert main(["check", *models, *routes]) == 1
    captured = capsys.readouterr()
    problems = [line for line in captured.err.splitlines() if line.startswith("problem: ")]
    assert {line.split(":")[1] for line in problems} == {" route a", " route b"}
    assert "not loaded" in captured.out and "(not reached)" in captured.out
    assert main(["check", *models, "-s", "routes.a.source=-"]) == 1
    captured = capsys.readouterr()
    assert [line.split(":")[1] for line in captured.err.splitlines()] == [
        " models.m does not load", " models.n does not load",
    ]  # fmt: skip
    assert "does not load" in captured.out


def test_check_of_wrong_settings_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "-s", "log.level=loud"]) == 1
    assert "log.level" in capsys.readouterr().err


def test_without_a_command_the_help_is_printed_as_it_is() -> None:
    alone, asked = embedstream(), embedstream("--help")
    assert alone.returncode == 2 and asked.returncode == 0
    assert alone.stderr.strip() == asked.stdout.strip() and alone.stdout == ""


def test_models_list_fits_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.cli.models.out_console", lambda: Console(width=60))
    assert main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("folder:")) <= 60
    assert any(line.startswith("all-MiniLM-L6-v2") and "Apache-2.0" in line for line in lines)


def test_without_torch_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "torch" else real(name)
    )
    assert main(["embed", "x", "--model", str(ROOT)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "torch is not installed" in line and "pip install torch" in line


@pytest.mark.parametrize(
    ("shell", "environment"),
    [
        ("bash", {"COMP_WORDS": "embedstream em", "COMP_CWORD": "1"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "embedstream em"}),
        (
            "fish",
            {"_TYPER_COMPLETE_ARGS": "embedstream em", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
        ),
    ],
)
def test_shells_get_a_script_and_completions(shell: str, environment: dict[str, str]) -> None:
    def ask(what: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pipeline"], cwd=ROOT, capture_output=True, text=True,
            timeout=50, env={**os.environ, **environment, "_EMBEDSTREAM_COMPLETE": what},
        )  # fmt: skip
        assert not done.stderr
        return done.stdout

    assert "_EMBEDSTREAM_COMPLETE=complete_" + shell in ask(f"source_{shell}")
    assert "embed" in ask(f"complete_{shell}") and "rerank" not in ask(f"complete_{shell}")
    assert f"source_{shell}" in (ROOT / "docs" / "operations.md").read_text()


def test_models_list_and_fetch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMBEDSTREAM_MODELS", str(tmp_path))
    assert main(["models", "list"]) == 0
    out = capsys.readouterr().out
    assert "all-MiniLM-L6-v2" in out and str(tmp_path) in out
    assert main(["models", "fetch", "nonsense"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    fetched: list[str] = []

    def ensure_model(name: str, *, progress: Callable[[str, int, int], None]) -> Path:
        progress("downloading", 1, 2)
        fetched.append(name)
        return tmp_path / name

    monkeypatch.setattr(pipeline.demo.fetch, "ensure_model", ensure_model)
    assert main(["models", "fetch"]) == 0
    assert len(fetched) == 2
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / name) for name in fetched]


def test_stdout_of_tables_is_plain_without_a_terminal(
    fake_service: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["embed", "x"]) == 0
    stream.flush()
    assert b"\x1b" not in stream.buffer.getvalue()  # type: ignore[attr-defined]
