"""The load-time self-check: is the pack computed as its items would be alone, by the model class itself?

Who calls it: `gpu.model_runner` at every load; nobody may skip it.
What must stay true: the reference is transformers' own path, or that of `gpu.forward.encoder` (attention by
the plain formula, positions of its own, one item at a time, torch's linears), so a wrong position offset, a leak between items, a window that is off by
one, a RoPE that depends on the pack or a broken linear all show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from gpu.batch import EncodedItem, PackedBatch, pack
from gpu.folder.decoders import length_dependent
from gpu.folder.families import Family
from gpu.forward.packed import Forward, PackedForward, fixed_arguments

# fp32: relative to the largest activation. Measured on every family: 2e-5 at activations of 4 to 22
# when right, 1 and more when items leak. Half precision: cosine per token, where rounding alone gives
# 0.999 and a leak gives 0.9 or less.
FP32_TOLERANCE = 1e-4
HALF_COSINE = 0.97
HALF_LOGIT_TOLERANCE = 0.1
LONGEST_PROBE = 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of one comparison. reason: why it failed, or None. max_diff: the largest difference
    seen, relative to the largest reference value. bit_exact: an item alone gave the same bits.
    attention: the backends that served the layers, by name."""

    reason: str | None
    max_diff: float = 0.0
    bit_exact: bool = False
    attention: tuple[str, ...] = ()


def probes(
    config: Any,
    *,
    max_tokens: int,
    vocab_size: int,
    reserved: int | None,
    expanded: int | None = None,
) -> PackedBatch:
    """Items of different lengths, one across the attention window where there is one.

    reserved: an id that never appears (the pad token: some models number positions around it).
    expanded: tokens of a query of which only the first are attended to, where the model has such ones.
    """
    windows = [
        int(w)
        for name in ("sliding_window", "local_attention")
        if (w := getattr(config, name, None)) is not None and int(w) > 0
    ]
    longest = min([max_tokens, LONGEST_PROBE, max([*windows, 31]) + 9])
    lengths = sorted({1, min(5, max_tokens), min(17, max_tokens), longest})
    switch = length_dependent(config.to_dict())
    if switch is not None and switch[1] + 5 <= min(max_tokens, LONGEST_PROBE):
        lengths = sorted({*lengths, switch[1] + 1, switch[1] + 5})
    rng = np.random.default_rng(0)
    items = []
    for length in (*lengths, lengths[-2] if len(lengths) > 1 else 1):
        ids = rng.integers(0, vocab_size, size=length, dtype=np.int32)
        if reserved is not None:
            ids[ids == reserved] = (reserved + 1) % vocab_size
        items.append(EncodedItem(input_ids=ids))
    if expanded is not None:
        ids = rng.integers(0, vocab_size, size=expanded, dtype=np.int32)
        if reserved is not None:
            ids[ids == reserved] = (reserved + 1) % vocab_size
        items.append(EncodedItem(input_ids=ids, attended=min(3, expanded)))
    return pack(items)


def crosses_window(config: Any, batch: PackedBatch) -> bool:
    """Whether the longest probe is longer than every window, and than where the RoPE changes."""
    windows = [getattr(config, name, None) for name in ("sliding_window", "local_attention")]
    switch = length_dependent(config.to_dict())
    windows.append(None if switch is None else switch[1])
    return all(w is None or batch.max_seqlen > int(w) for w in windows)


def reference_states(base: nn.Module, batch: PackedBatch, device: torch.device) -> torch.Tensor:
    """[total_tokens, hidden_size]: each item alone through transformers' own forward."""
    return torch.cat([_alone(base, item, device).last_hidden_state[0] for item in batch.items])


def reference_logits(
    model: nn.Module, batch: PackedBatch, device: torch.device, family: Family
) -> torch.Tensor:
    """[n_items, n_labels]: each item alone through the whole `*ForSequenceClassification`."""
    if family.head == "score_on_pooled":
        return _pooled_logits(model, batch, device, family)
    return torch.stack([_alone(model, item, device).logits[0] for item in batch.items])


