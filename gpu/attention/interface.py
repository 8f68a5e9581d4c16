"""The one attention function that transformers' model classes call, and the context it reads.

Who calls it: `register()` at load, `packed_context` around each forward, and transformers' attention modules call `attention` because their config names "packed".
What must stay true:
  - "packed" is no key of transformers' mask registry, so no mask is ever built for it, and it does not
    contain "flash", which transformers would try to download as a kernel;
  - everything that changes the numbers is read here, once, into a `LayerKind`; an argument that would
    change them and is not understood raises (attention sinks), it is never dropped;
  - the context is thread-local: executor threads share the model and not their packs;
  - a forward that did not reach this function as often as it has layers is wrong silently (MPNet and
    DeBERTa accept the name and ignore it), so `calls` and `masks_seen` are there for the self-check.

CUDA graphs: the function is where they are cut. `gpu.forward.cuda_graphs` enters a context of its own, whose
`attend` ends one recording and begins the next; attention itself is never recorded, because FlashInfer's
`plan` copies to the host and may not run inside a capture.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from gpu.attention.base import (
    AttentionBackend,
    AttentionError,
    LayerKind,
    MultiItem,
    PackLayout,
    choose,
)
from gpu.attention.sdpa import SdpaBackend
from gpu.batch import PackedBatch

NAME = "packed"

_state = threading.local()


def register() -> str:
    """Make "packed" known to transformers; returns the name for `set_attn_implementation`. Idempotent.

    Raises:
        AttentionError: when this transformers would build masks for the name.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if NAME in ALL_MASK_ATTENTION_FUNCTIONS:
        raise AttentionError(
            f"transformers builds masks for {NAME!r}: something registered a mask function under it"
        )
    AttentionInterface.register(NAME, attention)
    return NAME


class PackedContext:
    """One pack on its way through the model: plans per layer kind, made at first use.

    For the load-time self-check: calls: attention calls so far. masks_seen: those that came with a mask
    (the function ignores it, so anything but 0 means that the model built one it relies on).
    layer_kinds: kind -> calls. served_by: kind -> name of the backend that serves it.
    """

    def __init__(self, layout: PackLayout, backends: Sequence[AttentionBackend]) -> None:
        self.layout = layout
        self.backends = tuple(backends)
        self.calls = 0
        self.masks_seen = 0
        self.layer_kinds: dict[LayerKind, int] = {}
        self.served_by: dict[LayerKind, str] = {}
        self.plans: dict[tuple[LayerKind, torch.dtype], tuple[AttentionBackend, Any]] = {}

    def record(self, kind: LayerKind, mask: torch.Tensor | None) -> None:
        """One more attention call."""
        self.calls += 1
        self.masks_seen += mask is not None
        self.layer_kinds[kind] = self.layer_kinds.get(kind, 0) + 1

    def attend(
        self,
        kind: LayerKind,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """q: [1, n_heads, total_tokens, head_dim], k/v likewise -> [1, total_tokens, n_heads, head_dim].

        Raises:
            AttentionError: when the call's tokens are not this pack's (a vision tower or a decoder's
                cross-attention inside the forward needs an attention of its own).
        """
        expected = self.layout.total_tokens
        if q.shape[0] != 1 or q.shape[2] != expected or k.shape[2] != expected:
            raise AttentionError(
                f"attention over {tuple(q.shape)} queries and {tuple(k.shape)} keys inside a pack of "
                f"{expected} tokens: this module does not attend over the packed sequence"
            )
        backend, plan = self._plan(kind, q.dtype)
        out = backend.run(
            q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), plan, bias
        )
        return out.unsqueeze(0)

    def _plan(self, kind: LayerKind, dtype: torch.dtype) -> tuple[AttentionBackend, Any]:
        found = self.plans.get((kind, dtype))
        if found is None:
            backend = choose(self.backends, kind, dtype, self.layout.device)
            found = (backend, backend.plan(self.layout, kind, dtype))
            self.plans[kind, dtype] = found
            self.served_by[kind] = backend.name
        return found


