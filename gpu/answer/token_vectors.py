"""One vector per token from hidden states of a pack: ColBERT's projection, and BGE-M3's.

Who calls it: `gpu.answer.outputs` after the forward.
What must stay true: projection and norm in fp32, one token at a time in effect (same bits whatever
else is in the pack); tokens that the model's own library leaves out are left out here; the order
is that of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gpu.answer.sparse import load_linear
from gpu.batch import Float32, PackedBatch
from gpu.device.linears import prepack_one
from gpu.device.staging import CopyOut, Ticket, upload
from gpu.folder.outputs import QUERY_PROMPT, TokenVectorSpec
from gpu.pooler import NORM_EPS, DenseStack


class TokenVectors(nn.Module):
    """hidden states -> vectors of the tokens that count."""

    def __init__(
        self, spec: TokenVectorSpec, hidden_size: int, *, allow_pickle: bool, prepack: bool
    ) -> None:
        super().__init__()
        self._spec = spec
        self._skip = np.asarray(spec.skip_ids, dtype=np.int32)
        if spec.linear is not None:
            linear = load_linear(spec.linear, hidden_size, spec.dimensions)
            self._project: nn.Module = prepack_one(linear) if prepack else linear
        else:
            stack = DenseStack(spec.dense, allow_pickle=allow_pickle)
            if prepack:
                stack.prepack()
            self._project = stack

    def forward(
        self,
        hidden: torch.Tensor,
        batch: PackedBatch,
        rows: Sequence[int],
        sizes: Sequence[int | None],
        units: Sequence[bool],
        copies: CopyOut,
    ) -> Callable[[], list[Float32 | None]]:
        """What gives, once `copies` has finished, one [n_vectors, size] float32 per asked row, on the
        host; None: it was not finite.

        hidden: [total_tokens, hidden_size]. sizes, units: cut and normalise, entry by entry of `rows`.
        """
        places = [self._places(batch, row) for row in rows]
        index = np.concatenate(places)
        if len(index) == 0:
            shapes = [(0, size or self._spec.dimensions) for size in sizes]
            return lambda: [np.zeros(shape, np.float32) for shape in shapes]
        vectors = self._project(hidden[upload([index], hidden.device)[0]].float())
        tickets: list[Ticket] = []
        at = 0
        for place, size, unit in zip(places, sizes, units, strict=True):
            part = vectors[at : at + len(place)]
            at += len(place)
            if size is not None:
                part = part[:, :size].contiguous()
            if unit:
                norm = torch.linalg.vector_norm(part, dim=-1, keepdim=True)
                part = part / norm.clamp_min(NORM_EPS)
            tickets.append(copies.add(part))

        def arrived() -> list[Float32 | None]:
            arrays = [ticket() for ticket in tickets]
            return [values if np.isfinite(values).all() else None for values in arrays]

        return arrived

    def _places(self, batch: PackedBatch, row: int) -> npt.NDArray[np.int64]:
        """Token offsets in the pack of those that give a vector."""
        item = batch.items[row]
        kept = np.ones(item.n_tokens, dtype=bool)
        if self._spec.skip_first:
            kept[0] = False
        if len(self._skip) and item.extras.get("prompt_name") != QUERY_PROMPT:
            kept &= ~np.isin(item.input_ids, self._skip)
        return np.flatnonzero(kept) + int(batch.cu_seqlens[row])
