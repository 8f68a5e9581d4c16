"""The runner on tiny models: the same bytes in any batch, bad rows alone, loads that refuse."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import EncodedItem, ItemOptions, ItemResult, PackedBatch, pack, scatter
from gpu.faults import ModelLoadError
from gpu.load import make_runner_factory
from schemas.errors import EmptyInput, InvalidRequest, NonFinite, TooLong, Unsupported
from tests.support.models import FAMILY_NAMES, HIDDEN, edit_json, write_model

LENGTHS = (1, 1, 2, 3, 5, 5, 5, 8, 16, 17, 30, 30, 31, 33, 47, 60, 64)


def items(runner: Any, lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[EncodedItem]:
    task: Any = next(t for t in ("embed", "classify", "score") if t in runner.info.tasks)
    rng = np.random.default_rng(seed)
    return [
        EncodedItem(rng.integers(5, 50, size=n).astype(np.int32), ItemOptions(task=task))
        for n in lengths
    ]


def values(outcome: Any) -> Any:
    assert isinstance(outcome, ItemResult), outcome
    return outcome.scores if outcome.dense is None else outcome.dense


def run(runner: Any, batch_items: list[EncodedItem]) -> list[Any]:
    """Outcomes in the order given."""
    batch = pack(batch_items)
    return scatter(batch, runner.forward(batch))


def pooling_of(family: str) -> str:
    decoders = ("qwen2", "qwen3", "llama", "mistral")
    return "lasttoken" if family in decoders else "mean"


@pytest.mark.parametrize("labels", [None, 1, 3])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_same_bytes_alone_and_in_any_batch(load: Any, family: str, labels: int | None) -> None:
    """A01, A02, A06, A07: fp32 on the CPU, every family, any neighbours, any position, any order."""
    runner = load(family, labels=labels, pooling=pooling_of(family))
    pool = items(runner)
    alone = [values(run(runner, [item])[0]) for item in pool]
    rng = np.random.default_rng(2)
    for _ in range(6):
        order = rng.permutation(len(pool))
        for part in np.array_split(order, rng.integers(1, 5)):
            outcomes = run(runner, [pool[i] for i in part])
            for i, outcome in zip(part, outcomes, strict=True):
                assert np.array_equal(values(outcome), alone[i]), (family, pool[i].n_tokens)
    assert runner.info.linears == "onednn-prepacked" or runner.settings.prepack is False
    assert not any("depend" in note for note in runner.info.notes)


def test_a_short_text_a_thousand_times_gives_one_vector(load: Any) -> None:
    """A02."""
    runner = load("bert")
    item = EncodedItem(np.array([2, 40, 3], np.int32))
    rows = [values(o) for o in run(runner, [item] * 1000)]
    assert np.isfinite(rows[0]).all()
    assert all(np.array_equal(row, rows[0]) for row in rows)


def test_bits_hold_between_threads_that_share_the_model(load: Any) -> None:
    import torch

    runner = load("bert")
    pool = items(runner)
    alone = [values(run(runner, [item])[0]) for item in pool]
    wrong: list[int] = []

    def work(seed: int) -> None:
        torch.set_num_threads(1)
        rng = np.random.default_rng(seed)
        for _ in range(15):
            order = list(rng.permutation(len(pool)))
            for i, outcome in zip(order, run(runner, [pool[i] for i in order]), strict=True):
                if not np.array_equal(values(outcome), alone[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_runs_packed(load: Any, family: str) -> None:
    info = load(family, pooling=pooling_of(family)).info
    assert info.packed
    assert "padded" not in " ".join(info.notes)


def test_a_family_that_bypasses_the_interface_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent failure: MPNet accepts the setting and attends across items; the self-check sees it."""
    import dataclasses

    from gpu.folder.families import FAMILIES

    row = dataclasses.replace(FAMILIES["mpnet"], wrapper=None)
    monkeypatch.setitem(FAMILIES, "mpnet", row)
    runner = make_runner_factory("m", write_model(tmp_path / "m", "mpnet"))()
    assert runner.info.packed is False
    assert "attention was reached 0 times" in " ".join(runner.info.notes)


