"""A vector of zeros has no direction: never answered as one of length 1."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu.batch import pack, scatter
from gpu.faults import ModelLoadError
from gpu.load import make_runner_factory
from schemas.errors import ZeroVector
from schemas.requests import EmbedRequest, Text
from tests.support.models import write_model


class Zeros(torch.nn.Module):
    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(pooled)


def test_a_model_that_gives_nothing_but_zeros_does_not_load(tmp_path: Path) -> None:
    """K24"""
    folder = write_model(tmp_path / "m", "bert", dense=8)
    weights = folder / "2_Dense" / "model.safetensors"
    save_file({name: torch.zeros_like(t) for name, t in load_file(weights).items()}, weights)
    with pytest.raises(ModelLoadError, match="vector of zeros"):
        make_runner_factory("m", folder)()


@pytest.mark.parametrize(
    ("fields", "fails"),
    [({}, True), ({"normalize": False}, False), ({"chunk_tokens": 4}, True)],
)
def test_zeros_fail_alone_unless_asked_for_as_they_are(
    tmp_path: Path, fields: dict, fails: bool
) -> None:
    """K24"""
    runner = make_runner_factory("m", write_model(tmp_path / "m", "bert"))()
    runner._outputs.dense = Zeros()
    request = EmbedRequest(
        id="r", input=(Text("the river"), Text("a model of the queue")), **fields
    )
    batch = pack(runner.encoder.encode([request])[0].items)
    outcomes = scatter(batch, runner.forward(batch))
    assert [isinstance(outcome, ZeroVector) for outcome in outcomes] == [fails, fails]
