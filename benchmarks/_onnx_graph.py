"""A BERT encoder as the fused ONNX graph that ONNX Runtime's own transformer optimizer arrives at.

Who calls it: `benchmarks.engine`, for the ONNX Runtime peers and for fastembed.
What must stay true: the same weights and the same numbers as transformers' class (the caller compares
before it times anything); every node is one that the optimizer uses (EmbedLayerNormalization, Attention with q, k and v in
one product, SkipLayerNormalization, BiasGelu), so that the peer is as fast as it can be. Written node by
node because the exporters' graphs change with every release of torch and transformers and then no
longer match the optimizer's patterns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper


class _Graph:
    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def weight(self, name: str, value: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def add(
        self,
        op: str,
        inputs: list[str],
        outputs: list[str],
        *,
        ours: bool = True,
        **attributes: Any,
    ) -> str:
        domain = "com.microsoft" if ours else ""
        self.nodes.append(
            helper.make_node(op, inputs, outputs, name=outputs[0], domain=domain, **attributes)
        )
        return outputs[0]


def fused_bert(
    state: dict[str, np.ndarray],
    *,
    n_layers: int,
    n_heads: int,
    eps: float,
    masked: bool,
    exported: bool = False,
) -> bytes:
    """The serialized model.

    state: transformers' BertModel names -> float32. Inputs `input_ids`, `token_types` (and `mask` when
    `masked`, 1 where a token is): int32 [n, T]. Output `hidden`: float32 [n, T, hidden_size].
    exported: the names and types of exporters instead: `token_type_ids` and `attention_mask`, int64;
    `last_hidden_state`. Needs `masked`.
    """
    g = _Graph()
    feeds = ["input_ids", "token_types", *(["mask"] if masked else [])]
    given, result = feeds, "hidden"
    if exported:
        given, result = ["input_ids", "token_type_ids", "attention_mask"], "last_hidden_state"
        feeds = ["ids", "token_types", "mask"]
        for source, feed in zip(given, feeds, strict=True):
            g.add("Cast", [source], [feed], ours=False, to=TensorProto.INT32)
    names = ["word_embeddings", "position_embeddings", "token_type_embeddings"]
    tables = [g.weight(n, state[f"embeddings.{n}.weight"]) for n in names]
    norm = [g.weight(f"ln0.{p}", state[f"embeddings.LayerNorm.{p}"]) for p in ("weight", "bias")]
    x = g.add(
        "EmbedLayerNormalization",
        [*feeds[:2], *tables, *norm, *feeds[2:]],
        ["embedded", "mask_index"],
        epsilon=eps,
    )
    for i in range(n_layers):
        x = _layer(g, state, i, x, n_heads, eps, masked)
    g.add("Identity", [x], [result], ours=False)
    hidden = state["embeddings.word_embeddings.weight"].shape[1]
    kind = TensorProto.INT64 if exported else TensorProto.INT32
    graph = helper.make_graph(
        g.nodes,
        "bert",
        [helper.make_tensor_value_info(n, kind, ["n", "t"]) for n in given],
        [helper.make_tensor_value_info(result, TensorProto.FLOAT, ["n", "t", hidden])],
        g.weights,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    serialized: bytes = model.SerializeToString()
    return serialized


def _layer(
    g: _Graph, state: dict[str, np.ndarray], i: int, x: str, n_heads: int, eps: float, masked: bool
) -> str:
    def of(name: str) -> np.ndarray:
        return state[f"encoder.layer.{i}.{name}"]

    def weight(name: str, *, transposed: bool = False) -> str:
        value = of(name)
        return g.weight(f"l{i}.{name}", value.T if transposed else value)

    qkv = ("query", "key", "value")
    w = g.weight(f"l{i}.qkv.w", np.hstack([of(f"attention.self.{p}.weight").T for p in qkv]))
    b = g.weight(f"l{i}.qkv.b", np.concatenate([of(f"attention.self.{p}.bias") for p in qkv]))
    inputs = [x, w, b, *(["mask_index"] if masked else [])]
    attended = g.add("Attention", inputs, [f"l{i}.att"], num_heads=n_heads)

    def project(source: str, name: str, out: str) -> str:
        return g.add(
            "MatMul", [source, weight(f"{name}.weight", transposed=True)], [out], ours=False
        )

    def norm(source: str, skip: str, name: str, out: str) -> str:
        parts = [f"{name}.LayerNorm.weight", f"{name}.LayerNorm.bias", f"{name}.dense.bias"]
        return g.add(
            "SkipLayerNormalization", [source, skip, *map(weight, parts)], [out], epsilon=eps
        )

    projected = project(attended, "attention.output.dense", f"l{i}.o")
    x = norm(projected, x, "attention.output", f"l{i}.n1")
    wide = project(x, "intermediate.dense", f"l{i}.up")
    wide = g.add("BiasGelu", [wide, weight("intermediate.dense.bias")], [f"l{i}.gelu"])
    return norm(project(wide, "output.dense", f"l{i}.down"), x, "output", f"l{i}.n2")
