"""Rotary positions that depend on length: grouping, padding, and the module that keeps no state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu.faults import ModelLoadError
from gpu.folder.decoders import length_dependent, rope_limit
from gpu.folder.read import load_spec
from gpu.forward.rope import RopePaddedForward, rope_groups
from gpu.load import make_runner_factory
from schemas.requests import EmbedRequest, TokenIds
from tests.support.models import edit_json, write_model

LONG = {"rope_type": "longrope", "original_max_position_embeddings": 24, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_parameters": LONG, "max_position_embeddings": 96}, ("longrope", 24)),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096},
         ("longrope", 4096)),
        ({"rope_parameters": DYNAMIC, "max_position_embeddings": 24}, ("dynamic", 24)),
        ({"rope_parameters": {"full_attention": LONG, "sliding_attention": {"rope_type": "default"}}},
         ("longrope", 24)),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, None),
        ({"rope_scaling": None}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_which_configs_depend_on_length(config: dict[str, Any], expected: Any) -> None:
    assert length_dependent(config) == expected


def test_how_far_dynamic_rope_goes() -> None:
    assert rope_limit({"rope_parameters": DYNAMIC, "max_position_embeddings": 24}) == 96
    assert rope_limit({"rope_parameters": LONG, "max_position_embeddings": 96}) is None


def test_groups() -> None:
    """Within the trained length all together; past it together, or one length at a time."""
    lengths = [90, 24, 25, 3, 90, 25]
    assert rope_groups(lengths, "longrope", 24) == [[0, 2, 4, 5], [1, 3]]
    assert rope_groups(lengths, "dynamic", 24) == [[0, 4], [1, 3], [2, 5]]
    assert rope_groups([3, 4], "dynamic", 24) == [[0, 1]]


def tiny(folder: Path, kind: str) -> Path:
    write_model(folder, "llama", pooling="lasttoken")
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    fields: dict[str, Any] = {"max_position_embeddings": 24}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [6.0, 3.0, 2.0, 5.0]}
        rope |= {"original_max_position_embeddings": 24}
        fields = {"max_position_embeddings": 96, "original_max_position_embeddings": 24}
    edit_json(folder / "config.json", rope_parameters=rope, **fields)
    return folder


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_padded_models_of_that_kind_are_right_too(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fallback pads no item across the switch; its vectors are those of the packed forward."""
    import dataclasses

    import numpy as np

    from gpu.batch import pack, scatter
    from gpu.folder.families import FAMILIES

    folder = tiny(tmp_path / "m", kind)
    packed = make_runner_factory("m", folder)()
    row = dataclasses.replace(FAMILIES["llama"], padded_because="a test")
    monkeypatch.setitem(FAMILIES, "llama", row)
    padded = make_runner_factory("m", folder)()
    assert isinstance(padded._forward, RopePaddedForward) and padded.info.packed is False
    items = tuple(
        TokenIds(tuple((5 * i + n) % 200 for i in range(n))) for n in (90, 24, 25, 20, 7, 60)
    )
    batch = pack(packed.encoder.encode([EmbedRequest(id="r", input=items)])[0].items)
    both = [
        np.stack([o.dense for o in scatter(batch, runner.forward(batch))])
        for runner in (packed, padded)
    ]
    assert np.abs(both[0] - both[1]).max() <= 1e-5


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_the_self_check_sees_a_pack_that_is_not_split(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent failure: without the split, short items take the long ones' frequencies; it is caught."""
    import gpu.forward.choice as choice

    folder = tiny(tmp_path / "m", kind)
    assert load_spec(folder).max_tokens == 96
    monkeypatch.setattr(choice, "length_dependent", lambda config: None)
    try:
        runner = make_runner_factory("m", folder)()
    except ModelLoadError as error:  # the plain padded forward is wrong as well
        assert "differs from transformers" in str(error)
    else:
        assert runner.info.packed is False
        assert "differs from transformers" in " ".join(runner.info.notes)
