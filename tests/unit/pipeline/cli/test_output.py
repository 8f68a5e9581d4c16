"""What a person sees of sparse and token-level answers, and of a model's outputs in `check`."""

from __future__ import annotations

import dataclasses

from gpu.batch import ModelInfo
from pipeline.cli.check import _model_plan
from pipeline.cli.output import _vector_head
from schemas.results import ItemReply, Sparse

INFO = ModelInfo(
    name="m", fingerprint="sha256:0", architecture="XLMRobertaModel", dtype="float32", device="cpu",
    tasks=frozenset({"embed"}), max_tokens=8192, max_batch_tokens=512, dimensions=1024,
    outputs=frozenset({"dense", "sparse", "multivector"}),
)  # fmt: skip


def test_sparse_weights_are_shown_heaviest_first() -> None:
    item = ItemReply(index=0, sparse=Sparse([3, 9, 77, 80], [0.5, 2.25, 1.0, 0.125]))
    assert _vector_head(item, "float32") == "4 weights; heaviest 9: 2.250, 77: 1.000, 3: 0.500"
    assert _vector_head(ItemReply(index=0, sparse=Sparse([], [])), "float32") == "0 weights"


def test_token_vectors_are_counted() -> None:
    item = ItemReply(index=0, multivector=[b"\0" * 8] * 5)
    assert _vector_head(item, "float32") == "5 vectors, one per token"


def test_check_names_outputs_and_sizes() -> None:
    plan = _model_plan(INFO, False)
    assert "outputs dense; on request multivector, sparse" in plan
    assert "dimensions on request" not in plan
    sizes = dataclasses.replace(INFO, allowed_dimensions=(256, 512, 1024))
    assert "dimensions on request 256, 512, 1024" in _model_plan(sizes, False)
    every = dataclasses.replace(INFO, allowed_dimensions=tuple(range(1, 1025)))
    assert "dimensions on request 1 to 1024" in _model_plan(every, False)
    scorer = dataclasses.replace(INFO, outputs=frozenset(), default_outputs=())
    assert "outputs" not in _model_plan(scorer, False)
