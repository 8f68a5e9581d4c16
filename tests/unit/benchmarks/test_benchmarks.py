"""The benchmarks measure what they say: turns, sums, equal vectors, every request answered."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import _common, pipeline
from benchmarks._common import Sample, interleave, table, write_results
from benchmarks._engines import OurEngine
from tests.support.models import write_model


def test_contestants_take_turns_part_by_part() -> None:
    seen: list[str] = []
    work = {name: [lambda n=name, p=p: seen.append(f"{n}{p}") for p in range(3)] for name in "ab"}
    samples = interleave(work, 2)
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 2, "b": 2}
    for start in range(0, len(seen), 2):
        part = start // 2 % 3
        assert sorted(seen[start : start + 2]) == [f"a{part}", f"b{part}"]


def test_parts_add_up_and_neighbours_are_weighted_by_time() -> None:
    whole = _common._sum([Sample(1.0, 0.5, 2.0), Sample(3.0, 1.0, 0.0)])
    assert whole == Sample(4.0, 1.5, 0.5)


def test_results_are_written_for_people_and_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_common, "RESULTS", tmp_path / "results")
    path = write_results("x", "Title", [table(["a", "b"], [[1, "two"]])], {"n": 1})
    text = path.read_text("utf-8")
    assert "# Title" in text and "| 1 | two |" in text and "- cpu: " in text
    assert json.loads(path.with_suffix(".json").read_text("utf-8"))["n"] == 1


@pytest.mark.parametrize("n_items", [1, 5])
def test_the_pipeline_benchmark_answers_every_request(n_items: int) -> None:
    records = pipeline.bodies(12, n_items)

    async def run() -> float:
        lane = pipeline.inproc()
        state = await lane.fill(records)
        assert await lane.bare(state) > 0
        return await pipeline.service(await lane.transport(state), len(records))

    assert asyncio.run(run()) > 0


TEXTS = ["a b c", "the quick brown fox", "a", "one two three four five six", "c b a", "b"] * 20


def test_our_engine_gives_each_text_its_own_vector(tmp_path: Path) -> None:
    engine = OurEngine(write_model(tmp_path / "m", "bert"), workers=2, empty_input="embed")
    try:
        together = engine(TEXTS)
        alone = np.concatenate([engine([text]) for text in TEXTS[:6]])
        assert np.array_equal(together[:6], alone) and np.array_equal(together[6:12], alone)
        assert len(engine.lengths(TEXTS)) == len(TEXTS)
    finally:
        engine.close()


@pytest.mark.parametrize("masked", [False, True])
def test_the_fused_graph_is_the_same_model(tmp_path: Path, masked: bool) -> None:
    ort = pytest.importorskip("onnxruntime", reason="needs the extra `bench`")
    torch = pytest.importorskip("torch")
    from transformers import AutoModel

    from benchmarks._onnx_graph import fused_bert

    model = AutoModel.from_pretrained(write_model(tmp_path / "m", "bert")).eval()
    config = model.config
    graph = fused_bert(
        {name: value.numpy() for name, value in model.state_dict().items()},
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        eps=config.layer_norm_eps,
        masked=masked,
    )
    session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
    ids = np.array([[3, 7, 9, 11, 4], [5, 6, 8, 0, 0]], np.int32)
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)
    feeds = {"input_ids": ids, "token_types": np.zeros_like(ids)} | (
        {"mask": mask} if masked else {}
    )
    (hidden,) = session.run(["hidden"], feeds)
    for row, n in enumerate(mask.sum(axis=1) if masked else (5, 5)):
        with torch.no_grad():
            wanted = model(torch.from_numpy(ids[row : row + 1, :n].astype(np.int64)))
        assert np.abs(hidden[row, :n] - wanted.last_hidden_state[0].numpy()).max() < 1e-4
