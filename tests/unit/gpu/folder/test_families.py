"""Encoder families: equal to transformers and sentence-transformers, packed, the same bytes anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import EncodedItem, ItemOptions, ItemResult, pack, scatter
from gpu.faults import ModelLoadError
from gpu.folder.families import FAMILIES
from gpu.load import make_runner_factory
from schemas.requests import ClassifyRequest, EmbedRequest, Text
from tests.support.models import edit_json, write_model
from tests.support.models_encoders import ENCODER_NAMES, WITHOUT_HEAD

LENGTHS = (1, 1, 2, 3, 5, 5, 8, 16, 17, 30, 30, 33, 47, 60)
TEXTS = (
    "the river of text",
    "kafka",
    "a queue is a topic and a vector in the stream of the broker model batch token",
    "paris is the capital",
    " ".join(["one two three four five mountain hello world"] * 5),
)
DECODERS = tuple(name for name, family in FAMILIES.items() if family.causal)
# Bit-equal in every pack on CPU fp32: all of them.
PACKED_FAMILIES = (*ENCODER_NAMES, "mpnet", "distilbert", "modernbert", "nomic_bert", "electra")


def items(task: str, seed: int = 3) -> list[EncodedItem]:
    rng = np.random.default_rng(seed)
    options = ItemOptions(task=task)  # type: ignore[arg-type]
    return [EncodedItem(rng.integers(5, 50, size=n).astype(np.int32), options) for n in LENGTHS]


def run(runner: Any, batch_items: list[EncodedItem]) -> list[np.ndarray]:
    batch = pack(batch_items)
    outcomes = scatter(batch, runner.forward(batch))
    values = []
    for outcome in outcomes:
        assert isinstance(outcome, ItemResult), outcome
        value = outcome.scores if outcome.dense is None else outcome.dense
        assert value is not None
        values.append(value)
    return values


def kinds(labels: int | None) -> list[str]:
    return [f for f in PACKED_FAMILIES if labels is None or f not in WITHOUT_HEAD]


@pytest.mark.parametrize(("family", "labels"), [(f, n) for n in (None, 2) for f in kinds(n)])
def test_packed_and_the_same_bytes_alone_and_in_any_batch(
    load: Any, family: str, labels: int | None
) -> None:
    """A01, A02, A06: every encoder family runs packed, and no neighbour changes a bit."""
    runner = load(family, labels=labels, pooling="mean", max_seq_length=64)
    info = runner.info
    assert info.packed, info.notes
    assert info.attention in ("sdpa", "deberta")
    pool = items("embed" if labels is None else "classify")
    alone = [run(runner, [item])[0] for item in pool]
    rng = np.random.default_rng(4)
    for _ in range(4):
        order = rng.permutation(len(pool))
        for part in np.array_split(order, rng.integers(1, 4)):
            for i, got in zip(part, run(runner, [pool[i] for i in part]), strict=True):
                assert np.array_equal(got, alone[i]), (family, pool[i].n_tokens)


def reference_vectors(folder: Path, texts: tuple[str, ...]) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    return np.stack([model.encode([t], convert_to_numpy=True)[0] for t in texts])


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("family", ENCODER_NAMES)  # the others: tests/parity/test_engine_tiny.py
def test_vectors_equal_sentence_transformers(tmp_path: Path, family: str, pooling: str) -> None:
    """A10, A11: pooling, Dense and Normalize from the folder, through the tokenizer, all in one pack."""
    in_bytes = family == "eurobert"
    texts = TEXTS[:4] if in_bytes else TEXTS
    dense = 24 if pooling == "mean" else None
    folder = write_model(
        tmp_path / "m", family, pooling=pooling, dense=dense, max_seq_length=100 if in_bytes else 60
    )
    runner = make_runner_factory("m", folder)()
    request = EmbedRequest(id="r", input=tuple(map(Text, texts)))
    encoded = runner.encoder.encode([request])[0]
    got = np.stack(run(runner, list(encoded.items)))
    expected = reference_vectors(folder, texts)
    assert got.shape == (len(texts), dense or 32)
    assert np.abs(got - expected).max() <= 1e-5
    cosine = (
        (got * expected).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(expected, axis=1)
    )
    assert cosine.min() >= 1 - 1e-6


@pytest.mark.parametrize("family", [f for f in ENCODER_NAMES if f not in WITHOUT_HEAD])
def test_heads_equal_transformers(tmp_path: Path, family: str) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    folder = write_model(tmp_path / "m", family, labels=3)
    runner = make_runner_factory("m", folder)()
    texts = TEXTS[:4]
    request = ClassifyRequest(id="r", input=tuple(map(Text, texts)), raw_scores=True)
    encoded = runner.encoder.encode([request])[0]
    got = np.stack(run(runner, list(encoded.items)))
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        for item, row in zip(encoded.items, got, strict=True):
            ids = torch.from_numpy(item.input_ids.astype(np.int64))[None]
            assert np.abs(model(input_ids=ids).logits[0].numpy() - row).max() <= 1e-5


@pytest.mark.parametrize("family", ["mpnet", "deberta-v2", "rembert", "t5", "umt5"])
def test_wrapped_families_run_packed_in_bfloat16(tmp_path: Path, family: str) -> None:
    """A12: the dtype is explicit; the wrappers mix no precisions."""
    folder = write_model(tmp_path / "m", family, max_seq_length=64)
    exact = make_runner_factory("m", folder)()
    half = make_runner_factory("m", folder, dtype="bfloat16")()
    assert half.info.packed and half.info.dtype == "bfloat16"
    pool = items("embed")
    for got, expected in zip(run(half, pool), run(exact, pool), strict=True):
        assert got.dtype == np.float32
        assert got @ expected >= 0.995  # transformers' own bfloat16 gives 0.9972 for this T5


@pytest.mark.parametrize("pooling", ["bos", "mean", "late"])
def test_eurobert_pools_its_classifier_as_the_config_says(tmp_path: Path, pooling: str) -> None:
    """The load's own self-check compares logits; a wrong recipe would not load."""
    folder = write_model(tmp_path / "m", "eurobert", labels=2, classifier_pooling=pooling)
    assert make_runner_factory("m", folder)().info.packed


