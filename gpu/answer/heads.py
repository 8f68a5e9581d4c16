"""Classification heads: the model's own modules on gathered rows, activation applied once.

Who calls it: `gpu.model_runner` with hidden states of a pack.
What must stay true: logits and activation in fp32; an item's scores depend on its own rows alone; the
activation that the folder names is applied exactly once, and never when raw scores are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from gpu.batch import ItemOutcome, ItemResult, PackedBatch
from gpu.device.staging import CopyOut
from gpu.faults import non_finite
from gpu.folder.families import Family
from gpu.pooler import Segments, first_rows, last_rows, mean_rows

HeadFn = Callable[[torch.Tensor, Segments], torch.Tensor]
"""hidden [total_tokens, hidden_size], segments -> logits [n_items, n_labels]."""


def build_head(model: nn.Module, base: nn.Module, family: Family, config: Any) -> HeadFn:
    """The head of a `*ForSequenceClassification` model as a function of packed hidden states.

    model: the whole model; base: its base model. A BERT-like pooler is taken out of the base model,
    which would run it on the first token of the whole pack. The head is computed in fp32.
    Raises `ValueError` for a family without a recipe.
    """
    m: Any = model
    b: Any = base
    if family.head == "pooler_classifier":
        pooler = b.pooler
        b.pooler = None
        pooler.float()
        m.classifier.float()
        return lambda h, s: m.classifier(pooler(first_rows(h, s).float().unsqueeze(1)))
    if family.head == "classifier_on_first":
        m.classifier.float()
        return lambda h, s: m.classifier(first_rows(h, s).float().unsqueeze(1))
    if family.head == "distilbert":
        m.pre_classifier.float()
        m.classifier.float()
        return lambda h, s: m.classifier(torch.relu(m.pre_classifier(first_rows(h, s).float())))
    if family.head == "modernbert":
        m.head.float()
        m.classifier.float()
        pool = {"cls": first_rows, "mean": mean_rows}[str(config.classifier_pooling)]
        return lambda h, s: m.classifier(m.head(pool(h, s).float()))
    if family.head == "albert":
        pooler, b.pooler, b.pooler_activation = b.pooler.float(), None, None
        m.classifier.float()
        return lambda h, s: m.classifier(torch.tanh(pooler(first_rows(h, s).float())))
    if family.head == "deberta":
        m.pooler.float()
        m.classifier.float()
        return lambda h, s: m.classifier(m.pooler(first_rows(h, s).float().unsqueeze(1)))
    if family.head == "eurobert":
        return _eurobert(m, str(config.classifier_pooling))
    if family.head == "score_on_last":
        score = m.score if hasattr(m, "score") else m.v_head  # InternLM2 rewards say v_head
        score.float()
        return lambda h, s: score(last_rows(h, s).float())
    if family.head == "layerwise":
        m.score.float()
        return lambda h, s: m.score(last_rows(h, s).float())
    if family.head == "modernbert_decoder":
        m.head.float()
        m.classifier.float()
        return lambda h, s: m.classifier(m.head(last_rows(h, s).float()))
    if family.head == "score_on_pooled":
        m.score.float()
        by_name = {"mean": mean_rows, "cls": first_rows, "last_token": last_rows}
        pool, divisor = by_name[str(family.default_pooling)], family.temperature
        return lambda h, s: m.score(pool(h, s).float()) / divisor
    raise ValueError(f"no head recipe for model type {family.model_type}")


def _eurobert(m: Any, pooling: str) -> HeadFn:
    """Pool, then ``classifier(gelu(dense(x)))``; "late" classifies every token and takes the mean."""
    m.dense.float()
    m.classifier.float()

    def per_row(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = m.classifier(m.activation(m.dense(x.float())))
        return out

    if pooling == "late":
        return lambda h, s: mean_rows(per_row(h), s)
    pool = {"bos": first_rows, "mean": mean_rows}[pooling]
    return lambda h, s: per_row(pool(h, s))


def activate(logits: torch.Tensor, activation: str) -> torch.Tensor:
    """Sigmoid, softmax over labels (shifted by the maximum, stable for any finite logits) or identity.

    logits: [n_items, n_labels] float32 -> same shape.
    """
    if activation == "sigmoid":
        return torch.sigmoid(logits)
    if activation == "softmax":
        return torch.softmax(logits, dim=-1)
    assert activation == "identity", activation
    return logits


def scored(
    batch: PackedBatch, logits: torch.Tensor, *, score: str, label: str
) -> list[ItemOutcome]:
    """logits: [n_items, n_labels] float32 -> one outcome per row, the activation applied once.

    score, label: the activations that the folder names for scores and for labels.
    """
    copies = CopyOut(logits.device)
    tickets = {name: copies.add(activate(logits, name)) for name in {"identity", score, label}}
    copies.finish()
    by_activation = {name: ticket() for name, ticket in tickets.items()}
    finite = np.asarray(np.isfinite(by_activation["identity"]).all(axis=1))
    outcomes: list[ItemOutcome] = []
    for row, item in enumerate(batch.items):
        if not finite[row]:
            outcomes.append(non_finite())
            continue
        options = item.options
        name = "identity"
        if not options.raw_scores and options.task == "classify":
            name = label
        elif not options.raw_scores:
            name = score
        outcomes.append(ItemResult(scores=by_activation[name][row]))
    return outcomes
