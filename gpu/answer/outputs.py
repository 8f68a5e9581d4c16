"""Every output of an embedding model from one forward: dense, sparse, token-level vectors.

Who calls it: `gpu.model_runner` with the hidden states of a pack.
What must stay true: one forward whatever is asked; a row gets what it asked for and nothing else; a
row of which one output is not finite fails alone and names no value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from gpu.answer.chunks import spans_of
from gpu.answer.latent import Latent
from gpu.answer.sparse import Lexical, SparseRow, Splade, mlm_head
from gpu.answer.token_vectors import TokenVectors
from gpu.batch import Float32, ItemOutcome, ItemResult, PackedBatch
from gpu.device.staging import CopyOut, Ticket
from gpu.faults import non_finite
from gpu.folder.latent import LatentSpec
from gpu.folder.outputs import LexicalSpec, SpladeSpec
from gpu.folder.spec import ModelSpec
from gpu.pooler import DenseStack, Segments, finish, flaw, pool
from schemas.errors import NonFinite
from schemas.requests import Output

_Value = TypeVar("_Value")
Arriving: TypeAlias = Callable[[], dict[int, _Value]]
"""What gives the rows' values once the copies to the host have finished."""


class Outputs(nn.Module):
    """The heads of one model, loaded, in fp32 (the masked-LM head in the model's own dtype)."""

    def __init__(
        self,
        spec: ModelSpec,
        model: nn.Module,
        *,
        device: torch.device,
        allow_pickle: bool = False,
        prepack: bool = False,
    ) -> None:
        super().__init__()
        self._spec = spec
        config: Any = model.config
        self.dense = DenseStack(spec.dense, allow_pickle=allow_pickle)
        if prepack:
            self.dense.prepack()
        self.splade: Splade | None = None
        self.lexical: Lexical | None = None
        if isinstance(spec.sparse, SpladeSpec):
            assert spec.family.mlm is not None, "artifacts refuses such a folder"
            self.splade = Splade(
                mlm_head(model, spec.family.mlm),
                spec.sparse,
                vocab_size=int(config.vocab_size),
                device=device,
            )
        elif isinstance(spec.sparse, LexicalSpec):
            self.lexical = Lexical(spec.sparse, int(config.hidden_size))
        self.latent: Latent | None = None
        if isinstance(spec.sparse, LatentSpec):
            self.latent = Latent(spec.sparse, allow_pickle=allow_pickle, prepack=prepack)
        self.token_vectors: TokenVectors | None = None
        if spec.multivector is not None:
            self.token_vectors = TokenVectors(
                spec.multivector,
                int(config.hidden_size),
                allow_pickle=allow_pickle,
                prepack=prepack,
            )
        self.to(device)

    def forward(
        self, batch: PackedBatch, hidden: torch.Tensor, segments: Segments
    ) -> list[ItemOutcome]:
        """hidden: [total_tokens, hidden_size] in the compute dtype -> one outcome per row."""
        copies = CopyOut(hidden.device)
        get_dense = self._dense(batch, hidden, segments, copies)
        get_vectors = self._token_vectors(batch, hidden, copies)
        get_late = self._late_chunks(batch, hidden, segments, copies)
        sparse = self._sparse(batch, hidden, segments)
        copies.finish()
        dense, vectors, late = get_dense(), get_vectors(), get_late()
        outcomes: list[ItemOutcome] = []
        for row in range(batch.n_items):
            if row in late:
                outcomes.append(late[row])
                continue
            vector = dense.get(row)
            if isinstance(vector, NonFinite):
                outcomes.append(vector)
                continue
            if any(found[row] is None for found in (sparse, vectors) if row in found):
                outcomes.append(non_finite())
                continue
            outcomes.append(
                ItemResult(dense=vector, sparse=sparse.get(row), multivector=vectors.get(row))
            )
        return outcomes

    def _dense(
        self, batch: PackedBatch, hidden: torch.Tensor, segments: Segments, copies: CopyOut
    ) -> Arriving[Float32 | NonFinite]:
        rows = _asking(batch, "dense")
        if not rows:
            return dict
        assert self._spec.pooling is not None, "gpu.encode.supported refuses a dense vector here"
        own = segments if len(rows) == batch.n_items else segments.of(rows)
        vectors = self.dense(pool(hidden, own, self._spec.pooling))
        return dense_rows(batch, rows, vectors, self._spec.normalize, copies)

    def _late_chunks(
        self, batch: PackedBatch, hidden: torch.Tensor, segments: Segments, copies: CopyOut
    ) -> Arriving[ItemOutcome]:
        """Rows of late chunking: the mean of each span, finished as a dense vector is."""
        chunked: list[tuple[int, tuple[tuple[int, int], ...], bool, Ticket]] = []
        for row, item in enumerate(batch.items):
            spans = spans_of(item)
            if not spans:
                continue
            start = segments.starts[row]
            starts = tuple(start + a for a, _ in spans)
            ends = tuple(start + b for _, b in spans)
            pooled = pool(hidden, Segments(starts, ends, (0,) * len(spans)), "mean")
            vectors = self.dense(pooled)
            sizes, units = self._asked(batch, [row] * len(spans), vectors.shape[1])
            ((_, part),) = finish(vectors, sizes, units)
            chunked.append((row, tuple(spans), units[0], copies.add(part)))

        def arrived() -> dict[int, ItemOutcome]:
            found: dict[int, ItemOutcome] = {}
            for row, spans, unit, ticket in chunked:
                values = ticket()
                flaws = (bad for value in values if (bad := flaw(value, unit)) is not None)
                found[row] = next(flaws, None) or ItemResult(multivector=values, spans=spans)
            return found

        return arrived

    def _sparse(
        self, batch: PackedBatch, hidden: torch.Tensor, segments: Segments
    ) -> dict[int, SparseRow]:
        rows = _asking(batch, "sparse")
        if not rows:
            return {}
        if self.splade is not None:
            return dict(zip(rows, self.splade(hidden, segments, rows), strict=True))
        if self.latent is not None:
            found = self.latent(hidden, segments, rows, self.dense)
            return dict(zip(rows, found, strict=True))
        assert self.lexical is not None, "gpu.encode.supported refuses sparse weights here"
        return dict(zip(rows, self.lexical(hidden, batch, rows), strict=True))

    def _token_vectors(
        self, batch: PackedBatch, hidden: torch.Tensor, copies: CopyOut
    ) -> Arriving[Float32 | None]:
        rows = _asking(batch, "multivector")
        if not rows:
            return dict
        assert self.token_vectors is not None and self._spec.multivector is not None
        native = self._spec.multivector.dimensions
        arrived = self.token_vectors(
            hidden,
            batch,
            rows,
            *self._asked(batch, rows, native),
            copies,
        )
        return lambda: dict(zip(rows, arrived(), strict=True))

    def _asked(
        self, batch: PackedBatch, rows: Sequence[int], native: int
    ) -> tuple[list[int | None], list[bool]]:
        return _sizes_and_units(batch, rows, native, self._spec.normalize)


