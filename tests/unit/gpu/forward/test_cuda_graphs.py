"""Graphs over token buckets, recorded and replayed on the CPU: same numbers, L + 1 pieces, fallbacks."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from gpu.batch import EncodedItem, ItemOptions, pack
from gpu.faults import ModelLoadError
from gpu.forward.cuda_graphs import CudaRecorder, GraphedForward, GraphRefused, record, with_graphs
from gpu.forward.packed import PackedForward
from gpu.forward.token_buckets import bucket_of, buckets, filled, probe
from gpu.load import make_runner_factory
from tests.support.models import FAMILY_NAMES, LAYERS, write_model
from tests.support.models_encoders import ENCODER_NAMES
from tests.support.recorded import CpuRecorder

CPU = torch.device("cpu")
READS = "the model's own code reads the pack (max_seqlen)"
STOPS = "ReadWhileRecording: operation not permitted when stream is capturing"
REFUSED = {
    "mpnet": READS, "t5": READS, "mt5": READS, "umt5": READS, "deberta-v2": STOPS, "rembert": STOPS,
}  # fmt: skip
GRAPHED = ("bert", "qwen3", "modernbert", "xlm-roberta", "mistral")


def forward_of(runner: Any) -> PackedForward:
    forward = runner._forward
    assert isinstance(forward, PackedForward), runner.info.notes
    return forward


def some_items(lengths: tuple[int, ...], seed: int = 3) -> list[EncodedItem]:
    rng = np.random.default_rng(seed)
    return [EncodedItem(rng.integers(5, 50, size=n).astype(np.int32)) for n in lengths]


def graphs(runner: Any, notes: list[str], **fields: Any) -> Any:
    given: dict[str, Any] = {
        "device": CPU,
        "max_batch_tokens": 128,
        "max_tokens": runner.info.max_tokens,
        "vocab_size": 50,
        "recorder": CpuRecorder,
    }
    return with_graphs(forward_of(runner), "auto", notes=notes, **(given | fields))


def test_buckets() -> None:
    assert buckets(15) == ()
    assert buckets(16) == (16,)
    assert buckets(1000) == (16, 32, 64, 128, 256, 512)
    assert buckets(10**6)[-1] == 4096
    assert [bucket_of(n, (16, 32)) for n in (1, 16, 17, 32, 33)] == [16, 16, 32, 32, None]


@pytest.mark.parametrize("longest", [1, 5, 512])
@pytest.mark.parametrize("size", [31, 32, 100])
def test_filler_leaves_the_rows_alone(size: int, longest: int) -> None:
    types = np.ones(min(4, longest), np.int32)
    items = some_items((min(7, longest), 1))
    items.append(EncodedItem(np.arange(len(types), dtype=np.int32), token_type_ids=types))
    batch = pack(items)
    whole = filled(batch, size, longest)
    n, rows = batch.n_tokens, batch.n_items
    assert whole.n_tokens == size == sum(whole.seqlens)
    assert whole.items[:rows] == batch.items and whole.seqlens[:rows] == batch.seqlens
    for name in ("input_ids", "positions", "token_type_ids"):
        assert np.array_equal(getattr(whole, name)[:n], getattr(batch, name)), name
    assert max(whole.seqlens[rows:]) <= min(16, longest) and min(whole.seqlens[rows:]) >= 1
    assert whole.max_seqlen == max(whole.seqlens)
    starts = whole.cu_seqlens[:-1]
    assert (whole.positions[starts] == 0).all()
    assert np.array_equal(whole.positions, np.concatenate([np.arange(k) for k in whole.seqlens]))
    assert filled(whole, size, longest) is whole


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_filler_changes_no_bit_of_a_row(load: Any, family: str) -> None:
    """Hidden states with and without filler, fp32 on the CPU."""
    runner = load(family)
    if not runner.info.packed:
        pytest.skip("runs padded")
    forward = forward_of(runner)
    for lengths in ((1,), (16, 16, 3), (40, 7, 7, 1)):
        batch = pack(some_items(lengths))
        with torch.inference_mode():
            alone = forward(batch)
            whole = forward(filled(batch, 64, runner.info.max_tokens))
        assert torch.equal(whole[: batch.n_tokens], alone), lengths


@pytest.mark.parametrize("family", GRAPHED)
def test_replays_give_the_bits_of_the_ordinary_forward(load: Any, family: str) -> None:
    """One recording per bucket serves packs of other ids, items and token types; L + 1 pieces."""
    runner = load(family)
    notes: list[str] = []
    graphed = graphs(runner, notes)
    assert isinstance(graphed, GraphedForward), notes
    assert graphed.sizes == (16, 32, 64, 128)
    assert [graphed.n_pieces(size) for size in graphed.sizes] == [LAYERS + 1] * 4
    assert len(notes) == 1 and "128 tokens run as CUDA graphs" in notes[0]
    kept = []
    for seed, lengths in enumerate([(1,), (5, 3), (16,), (17,), (40, 20, 4), (64, 60), (2, 2, 2)]):
        items = some_items(lengths, seed)
        if seed % 2:
            types = np.ones(items[0].n_tokens, np.int32)
            items[0] = EncodedItem(items[0].input_ids, token_type_ids=types)
        batch = pack(items)
        with torch.inference_mode():
            got, want = graphed(batch), runner._forward(batch)
        assert torch.equal(got, want), lengths
        kept.append((got, want))
    # What an earlier replay gave is not overwritten by later ones.
    assert all(torch.equal(got, want) for got, want in kept)


def test_no_python_of_the_model_runs_in_a_replay(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No new recording across packs of one bucket; a pack above the largest runs as ever."""
    runner = load("bert")
    graphed = graphs(runner, [], max_batch_tokens=32)
    want = {}
    packs = {n: pack(some_items((n,))) for n in (3, 20, 32, 40)}
    with torch.inference_mode():
        for n, batch in packs.items():
            want[n] = runner._forward(batch)
        calls: list[int] = []
        real = graphed.base.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return real(*args, **kwargs)

        monkeypatch.setattr(graphed.base, "forward", counted)
        for n in (3, 20, 32):
            assert torch.equal(graphed(packs[n]), want[n])
        assert calls == []
        assert torch.equal(graphed(packs[40]), want[40])
    assert calls == [1]


