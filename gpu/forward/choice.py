"""Which forward serves a loaded model: packed, or padded when the self-check says so; and item sharing.

Who calls it: `gpu.model_runner`, once per load.
What must stay true: nothing is chosen by name or by hope: a forward is taken when its numbers are those
of the model class itself, and what is given up instead is a sentence in the notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpu.attention import NAME, AttentionBackend, register
from gpu.batch import PackedBatch
from gpu.folder.decoders import length_dependent
from gpu.folder.spec import ModelSpec
from gpu.forward.packed import Forward, PackedForward, PaddedForward
from gpu.forward.rope import RopePackedForward, RopePaddedForward
from gpu.forward.selfcheck import Finding, check_forward, compare
from gpu.forward.shared_prefix import SharedPrefixForward, probe_pack
from gpu.forward.weights import LoadedModel


def pick_forward(
    loaded: LoadedModel,
    spec: ModelSpec,
    batch: PackedBatch,
    reference: torch.Tensor,
    *,
    native: str,
    device: torch.device,
    backends: Sequence[AttentionBackend],
    notes: list[str],
) -> tuple[Forward, Finding]:
    """The packed forward, or the padded one with a note; and what the self-check found about it.

    native: transformers' own attention implementation for the padded one.
    """
    rope = length_dependent(loaded.config.to_dict())
    split: dict[str, Any] = {} if rope is None else {"rope": rope}
    common: dict[str, Any] = {
        "device": device,
        "token_types": int(getattr(loaded.config, "type_vocab_size", 0) or 0) > 1,
    }
    against = "the plain formula" if loaded.own else "transformers"
    reason = spec.family.padded_because
    if reason is None and not hasattr(loaded.model, "set_attn_implementation"):
        reason = "its code has no attention interface"
    if reason is None:
        if not loaded.own:
            register()
        loaded.model.set_attn_implementation(NAME)  # type: ignore[operator]
        packed = (PackedForward if rope is None else RopePackedForward)(
            loaded.base, position_offset=spec.position_offset, backends=backends, **common, **split
        )
        finding = check_forward(
            packed, batch, reference, int(loaded.config.num_hidden_layers), against
        )
        if finding.reason is None:
            return packed, finding
        reason = finding.reason
        loaded.model.set_attn_implementation(native)  # type: ignore[operator]
    padded = (PaddedForward if rope is None else RopePaddedForward)(
        loaded.base,
        pad_token_id=int(getattr(loaded.config, "pad_token_id", None) or 0),
        max_tokens=spec.max_tokens,
        **common,
        **split,
    )
    notes.append(f"runs padded, not packed: {reason}")
    return padded, check_forward(padded, batch, reference, 0, against)


@torch.inference_mode()
def pick_sharing(
    forward: Forward, spec: ModelSpec, batch: PackedBatch, vocab_size: int, notes: list[str]
) -> SharedPrefixForward | None:
    """Multi-item scoring for a model that asks for it, after it gave the same numbers as item by item;
    None, with the reason in the notes, when the model cannot."""
    reason: str | None = None
    sharing: SharedPrefixForward | None = None
    if not isinstance(forward, PackedForward):
        reason = "the model does not run packed"
    elif spec.pairs is None:
        reason = "it reads pairs without a prompt, whose query is no common beginning"
    elif isinstance(forward, RopePackedForward):
        reason = "its rotary positions depend on the longest item"
    else:
        sharing = SharedPrefixForward(forward, spec.skipped_pad)
        reason = _differs(sharing, forward, probe_pack(batch, vocab_size))
    if reason is None:
        notes.append(
            "documents of one query share its computation; scores depend on their neighbours in the "
            "last digits"
        )
        return sharing
    notes.append(f"multi_item is off, items are scored one by one: {reason}")
    return None


def _differs(
    sharing: SharedPrefixForward, forward: PackedForward, probe: PackedBatch
) -> str | None:
    """Why joined items must not be used, or None."""
    try:
        hidden, segments, context = sharing.run(probe)
    except (RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    # Distances inside a joined sequence are not those of the items, which a window would measure.
    if any(kind.windowed for kind in context.layer_kinds):
        return "some layers attend through a sliding window"
    ends = torch.tensor(segments.ends, device=hidden.device) - 1
    alone = forward(probe)[torch.from_numpy(probe.cu_seqlens[1:]).long().to(hidden.device) - 1]
    return compare(hidden[ends], alone).reason
