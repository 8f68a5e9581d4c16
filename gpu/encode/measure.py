"""What somebody must know who cuts texts for a model: its tokenizer, its prompt, its room.

Who calls it: an indexing route, once, when its model is loaded.
What must stay true: a text of `room` tokens is taken whole, whatever stands around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu.folder.latent import LatentSpec
from gpu.folder.spec import ModelSpec
from schemas.errors import Unsupported
from schemas.requests import EmbedRequest, Text

SLACK_TOKENS = 2
"""Where prompt and text meet, both may be spelled with other tokens than alone."""


@dataclass(frozen=True, slots=True)
class TextMeasure:
    """tokenizer_json: as `tokenizers` writes it. prompt: the text put before each item, or "".
    room: tokens of an item beside special tokens and prompt. vocabulary: entries that sparse vectors have,
    0 where the model has none."""

    tokenizer_json: str
    prompt: str
    room: int
    vocabulary: int = 0


def text_measure(encoder: Any, *, prompt: str | None, prompt_name: str | None) -> TextMeasure:
    """What `encoder` does to the texts of an embed request with this prompt.

    Raises:
        Unsupported: the model takes no texts, or has no prompt of that name.
    """
    measure = getattr(encoder, "measure", None)
    if measure is None:
        raise Unsupported("the model has no text tokenizer: choose a model for texts")
    tokenizer_json, told_prompt, room = measure(
        EmbedRequest(id="measure", input=(), prompt=prompt, prompt_name=prompt_name)
    )
    if told_prompt:
        room -= SLACK_TOKENS
    if room < 8:
        raise Unsupported("the prompt leaves no room for a text", limit=8, given=max(room, 0))
    return TextMeasure(tokenizer_json, told_prompt, room, _vocabulary(encoder.spec))


def _vocabulary(spec: ModelSpec) -> int:
    if isinstance(spec.sparse, LatentSpec):
        return spec.sparse.hidden_dim
    return 0 if spec.sparse is None else int(spec.config["vocab_size"])


def check_late(encoder: Any) -> None:
    """Raises `Unsupported` unless the model of this encoder can make vectors of a text's spans."""
    request = EmbedRequest(id="late", input=(Text("late", ((0, 4),)),))
    (found,) = encoder.encode([request])
    if isinstance(found, Unsupported):
        raise Unsupported(f"late chunking: {found.message}")
