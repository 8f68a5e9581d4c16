"""Scores of a causal language model from a few rows of its vocabulary head, never from the whole.

Who calls it: `gpu.forward.proven` builds the reader at load, `gpu.model_runner` applies it to hidden states
of a pack.
What must stay true: only the rows of the label tokens are read from the weights and applied, to the
last hidden state of each item; products and sums in fp32, row by row, so that an item's score has the
same bits whatever else is in the pack, whatever labels its neighbours name. A weights file that is no
longer the one that was loaded gives no row.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu.answer.heads import activate
from gpu.batch import ItemOutcome, ItemResult, PackedBatch
from gpu.device.staging import CopyOut
from gpu.faults import ModelLoadError, non_finite
from gpu.folder.prompts import LabelHead
from gpu.folder.spec import ModelSpec
from gpu.pooler import Segments, last_rows
from schemas.errors import ModelError

_HEADS = ("lm_head.weight", "embed_out.weight")  # the second is GPT-NeoX's
_BIAS = "lm_head.bias"
_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight")
_KEPT_ROWS = 4096
"""Rows of labels that requests named, kept on the device: 16 KiB each where a state has 4,096 components."""


class VocabularyHead:
    """The tensor of the weights that gives logits (or the embeddings that stand in for it).

    weights: the model's files. Raises `ModelLoadError` when they hold neither.
    """

    def __init__(self, weights: Sequence[Path], *, tied: bool) -> None:
        for name in (*_HEADS, *(_EMBEDDINGS if tied else ())):
            for path in weights:
                if _read(path, name, [0]) is not None:
                    self._path, self._name, self._loaded = path, name, _stamp(path)
                    return
        raise ModelLoadError(
            f"{weights[0].parent}: the weights hold no {_HEADS[0]}, and the config does not tie it to the "
            "embeddings; this is no causal language model"
        )

    def rows(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), hidden_size] float32, host. Raises `OSError` when the file is another than at load."""
        if not ids:
            return self.rows([0])[:0]
        if _stamp(self._path) != self._loaded:
            raise OSError("the weights have changed since the load")
        found = _read(self._path, self._name, ids)
        assert found is not None, "it was there at load"
        return found.float()


class LabelReader:
    """Reads states at the model's own label tokens, or at those that a request names.

    bias: [vocab_size] of the vocabulary head (Phi), or None. divisor: of logits (Granite). softcap: the
    model's own bound on logits (Gemma 2: ``cap * tanh(x / cap)``), or None.
    """

    def __init__(
        self,
        head: LabelHead,
        vocabulary: VocabularyHead,
        device: torch.device,
        *,
        bias: torch.Tensor | None = None,
        divisor: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        self._head, self._vocabulary, self._device = head, vocabulary, device
        self._bias, self._divisor, self._softcap = bias, divisor, softcap
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        self._own = vocabulary.rows(head.ids).to(device)

    def __call__(self, hidden: torch.Tensor, segments: Segments) -> torch.Tensor:
        """hidden [total_tokens, hidden_size], segments -> logits [n_items, n_scores] float32."""
        states = last_rows(hidden, segments).float()
        values = self._logits(states, self._own, self._head.ids)
        return values[:, :1] - values[:, 1:2] if self._head.difference else values

    def named(
        self, batch: PackedBatch, hidden: torch.Tensor, segments: Segments
    ) -> dict[int, ItemOutcome]:
        """Outcomes of the rows whose request named labels: softmax over these (the sigmoid of a single
        one), or logits where raw scores are asked for."""
        rows = [row for row, item in enumerate(batch.items) if item.options.labels]
        if not rows:
            return {}
        states = last_rows(hidden, segments).float()
        copies = CopyOut(states.device)
        tickets, outcomes = {}, dict[int, ItemOutcome]()
        weights: dict[tuple[int, ...], torch.Tensor] = {}
        for row in rows:
            options = batch.items[row].options
            labels = options.labels
            try:
                if labels not in weights:
                    weights[labels] = self._rows(labels)
            except OSError:
                outcomes[row] = ModelError(
                    "labels of a request are read from the weights file, which is not the one that was "
                    "loaded any more; restart the service"
                )
                continue
            logits = self._logits(states[row : row + 1], weights[labels], labels)
            scores = logits
            if not options.raw_scores:
                scores = activate(logits, "sigmoid" if len(labels) == 1 else "softmax")
            tickets[row] = copies.add(torch.cat((logits, scores)))
        copies.finish()
        for row, ticket in tickets.items():
            logit_values, values = ticket()
            finite = bool(np.isfinite(logit_values).all())
            outcomes[row] = ItemResult(scores=values) if finite else non_finite()
        return outcomes

    def _logits(self, states: torch.Tensor, rows: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        """states [n_items, hidden_size] and rows [n_labels, hidden_size] -> [n_items, n_labels], fp32."""
        values = (states[:, None, :] * rows[None, :, :]).sum(dim=-1)
        if self._bias is not None:
            values = values + self._bias[list(ids)]
        values = values / self._divisor
        if self._softcap is not None:
            values = torch.tanh(values / self._softcap) * self._softcap
        return values

    def _rows(self, labels: tuple[int, ...]) -> torch.Tensor:
        """[n_labels, hidden_size] float32 on the device. Raises `OSError`."""
        with self._lock:
            missing = [label for label in labels if label not in self._kept]
            if missing:
                found = self._vocabulary.rows(missing).to(self._device)
                self._kept.update(zip(missing, found, strict=True))
            for label in labels:
                self._kept.move_to_end(label)
            rows = torch.stack([self._kept[label] for label in labels])
            while len(self._kept) > _KEPT_ROWS:
                self._kept.popitem(last=False)
            return rows


def label_reader_of(spec: ModelSpec, config: Any, device: torch.device) -> LabelReader:
    """The reader of a model whose spec names label tokens. config: transformers' own."""
    assert spec.label_head is not None
    tied = bool(getattr(config, "tie_word_embeddings", False))
    found = (_read(path, _BIAS, None) for path in spec.weights)
    return LabelReader(
        spec.label_head,
        VocabularyHead(spec.weights, tied=tied),
        device,
        bias=next((part.float().to(device) for part in found if part is not None), None),
        divisor=float(getattr(config, "logits_scaling", None) or 1.0),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: Path, name: str, rows: Sequence[int] | None) -> torch.Tensor | None:
    """Rows of a tensor of the file (all for None), a copy; None when it has no such tensor."""
    if path.suffix != ".safetensors":
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if name not in state:
            return None
        return (state[name] if rows is None else state[name][list(rows)]).clone()
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        if name not in file.keys():  # noqa: SIM118 - not a mapping
            return None
        if rows is None:
            return file.get_tensor(name).clone()
        part = file.get_slice(name)
        return torch.cat([part[row : row + 1] for row in rows])
