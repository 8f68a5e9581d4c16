"""CSR: a sparse autoencoder behind the pooling, against Sentence-Transformers' SparseEncoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import pack, scatter
from gpu.faults import ModelLoadError
from gpu.folder.read import load_spec
from gpu.load import make_runner_factory
from gpu.verify import second_opinion
from schemas.errors import Unsupported
from schemas.requests import EmbedRequest, Text
from tests.support.models import edit_json
from tests.support.models_outputs import write_csr

TEXTS = [
    "hello world", "kafka", "the capital of china is beijing, a large river in blue", "x",
    "one two three four five " * 4,
]  # fmt: skip
MODULE = "2_SparseAutoEncoder"


def items(runner: Any, **fields: Any) -> list[Any]:
    request = EmbedRequest(id="r", input=tuple(map(Text, TEXTS)), **fields)
    return list(runner.encoder.encode([request])[0].items)


def computed(runner: Any, batch_items: list[Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    batch = pack(batch_items)
    return [one.sparse for one in scatter(batch, runner.forward(batch))]


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "centred": {"centred": True},
    "unit": {"unit": True},
    "dense": {"dense": 24, "centred": True, "unit": True},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_latents_equal_sparse_encoder(tmp_path: Path, shape: str) -> None:
    """A10, J07, A06: the same latents, numbers within 1e-5 of size; the same bytes in any pack."""
    from sentence_transformers import SparseEncoder

    folder = write_csr(tmp_path / "m", **SHAPES[shape])
    runner = make_runner_factory("m", folder)()
    assert runner.info.packed and runner.info.outputs == {"sparse"}
    want = SparseEncoder(str(folder), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False)
    pool = items(runner)
    got = computed(runner, pool)
    for (ids, weights), expected in zip(got, want.numpy(), strict=True):
        assert ids.tolist() == np.flatnonzero(expected > 0).tolist() and 0 < len(ids) <= 8
        assert np.abs(weights - expected[ids]).max() <= 1e-5 * max(1.0, expected.max())
    for order in (range(len(pool)), range(len(pool))[::-1]):
        for i, (ids, weights) in zip(
            order, computed(runner, [pool[i] for i in order]), strict=True
        ):
            alone = computed(runner, [pool[i]])[0]
            assert ids.tobytes() == alone[0].tobytes() and weights.tobytes() == alone[1].tobytes()
    opinion = second_opinion(runner)
    assert opinion.worst is not None and opinion.worst <= 1e-5, opinion


def test_the_largest_count_of_the_library_s_own_file_counts(tmp_path: Path) -> None:
    """`max_active_dims` goes before the module's `k`, and both into the fingerprint."""
    from sentence_transformers import SparseEncoder

    folder = write_csr(tmp_path / "m")
    before = load_spec(folder).fingerprint
    edit_json(folder / "config_sentence_transformers.json", max_active_dims=3)
    runner = make_runner_factory("m", folder)()
    want = SparseEncoder(str(folder), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False)
    for (ids, _), expected in zip(computed(runner, items(runner)), want.numpy(), strict=True):
        assert ids.tolist() == np.flatnonzero(expected > 0).tolist() and len(ids) <= 3
    assert load_spec(folder).fingerprint != before


def test_the_library_s_own_save_is_read(tmp_path: Path) -> None:
    from sentence_transformers import SparseEncoder

    folder = write_csr(tmp_path / "m")
    SparseEncoder(str(folder), device="cpu").save_pretrained(str(tmp_path / "saved"))
    one, other = (make_runner_factory("m", place)() for place in (folder, tmp_path / "saved"))
    for a, b in zip(computed(one, items(one)), computed(other, items(other)), strict=True):
        assert a[0].tolist() == b[0].tolist() and a[1].tobytes() == b[1].tobytes()


def test_a_dense_vector_is_refused_as_its_library_gives_none(tmp_path: Path) -> None:
    runner = make_runner_factory("m", write_csr(tmp_path / "m"))()
    for fields in ({"outputs": ("dense",)}, {"chunk_tokens": 4}, {"aggregate": "mean"}):
        request = EmbedRequest(id="r", input=(Text("x"),), **fields)  # type: ignore[arg-type]
        assert isinstance(runner.encoder.encode([request])[0], Unsupported)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 65}, "k = 65 of 64 latents"),
        ({"k": 0}, "k = 0 is not 1 and more"),
        ({"input_dim": 16}, "input_dim = 16, but the vector before it has 32"),
        ({"hidden_dim": 63}, r"wanted .*\(63, 32\)"),
        ({"scale_of_the_moon": 2}, r"scale_of_the_moon .*ignore_keys"),
    ],
)
def test_a_module_that_does_not_fit_is_refused_by_its_key(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = write_csr(tmp_path / "m")
    edit_json(folder / MODULE / "config.json", **change)
    with pytest.raises(ModelLoadError, match=words):
        make_runner_factory("m", folder)()


def test_settings_of_dense_vectors_are_refused(tmp_path: Path) -> None:
    folder = write_csr(tmp_path / "m")
    for setting in ({"pooling": "cls"}, {"matryoshka_dimensions": (8,)}):
        with pytest.raises(ModelLoadError, match=next(iter(setting))):
            make_runner_factory("m", folder, **setting)()
