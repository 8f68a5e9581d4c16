"""BERT, RoBERTa, XLM-RoBERTa and CamemBERT as this engine's own few lines: no import of transformers, less per layer.

Who calls it: `gpu.forward.weights`, for folders whose every key it understands; all others, and other
families, load transformers' classes.
What must stay true: the same weights give what transformers' class gives (tests/unit/gpu compares
them, over random configs and real weights); parameters are exactly those of the checkpoint; without a
pack around it, attention is the plain formula, which is what the load-time self-check compares with.
The formula: Devlin et al. 2018 (post-LayerNorm encoder, learned positions, exact GELU).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from gpu.attention.interface import NAME, attention
from gpu.device import intra_op
from gpu.device.linears import ReplacedLinear, inferred

PREFIXES = {
    "bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta.", "camembert": "roberta.",
}  # fmt: skip
"""Model types, and what a checkpoint of a model with a head puts before the names of the base model."""

_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """What of config.json changes the numbers. n_labels: of the classification head, 0 without one."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    pad_token_id: int
    n_labels: int

    @property
    def first_position(self) -> int:
        """Where RoBERTa and its kin begin to count: behind the pad token's row."""
        return 0 if self.model_type == "bert" else self.pad_token_id + 1

    def to_dict(self) -> dict[str, Any]:
        """As a transformers config."""
        return asdict(self)


def encoder_config(
    config: Mapping[str, Any], *, model_type: str, n_labels: int
) -> EncoderConfig | None:
    """None where config.json leaves out a size, or asks for something that is not computed here."""
    sizes: dict[str, Any] = {name: config.get(name) for name in _SIZES}
    types: Any = config.get("type_vocab_size")
    eps: Any = config.get("layer_norm_eps")
    pad = config.get("pad_token_id")
    whole = [*sizes.values(), types]
    if not all(type(n) is int and n > 0 for n in whole) or type(eps) is not float:
        return None
    if type(pad) is not int or not 0 <= pad < int(config["vocab_size"]):
        return None
    plain = config.get("hidden_act", "gelu") == "gelu" and not (
        config.get("is_decoder") or config.get("is_causal") or config.get("add_cross_attention")
    )
    if not plain or int(config["hidden_size"]) % int(config["num_attention_heads"]):
        return None
    return EncoderConfig(
        model_type=model_type, type_vocab_size=int(types), layer_norm_eps=eps, pad_token_id=pad,
        n_labels=n_labels, **{k: int(v) for k, v in sizes.items()},
    )  # fmt: skip


class States(NamedTuple):
    """last_hidden_state: [n, length, hidden_size]."""

    last_hidden_state: torch.Tensor


class Logits(NamedTuple):
    """logits: [n, n_labels]."""

    logits: torch.Tensor


