"""The benchmarks measure what they say: turns, sums, equal vectors, every request answered."""

from __future__ import annotations

import asyncio
import json
import platform
from pathlib import Path

import numpy as np
import pytest

from benchmarks import _common, pipeline
from benchmarks._common import Sample, interleave, machine_kind, table, write_results
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


@pytest.mark.parametrize(
    ("cpu", "units", "kind"),
    [
        ("AMD EPYC", "avx2", "avx2-amd"),
        ("Intel(R) Xeon(R) Processor", "avx2, avx512f, avx512_bf16, amx_bf16", "amx-intel"),
        ("AMD EPYC 9B14", "avx2, avx512f", "avx512-amd"),
        ("something new", "none listed", f"{platform.machine()}-other"),
    ],
)
def test_results_are_named_by_the_kind_of_machine(cpu: str, units: str, kind: str) -> None:
    assert machine_kind({"cpu": cpu, "vector units": units}) == kind


def test_kept_results_are_those_of_the_machine_in_their_name() -> None:
    kept = sorted(_common.RESULTS.glob("engine-*.json"))
    assert kept
    for path in kept:
        facts = json.loads(path.read_text("utf-8"))["machine"]
        assert path.stem == f"engine-{machine_kind(facts)}"
        assert f"- cpu: {facts['cpu']}" in path.with_suffix(".md").read_text("utf-8")


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


@pytest.mark.parametrize(("masked", "exported"), [(False, False), (True, False), (True, True)])
def test_the_fused_graph_is_the_same_model(tmp_path: Path, masked: bool, exported: bool) -> None:
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
        exported=exported,
    )
    session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
    ids = np.array([[3, 7, 9, 11, 4], [5, 6, 8, 0, 0]], np.int32)
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)
    feeds = {"input_ids": ids, "token_types": np.zeros_like(ids)} | (
        {"mask": mask} if masked else {}
    )
    if exported:
        names = {"token_types": "token_type_ids", "mask": "attention_mask"}
        feeds = {names.get(name, name): value.astype(np.int64) for name, value in feeds.items()}
    (hidden,) = session.run(["last_hidden_state" if exported else "hidden"], feeds)
    for row, n in enumerate(mask.sum(axis=1) if masked else (5, 5)):
        with torch.no_grad():
            wanted = model(torch.from_numpy(ids[row : row + 1, :n].astype(np.int64)))
        assert np.abs(hidden[row, :n] - wanted.last_hidden_state[0].numpy()).max() < 1e-4
