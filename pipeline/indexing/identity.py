"""What makes vectors comparable, kept beside a collection: never two models in one index. Pure.

Who calls it: a `Collection` when it is opened; `index status`.
What must stay true: a collection takes vectors of exactly the model, prompt, size and cutting it was
made with; others are refused before anything is written, with what differs and the remedy.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.indexing.vectors import METRICS
from schemas.requests import Output


class WrongCollection(Exception):
    """The collection holds something else than this route makes. Not retryable."""


class CollectionIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Stands beside the collection as JSON.

    model: name, for people; fingerprint: of weights, tokenizer and pooling; prompt: the text put
    before each chunk, or ""; chunking: `Chunker.described`; metric: how vectors are compared, which
    says of what kind they are. dimensions of sparse vectors: entries of the vocabulary.
    """

    model: str
    fingerprint: str
    dimensions: int
    prompt: str = ""
    chunking: str = ""
    metric: str = "cosine"
    format: int = 1
    """Of what embedstream stores; a newer one is not written to."""

    def to_json(self) -> str:
        """One line of JSON, keys in the order of the fields."""
        return msgspec.json.encode(self).decode()

    @property
    def kind(self) -> Output:
        """What vectors it holds. Raises `WrongCollection`: made by a newer version."""
        for kind, metric in METRICS.items():
            if metric == self.metric:
                return kind
        raise WrongCollection(f"vectors are compared by {self.metric}, which this version has not")

    @staticmethod
    def from_json(text: str | bytes | None, where: str) -> CollectionIdentity:
        """Raises `WrongCollection` when it is absent or unreadable: others made that collection."""
        if not text:
            raise WrongCollection(
                f"{where} exists and was not made by embedstream: name another collection"
            )
        try:
            return msgspec.json.decode(text, type=CollectionIdentity)
        except msgspec.DecodeError as error:
            raise WrongCollection(
                f"what stands beside {where} cannot be read ({error}): name another collection"
            ) from error

    def check(self, wanted: CollectionIdentity, where: str) -> None:
        """Raises `WrongCollection` unless vectors of `wanted` may be written into this one."""
        mine, theirs = msgspec.to_builtins(self), msgspec.to_builtins(wanted)
        if not wanted.fingerprint:
            raise WrongCollection("the model has no fingerprint: this is a bug")
        different = [
            f"{name} is {_short(mine[name])} there and {_short(theirs[name])} here"
            for name in mine
            if name != "model" and mine[name] != theirs[name]
        ]
        if different:
            raise WrongCollection(
                f"{where} holds other vectors ({self.model}): {'; '.join(different)}. "
                "Write into another collection, or make one anew with `embedstream reindex`"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:96] + "...'"
