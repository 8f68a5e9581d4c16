"""One linear as a session of ONNX Runtime, whose MLAS packs the weight once and knows no odd row counts.

Who calls it: `gpu.device.linears`, where onnxruntime is installed.
What must stay true: onnxruntime is imported late and never required. The model of one Gemm is written
here in protobuf's wire format (onnx.proto, ONNX 1.12; field numbers beside the names), because the
package `onnx` is not needed for more than that.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch

_FLOAT, _INT_ATTRIBUTE = 1, 2  # TensorProto.DataType, AttributeProto.AttributeType


@cache
def version() -> str | None:
    """Of the installed onnxruntime; None: there is none."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    return str(importlib.import_module("onnxruntime").__version__)


def gemm(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """x [rows, in_features] float32 -> x @ weight.T + bias, new memory. Safe to share between threads."""
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    session = runtime.InferenceSession(
        _model(weight, bias), options, providers=["CPUExecutionProvider"]
    )

    # Kept to make the session anew with another device's provider: as much memory as the weights.
    session._model_bytes = None

    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])

    return product


def _model(weight: torch.Tensor, bias: torch.Tensor | None) -> bytes:
    """ModelProto: ``y = Gemm(x, w, b)`` with transB."""
    inputs = ["x", "w"] if bias is None else ["x", "w", "b"]
    trans_b = [*_text(1, "transB"), *_varint(3, 1), *_varint(20, _INT_ATTRIBUTE)]
    node = [piece for name in inputs for piece in _text(1, name)]
    node += [*_text(2, "y"), *_text(4, "Gemm"), *_field(5, trans_b)]
    graph = [*_field(1, node), *_text(2, "linear"), *_field(5, _tensor("w", weight))]
    if bias is not None:
        graph += _field(5, _tensor("b", bias))
    out_features, in_features = weight.shape
    graph += _field(11, _matrix("x", in_features))
    graph += _field(12, _matrix("y", out_features))
    return b"".join([*_varint(1, 8), *_field(7, graph), *_field(8, _varint(2, 13))])


_Pieces: TypeAlias = list[bytes | memoryview]
"""A message as it will be written, so that a weight is copied once and not for each message around it."""


def _tensor(name: str, values: torch.Tensor) -> _Pieces:
    """TensorProto: dims, data_type, name, raw_data."""
    raw = values.detach().contiguous().numpy().data.cast("B")
    dims = [piece for n in values.shape for piece in _varint(1, n)]
    return [*dims, *_varint(2, _FLOAT), *_text(8, name), *_field(9, [raw])]


def _matrix(name: str, columns: int) -> _Pieces:
    """ValueInfoProto: float [rows, columns]."""
    shape = [*_field(1, _text(2, "rows")), *_field(1, _varint(1, columns))]
    kind = _field(1, [*_varint(1, _FLOAT), *_field(2, shape)])
    return [*_text(1, name), *_field(2, kind)]


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def _varint(field: int, value: int) -> _Pieces:
    return [_number(field << 3) + _number(value)]


def _field(field: int, payload: _Pieces) -> _Pieces:
    return [_number(field << 3 | 2) + _number(sum(map(len, payload))), *payload]


def _text(field: int, value: str) -> _Pieces:
    return _field(field, [value.encode()])
