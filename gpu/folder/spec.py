"""What a model folder says, as one record; and what the settings may say instead.

Who calls it: the readers in this package make a `ModelSpec`, everything behind them reads it.
What must stay true: plain values without torch; paths are local, nothing is read from them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.folder.adapter import Adapter, TaskAdapter
from gpu.folder.chat import ChatForm
from gpu.folder.families import LAST_TOKEN_HEADS, Family
from gpu.folder.modules import DenseSpec
from gpu.folder.outputs import OUTPUTS, SparseSpec, SpladeSpec, TokenVectorSpec
from gpu.folder.prompts import LabelHead, PairPrompt
from gpu.folder.sentence_bert import Calls
from gpu.folder.stored import weight_files
from schemas.requests import Output, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What an operator says about a model instead of its folder; None: as the folder says.

    prompts are added to the folder's. causal: whether a decoder attends to earlier tokens only.
    cutoff_layer: where a layerwise reranker is read.
    rerank_template, label_tokens: see `gpu.folder.rerankers`. ignore_keys: see `gpu.folder.keys`.
    offline: the base model of an adapter is not fetched.
    """

    pooling: str | None = None
    max_tokens: int | None = None
    matryoshka_dimensions: tuple[int, ...] | None = None
    prompts: Mapping[str, str] | None = None
    default_prompt_name: str | None = None
    rerank_template: str | None = None
    label_tokens: tuple[str, ...] | None = None
    causal: bool | None = None
    cutoff_layer: int | None = None
    trust_remote_code: bool = False
    ignore_keys: tuple[str, ...] = ()
    offline: bool = True


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a folder says. Paths are local; sizes in tokens or in elements.

    folder: the model folder; transformer: where tokenizer, config.json and weights are (may be the same);
    adapter: what is merged into the weights, which then lie in its base's folder.
    head: the model has a `*ForSequenceClassification` head.
    score_activation / label_activation: "sigmoid", "softmax" or "identity", applied once, by us.
    allowed_dimensions: sizes a vector may be cut to, ascending; None: only the native one.
    dimensions, pooling: of the dense vector; None: the model has none. pooling: `Pooling` names with "+"
    between them. sparse, multivector: the other
    outputs, computed from the same forward. calls: how texts become ids. honoured: keys of the folder's
    files that were obeyed, for `embedstream check`. chat: every text goes through a chat template.
    task_adapters: prompt name -> adapter that texts under it go through.
    conversation: the chat template by which a classifier reads items that are messages.
    """

    folder: Path
    transformer: Path
    architecture: str
    model_type: str
    family: Family
    config: Mapping[str, Any]
    tasks: frozenset[Task]
    head: bool
    max_tokens: int
    position_offset: int
    fingerprint: str
    dimensions: int | None = None
    pooling: str | None = None
    include_prompt: bool = True
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = False
    allowed_dimensions: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()
    score_activation: str = "identity"
    label_activation: str = "identity"
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    pairs: PairPrompt | None = None
    label_head: LabelHead | None = None
    causal: bool | None = None
    notes: tuple[str, ...] = ()
    sparse: SparseSpec | None = None
    multivector: TokenVectorSpec | None = None
    calls: Calls = field(default_factory=Calls)
    honoured: tuple[str, ...] = ()
    adapter: Adapter | None = None
    task_adapters: Mapping[str, TaskAdapter] = field(default_factory=dict)
    chat: ChatForm | None = None
    conversation: str | None = None

    @property
    def has_mlm_head(self) -> bool:
        """The model is a `*ForMaskedLM` whose logits are read (SPLADE)."""
        return isinstance(self.sparse, SpladeSpec)

    @property
    def free_queries(self) -> bool:
        """Queries go through no model: their tokens have weights of their own."""
        return isinstance(self.sparse, SpladeSpec) and self.sparse.query_table is not None

    @property
    def names_matter(self) -> bool:
        """A prompt's name changes more than the text before a text."""
        return self.multivector is not None or self.free_queries or bool(self.task_adapters)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What it can give for one text, in the order in which one of them is the default."""
        there = (self.dimensions, self.sparse, self.multivector)
        return tuple(o for o, value in zip(OUTPUTS, there, strict=True) if value is not None)

    @property
    def skipped_pad(self) -> int | None:
        """See `gpu.pooler.segments_of`."""
        last = self.head and self.family.head in LAST_TOKEN_HEADS
        return self.config.get("pad_token_id") if last else None

    @property
    def weights(self) -> list[Path]:
        """Weight files of the transformer, safetensors first."""
        return weight_files(self.weights_folder)

    @property
    def weights_folder(self) -> Path:
        """Where config.json and the weights lie: the base model's folder for an adapter."""
        return self.transformer if self.adapter is None else self.adapter.base