def test_threads_share_the_graphs(load: Any) -> None:
    runner = load("bert")
    graphed = graphs(runner, [])
    assert isinstance(graphed, GraphedForward)
    packs = [pack(some_items((n, n // 2 + 1), n)) for n in (2, 9, 17, 30, 50)]
    with torch.inference_mode():
        want = [runner._forward(batch) for batch in packs]
    wrong: list[int] = []

    def serve(first: int) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            for i in range(20):
                place = (first + i) % len(packs)
                if not torch.equal(graphed(packs[place]), want[place]):
                    wrong.append(place)

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Failing(CpuRecorder):
    """Fails while it records the second bucket, as CUDA would say it."""

    n_recorded = 0

    def record(self, run: Any) -> Any:
        type(self).n_recorded += 1
        if self.n_recorded == 2:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return super().record(run)


class Wrong(CpuRecorder):
    """Replays the wrong thing: the last piece gives zeros."""

    def record(self, run: Any) -> Any:
        pieces, out = super().record(run)
        return [*pieces[:-1], lambda: out.zero_()], out


@pytest.mark.parametrize(
    ("recorder", "why"),
    [
        (Failing, "RuntimeError: CUDA error: operation not permitted"),
        (Wrong, "tokens it differs from the ordinary forward by"),
    ],
)
def test_what_cannot_be_recorded_runs_without_graphs(load: Any, recorder: Any, why: str) -> None:
    runner = load("bert")
    notes: list[str] = []
    assert graphs(runner, notes, recorder=recorder) is runner._forward
    assert len(notes) == 1 and notes[0].startswith("cuda_graphs is not in use: ")
    assert why in notes[0]


def test_a_value_read_while_recording_is_refused(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control flow that follows from the ids cannot be replayed; the double sees it, as CUDA does."""
    runner = load("bert")
    real = runner._forward.base.forward

    def curious(*args: Any, **kwargs: Any) -> Any:
        kwargs["input_ids"].max().item()
        return real(*args, **kwargs)

    monkeypatch.setattr(runner._forward.base, "forward", curious)
    notes: list[str] = []
    assert graphs(runner, notes) is runner._forward
    assert "not permitted when stream is capturing" in notes[0]


@pytest.mark.parametrize("family", [*FAMILY_NAMES, *ENCODER_NAMES])
def test_every_family_has_graphs_or_a_reason(load: Any, family: str) -> None:
    """What reads the pack's shape, or a tensor's value, is refused and never recorded wrongly."""
    runner = load(family, settings={"max_tokens": 32})
    notes: list[str] = []
    if not runner.info.packed:
        found = with_graphs(
            runner._forward, "auto", device=CPU, max_batch_tokens=32, max_tokens=32,
            vocab_size=50, notes=notes, recorder=CpuRecorder,
        )  # fmt: skip
    else:
        found = graphs(runner, notes, max_batch_tokens=32)
    assert len(notes) == 1
    if family in REFUSED:
        assert found is runner._forward
        assert notes == [f"cuda_graphs is not in use: {REFUSED[family]}"]
        return
    assert isinstance(found, GraphedForward), notes
    batch = pack(some_items((9, 4, 1)))
    with torch.inference_mode():
        assert torch.equal(found(batch), runner._forward(batch))


def test_a_forward_without_attention_calls_is_refused(load: Any) -> None:
    class Blind(PackedForward):
        def compute(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            return inputs["input_ids"].float().unsqueeze(1)

    runner = load("bert")
    blind = Blind(
        runner._forward.base, device=CPU, position_offset=0, token_types=False, backends=()
    )
    with pytest.raises(GraphRefused, match="1 pieces around 0 attention calls"):
        record(blind, CpuRecorder(), (16,), 512)


def test_a_small_budget_and_a_cpu_are_told(load: Any) -> None:
    runner = load("bert")
    notes: list[str] = []
    assert graphs(runner, notes, max_batch_tokens=8) is runner._forward
    assert notes == ["cuda_graphs is not in use: a pack holds less than 16 tokens"]


def test_the_setting(tmp_path: Any) -> None:
    folder = write_model(tmp_path / "m", "bert")
    runner = make_runner_factory("m", folder, cuda_graphs="auto", device="cpu")()
    assert type(runner._forward) is PackedForward
    assert "cuda_graphs is not in use: they are CUDA's, and the model runs on cpu" in (
        runner.info.notes
    )
    off = make_runner_factory("m", folder, device="cpu")()
    assert not any("graph" in note for note in off.info.notes)
    with pytest.raises(ModelLoadError, match=r"cuda_graphs = .on.: Invalid"):
        make_runner_factory("m", folder, cuda_graphs="on")


def test_probes_fill_their_bucket_and_stay_within_limits() -> None:
    batch = probe(100, 7, 12)
    assert batch.n_tokens == 100 and batch.max_seqlen <= 12
    assert batch.input_ids.min() >= 0 and batch.input_ids.max() < 7
    assert np.array_equal(probe(100, 7, 12).input_ids, batch.input_ids)


@pytest.mark.parametrize("labels", [None, 3])
def test_the_runner_answers_with_the_same_bytes(
    load: Any, monkeypatch: pytest.MonkeyPatch, labels: int | None
) -> None:
    """Pooling and heads on what replays give: one row per item, none of the filler's."""
    runner = load("bert", labels=labels)
    options = ItemOptions(task="classify" if labels else "embed")
    packs = [
        pack([EncodedItem(item.input_ids, options) for item in some_items(lengths)])
        for lengths in ((1,), (9, 9, 4), (30, 2), (60, 60))
    ]
    want = [runner.forward(batch) for batch in packs]
    graphed = graphs(runner, [])
    assert isinstance(graphed, GraphedForward)
    monkeypatch.setattr(runner, "_forward", graphed)
    for batch, expected in zip(packs, want, strict=True):
        outcomes = runner.forward(batch)
        for a, b in zip(outcomes, expected, strict=True):
            name = "scores" if labels else "dense"
            assert np.array_equal(getattr(a, name), getattr(b, name))


class FakeCuda:
    """The parts of torch.cuda that `CudaRecorder` calls. log: what was asked, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.ends_badly = False
        fake = self

        class Graph:
            def __init__(self) -> None:
                self.number = sum(line.startswith("begin") for line in fake.log)

            def capture_begin(self, **settings: Any) -> None:
                INSTALLED.bind(self, **settings)
                assert settings == {"pool": (7, 0), "capture_error_mode": "thread_local"}
                fake.log.append(f"begin {self.number}")

            def capture_end(self) -> None:
                fake.log.append(f"end {self.number}")
                if fake.ends_badly:
                    raise RuntimeError("CUDA error: the capture was invalidated")

            def replay(self) -> None:
                fake.log.append(f"replay {self.number}")

            def reset(self) -> None:
                fake.log.append(f"reset {self.number}")

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: "side")
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (7, 0))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("wait"))
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "stream", self._on)

    @contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        self.log.append(f"on {stream}")
        try:
            yield
        finally:
            self.log.append(f"off {stream}")


INSTALLED = inspect.signature(torch.cuda.CUDAGraph.capture_begin)


def test_cuda_recordings_follow_each_other_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our calls of torch.cuda, with the installed signature; pieces replay in the order recorded."""
    cuda = FakeCuda(monkeypatch)
    recorder = CudaRecorder(torch.device("cuda", 0))
    recorder.warm_up(lambda: cuda.log.append("warm"))
    out = torch.zeros(1)

    def run(cut: Any) -> torch.Tensor:
        for name in "ab":
            cuda.log.append(name)
            cut()
        return out

    pieces, got = recorder.record(run)
    assert got is out and len(pieces) == 3
    assert cuda.log == [
        "wait", "on side", "warm", "off side", "wait",
        "wait", "on side", "begin 0", "a", "end 0", "begin 1", "b", "end 1", "begin 2", "end 2",
        "off side", "wait",
    ]  # fmt: skip
    cuda.log.clear()
    for piece in pieces:
        piece()
    assert cuda.log == ["replay 0", "replay 1", "replay 2"]


@pytest.mark.parametrize("ends_badly", [False, True])
def test_a_failed_recording_is_ended(monkeypatch: pytest.MonkeyPatch, ends_badly: bool) -> None:
    """The first error is the one that is told, also when the recording cannot be ended either."""
    cuda = FakeCuda(monkeypatch)

    def run(cut: Any) -> torch.Tensor:
        cut()
        cuda.ends_badly = ends_badly
        raise GraphRefused("the model does something else")

    with pytest.raises(GraphRefused, match="something else"):
        CudaRecorder(torch.device("cuda", 0)).record(run)
    ended = ["end 1"] if ends_badly else ["end 1", "reset 1"]
    assert cuda.log == ["wait", "on side", "begin 0", "end 0", "begin 1", *ended, "off side"]
