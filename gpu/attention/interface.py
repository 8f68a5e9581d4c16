"""The one attention function that transformers' model classes call, and the contexts it reads.

Who calls it: `register()` at load (by the runner), `packed_context` / `padded_context` around each
forward, and transformers' attention modules call `attention` because their config names "packed".
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
from abc import ABC, abstractmethod
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
from gpu.attention.sdpa import Call, SdpaBackend, band_mask, dense, joined
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


class _Context(ABC):
    """What both kinds of context record for the load-time self-check.

    calls: attention calls so far. masks_seen: calls that came with a mask (the function ignores it, so
    anything but 0 means that the model built one it relies on). layer_kinds: kind -> calls.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.masks_seen = 0
        self.layer_kinds: dict[LayerKind, int] = {}

    def record(self, kind: LayerKind, mask: torch.Tensor | None) -> None:
        self.calls += 1
        self.masks_seen += mask is not None
        self.layer_kinds[kind] = self.layer_kinds.get(kind, 0) + 1

    @abstractmethod
    def attend(
        self,
        kind: LayerKind,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """q: [n, n_heads, T, head_dim], k/v with n_kv_heads -> [n, T, n_heads, head_dim]."""


class PackedContext(_Context):
    """One pack on its way through the model: plans per layer kind, made at first use.

    served_by: layer kind -> name of the backend that serves it.
    """

    def __init__(self, layout: PackLayout, backends: Sequence[AttentionBackend]) -> None:
        super().__init__()
        self.layout = layout
        self.backends = tuple(backends)
        self.served_by: dict[LayerKind, str] = {}
        self._plans: dict[tuple[LayerKind, torch.dtype], tuple[AttentionBackend, Any]] = {}

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
        found = self._plans.get((kind, dtype))
        if found is None:
            backend = choose(self.backends, kind, dtype, self.layout.device)
            found = (backend, backend.plan(self.layout, kind, dtype))
            self._plans[kind, dtype] = found
            self.served_by[kind] = backend.name
        return found


class PaddedContext(_Context):
    """One padded batch [n, T]: dense attention with a mask of our own per layer kind.

    Every row may always see itself, so a row of padding is a harmless average and never 0/0; its
    values are thrown away by whoever padded. Without padding no mask is built at all.
    """

    def __init__(self, attention_mask: torch.Tensor) -> None:
        super().__init__()
        assert attention_mask.ndim == 2, "attention_mask is [n_items, T], true where a token is"
        self.attention_mask = attention_mask.bool()
        self.full = bool(self.attention_mask.all())
        self._masks: dict[tuple[LayerKind, torch.dtype], torch.Tensor | None] = {}

    def attend(
        self,
        kind: LayerKind,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """q: [n, n_heads, T, head_dim], k/v likewise -> [n, T, n_heads, head_dim].

        Raises:
            AttentionError: when the call's batch is not this context's.
        """
        n, length = self.attention_mask.shape
        if q.shape[0] != n or q.shape[2] != length or k.shape[2] != length:
            raise AttentionError(
                f"attention over {tuple(q.shape)} queries and {tuple(k.shape)} keys inside a padded "
                f"batch of {n} x {length}"
            )
        if (kind, q.dtype) not in self._masks:
            self._masks[kind, q.dtype] = self._mask(kind, q.dtype, q.device)
        return dense_attention(kind, q, k, v, self._masks[kind, q.dtype], bias)

    def _mask(
        self, kind: LayerKind, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | None:
        """[n, 1, T, T] additive, or None when neither padding nor a window blocks anything."""
        length = self.attention_mask.shape[1]
        reach = _reaches_all(kind, length)
        if self.full and reach:
            return None
        lowest = torch.finfo(dtype).min
        band = band_mask(Call(0, length, 0, length, None, False), kind, dtype, device)
        if self.full:
            return band[None, None]
        blocked = ~self.attention_mask.to(device)[:, None, None, :]
        blocked = blocked & ~torch.eye(length, dtype=torch.bool, device=device)
        return band[None, None].masked_fill(blocked, lowest)


def current_context() -> PackedContext | PaddedContext | None:
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


@contextmanager
def padded_context(attention_mask: torch.Tensor) -> Iterator[PaddedContext]:
    """Calls from this thread attend over a padded batch.

    Args:
        attention_mask: [n_items, T] bool (or 0/1), true where a token is; padding on either side.
    """
    with entered(PaddedContext(attention_mask)) as context:
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
            serves, and calls that do not fit the context.
    """
    if s_aux is not None:
        raise AttentionError("this model uses attention sinks (s_aux), which no backend serves")
    context = current_context()
    kind = _layer_kind(
        module, query, key, value, scaling, is_causal, sliding_window, softcap,
        position_bias is not None,
        isinstance(context, PackedContext) and context.layout.multi_item is not None,
    )  # fmt: skip
    if context is None:
        out = dense_attention(kind, query, key, value, attention_mask, position_bias)
    else:
        context.record(kind, attention_mask)
        out = context.attend(kind, query, key, value, position_bias)
    return out.contiguous(), None


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
    )


def _reaches_all(kind: LayerKind, length: int) -> bool:
    """No window cuts anything off in sequences of this length."""
    left = kind.window_left is None or kind.window_left >= length - 1
    right = kind.causal or kind.window_right is None or kind.window_right >= length - 1
    return left and right


def dense_attention(
    kind: LayerKind,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over an ordinary batch: [n, n_heads, Tq, head_dim] -> [n, Tq, n_heads, head_dim].

    mask: says everything (causality and window included), as transformers' own sdpa function has it:
        additive or bool [n, 1, Tq, Tk], or bool/int padding [n, Tk]; None: built from the kind.
    """
    mask = _additive(mask, kind, query, key)
    if mask is None and (bias is not None and kind.causal):
        length = query.shape[2]
        mask = band_mask(Call(0, length, 0, length, None, False), kind, query.dtype, query.device)
    if bias is not None:
        bias = bias.to(query.dtype)
        mask = bias if mask is None else joined(bias, mask)
    out = dense(
        query,
        key,
        value,
        mask=mask,
        causal=mask is None and kind.causal and query.shape[2] > 1,
        scale=kind.scale,
        softcap=kind.softcap,
    )
    return out.transpose(1, 2)


def _additive(
    mask: torch.Tensor | None, kind: LayerKind, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """The mask in additive form, without a row that blocks everything; None when nothing is blocked."""
    length, dtype, device = query.shape[2], query.dtype, query.device
    lowest = torch.finfo(dtype).min
    if mask is not None and mask.ndim == 2:
        return PaddedContext(mask)._mask(kind, dtype, device)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, lowest)
    if mask is not None:
        return mask.to(dtype).clamp(min=lowest)
    if query.shape[2] != key.shape[2]:
        if kind.causal or kind.windowed:
            raise AttentionError("causal or windowed attention between sequences of two lengths")
        return None
    if _reaches_all(kind, length):
        return None
    return band_mask(Call(0, length, 0, length, None, False), kind, dtype, device)