def test_a_wrong_position_offset_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 13: offset 0 for a RoBERTa runs without an error and is wrong; here it is not packed."""
    import dataclasses

    from gpu.folder.families import FAMILIES

    row = dataclasses.replace(FAMILIES["xlm-roberta"], position_offset="none")
    monkeypatch.setitem(FAMILIES, "xlm-roberta", row)
    folder = write_model(tmp_path / "m", "xlm-roberta")
    for implementation, reference in (
        ("transformers", "transformers"),
        ("auto", "the plain formula"),
    ):
        runner = make_runner_factory("m", folder, max_tokens=60, implementation=implementation)()
        assert runner.info.packed is False
        assert f"differs from {reference}" in " ".join(runner.info.notes)


def test_a_classification_head_that_differs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    from gpu.folder.families import FAMILIES

    row = dataclasses.replace(FAMILIES["qwen3"], head="classifier_on_first")
    folder = write_model(tmp_path / "m", "qwen3", labels=1)
    monkeypatch.setitem(FAMILIES, "qwen3", row)
    with pytest.raises((ModelLoadError, AttributeError)):
        make_runner_factory("m", folder)()


def test_bad_rows_cost_nobody_else(load: Any) -> None:
    """B09, B12, B19: Empty segments, unknown ids and rows past the limit never reach the model (on a GPU they
    would poison it); their neighbours get the bytes they would get alone."""
    runner = load("bert")
    good = items(runner, (5, 9))
    bad = [
        EncodedItem(np.zeros(0, np.int32)),
        EncodedItem(np.full(3, 10_000, np.int32)),
        EncodedItem(np.full(3, -1, np.int32)),
        EncodedItem(np.full(129, 7, np.int32)),
        EncodedItem(np.full(3, 7, np.int32), ItemOptions(task="rerank")),
    ]
    outcomes = run(runner, [good[0], *bad, good[1]])
    kinds = [EmptyInput, InvalidRequest, InvalidRequest, TooLong, Unsupported]
    assert [type(outcome) for outcome in outcomes[1:-1]] == kinds
    for item, outcome in zip(good, (outcomes[0], outcomes[-1]), strict=True):
        assert np.array_equal(values(outcome), values(run(runner, [item])[0]))
    assert [type(o) for o in run(runner, bad)] == kinds


def test_an_empty_last_row_still_gives_n_outcomes(load: Any) -> None:
    """B12."""
    runner = load("bert")
    empty, full = EncodedItem(np.zeros(0, np.int32)), items(runner, (4,))[0]
    for order in ([full, empty], [empty, full], [empty], [empty, empty]):
        outcomes = run(runner, order)
        assert [isinstance(o, EmptyInput) for o in outcomes] == [i is empty for i in order]


def test_a_non_finite_row_fails_alone(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A03, A04: NaN in item 2 of 5 becomes that item's error; the others are answered."""
    runner = load("bert")
    pool = items(runner, (9, 8, 7, 6, 5))
    expected = [values(o) for o in run(runner, pool)]
    inner = runner._forward

    def poisoned(batch: PackedBatch) -> Any:
        hidden = inner(batch).clone()
        hidden[int(batch.cu_seqlens[2]), 3] = float("nan")
        return hidden

    monkeypatch.setattr(runner, "_forward", poisoned)
    outcomes = run(runner, pool)
    assert isinstance(outcomes[2], NonFinite)
    for i in (0, 1, 3, 4):
        assert np.array_equal(values(outcomes[i]), expected[i])