def dense_rows(
    batch: PackedBatch,
    rows: Sequence[int],
    vectors: torch.Tensor,
    normalize: bool,
    copies: CopyOut,
) -> Arriving[Float32 | NonFinite]:
    """vectors: [len(rows), dimensions] float32 -> cut and normalised as each row asks, or what is wrong
    with it. normalize: the model's own default."""
    sizes, units = _sizes_and_units(batch, rows, vectors.shape[1], normalize)
    groups = [(group, copies.add(part)) for group, part in finish(vectors, sizes, units)]

    def arrived() -> dict[int, Float32 | NonFinite]:
        found: dict[int, Float32 | NonFinite] = {}
        for group, ticket in groups:
            for i, value in zip(group, ticket(), strict=True):
                found[rows[i]] = flaw(value, units[i]) or value
        return found

    return arrived


def _sizes_and_units(
    batch: PackedBatch, rows: Sequence[int], native: int, normalize: bool
) -> tuple[list[int | None], list[bool]]:
    """What each row asks for: where to cut (None: nowhere), and whether to normalise."""
    options = [batch.items[row].options for row in rows]
    sizes = [None if o.dimensions == native else o.dimensions for o in options]
    return sizes, [normalize if o.normalize is None else o.normalize for o in options]


def _asking(batch: PackedBatch, output: Output) -> list[int]:
    return [row for row, item in enumerate(batch.items) if output in item.options.outputs]
