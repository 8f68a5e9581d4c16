"""Fakes for the actors' tests: a runner without a model, a clock that tests own, a delivery.

Who calls it: unit tests of actors, integration tests that need no real model.
What must stay true: the fake runner's vectors depend on an item's ids alone, so that a swapped row
is seen; faults are injected by text, so that a test decides per item what goes wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpu.batch import (
    EncodedItem,
    EncodedRequest,
    ItemOptions,
    ItemOutcome,
    ItemResult,
    ModelInfo,
    PackedBatch,
)
from schemas.errors import EmbedstreamError, EmptyInput, NonFinite, TooLong
from schemas.requests import AnyRequest, EmbedRequest, RerankRequest, Text, TokenIds

DIMENSIONS = 8


def fake_vector(ids: Sequence[int]) -> np.ndarray:
    """The vector that `FakeRunner` gives for these ids: float32 [DIMENSIONS]."""
    rng = np.random.default_rng(abs(hash(tuple(ids))) % 2**32)
    return rng.standard_normal(DIMENSIONS).astype(np.float32)


def fake_ids(text: str) -> list[int]:
    """One id per word, stable within a process."""
    return [1 + (sum(word.encode()) * 31 + len(word)) % 997 for word in text.split()]


class FakeEncoder:
    """Words to ids. `calls` counts batched calls."""

    spec: Any = SimpleNamespace(sparse=None)
    """What a folder says of a model: no sparse vectors."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.calls = 0
        self.threads: set[int] = set()

    def encode(self, requests: Sequence[AnyRequest]) -> list[EncodedRequest | EmbedstreamError]:
        self.calls += 1
        self.threads.add(threading.get_ident())
        return [self._encode(request) for request in requests]

    def measure(self, request: EmbedRequest) -> tuple[str, str, int]:
        """As `gpu.encode.text.TextEncoder.measure`: one token per word."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return tokenizer.to_str(), request.prompt or "", self.max_tokens

    def _encode(self, request: AnyRequest) -> EncodedRequest | EmbedstreamError:
        options = ItemOptions(task=request.task)
        if isinstance(request, RerankRequest):
            texts = [f"{request.query} {document.text}" for document in request.documents]
            idss = [fake_ids(text) for text in texts]
        else:
            idss = [
                list(item.ids) if isinstance(item, TokenIds) else fake_ids(item.text or "")
                for item in request.input
            ]
        items: list[EncodedItem | EmbedstreamError] = []
        for index, ids in enumerate(idss):
            if not ids:
                items.append(EmptyInput("no token", items=(index,)))
            elif len(ids) > self.max_tokens:
                items.append(
                    TooLong("too long", items=(index,), limit=self.max_tokens, given=len(ids))
                )
            else:
                items.append(EncodedItem(np.asarray(ids, dtype=np.int32), options))
        return EncodedRequest(tuple(items))


@dataclass(eq=False)
class FakeRunner:
    """Answers every batch at once, or does what `before_forward` says (raise, block).

    poison_id: a batch that holds this id raises `RuntimeError`; alone too.
    nan_id: that item's row is non-finite. oom_tokens: a batch above it raises `MemoryError`.
    """

    name: str = "fake"
    max_tokens: int = 512
    max_batch_tokens: int = 64
    tasks: frozenset[str] = frozenset({"embed", "rerank", "score", "classify"})
    labels: tuple[str, ...] = ()
    before_forward: Callable[[PackedBatch], None] | None = None
    poison_id: int | None = None
    nan_id: int | None = None
    oom_tokens: int | None = None
    batches: list[PackedBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.encoder = FakeEncoder(self.max_tokens)
        self.info = ModelInfo(
            name=self.name,
            fingerprint="f" * 16,
            architecture="Fake",
            dtype="float32",
            device="cpu",
            tasks=self.tasks,  # type: ignore[arg-type]
            max_tokens=self.max_tokens,
            max_batch_tokens=self.max_batch_tokens,
            dimensions=DIMENSIONS,
            labels=self.labels,
        )

    def forward(self, batch: PackedBatch) -> list[ItemOutcome]:
        self.batches.append(batch)
        if self.before_forward is not None:
            self.before_forward(batch)
        if self.oom_tokens is not None and batch.n_tokens > self.oom_tokens:
            raise MemoryError("fake device memory")
        if self.poison_id is not None and self.poison_id in batch.input_ids:
            raise RuntimeError("poisoned batch")
        return [self._row(item) for item in batch.items]

    def _row(self, item: EncodedItem) -> ItemOutcome:
        ids = item.input_ids.tolist()
        if self.nan_id is not None and self.nan_id in ids:
            return NonFinite("the model gave NaN for this item")
        vector = fake_vector(ids)
        if item.options.task == "embed":
            return ItemResult(dense=vector)
        if item.options.task == "classify":
            return ItemResult(scores=vector[: len(self.labels)])
        return ItemResult(scores=vector[:1])

    def close(self) -> None:
        """Nothing to free."""


class ManualClock:
    """A clock that moves when told."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def epoch_ms(self) -> int:
        return int(self.now * 1000)

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(eq=False)
class FakeDelivery:
    """A delivery that remembers what became of it."""

    body: bytes | None = b""
    headers: Mapping[str, bytes] = field(default_factory=dict)
    key: str | None = None
    default_id: str = "delivery-1"
    attempt: int = 1
    redelivered: bool = False
    received_at: float = 0.0
    origin: Mapping[str, str | int] = field(default_factory=lambda: {"transport": "fake"})
    damage: str | None = None
    withdrawn: bool = False
    held: bool = True
    outcome: str | None = None

    def settle(self) -> None:
        self.outcome = self.outcome or "settled"

    def release(self, reason: str) -> None:
        self.outcome = self.outcome or f"released: {reason}"


class RecordingMetrics:
    """Keeps totals by metric name (labels ignored) and all observations."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}
        self.gauges: dict[str, list[float]] = {}
        self.observed: dict[str, list[float]] = {}

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + value

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self.gauges.setdefault(name, []).append(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        self.observed.setdefault(name, []).append(value)

    def observe_all(self, name: str, values: Sequence[float], **labels: str) -> None:
        self.observed.setdefault(name, []).extend(values)


def embed(text: str, *more: str, request_id: str = "r1", **given: object) -> EmbedRequest:
    """An embed request of these texts."""
    return EmbedRequest(
        id=request_id,
        input=tuple(Text(one) for one in (text, *more)),
        **given,  # type: ignore[arg-type]
    )