class _Layer(nn.Module):
    """One block: attention and a feed-forward net, each added to its input and then normalised; `forward`
    is the model's, which computes a layer's end and the next one's first product in one go."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.heads, self.head_dim = config.num_attention_heads, hidden // config.num_attention_heads
        self.qkv = nn.Linear(hidden, 3 * hidden)  # one product instead of three
        self.out = nn.Linear(hidden, hidden)
        self.norm1 = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.lin1 = nn.Linear(hidden, inner)
        self.activation: nn.Module = nn.GELU()
        self.lin2 = nn.Linear(inner, hidden)
        self.norm2 = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.rows = intra_op.Divisible()

    def mixed(self, qkv: torch.Tensor, mask: torch.Tensor | None, packed: bool) -> torch.Tensor:
        """Attention. qkv: [n, length, 3 * hidden_size], what `self.qkv` gives. mask: additive,
        [n, 1, 1, length]; never with a pack. -> [n, length, hidden_size]."""
        rows = qkv.view(*qkv.shape[:2], 3, self.heads, self.head_dim)
        q, k, v = (rows[:, :, i].transpose(1, 2) for i in range(3))
        if packed:
            found = attention(self, q, k, v, scaling=self.head_dim**-0.5, is_causal=False)[0]
        else:
            found = _plain(q, k, v, mask)
        return found.flatten(2)

    def after(
        self, mixed: torch.Tensor, x: torch.Tensor, following: nn.Module | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows attention, each row of [n, length, hidden_size] for itself. x: what went into the
        layer. following: the next layer's `qkv`. Returns what leaves the layer, and that after `following`."""
        # The products are memory of their own, so that sums may go into them.
        y = self.norm1(self.out(mixed).add_(x))
        out: torch.Tensor = self.norm2(self.lin2(self.activation(self.lin1(y))).add_(y))
        return out, out if following is None else following(out)

    def divided(
        self, mixed: torch.Tensor, x: torch.Tensor, following: nn.Module | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`after`, its rows shared out among threads without other work, where that is worth it."""
        threads, rows = intra_op.lent(), x.shape[1]
        if threads is None or not self._may_divide() or x.shape[0] > 1:
            return self.after(mixed, x, following)
        n = self.rows.parts(rows, rows // intra_op.PART_ROWS)
        with self.rows.timed(rows, n):
            if n == 1:
                return self.after(mixed, x, following)
            parts = threads.map([
                partial(inferred, self.after, mixed[:, start:end], x[:, start:end], following)
                for start, end in intra_op.even(rows, n)
            ])  # fmt: skip
            out, then = (torch.cat(one, dim=1) for one in zip(*parts, strict=True))
            return out, then

    def _may_divide(self) -> bool:
        """Do all products keep a row's bits whatever others there are?"""
        return all(
            isinstance(one, ReplacedLinear) and one.min_rows is not None
            for one in (self.qkv, self.out, self.lin1, self.lin2)
        )


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """softmax(q k' / sqrt(d)) v; q, k, v: [n, heads, length, d] -> [n, length, heads, d]."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1), v).transpose(1, 2)


class Pooler(nn.Module):
    """tanh of a linear on the first token."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[n, length, hidden] -> [n, hidden]."""
        return torch.tanh(self.dense(states[:, 0]))


class EncoderModel(nn.Module):
    """The base model. `set_attn_implementation` as transformers has it: "packed", or anything else for
    the plain formula."""

    def __init__(self, config: EncoderConfig, *, pooler: bool = False) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.words = nn.Embedding(config.vocab_size, hidden)
        self.types = nn.Embedding(config.type_vocab_size, hidden)
        self.places = nn.Embedding(config.max_position_embeddings, hidden)
        self.norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        for layer in self.layers:
            layer.rows = self.layers[0].rows  # they are alike
        self.pooler = Pooler(hidden) if pooler else None
        self._packed = False

    def set_attn_implementation(self, name: str) -> None:
        """See the class."""
        self._packed = name == NAME

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        read: torch.Tensor | None = None,
    ) -> States:
        """All [n, length] int64. attention_mask: 0 where a token is not attended to; not with a pack.
        read: [n_read], the tokens whose last states are wanted; the others end before the last layer's
        feed-forward net. None: all."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
            position_ids = position_ids + self.config.first_position
        x = self.words(input_ids)
        x += self.types.weight[0] if token_type_ids is None else self.types(token_type_ids)
        x = self.norm(x.add_(self.places(position_ids)))
        mask = None
        if attention_mask is not None:
            blocked = attention_mask[:, None, None, :] == 0
            mask = torch.zeros_like(blocked, dtype=x.dtype)
            mask = mask.masked_fill_(blocked, torch.finfo(x.dtype).min)
        layers = [*self.layers]
        qkv = layers[0].qkv(x)
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            mixed = layer.mixed(qkv, mask, self._packed)
            if following is None and read is not None:
                mixed, x = mixed[:, read], x[:, read]
            x, qkv = layer.divided(mixed, x, None if following is None else following.qkv)
        return States(x)


class ClassifierHead(nn.Module):
    """RoBERTa's: a linear, tanh, and the labels, on the first token."""

    def __init__(self, hidden: int, n_labels: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.out_proj = nn.Linear(hidden, n_labels)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[n, length, hidden] -> [n, n_labels]."""
        out: torch.Tensor = self.out_proj(torch.tanh(self.dense(states[:, 0])))
        return out


class EncoderClassifier(nn.Module):
    """The base model and its classification head, named as `gpu.answer.heads` finds them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        pooled = config.model_type == "bert"
        self.base_model = EncoderModel(config, pooler=pooled)
        self.classifier = (
            nn.Linear(config.hidden_size, config.n_labels)
            if pooled
            else ClassifierHead(config.hidden_size, config.n_labels)
        )

    def set_attn_implementation(self, name: str) -> None:
        """See `EncoderModel`."""
        self.base_model.set_attn_implementation(name)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> Logits:
        """Each row of [n, length] int64 alone, as the self-check wants it."""
        states = self.base_model(input_ids, attention_mask=attention_mask).last_hidden_state
        pooler = self.base_model.pooler
        return Logits(self.classifier(states if pooler is None else pooler(states)))


def tensor_names(config: EncoderConfig) -> dict[str, tuple[str, ...]]:
    """Parameter here -> tensors of the checkpoint that it is made of, one below the other; without the
    prefix of the base model."""
    found: dict[str, tuple[str, ...]] = {
        "words.weight": ("embeddings.word_embeddings.weight",),
        "types.weight": ("embeddings.token_type_embeddings.weight",),
        "places.weight": ("embeddings.position_embeddings.weight",),
    }
    modules: dict[str, tuple[str, ...]] = {"norm": ("embeddings.LayerNorm",)}
    for i in range(config.num_hidden_layers):
        here, there = f"layers.{i}", f"encoder.layer.{i}"
        modules |= {
            f"{here}.qkv": tuple(f"{there}.attention.self.{n}" for n in ("query", "key", "value")),
            f"{here}.out": (f"{there}.attention.output.dense",),
            f"{here}.norm1": (f"{there}.attention.output.LayerNorm",),
            f"{here}.lin1": (f"{there}.intermediate.dense",),
            f"{here}.lin2": (f"{there}.output.dense",),
            f"{here}.norm2": (f"{there}.output.LayerNorm",),
        }
    for here, parts in modules.items():
        for kind in ("weight", "bias"):
            found[f"{here}.{kind}"] = tuple(f"{part}.{kind}" for part in parts)
    return found
