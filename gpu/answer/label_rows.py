"""Scores of a causal language model from a few rows of its vocabulary head, never from the whole.

Who calls it: `gpu.model_runner` builds the head at load and applies it to hidden states of a pack.
What must stay true: only the rows of the label tokens are read from the weights and applied, to the
last hidden state of each item; products and sums in fp32, row by row, so that an item's score has the
same bits whatever else is in the pack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu.faults import ModelLoadError
from gpu.folder.prompts import LabelHead
from gpu.folder.spec import ModelSpec
from gpu.pooler import Segments, last_rows

_HEADS = ("lm_head.weight", "embed_out.weight")  # the second is GPT-NeoX's
_BIAS = "lm_head.bias"
_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight")


def read_rows(weights: Sequence[Path], rows: list[int], *, tied: bool) -> torch.Tensor:
    """[len(rows), hidden_size] float32, host: rows of the vocabulary head (or of the embeddings that
    stand in for it). Raises `ModelLoadError` when the weights hold neither."""
    names = (*_HEADS, *(_EMBEDDINGS if tied else ()))
    for name in names:
        for path in weights:
            found = _rows_of(path, name, rows)
            if found is not None:
                return found.float()
    raise ModelLoadError(
        f"{weights[0].parent}: the weights hold no {_HEADS[0]}, and the config does not tie it to the "
        "embeddings; this is no causal language model"
    )


def label_head_of(
    spec: ModelSpec, config: Any, device: torch.device
) -> Callable[[torch.Tensor, Segments], torch.Tensor]:
    """The head of a model whose spec names label tokens. config: transformers' own."""
    assert spec.label_head is not None
    tied = bool(getattr(config, "tie_word_embeddings", False))
    rows = read_rows(spec.weights, spec.label_head.ids, tied=tied).to(device)
    found = (_rows_of(path, _BIAS, spec.label_head.ids) for path in spec.weights)
    bias = next((part.float().to(device) for part in found if part is not None), None)
    return build_label_head(
        spec.label_head,
        rows,
        getattr(config, "final_logit_softcapping", None),
        bias=bias,
        divisor=float(getattr(config, "logits_scaling", None) or 1.0),
    )


def _rows_of(path: Path, name: str, rows: list[int]) -> torch.Tensor | None:
    if path.suffix != ".safetensors":
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return state[name][rows].clone() if name in state else None
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        if name not in file.keys():  # noqa: SIM118 - not a mapping
            return None
        part = file.get_slice(name)
        return torch.cat([part[row : row + 1] for row in rows])


def build_label_head(
    head: LabelHead,
    rows: torch.Tensor,
    softcap: float | None,
    *,
    bias: torch.Tensor | None = None,
    divisor: float = 1.0,
) -> Callable[[torch.Tensor, Segments], torch.Tensor]:
    """hidden [total_tokens, hidden_size], segments -> logits [n_items, n_scores] float32.

    softcap: the model's own bound on logits (Gemma 2: ``cap * tanh(x / cap)``), or None. bias: [n_labels]
    of the vocabulary head (Phi). divisor: of logits (Granite).
    """

    def logits(hidden: torch.Tensor, segments: Segments) -> torch.Tensor:
        last = last_rows(hidden, segments).float()
        values = (last[:, None, :] * rows[None, :, :]).sum(dim=-1)
        if bias is not None:
            values = values + bias
        values = values / divisor
        if softcap is not None:
            values = torch.tanh(values / softcap) * softcap
        return values[:, :1] - values[:, 1:2] if head.difference else values

    return logits