def test_non_finite_logits_fail_alone(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A03."""
    runner = load("bert", labels=3)
    inner = runner._head

    def poisoned(hidden: Any, segments: Any) -> Any:
        logits = inner(hidden, segments).clone()
        logits[0, 1] = float("inf")
        return logits

    monkeypatch.setattr(runner, "_head", poisoned)
    outcomes = run(runner, items(runner, (9, 8)))
    assert isinstance(outcomes[0], NonFinite) and isinstance(outcomes[1], ItemResult)


@pytest.mark.parametrize("size", [1, 8, 16, 32])
def test_a_cut_vector_is_normalised_after_the_cut(load: Any, size: int) -> None:
    """A08."""
    runner = load("bert", settings={"matryoshka_dimensions": (1, 8, 16)})
    ids = items(runner, (9,))[0].input_ids
    whole, cut = run(runner, [EncodedItem(ids), EncodedItem(ids, ItemOptions(dimensions=size))])
    prefix = whole.dense[:size] / np.linalg.norm(whole.dense[:size])
    assert cut.dense.shape == (size,)
    assert abs(np.linalg.norm(cut.dense) - 1) < 1e-6
    assert np.abs(cut.dense - prefix).max() < 1e-6


def test_normalize_is_the_models_unless_the_request_says(load: Any) -> None:
    """D10."""
    runner, raw = load("bert"), load("bert", normalize=False)
    ids = items(runner, (9,))[0].input_ids

    def norm(which: Any, normalize: bool | None) -> float:
        options = ItemOptions(normalize=normalize)
        return float(np.linalg.norm(values(run(which, [EncodedItem(ids, options)])[0])))

    assert runner.info.normalized and not raw.info.normalized
    assert abs(norm(runner, None) - 1) < 1e-6 and abs(norm(raw, True) - 1) < 1e-6
    assert norm(runner, False) == norm(raw, None) == norm(raw, False) != norm(raw, True)


def test_mixed_options_in_one_batch(load: Any) -> None:
    """A08, A09: sizes and norms of neighbours do not mix."""
    runner = load("bert", settings={"matryoshka_dimensions": (8, 16)})
    pool = [
        EncodedItem(item.input_ids, ItemOptions(dimensions=size, normalize=unit))
        for item, size, unit in zip(
            items(runner, (9, 9, 5, 5, 3)),
            (8, None, 16, 8, HIDDEN),
            (True, False, None, False, True),
            strict=True,
        )
    ]
    for item, outcome in zip(pool, run(runner, pool), strict=True):
        assert np.array_equal(values(outcome), values(run(runner, [item])[0]))


def test_activation_once_and_raw_on_request(load: Any) -> None:
    """A16, A17: raw logits, their sigmoid, in the same order; a score needs no neighbours."""
    runner = load("bert", labels=1)
    ids = [item.input_ids for item in items(runner, (5, 9, 13))]
    raw = run(runner, [EncodedItem(i, ItemOptions(task="rerank", raw_scores=True)) for i in ids])
    scored = run(runner, [EncodedItem(i, ItemOptions(task="rerank")) for i in ids])
    for r, s, i in zip(raw, scored, ids, strict=True):
        assert r.scores.shape == s.scores.shape == (1,) and s.scores.dtype == np.float32
        assert abs(float(s.scores[0]) - 1 / (1 + np.exp(-float(r.scores[0])))) < 1e-6
        assert 0.0 <= float(s.scores[0]) <= 1.0
        alone = run(runner, [EncodedItem(i, ItemOptions(task="rerank"))])[0]
        assert np.array_equal(alone.scores, s.scores)


def test_an_identity_head_is_not_squashed(tmp_path: Path) -> None:
    """A17."""
    folder = write_model(tmp_path / "m", "bert", labels=1)
    activation = {"activation_fn": "torch.nn.modules.linear.Identity"}
    edit_json(folder / "config.json", sentence_transformers=activation)
    runner = make_runner_factory("m", folder)()
    ids = items(runner, (9,))[0].input_ids
    raw = run(runner, [EncodedItem(ids, ItemOptions(task="score", raw_scores=True))])[0]
    same = run(runner, [EncodedItem(ids, ItemOptions(task="score"))])[0]
    assert np.array_equal(raw.scores, same.scores)


def test_trap6_softmax_is_stable_for_large_logits() -> None:
    import torch

    from gpu.answer.heads import activate

    out = activate(torch.tensor([[-60.0, 30.0], [1e4, -1e4], [88.0, 89.0]]), "softmax")
    assert torch.isfinite(out).all() and torch.allclose(out.sum(1), torch.ones(3))


def test_trap7_a_zero_vector_stays_zero() -> None:
    import torch

    from gpu.pooler import finish

    ((rows, part),) = finish(torch.zeros(2, 4), [None, None], [True, True])
    assert rows == [0, 1] and torch.equal(part, torch.zeros(2, 4))


def test_trap1_means_are_summed_in_fp32_per_segment() -> None:
    """Trap 1: bf16 states with an outlier channel; the mean does not depend on the place."""
    import torch

    from gpu.pooler import Segments, mean_rows

    torch.manual_seed(0)
    hidden = torch.randn(4000, 8).to(torch.bfloat16)
    hidden[:, 0] += 5
    starts = tuple(range(0, 4000, 100))
    segments = Segments(starts, tuple(s + 100 for s in starts), (0,) * 40)
    rows = mean_rows(hidden, segments)
    assert rows.dtype == torch.float32
    for i, start in enumerate(starts):
        exact = hidden[start : start + 100].double().mean(0)
        assert float((rows[i] - exact).abs().max()) < 1e-6
        alone = mean_rows(hidden[start : start + 100], Segments((0,), (100,), (0,)))
        assert torch.equal(alone[0], rows[i])


def test_a_prompt_outside_the_mean() -> None:
    import torch

    from gpu.pooler import Segments, mean_rows

    hidden = torch.arange(20.0).view(10, 2)
    rows = mean_rows(hidden, Segments((0, 4, 8), (4, 8, 10), (2, 0, 2)))
    assert torch.equal(rows[0], hidden[2:4].mean(0)) and torch.equal(rows[1], hidden[4:8].mean(0))
    assert torch.equal(rows[2], hidden[8:10].mean(0))  # a prompt that covers all: averaged whole


def test_a_warm_up_that_does_not_fit_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C03."""
    from gpu.model_runner import ModelRunner

    def compute(self: Any, batch: PackedBatch) -> Any:
        if batch.n_tokens > 300:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return inner(self, batch)

    inner = ModelRunner._compute
    monkeypatch.setattr(ModelRunner, "_compute", compute)
    folder = write_model(tmp_path / "m", "bert")
    with pytest.raises(ModelLoadError, match="max_batch_tokens"):
        make_runner_factory("m", folder, max_batch_tokens=512)()
    assert make_runner_factory("m", folder, max_batch_tokens=256)().info.max_batch_tokens == 256


def test_out_of_memory_in_a_forward_is_a_memory_error(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C04."""
    runner = load("bert")

    def full(batch: PackedBatch) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(runner, "_forward", full)
    with pytest.raises(MemoryError):
        run(runner, items(runner, (5,)))


@pytest.fixture
def spoiled(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m", "bert", labels=2)


def _rewrite(folder: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s: s.pop("bert.encoder.layer.1.output.dense.weight"), "output.dense.weight"),
        (lambda s: s.update(extra_tensor=s["classifier.bias"].clone()), "extra_tensor"),
        (
            lambda s: s.update({"classifier.bias": s["classifier.weight"].clone()}),
            "classifier.bias",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    spoiled: Path, change: Any, named: str
) -> None:
    _rewrite(spoiled, change)
    with pytest.raises(ModelLoadError, match=named.replace(".", r"\.")):
        make_runner_factory("m", spoiled)()


def test_old_buffers_in_a_checkpoint_are_harmless(spoiled: Path) -> None:
    import torch

    _rewrite(
        spoiled,
        lambda s: s.update({"bert.embeddings.position_ids": torch.arange(128).unsqueeze(0)}),
    )
    make_runner_factory("m", spoiled)()


def test_pickled_weights_are_refused_unless_asked_for(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    folder = write_model(tmp_path / "m", "bert")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="allow_pickle"):
        make_runner_factory("m", folder)()
    runner = make_runner_factory("m", folder, allow_pickle=True)()
    assert runner.info.tasks == {"embed"}


def test_truncated_weights_are_one_line(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "bert")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError) as caught:
        make_runner_factory("m", folder)()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("device", "cuda:7"), ("device", "tpu"), ("dtype", "int4"), ("attention", "magic")],
)
def test_what_is_not_there_is_refused_by_name(tmp_path: Path, setting: str, value: str) -> None:
    folder = write_model(tmp_path / "m", "bert")
    with pytest.raises(ModelLoadError, match=value):
        make_runner_factory("m", folder, **{setting: value})()


def test_phases_and_info(tmp_path: Path) -> None:
    factory = make_runner_factory("tiny", write_model(tmp_path / "m", "bert"))
    assert factory.phase == "waiting"
    info = factory().info
    assert factory.phase == "ready"
    assert (info.name, info.dtype, info.device, info.max_batch_tokens) == (
        "tiny", "float32", "cpu", 512,
    )  # fmt: skip
    assert info.fingerprint.startswith("sha256:") and info.attention == "sdpa"


def test_a_local_folder_makes_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G08: no socket is opened and no name is looked up while a model loads and answers."""
    import socket

    folder = Path(shutil.copytree(write_model(tmp_path / "a", "bert"), tmp_path / "b"))
    attempts: list[Any] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        attempts.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    runner = make_runner_factory("m", folder)()
    assert isinstance(run(runner, items(runner, (5,)))[0], ItemResult)
    assert attempts == []


def test_close_drops_the_model(tmp_path: Path) -> None:
    import gc
    import weakref

    runner = make_runner_factory("m", write_model(tmp_path / "m", "bert"))()
    base = weakref.ref(runner._forward.base)
    runner.close()
    gc.collect()
    assert base() is None


@pytest.mark.parametrize("prepack", [True, False])
def test_no_tensor_reads_the_weights_file_after_the_load(tmp_path: Path, prepack: bool) -> None:
    """A file that is replaced in place must not change answers, nor may a truncated one kill us."""
    folder = write_model(tmp_path / "m", "bert")
    runner = make_runner_factory("m", folder, prepack=prepack)()
    before = [values(o) for o in run(runner, items(runner))]
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\xff" * size)
        file.flush()
        file.truncate(0)
    for got, expected in zip(run(runner, items(runner)), before, strict=True):
        assert np.array_equal(values(got), expected)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_half_precision_is_close_and_named(load: Any, family: str) -> None:
    """A12, J02: dtype is explicit, pooling and heads stay fp32, nothing is non-finite."""
    model = {"pooling": pooling_of(family)}
    exact = load(family, **model)
    half = load(family, settings={"dtype": "bfloat16"}, **model)
    assert (exact.info.dtype, half.info.dtype) == ("float32", "bfloat16")
    assert exact.info.fingerprint != half.info.fingerprint, "the numbers are others"
    pool = items(exact, (3, 9, 17, 30))
    for a, b in zip(run(exact, pool), run(half, pool), strict=True):
        assert b.dense.dtype == np.float32
        assert float(a.dense @ b.dense) > 0.98


def test_half_precision_scores_are_fp32_and_finite(load: Any) -> None:
    """A05."""
    for family in ("bert", "modernbert", "distilbert", "qwen3", "xlm-roberta"):
        runner = load(family, settings={"dtype": "bfloat16"}, labels=3)
        for outcome in run(runner, items(runner, (3, 9, 17))):
            assert outcome.scores.dtype == np.float32 and np.isfinite(outcome.scores).all()
