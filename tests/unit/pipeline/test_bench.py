"""`embedstream bench`: what it asks, how it counts, what it shows."""

from __future__ import annotations

import asyncio
import itertools
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu.device.ceiling import gemm_gflops
from pipeline.bench.load import Step, closed_loop, open_loop
from pipeline.bench.plot import svg
from pipeline.bench.workload import Mix, endless, texts_of
from pipeline.cli.commands import main
from tests.support.models import write_model


def numbers() -> Iterator[str]:
    return (str(number) for number in itertools.count())


def test_a_mix_draws_its_lengths_by_their_shares_and_the_same_again() -> None:
    mix = Mix.parse("16:3, 64")
    texts = list(itertools.islice(mix.texts(1), 4000))
    lengths = [len(text.split()) + 2 for text in texts]
    assert set(lengths) == {16, 64} and 2800 < lengths.count(16) < 3200
    assert texts[:50] == list(itertools.islice(mix.texts(1), 50))
    assert texts[:50] != list(itertools.islice(mix.texts(2), 50))


@pytest.mark.parametrize("text", ["", "x", "16:", "16:x", "2", "16:0", "16:-1", "16:nan", "16;3"])
def test_what_is_no_mix_is_refused(text: str) -> None:
    if text == "16:":
        assert Mix.parse(text) == Mix((16,), (1.0,))
        return
    with pytest.raises(ValueError, match=r"share|SHARE"):
        Mix.parse(text)


def test_a_file_of_texts_and_records_is_asked_over_and_over(tmp_path: Path) -> None:
    path = tmp_path / "texts"
    path.write_text('one\n\n{"input": "two"}\n{"text": "three", "id": 1}\n')
    assert texts_of(path) == ("one", "two", "three")
    rounds = list(itertools.islice(endless(texts_of(path), 1), 30))
    assert all(set(rounds[i : i + 3]) == {"one", "two", "three"} for i in range(0, 30, 3))
    for bad in ("", "{}", '{"input": ["a"]}', "{", '{"text": " "}'):
        path.write_text(bad)
        with pytest.raises(ValueError, match="text"):
            texts_of(path)


async def test_an_open_loop_sends_when_it_is_time_and_a_stall_is_seen_by_all_that_waited() -> None:
    """One slow answer does not hold up the others, and whoever was due during a stall waited for it."""
    asked: list[str] = []
    gate = asyncio.Event()

    async def ask(text: str) -> int:
        asked.append(text)
        if text == "0":
            await gate.wait()
        elif len(asked) == 20:
            gate.set()
        return 3

    step = await open_loop(ask, numbers(), rate=400, seconds=0.5)
    assert len(asked) > 20 and len(step.latencies_s) == len(asked) and step.tokens == 3 * len(asked)
    first, others = step.latencies_s.index(max(step.latencies_s)), sorted(step.latencies_s)
    assert first > 0 and others[-1] > others[len(others) // 2]


async def test_what_is_not_answered_stands_behind_all_that_was() -> None:
    async def ask(text: str) -> int:
        if int(text) % 10 == 9:
            raise TimeoutError("no answer")
        if int(text) % 10 == 8:
            raise ValueError("too_long: it is")
        return 1

    step = await closed_loop(ask, itertools.islice(numbers(), 100_000), 0.05, concurrent=1)
    assert step.failed and step.first_failure == "ValueError: too_long: it is"
    assert step.latency_s(0.5) is not None and step.latency_s(0.99) is None


def test_percentiles_are_nearest_ranks() -> None:
    step = Step(1.0, seconds=2.0, tokens=10, latencies_s=[i / 100 for i in range(100, 0, -1)])
    assert [step.latency_s(share) for share in (0.01, 0.5, 0.95, 0.99, 1.0)] == [
        0.01, 0.5, 0.95, 0.99, 1.0,
    ]  # fmt: skip
    assert (step.texts_per_s, step.tokens_per_s) == (50, 5)
    assert Step(1.0).latency_s(0.5) is None and Step(1.0).texts_per_s == 0


def test_the_plot_is_a_picture_of_every_rate_and_hides_no_failure() -> None:
    steps = [Step(rate, latencies_s=[0.001 * rate, 0.002 * rate, 0.2]) for rate in (10.0, 50.0)]
    steps.append(Step(100.0, latencies_s=[0.5], failed=3))
    root = ElementTree.fromstring(svg(steps, "a <model> & a machine"))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"a <model> & a machine", "p50", "p95", "p99", "not all answered"} <= set(texts)
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == 6  # nothing is known of the slowest where most were not answered
    with pytest.raises(ValueError, match="nothing to draw"):
        svg([Step(1.0, failed=1)], "none")


def test_the_ceiling_is_a_rate() -> None:
    assert gemm_gflops(1, seconds=0.05) > 0


@pytest.mark.timeout(120)
def test_a_model_is_measured_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "tiny")
    plot = tmp_path / "latency.svg"
    command = ["bench", "--model", str(model), "--tokens", "8", "--seconds", "0.5"]
    assert main([*command, "--rates", "5,20", "--plot", str(plot), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["what"] == "tiny" and told["closed_loop"]["texts_per_s"] > 0
    assert [step["rate"] for step in told["open_loops"]] == [5, 20]
    assert set(told["busy"]) == {
        "tokenizer",
        "event loop",
        *(k for k in told["busy"] if "forw" in k),
    }
    assert told["gflops"] > 0 and told["ceiling_gflops"] > 0 and told["limit"]
    ElementTree.fromstring(plot.read_text())
    assert main([*command, "--rates", "20"]) == 0
    shown = capsys.readouterr().out
    assert "as fast as it goes" in shown and "what limits: " in shown and "p99 ms" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rates", "0"], "--rates"),
        (["--rates", "fast"], "--rates"),
        (["--tokens", "1"], "--tokens"),
        (["--texts", "nowhere.txt"], "--texts"),
        (["--texts", "a", "--tokens", "16"], "give one"),
        (["--plot", "/nowhere/x.svg"], "--plot"),
    ],
)
def test_a_wrong_option_is_one_line_before_anything_is_loaded(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) in (1, 2)
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
