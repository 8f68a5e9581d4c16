"""The contract between batching and compute: encoded items in, one packed batch, results out.

Who calls it: the tokenizer makes `EncodedItem`s, the coalescer packs them, the dispatcher hands the
`PackedBatch` to the executor, the runner returns one `ItemOutcome` per row.
What must stay true: numpy only (no torch, no asyncio, no broker); arrays live on the host; shapes and
dtypes are asserted here once and trusted everywhere else; row i of a batch belongs to the item
`item_index[i]` of the sequence that was packed.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from schemas.errors import EmbedstreamError
from schemas.requests import AnyRequest, Output, Task

Int32: TypeAlias = npt.NDArray[np.int32]
Float32: TypeAlias = npt.NDArray[np.float32]
Pooling: TypeAlias = Literal["cls", "mean", "last_token", "max", "mean_sqrt_len", "weightedmean"]


_INT32 = np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class ItemOptions:
    """What the pooler does with one item; part of the item, so that mixed batches are ordinary."""

    task: Task = "embed"
    outputs: tuple[Output, ...] = ("dense",)
    dimensions: int | None = None
    normalize: bool | None = None  # None: as the model's own module list says
    raw_scores: bool = False
    chunk_tokens: int | None = None  # late chunking: vectors of spans instead of `outputs`
    labels: tuple[
        int, ...
    ] = ()  # ids of the vocabulary to read a score at, instead of the model's own


# These are not frozen, for a frozen one takes three times as long to make: one for each item, one for each batch.
@dataclass(slots=True, eq=False)
class EncodedItem:
    """One item as token ids, ready to be packed. Never changed.

    input_ids: [n_tokens] int32, host.  token_type_ids: [n_tokens] int32 or None (all zero).
    pooled_from: first token that takes part in mean pooling (a prompt may be excluded).
    attended: leading tokens that tokens attend to; None: all. ColBERT's expansion tokens stand behind
        them: they read the query and are not read.
    extras: arrays that only some families read (pixel values, delimiter positions), by name.
    """

    input_ids: Int32
    options: ItemOptions = ItemOptions()
    token_type_ids: Int32 | None = None
    truncated: bool = False
    pooled_from: int = 0
    attended: int | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.input_ids.dtype == _INT32 and self.input_ids.ndim == 1
        if self.token_type_ids is not None:
            assert self.token_type_ids.dtype == _INT32
            assert self.token_type_ids.shape == self.input_ids.shape
        assert self.attended is None or 0 < self.attended <= len(self.input_ids)

    @property
    def n_tokens(self) -> int:
        """Tokens incl. special ones: the item's cost everywhere."""
        return len(self.input_ids)


@dataclass(slots=True, eq=False)
class PackedBatch:
    """Items laid end to end without padding, as flash-attn's varlen kernels take them. Never changed.

    input_ids       [total_tokens] int32   rows one after the other
    positions       [total_tokens] int32   restart at 0 for every item; families add their offset
    token_type_ids  [total_tokens] int32   or None when every item's are zero
    cu_seqlens      [n_items + 1]  int32   prefix sums, starts at 0, ends at total_tokens
    item_index      [n_items]      int32   row -> position in the sequence given to `pack`
    items           rows' items in row order (options and extras are read from here)
    """

    input_ids: Int32
    positions: Int32
    token_type_ids: Int32 | None
    cu_seqlens: Int32
    max_seqlen: int
    item_index: Int32
    items: tuple[EncodedItem, ...]

    def __post_init__(self) -> None:
        n, total = len(self.items), int(self.input_ids.shape[0])
        assert self.cu_seqlens.dtype == _INT32 and self.cu_seqlens.shape == (n + 1,)
        assert self.cu_seqlens[0] == 0 and int(self.cu_seqlens[-1]) == total
        assert self.positions.dtype == _INT32 and self.positions.shape == (total,)
        assert self.input_ids.dtype == _INT32
        assert self.item_index.shape == (n,)
        assert self.token_type_ids is None or self.token_type_ids.shape == (total,)

    @property
    def n_items(self) -> int:
        return len(self.items)

    @property
    def n_tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def seqlens(self) -> list[int]:
        """Tokens of each row."""
        return [int(n) for n in np.diff(self.cu_seqlens)]

    def __repr__(self) -> str:
        return f"PackedBatch(n_items={self.n_items}, n_tokens={self.n_tokens}, max_seqlen={self.max_seqlen})"


def pack(items: Sequence[EncodedItem]) -> PackedBatch:
    """Lay items end to end, longest first, so that equal lengths share an attention call.

    The order is a stable sort by length: which items travel together decides the layout, never
    the history. Zero-token items are allowed (their segment is empty).
    """
    assert len(items) > 0, "an empty batch is a bug of the packer"
    given = [len(item.input_ids) for item in items]
    order = sorted(range(len(items)), key=given.__getitem__, reverse=True)  # stable all the same
    rows = tuple([items[i] for i in order])
    cu_seqlens = _int32([0, *accumulate([given[i] for i in order])])
    starts, total = cu_seqlens[:-1], int(cu_seqlens[-1])
    token_type_ids: Int32 | None = None
    if any(item.token_type_ids is not None for item in rows):
        token_type_ids = np.zeros(total, dtype=np.int32)
        for row, item in enumerate(rows):
            if item.token_type_ids is not None:
                token_type_ids[cu_seqlens[row] : cu_seqlens[row + 1]] = item.token_type_ids
    return PackedBatch(
        input_ids=_joined([item.input_ids for item in rows]),
        positions=np.arange(total, dtype=np.int32) - starts.repeat(cu_seqlens[1:] - starts),
        token_type_ids=token_type_ids,
        cu_seqlens=cu_seqlens,
        max_seqlen=given[order[0]],
        item_index=_int32(order),
        items=rows,
    )