def test_deberta_with_a_convolution_runs_padded_and_says_so(tmp_path: Path) -> None:
    """A convolution over the sequence mixes neighbours; it is found and the model is padded."""
    folder = write_model(
        tmp_path / "m", "deberta-v2", conv_kernel_size=3, conv_act="gelu", conv_groups=1
    )
    info = make_runner_factory("m", folder)().info
    assert info.packed is False
    assert "padded" in " ".join(info.notes)


def test_a_wrapper_that_is_left_out_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPNet and DeBERTa accept the interface's name and attend across items: found, and padded."""
    import dataclasses

    for family in ("mpnet", "deberta-v2", "rembert"):
        row = dataclasses.replace(FAMILIES[family], wrapper=None)
        monkeypatch.setitem(FAMILIES, family, row)
        info = make_runner_factory("m", write_model(tmp_path / family, family))().info
        assert info.packed is False
        assert "attention was reached 0 times" in " ".join(info.notes)


def test_t5_biases_are_as_large_as_the_longest_item(load: Any) -> None:
    """Memory: [heads, longest, longest], never the square of the pack."""
    runner = load("t5", pooling="mean", max_seq_length=64)
    bias = runner._forward.base.encoder.block[0].layer[0].SelfAttention
    seen: list[tuple[int, int]] = []
    original = bias.compute_bias

    def spy(query_length: int, key_length: int, *args: Any, **kwargs: Any) -> Any:
        out = original(query_length, key_length, *args, **kwargs)
        seen.append((out.shape[-2], out.shape[-1]))
        return out

    bias.compute_bias = spy
    try:
        run(runner, items("embed"))
    finally:
        bias.compute_bias = original
    assert seen == [(60, 60)]


@pytest.mark.parametrize("model_type", ["longformer", "not-a-model", ""])
def test_unknown_families_are_refused_by_name(tmp_path: Path, model_type: str) -> None:
    folder = write_model(tmp_path / "m", "bert")
    edit_json(folder / "config.json", model_type=model_type)
    with pytest.raises(ModelLoadError, match=r"is not supported; .*supported are albert, "):
        make_runner_factory("m", folder)()
