"""Late chunking where the sender cuts: spans of a text's characters become spans of its tokens.

Who calls it: `gpu.encode.text`, for texts that come with spans; `gpu.answer.outputs` pools them.
What must stay true: a token counts for every span that has one of its characters; the special tokens and
the prompt count for a span that begins, or ends, where the text does, so that one span over all of a
text gives the text's ordinary vector (the rule of Jina's published code).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu.batch import EncodedItem, Int32
from gpu.encode.control import ControlTokens
from gpu.encode.cut import reraise_unless_fault
from schemas.errors import EmbedstreamError, InvalidRequest, ModelError
from schemas.requests import AnyRequest, EmbedRequest, Span, Text

SPANS = "spans"
"""Key in `EncodedItem.extras`: [n_spans, 2] int32, the item's own tokens [from, to) of each vector."""


def first_with_spans(request: AnyRequest) -> int | None:
    """The index of the first text with spans; None: there is none."""
    if not isinstance(request, EmbedRequest):
        return None
    found = (i for i, item in enumerate(request.input) if isinstance(item, Text) and item.spans)
    return next(found, None)


@dataclass(frozen=True, slots=True)
class CutText:
    """A text with spans, and how it went into its item.

    before: the prompt that was tokenized together with it. n_head, n_tail: tokens of the item that stand
    around both. strip: white space at its ends was left out.
    """

    item: Text
    index: int
    before: str
    n_head: int
    n_tail: int
    strip: bool

    @property
    def text(self) -> str:
        return self.item.text.strip() if self.strip else self.item.text

    @property
    def spans(self) -> list[Span]:
        n_cut = len(self.item.text) - len(self.item.text.lstrip()) if self.strip else 0
        return [(start - n_cut, end - n_cut) for start, end in self.item.spans]


def in_spans(
    item: EncodedItem, cut: CutText, tokenizer: Any, control: ControlTokens
) -> EncodedItem | EmbedstreamError:
    """The item, to be answered with one vector for each span of its text."""
    try:
        encoding = tokenizer.encode(cut.before + cut.text, add_special_tokens=False)
    except BaseException as error:  # noqa: BLE001 - whatever this text did, it did to itself
        reraise_unless_fault(error)
        return ModelError(f"the tokenizer cannot take this text: {type(error).__name__}")
    offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2) - len(cut.before)
    # Where each token stands in the item, which spells some of them out in several.
    places = cut.n_head + control.places(np.asarray(encoding.ids, dtype=np.int32))
    last = item.n_tokens - cut.n_tail
    assert places[-1] == last, "the same text gives the same tokens"
    own = np.flatnonzero(offsets[:, 1] > 0)
    found: list[tuple[int, int]] = []
    for i, (start, end) in enumerate(cut.spans):
        inside = own[(offsets[own, 0] < end) & (offsets[own, 1] > start)]
        inside = inside[offsets[inside, 1] > offsets[inside, 0]]
        if not len(inside):
            return InvalidRequest(
                "the span holds no token",
                path=f"$.input[{cut.index}].spans[{i}]",
                items=(cut.index,),
            )
        begins, ends = inside[0] == own[0], places[inside[-1] + 1] == last
        found.append(
            (
                item.pooled_from if begins else int(places[inside[0]]),
                item.n_tokens if ends else int(places[inside[-1] + 1]),
            )
        )
    return dataclasses.replace(
        item,
        options=dataclasses.replace(item.options, outputs=()),
        extras={**item.extras, SPANS: _frozen(found)},
    )


def _frozen(found: Sequence[tuple[int, int]]) -> Int32:
    spans = np.asarray(found, dtype=np.int32)
    spans.flags.writeable = False
    return spans