def _int32(values: list[int]) -> Int32:
    return np.frombuffer(array("i", values), dtype=np.int32)  # a third of what `np.array` takes


def _joined(ids: list[Int32]) -> Int32:
    """End to end, in an array of its own."""
    try:
        return np.frombuffer(bytearray().join(cast(list[Any], ids)), dtype=np.int32)
    except BufferError:  # one does not lie in one piece
        return np.concatenate(ids)


@dataclass(slots=True, eq=False)
class ItemResult:
    """What the pooler made of one item. Every array is finite float32 (the runner checks). Never changed."""

    dense: Float32 | None = None  # [dimensions]
    scores: Float32 | None = None  # [n_labels]; [1] for a relevance score
    sparse: tuple[Int32, Float32] | None = None  # vocabulary ids ascending, weights
    multivector: Float32 | None = None  # [n_vectors, dimensions]
    spans: tuple[tuple[int, int], ...] | None = None  # late chunking: tokens of each vector

    @property
    def is_dense_only(self) -> bool:
        """One vector and nothing beside it?"""
        return (
            self.dense is not None
            and self.scores is None
            and self.sparse is None
            and self.multivector is None
            and self.spans is None
        )


ItemOutcome: TypeAlias = ItemResult | EmbedstreamError


def scatter(batch: PackedBatch, rows: Sequence[ItemOutcome]) -> list[ItemOutcome]:
    """Rows back in the order of the sequence that was packed."""
    assert len(rows) == batch.n_items, (
        f"runner returned {len(rows)} rows for {batch.n_items} items; this is a bug"
    )
    out: list[ItemOutcome | None] = [None] * batch.n_items
    for position, outcome in zip(batch.item_index.tolist(), rows, strict=True):
        out[position] = outcome
    return out  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the rest of the service must know about a loaded model. Plain values."""

    name: str
    fingerprint: (
        str  # hash over weights, tokenizer and pooling configuration; same bytes, same name
    )
    architecture: str
    dtype: str  # compute dtype: "float32", "bfloat16", "float16"
    device: str  # "cpu", "cuda:0"
    tasks: frozenset[Task]
    max_tokens: int  # per item, incl. special tokens
    max_batch_tokens: int  # the token budget of a batch; a longer item travels alone
    dimensions: int | None = None  # native vector size
    allowed_dimensions: tuple[int, ...] | None = None  # None: native only
    pooling: str | None = None
    normalized: bool = False  # the model's own default
    outputs: frozenset[Output] = frozenset({"dense"})
    default_outputs: tuple[Output, ...] = ("dense",)  # of a request that names none
    multivector_dimensions: int | None = None  # size of each token-level vector
    labels: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()  # names
    default_prompt_name: str | None = None
    modalities: tuple[str, ...] = ("text",)  # what an item may hold
    packed: bool = True  # False: length-bucketed padding through the same seam
    attention: str = "sdpa"  # backend, shown by `check`
    linears: str = "torch"  # "onednn-prepacked" or "torch"
    implementation: str = "transformers"  # whose code computes the layers: that, or "own"
    notes: tuple[str, ...] = ()  # what an operator should know, one sentence each
    flops_per_token: int = 0  # of the linears, two per weight; 0: not a sum of linears
    honoured: tuple[str, ...] = ()  # keys of the folder's files that were obeyed, "file: key"


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """A request after tokenization: one entry per item, in input order."""

    items: tuple[EncodedItem | EmbedstreamError, ...]
    prompt: str | None = None  # the prompt text that was put before each text, echoed in the reply


class Encoder(Protocol):
    """Turns requests into token ids. Not thread-safe: one thread owns it."""

    def encode(self, requests: Sequence[AnyRequest]) -> list[EncodedRequest | EmbedstreamError]:
        """One entry per request, in order; an error entry fails that whole request.

        Never raises for what a sender may cause. All texts of all requests go through one batched
        tokenizer call.
        """
        ...


class Runner(Protocol):
    """One model on one device. `forward` may be called from several executor threads at once."""

    info: ModelInfo
    encoder: Encoder

    def forward(self, batch: PackedBatch) -> list[ItemOutcome]:
        """One outcome per row, in row order. Raises only when the whole batch failed;
        `MemoryError` (or a subclass) means device memory ran out and a smaller batch may pass."""
        ...

    def close(self) -> None:
        """Drop weights and device memory."""
        ...


class ExecutorDied(Exception):
    """The executor refuses work for good: its device is lost, a thread ended, or it was closed. No
    fault of the batch, which may pass elsewhere."""


@dataclass(frozen=True, slots=True)
class ExecutorHealth:
    """alive: every thread runs. fatal: why the executor refuses work for good, or None.

    last_success_s / oldest_running_s: `time.monotonic()` stamps, None when there is none.
    """

    alive: bool
    fatal: str | None = None
    last_success_s: float | None = None
    oldest_running_s: float | None = None
    n_running: int = 0
    consecutive_failures: int = 0


class Executor(Protocol):
    """The threads that own the models of one device."""

    width: int  # batches that run at once

    def submit(self, model: str, batch: PackedBatch) -> Future[list[ItemOutcome]]:
        """Queue one batch; the future resolves to outcomes in row order. Raises nothing itself:
        a dead executor resolves the future with `ExecutorDied`. Until a thread has taken the batch its
        caller may cancel the future: it is not computed then."""
        ...

    def health(self) -> ExecutorHealth: ...
