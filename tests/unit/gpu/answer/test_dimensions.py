"""Matryoshka sizes: what a folder or a setting names, and what a request may ask, item kind by kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import pack, scatter
from gpu.faults import ModelLoadError
from gpu.folder.read import load_spec
from gpu.load import make_runner_factory
from schemas.codec import decode_request
from schemas.errors import EmbedstreamError, InvalidDimensions
from tests.support.models import edit_json, write_model

NATIVE = 32
ASKED = [1, 2, 8, 16, 31, 32, 33, 5000]
INPUTS: dict[str, Any] = {
    "text": "hello world",
    "texts": ["hello", "kafka topic"],
    "ids": [5, 6, 7],
    "ids of several": [[5, 6], [7]],
}


def declare(folder: Path, way: str) -> dict[str, Any]:
    """Writes what the folder says about sizes; returns the settings that say it instead."""
    if way == "list":
        edit_json(folder / "config.json", matryoshka_dimensions=[16, 8])
    if way == "flag":
        edit_json(folder / "config.json", is_matryoshka=True)
    return {"matryoshka_dimensions": (8, 16)} if way == "setting" else {}


ALLOWED = {
    "none": (NATIVE,), "list": (8, 16, NATIVE), "setting": (8, 16, NATIVE),
    "flag": tuple(range(1, NATIVE + 1)),
}  # fmt: skip


@pytest.fixture(scope="module", params=sorted(ALLOWED))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_model(tmp_path_factory.mktemp("m") / "m")
    settings = declare(folder, request.param)
    return request.param, make_runner_factory("m", folder, **settings)()


def vectors(runner: Any, given: Any, **fields: Any) -> np.ndarray | EmbedstreamError:
    record = json.dumps({"id": "r", "input": given, **fields}).encode()
    encoded = runner.encoder.encode([decode_request(record, {}, default_id="r")])[0]
    if isinstance(encoded, EmbedstreamError):
        return encoded
    batch = pack(encoded.items)
    return np.stack([o.dense for o in scatter(batch, runner.forward(batch))])


def test_allowed_sizes_are_told(model: Any) -> None:
    """A09: `ModelInfo.allowed_dimensions`: ascending, native among them; None when there is one."""
    way, runner = model
    told = runner.info.allowed_dimensions
    assert told == (None if way == "none" else ALLOWED[way])
    assert runner.info.dimensions == NATIVE


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", sorted(INPUTS))
def test_a_size_is_computed_or_refused(model: Any, kind: str, asked: int) -> None:
    """A08, A09: for texts and token ids alike: the renormalised prefix of the full vector, of norm
    1 within 1e-6, or `invalid_dimensions` with what was given, the limit and the sizes."""
    way, runner = model
    got = vectors(runner, INPUTS[kind], dimensions=asked)
    if asked not in ALLOWED[way]:
        assert isinstance(got, InvalidDimensions)
        assert (got.given, got.limit, got.path) == (asked, NATIVE, "$.dimensions")
        told = "1 to 32" if way == "flag" else ", ".join(map(str, ALLOWED[way]))
        assert told in str(got)
        return
    assert isinstance(got, np.ndarray) and got.shape[1] == asked
    full = vectors(runner, INPUTS[kind])
    assert isinstance(full, np.ndarray)
    prefix = full[:, :asked].astype(np.float64)
    prefix /= np.linalg.norm(prefix, axis=1, keepdims=True)
    assert np.abs(got - prefix).max() <= 1e-6
    assert np.abs(np.linalg.norm(got.astype(np.float64), axis=1) - 1).max() <= 1e-6


@pytest.mark.parametrize("asked", [0, -1, -5000, 2**63, True, 8.0, "8", [8]])
def test_what_is_no_size_is_refused_before_any_model(asked: Any) -> None:
    """A09: 0, negative, huge, a boolean, a float, a string: never a crash, never another size."""
    record = json.dumps({"id": "r", "input": "x", "dimensions": asked}).encode()
    with pytest.raises(EmbedstreamError) as caught:
        decode_request(record, {}, default_id="r")
    assert caught.value.code in ("invalid_dimensions", "invalid_request")
    assert caught.value.path == "$.dimensions" and not caught.value.retryable


def test_the_cut_comes_before_the_norm_and_raw_vectors_are_cut_raw(model: Any) -> None:
    """A08: `normalize` false: the raw prefix; mixed sizes in one pack do not disturb each other."""
    way, runner = model
    size = ALLOWED[way][0]
    raw, full = (vectors(runner, "river", normalize=False, dimensions=n) for n in (size, NATIVE))
    assert isinstance(raw, np.ndarray) and isinstance(full, np.ndarray)
    assert raw.tobytes() == np.ascontiguousarray(full[:, :size]).tobytes()
    records = [{"dimensions": n, "normalize": u} for n in ALLOWED[way][:3] for u in (True, False)]
    alone = [vectors(runner, "river", **fields) for fields in records]
    items = []
    for fields in records:
        record = json.dumps({"id": "r", "input": "river", **fields}).encode()
        items += runner.encoder.encode([decode_request(record, {}, default_id="r")])[0].items
    batch = pack(items)
    for outcome, expected in zip(scatter(batch, runner.forward(batch)), alone, strict=True):
        assert isinstance(expected, np.ndarray)
        assert outcome.dense.tobytes() == expected[0].tobytes()


@pytest.mark.parametrize("named", [[0, 8], [-8], [33], [8, 5000]])
def test_sizes_that_the_model_does_not_have_stop_the_load(tmp_path: Path, named: list[int]) -> None:
    """A09."""
    folder = write_model(tmp_path / "m")
    with pytest.raises(ModelLoadError, match="outside 1 to 32"):
        load_spec(folder, matryoshka_dimensions=tuple(named))
    edit_json(folder / "config.json", matryoshka_dimensions=named)
    with pytest.raises(ModelLoadError, match="outside 1 to 32"):
        load_spec(folder)


def test_native_is_the_size_behind_dense_modules(tmp_path: Path) -> None:
    """A09, A10: a Dense module of 12: 12 is native, 32 is not."""
    runner = make_runner_factory("m", write_model(tmp_path / "m", dense=12))()
    got = vectors(runner, "river", dimensions=12)
    assert isinstance(got, np.ndarray) and got.shape == (1, 12)
    refused = vectors(runner, "river", dimensions=32)
    assert isinstance(refused, InvalidDimensions) and refused.limit == 12