@torch.inference_mode()
def _pooled_logits(
    model: Any, batch: PackedBatch, device: torch.device, family: Family
) -> torch.Tensor:
    """Of a bidirectional Llama, whose class is not transformers': its own formula over transformers' states."""
    rows = []
    for item in batch.items:
        states = _alone(model.base_model, item, device).last_hidden_state[0]
        pooled = {"mean": states.mean(0), "cls": states[0], "last_token": states[-1]}
        rows.append(model.score(pooled[str(family.default_pooling)]) / family.temperature)
    return torch.stack(rows)


MLM_PROBE_TOKENS = 64


def reference_tokens(
    model: nn.Module, batch: PackedBatch, device: torch.device
) -> list[tuple[EncodedItem, torch.Tensor]]:
    """Short probes alone through the whole `*ForMaskedLM`, each with its [n_tokens, vocabulary]."""
    short = [item for item in batch.items if item.n_tokens <= MLM_PROBE_TOKENS]
    return [(item, _alone(model, item, device).logits[0]) for item in short]


@torch.inference_mode()
def _alone(model: nn.Module, item: EncodedItem, device: torch.device) -> Any:
    ids = torch.from_numpy(item.input_ids.astype(np.int64)).unsqueeze(0).to(device)
    mask = {}
    if item.attended is not None:
        seen = torch.arange(item.n_tokens, device=device) < item.attended
        mask["attention_mask"] = seen.long().unsqueeze(0)
    return model(input_ids=ids, **mask, **fixed_arguments(model))


@torch.inference_mode()
def check_tokens(
    head: Callable[[torch.Tensor], torch.Tensor],
    forward: Forward,
    expected: list[tuple[EncodedItem, torch.Tensor]],
    finding: Finding,
) -> Finding:
    """The masked-LM head on our hidden states against the model's own logits; `finding` when equal."""
    for item, logits in expected:
        found = compare(head(forward(pack([item]))), logits)
        if found.reason is not None:
            return Finding(f"the masked-LM head is wrong: {found.reason}")
    return finding


@torch.inference_mode()
def check_forward(
    forward: Forward,
    batch: PackedBatch,
    reference: torch.Tensor,
    n_layers: int,
    against: str = "transformers",
) -> Finding:
    """Run the probes and compare with the reference; for a packed forward also count attention calls."""
    served: tuple[str, ...] = ()
    try:
        if isinstance(forward, PackedForward):
            states, context = forward.run(batch)
            if context.calls != n_layers:
                return Finding(f"attention was reached {context.calls} times in {n_layers} layers")
            served = tuple(sorted(set(context.served_by.values())))
            if context.masks_seen:
                return Finding("the model built an attention mask of its own for the pack")
        else:
            states = forward(batch)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        return Finding(
            f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        )
    finding = compare(states, reference, against)
    if finding.reason is not None:
        return finding
    alone = torch.cat([forward(pack([item])) for item in batch.items])
    return Finding(None, finding.max_diff, bool(torch.equal(alone, states)), served)


def compare(got: torch.Tensor, reference: torch.Tensor, against: str = "transformers") -> Finding:
    """Same shape, finite and close: by the largest difference in fp32, by cosine in half precision."""
    if got.shape != reference.shape:
        return Finding(f"shape {tuple(got.shape)} instead of {tuple(reference.shape)}")
    a, b = got.double(), reference.double()
    if not torch.isfinite(a).all():
        return Finding("it gave NaN or infinity")
    scale = max(float(b.abs().max()), 1e-6)
    diff = float((a - b).abs().max()) / scale
    if got.dtype == reference.dtype == torch.float32:
        bad = diff > FP32_TOLERANCE
    else:
        bad = float(torch.cosine_similarity(a, b, dim=-1).min()) < HALF_COSINE
    reason = f"it differs from {against} by {diff:.1e} of the largest activation" if bad else None
    return Finding(reason, diff)


def check_head(got: torch.Tensor, reference: torch.Tensor) -> Finding:
    """Logits of the head recipe (fp32) against the model's own, in the dtype the model computes in."""
    if reference.dtype == torch.float32:
        return compare(got, reference)
    scale = max(float(reference.abs().max()), 1e-6)
    diff = float((got - reference.float()).abs().max()) / scale
    bad = not diff <= HALF_LOGIT_TOLERANCE  # also when it is NaN
    return Finding(f"it differs from transformers by {diff:.1e}" if bad else None, diff)
