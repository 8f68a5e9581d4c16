"""What a route says where a request says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from actors.route import Route
from gpu.batch import ModelInfo
from pipeline.graph import _check_dimensions
from pipeline.lifecycle import OperatorError
from pipeline.settings.records import RouteSettings
from schemas.requests import ClassifyRequest, EmbedRequest, Text


def route(dimensions: int | None) -> Route:
    unused: Any = None
    return Route("r", "bulk", unused, unused, unused, unused, {}, dimensions=dimensions)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 128),
        ({"outputs": ("dense",)}, 128),
        ({"dimensions": 64}, 64),
        ({"model": "other"}, None),
        ({"outputs": ("sparse",)}, None),
        ({"outputs": ("dense", "multivector")}, None),
    ],
)
def test_a_routes_size_is_that_of_requests_that_say_nothing(
    fields: dict[str, Any], size: int | None
) -> None:
    """A08: a size in the request, or a model of its own, or another output stands above it."""
    request = EmbedRequest(id="r", input=(Text("x"),), **fields)
    assert route(128).completed(request).dimensions == size  # type: ignore[union-attr]
    assert route(None).completed(request) is request


def test_other_tasks_have_no_size() -> None:
    request = ClassifyRequest(id="r", input=(Text("x"),))
    assert route(128).completed(request) is request


def test_a_size_that_the_model_does_not_have_stops_the_start() -> None:
    settings = RouteSettings(name="docs", source="file:///x", dimensions=100)
    info = ModelInfo(
        name="m", fingerprint="f", architecture="A", dtype="float32", device="cpu",
        tasks=frozenset({"embed"}), max_tokens=8, max_batch_tokens=16, dimensions=384,
        allowed_dimensions=(128, 384),
    )  # fmt: skip
    with pytest.raises(
        OperatorError, match=r"route docs: dimensions = 100 .*matryoshka_dimensions"
    ):
        _check_dimensions(settings, info)
    with pytest.raises(OperatorError, match="is no size"):
        _check_dimensions(settings, None)
    for size in (128, 384, None):
        _check_dimensions(RouteSettings(name="d", source="file:///x", dimensions=size), info)