def current_context() -> PackedContext | None:
    """The context of this thread, or None outside of one."""
    return getattr(_state, "context", None)


@contextmanager
def entered(context: Any) -> Iterator[Any]:
    """Calls from this thread go to `context`; a nested one hides the outer one."""
    outer = getattr(_state, "context", None)
    _state.context = context
    try:
        yield context
    finally:
        _state.context = outer


@contextmanager
def packed_context(
    batch: PackedBatch | Sequence[int] | torch.Tensor,
    device: torch.device | str,
    backends: Sequence[AttentionBackend] | None = None,
    multi_item: MultiItem | None = None,
) -> Iterator[PackedContext]:
    """Calls from this thread attend item by item over the pack; a nested context hides the outer one.

    Args:
        batch: the pack, or its `cu_seqlens` (host values).
        device: where q, k and v live.
        backends: in order of preference; None is the SDPA reference.
        multi_item: prefix and items of each sequence, for multi-item scoring.
    """
    layout = PackLayout.of(batch, device, multi_item)
    with entered(PackedContext(layout, backends or (SdpaBackend(),))) as context:
        yield context


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function behind the name "packed"; arguments as transformers' modules pass them.

    query: [n, n_heads, T, head_dim]; key, value: [n, n_kv_heads, T, head_dim]. Dropout is ignored
    (inference only). Returns ([n, T, n_heads, head_dim] contiguous, None).

    Raises:
        AttentionError: attention sinks (`s_aux`) and value heads of another size, which no backend
            serves, calls that do not fit the pack, and calls outside of one.
    """
    if s_aux is not None:
        raise AttentionError("this model uses attention sinks (s_aux), which no backend serves")
    context = current_context()
    if context is None:
        raise AttentionError(f"{NAME!r} attention outside of a pack; see packed_context")
    kind = _layer_kind(
        module, query, key, value, scaling, is_causal, sliding_window, softcap,
        position_bias is not None, context.layout.multi_item is not None,
        context.layout.keys is not None,
    )  # fmt: skip
    context.record(kind, attention_mask)
    return context.attend(kind, query, key, value, position_bias).contiguous(), None


def _layer_kind(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    is_causal: bool | None,
    sliding_window: int | None,
    softcap: float | None,
    bias: bool,
    multi_item: bool,
    partial_keys: bool,
) -> LayerKind:
    """transformers' conventions into a kind.

    A per-call `is_causal` beats the module's (gte-Qwen2: the module says causal, the call does not);
    a module without one is causal, as in transformers' own sdpa function. `sliding_window` is an
    exclusive bound: the farthest token seen is `sliding_window - 1` away, on both sides unless causal.
    """
    if value.shape[-1] != query.shape[-1]:
        raise AttentionError(
            f"value heads of {value.shape[-1]} with query heads of {query.shape[-1]} are not served"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if multi_item and not causal:
        raise AttentionError("multi-item scoring needs a causal model, this layer is bidirectional")
    return _kind(
        bool(causal),
        None if sliding_window is None else int(sliding_window) - 1,
        None if softcap is None else float(softcap),
        None if scaling is None else float(scaling),
        query.shape[1],
        key.shape[1],
        query.shape[3],
        bias,
        multi_item,
        partial_keys,
    )


@lru_cache(maxsize=256)
def _kind(
    causal: bool,
    reach: int | None,
    softcap: float | None,
    scaling: float | None,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    bias: bool,
    multi_item: bool,
    partial_keys: bool,
) -> LayerKind:
    return LayerKind(
        causal=causal,
        window_left=reach,
        window_right=reach,
        softcap=softcap,
        scale=head_dim**-0.5 if scaling is None else scaling,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        bias=bias,
        multi_item=multi_item,
        partial_keys=partial_keys,
    )
