"""A static model: the mean of a text's token vectors. The contract of a runner without a transformer.

Who calls it: `gpu.load` for a Model2Vec or StaticEmbedding folder; the executor's threads.
What must stay true: as in `gpu.runner`; an item's bytes depend on its own ids alone. The formula is model2vec's `StaticModel` (rows, times weights where there are some, averaged, normalised).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu.batch import EncodedItem, Float32, Int32, ItemOutcome, ItemResult, PackedBatch
from gpu.encode.text import Content, EmptyPolicy, TextEncoder
from gpu.faults import ModelLoadError
from gpu.folder.spec import ModelSpec
from gpu.folder.static import MODEL2VEC
from gpu.pooler import NORM_EPS, flaw
from gpu.runner import BaseRunner, OnPhase
from schemas.errors import EmbedstreamError

BATCH_TOKENS = 16384  # a pack costs memory only for one item at a time
CHUNK_TOKENS = 4096  # rows gathered at once, so that one huge item stays small


class StaticEncoder(TextEncoder):
    """No special tokens; model2vec also drops unknown ones."""

    def __init__(self, spec: ModelSpec, tokenizer: Any, *, empty_input: EmptyPolicy) -> None:
        super().__init__(spec, tokenizer, token_types=False, empty_input=empty_input)
        self._unknown = _unknown_id(tokenizer) if spec.model_type == MODEL2VEC else None

    def _contents(self, texts: list[str]) -> list[Content]:
        return [self._known(content) for content in super()._contents(texts)]

    def _known(self, content: Content) -> Content:
        if self._unknown is None or isinstance(content, EmbedstreamError):
            return content
        return content[content != self._unknown]


def load_static_encoder(spec: ModelSpec, *, empty_input: EmptyPolicy = "error") -> StaticEncoder:
    """The folder's tokenizer.json without its post-processor: no token is added to a text.

    Raises `ModelLoadError` when there is none.
    """
    from tokenizers import Tokenizer

    path = spec.transformer / "tokenizer.json"
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        description["post_processor"] = None
        tokenizer = Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the Rust library raises plain Exception
        raise ModelLoadError(f"{path}: no usable tokenizer: {error}") from error
    return StaticEncoder(spec, tokenizer, empty_input=empty_input)


def _unknown_id(tokenizer: Any) -> int | None:
    """The id that stands for unknown text: WordPiece, BPE and WordLevel name a token, Unigram an id."""
    model = json.loads(tokenizer.to_str())["model"]
    if model.get("unk_token") is not None:
        found: int | None = tokenizer.token_to_id(model["unk_token"])
        return found
    return model.get("unk_id")


class StaticRunner(BaseRunner):
    """Implements `gpu.batch.Runner`. Always on the CPU, in fp32; safe from several threads at once."""

    weights = ("_table", "_weights", "_mapping")

    def _where(self) -> tuple[torch.device, torch.dtype]:
        device, dtype = self.settings.device, self.settings.dtype
        if device not in ("auto", "cpu"):
            raise ModelLoadError(
                f"model {self.name}: device = {device!r}; a static model runs on the CPU"
            )
        if dtype not in ("auto", "float32"):
            raise ModelLoadError(
                f"model {self.name}: dtype = {dtype!r}; a static model computes in float32"
            )
        return torch.device("cpu"), torch.float32

    def _load(self, prepack: bool, on_phase: OnPhase) -> dict[str, Any]:
        self._table, self._weights, self._mapping = _read(self.spec)
        return {"attention": "none", "linears": "none"}

    def _auto_budget(self) -> int:
        return BATCH_TOKENS

    def _compute(self, batch: PackedBatch) -> list[ItemOutcome]:
        return [self._outcome(item) for item in batch.items]

    def _outcome(self, item: EncodedItem) -> ItemOutcome:
        options = item.options
        vector = self._mean(item.input_ids)[: options.dimensions]
        unit = self.spec.normalize if options.normalize is None else options.normalize
        if unit:
            vector = vector / max(float(np.linalg.norm(vector)), NORM_EPS)
        dense = vector.astype(np.float32)
        return flaw(dense, unit) or ItemResult(dense=dense)

    def _mean(self, ids: Int32) -> npt.NDArray[np.float64]:
        total = np.zeros(self._table.shape[1], dtype=np.float64)
        for at in range(0, len(ids), CHUNK_TOKENS):
            part = ids[at : at + CHUNK_TOKENS]
            rows = self._table[part if self._mapping is None else self._mapping[part]]
            if self._weights is not None:
                rows = rows.astype(np.float32) * self._weights[part][:, None]
            total += rows.sum(axis=0, dtype=np.float64)
        return total / len(ids)


def _read(
    spec: ModelSpec,
) -> tuple[npt.NDArray[Any], Float32 | None, npt.NDArray[np.int64] | None]:
    """(table [rows, dimensions] in its own dtype, weights [vocabulary], mapping [vocabulary])."""
    from safetensors.torch import load_file

    path = spec.weights[0]
    tensors = {
        name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        for name, tensor in load_file(path).items()
    }
    name = "embeddings" if spec.model_type == MODEL2VEC else "embedding.weight"
    known = {"embeddings", "weights", "mapping"} if spec.model_type == MODEL2VEC else {name}
    odd = sorted(set(tensors) - known)
    if odd or name not in tensors:
        raise ModelLoadError(f"{path}: holds {', '.join(sorted(tensors))}; wanted {name}")
    table = tensors[name].numpy()
    vocab_size = int(spec.config["vocab_size"])
    weights = mapping = None
    if "weights" in tensors:
        weights = tensors["weights"].float().numpy()
    if "mapping" in tensors:
        mapping = tensors["mapping"].long().numpy()
        if len(mapping) and (mapping.min() < 0 or mapping.max() >= len(table)):
            raise ModelLoadError(f"{path}: mapping points outside the {len(table)} vectors")
    for what, tensor in (("weights", weights), ("mapping", mapping)):
        if tensor is not None and tensor.shape != (vocab_size,):
            raise ModelLoadError(f"{path}: {what} for {tensor.shape} of {vocab_size} tokens")
    if mapping is None and len(table) != vocab_size:
        raise ModelLoadError(f"{path}: {len(table)} vectors for {vocab_size} tokens")
    return table, weights, mapping
