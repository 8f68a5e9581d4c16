"""Dequantised weights: named as in transformers, exact, and nothing left over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.demo.onnx_weights import OnnxWeightsError, encoder_weights

onnx = pytest.importorskip("onnx")
helper, numpy_helper = onnx.helper, onnx.numpy_helper


def graph_bytes(nodes: list[Any], initializers: dict[str, np.ndarray]) -> bytes:
    graph = helper.make_graph(
        nodes,
        "g",
        [],
        [],
        [numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    return helper.make_model(graph).SerializeToString()


def quantised_linear(scale: np.ndarray) -> tuple[list[Any], dict[str, np.ndarray]]:
    """A linear layer as quantisers write it: MatMulInteger, Cast, Mul, then Add with the bias."""
    nodes = [
        helper.make_node("MatMulInteger", ["x_q", "onnx::MatMul_7_quantized", "xz", "wz"], ["y0"]),
        helper.make_node("Cast", ["y0"], ["y1"], to=1),
        helper.make_node("Mul", ["y1", "s"], ["y2"]),
        helper.make_node("Add", ["layer.dense.bias", "y2"], ["y3"]),
    ]
    return nodes, {
        "onnx::MatMul_7_quantized": np.array([[1, -2, 3], [4, 5, -6]], dtype=np.int8),
        "onnx::MatMul_7_scale": scale,
        "onnx::MatMul_7_zero_point": np.zeros(scale.shape, dtype=np.int8),
        "layer.dense.bias": np.array([0.5, 1.5, 2.5], dtype=np.float32),
    }


@pytest.mark.parametrize(
    "scale",
    [np.array(0.5, dtype=np.float32), np.array([0.5, 0.25, 2.0], dtype=np.float32)],
    ids=["per tensor", "per channel"],
)
def test_a_quantised_linear_gets_its_name_from_its_bias(scale: np.ndarray) -> None:
    weights = encoder_weights(graph_bytes(*quantised_linear(scale)))
    want = (np.array([[1, -2, 3], [4, 5, -6]], dtype=np.float32) * scale).T
    assert set(weights) == {"layer.dense.weight", "layer.dense.bias"}
    np.testing.assert_array_equal(weights["layer.dense.weight"], want)
    assert weights["layer.dense.weight"].flags.c_contiguous
    assert weights["layer.dense.weight"].dtype == np.float32


def test_an_embedding_with_a_zero_point_keeps_its_orientation() -> None:
    table = np.array([[0, 255], [128, 7]], dtype=np.uint8)
    weights = encoder_weights(
        graph_bytes(
            [helper.make_node("Gather", ["emb.weight_quantized", "ids"], ["rows"])],
            {
                "emb.weight_quantized": table,
                "emb.weight_scale": np.array(0.1, dtype=np.float32),
                "emb.weight_zero_point": np.array(128, dtype=np.uint8),
            },
        )
    )
    want = (table.astype(np.float32) - 128) * np.float32(0.1)
    np.testing.assert_array_equal(weights["emb.weight"], want)


def test_a_float_linear_is_only_turned() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "onnx::MatMul_3"], ["y"]),
        helper.make_node("Add", ["y", "a.bias"], ["z"]),
    ]
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    bias = np.zeros(3, dtype=np.float32)
    weights = encoder_weights(graph_bytes(nodes, {"onnx::MatMul_3": matrix, "a.bias": bias}))
    np.testing.assert_array_equal(weights["a.weight"], matrix.T)


def test_a_product_without_a_named_bias_is_refused() -> None:
    nodes, initializers = quantised_linear(np.array(0.5, dtype=np.float32))
    with pytest.raises(OnnxWeightsError, match="no named bias"):
        encoder_weights(graph_bytes(nodes[:3], initializers))


def test_a_weight_left_over_is_refused() -> None:
    nodes, initializers = quantised_linear(np.array(0.5, dtype=np.float32))
    initializers["onnx::Mystery"] = np.ones((8, 8), dtype=np.int8)
    with pytest.raises(OnnxWeightsError, match="Mystery"):
        encoder_weights(graph_bytes(nodes, initializers))


def test_scales_that_do_not_fit_are_refused() -> None:
    nodes, initializers = quantised_linear(np.array(0.5, dtype=np.float32))
    initializers["onnx::MatMul_7_scale"] = np.ones(2, dtype=np.float32)
    with pytest.raises(OnnxWeightsError, match="2 scales"):
        encoder_weights(graph_bytes(nodes, initializers))
