"""CSR: the largest latents of a sparse autoencoder over a pooled vector.

Who calls it: `gpu.answer.outputs`.
What must stay true: fp32; a row's latents are a function of that row alone; latents at or below zero are no
weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gpu.answer.sparse import SparseRow, positive
from gpu.device.linears import prepack_one
from gpu.faults import ModelLoadError
from gpu.folder.latent import LatentSpec
from gpu.pooler import NORM_EPS, DenseStack, Segments, pool, read_weights

_EPS = 1e-5  # the module's own
# One tensor under two names; safetensors keeps one of them.
_TIED = ("encoder.weight", "decoder.linear.weight")


class Latent(nn.Module):
    """The module of one model, loaded. Raises `ModelLoadError` for tensors that do not fit its config."""

    before: torch.Tensor

    def __init__(self, spec: LatentSpec, *, allow_pickle: bool, prepack: bool) -> None:
        super().__init__()
        self._spec = spec
        state = read_weights(spec.folder, allow_pickle=allow_pickle)
        state.pop("stats_last_nonzero", None)  # counted in training
        tied = [state.pop(name).float() for name in _TIED if name in state]
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        wanted = {"pre_bias": (spec.input_dim,), "latent_bias": (spec.hidden_dim,)}
        size = (spec.hidden_dim, spec.input_dim)
        same = bool(tied) and all(torch.equal(one, tied[0]) for one in tied)
        if shapes != wanted or not same or tied[0].shape != size:
            raise ModelLoadError(
                f"{spec.folder}: holds {shapes} and {len(tied)} of {' and '.join(_TIED)}, wanted {wanted} "
                f"and one matrix {size}"
            )
        linear = nn.Linear(spec.input_dim, spec.hidden_dim)
        linear.load_state_dict({"weight": tied[0], "bias": state["latent_bias"].float()})
        linear.eval().requires_grad_(False)
        self.linear = prepack_one(linear) if prepack else linear
        self.register_buffer("before", state["pre_bias"].float())

    def forward(
        self, hidden: torch.Tensor, segments: Segments, rows: Sequence[int], dense: DenseStack
    ) -> list[SparseRow]:
        """hidden: [total_tokens, hidden_size] -> one entry per asked row, in the order of `rows`. dense: the
        modules between the pooling and this one."""
        own = segments if len(rows) == segments.n_items else segments.of(rows)
        x = dense(pool(hidden, own, self._spec.pooling))
        if self._spec.normalize:
            x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(NORM_EPS)
        if self._spec.centred:
            x = x - x.mean(dim=-1, keepdim=True)
            x = x / (x.std(dim=-1, keepdim=True) + _EPS)
        latents = self.linear(x - self.before)
        largest = torch.topk(latents, self._spec.k, dim=-1)
        kept = torch.zeros_like(latents).scatter_(-1, largest.indices, largest.values)
        # Not finite before the choice is not finite after it.
        kept = torch.where(torch.isfinite(latents).all(dim=-1, keepdim=True), kept, torch.nan)
        return positive(kept)
