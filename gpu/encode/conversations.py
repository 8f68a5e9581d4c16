"""Conversations in the form of the folder's own chat template, their control tokens the template's alone.

Who calls it: `gpu.encode.text`, for classifiers whose folder has a chat template.
What must stay true: a conversation gives the ids that its template gives it, or a typed error; the
template's text and a sender's are tokenized so that no control token comes from a sender; a template
that changes what it is given is refused, message by message. No conversation is ever cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from gpu.batch import EncodedItem, Int32, ItemOptions
from gpu.encode.control import ControlTokens
from schemas.errors import EmbedstreamError, EmptyInput, TooLong, Unsupported
from schemas.requests import Conversation, Message

Laid: TypeAlias = tuple[Int32 | int, ...]
"""A conversation on its way through the batched tokenizer call: ids of a control token, or the place of a
text among those of the call."""

_KEPT_FORMS = 256
_MARK = re.compile("\ue000\\d+\ue000")
_SAMPLES: tuple[tuple[Message, ...], ...] = (
    (Message("user", "What is it?"), Message("assistant", "It is one.\n1, 2")),
    (Message("user", "hello"),),
    (Message("system", "Be brief."), Message("user", "the river"), Message("assistant", "x")),
)


@dataclass(frozen=True, slots=True)
class _Form:
    """What a template writes for one sequence of roles. literals: around the messages, one more than there
    are; strips: whether a message loses white space (left, right)."""

    literals: tuple[str, ...]
    strips: tuple[tuple[bool, bool], ...]

    def text(self, messages: Sequence[Message]) -> str:
        parts = [self.literals[0]]
        for content, literal in zip(self.contents(messages), self.literals[1:], strict=True):
            parts += [content, literal]
        return "".join(parts)

    def contents(self, messages: Sequence[Message]) -> Iterator[str]:
        for message, (left, right) in zip(messages, self.strips, strict=True):
            text = message.content.lstrip() if left else message.content
            yield text.rstrip() if right else text


class Conversations:
    """Not thread-safe: it renders with the tokenizer that `gpu.encode.text` owns.

    Args:
        template: Jinja text, the owner's.
        outer: a transformers tokenizer, which renders it with the folder's control tokens.
        control: of the same tokenizer.

    refused: why no conversation can be taken, or None.
    """

    def __init__(self, template: str, outer: Any, control: ControlTokens) -> None:
        self._template, self._outer, self._control = template, outer, control
        self._forms: dict[tuple[str, ...], _Form | str] = {}
        self.refused = self._why_not()

    def as_lists(self) -> list[Any]:
        """What messages are written with, for the fingerprint."""
        if self.refused is not None:
            return []
        return [self._template, sorted(self._outer.special_tokens_map.items())]

    @property
    def note(self) -> str:
        """For the operator."""
        if self.refused is not None:
            return f"items with messages are refused: {self.refused}"
        return "items with messages are written as the folder's chat template says"

    def plan(
        self, conversation: Conversation, index: int, texts: list[str]
    ) -> Laid | EmbedstreamError:
        """Append what has to be tokenized to `texts`. index: of the item, for its error."""
        if self.refused is not None:
            return _unsupported(self.refused, index)
        messages = tuple(
            Message(message.role, _clean(message.content)) for message in conversation.messages
        )
        if not any(message.content.strip() for message in messages):
            return EmptyInput("no message holds text", path=f"$.input[{index}]", items=(index,))
        form = self._form(tuple(message.role for message in messages))
        if isinstance(form, str):
            return _unsupported(form, index)
        if self._render(messages) != form.text(messages):
            return _unsupported(
                "the model's chat template writes one of these messages otherwise than as it is (it looks "
                "into texts, and moves or drops parts of them); send token ids",
                index,
            )
        return self._laid(form, messages, texts)

    def _laid(self, form: _Form, messages: Sequence[Message], texts: list[str]) -> Laid:
        laid: list[Int32 | int] = []
        text, strip_left = "", False

        def flush(*, strip_right: bool) -> None:
            whole = text.lstrip() if strip_left else text
            whole = whole.rstrip() if strip_right else whole
            if whole:
                laid.append(len(texts))
                texts.append(whole)

        for content, literal in zip(("", *form.contents(messages)), form.literals, strict=True):
            text += content
            # Only the template's own text is looked through for control tokens.
            for piece in self._control.split(literal):
                if isinstance(piece, str):
                    text += piece
                    continue
                flush(strip_right=piece.strips_left)
                laid.append(np.asarray([piece.id], dtype=np.int32))
                text, strip_left = "", piece.strips_right
        flush(strip_right=False)
        return tuple(laid)

    # -- what the template writes --------------------------------------------------------------

    def _why_not(self) -> str | None:
        if "strftime_now" in self._template:
            return "the folder's chat template writes the date of the day, so a score would not stay the same"
        refusals = []
        for messages in _SAMPLES:
            form = self._form(tuple(message.role for message in messages))
            if isinstance(form, str):
                refusals.append(form)
                continue
            whole = self._render(messages)
            if whole != form.text(messages):
                return "the folder's chat template changes the texts it is given"
            texts: list[str] = []
            laid = self._laid(form, messages, texts)
            ids = [
                self._control.text_ids(texts[part]) if isinstance(part, int) else part
                for part in laid
            ]
            if np.concatenate(ids).tolist() != self._control.parsed(whole).tolist():
                return "the tokenizer joins texts across the control tokens of the folder's chat template"
        return refusals[0] if len(refusals) == len(_SAMPLES) else None

    def _form(self, roles: tuple[str, ...]) -> _Form | str:
        """What is written for such roles, or why nothing is."""
        if roles not in self._forms:
            if len(self._forms) >= _KEPT_FORMS:
                self._forms.clear()
            self._forms[roles] = self._formed(roles)
        return self._forms[roles]

    def _formed(self, roles: tuple[str, ...]) -> _Form | str:
        # Private use: in no template, untouched by upper, trim and replace.
        marks = [f"\ue000{place}\ue000" for place in range(len(roles))]
        bare = self._around(roles, marks, marks)
        padded = self._around(roles, marks, [f"\t{mark}\n" for mark in marks])
        if isinstance(bare, str) or isinstance(padded, str):
            return bare if isinstance(bare, str) else str(padded)
        strips = []
        for place in range(len(roles)):
            left = not padded[place].endswith("\t") or bare[place].endswith("\t")
            right = not padded[place + 1].startswith("\n") or bare[place + 1].startswith("\n")
            strips.append((left, right))
        return _Form(tuple(bare), tuple(strips))

    def _around(
        self, roles: tuple[str, ...], marks: list[str], contents: list[str]
    ) -> list[str] | str:
        """The text around the marks, or why they are not where they should be."""
        messages = [Message(role, text) for role, text in zip(roles, contents, strict=True)]  # type: ignore[arg-type]
        text = self._render(messages)
        if text is None:
            return "the folder's chat template does not take messages of these roles in this order"
        if _MARK.findall(text) != marks:
            return (
                "the folder's chat template leaves out, repeats or moves a message of these roles"
            )
        return _MARK.split(text)

    def _render(self, messages: Sequence[Message]) -> str | None:
        given = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(
                self._outer.apply_chat_template(given, chat_template=self._template, tokenize=False)
            )
        except Exception:  # noqa: BLE001 - Jinja text may raise what it likes
            return None


def assembled(
    laid: Laid | EmbedstreamError,
    contents: Sequence[Int32 | EmbedstreamError],
    index: int,
    options: ItemOptions,
    limit: int,
) -> EncodedItem | EmbedstreamError:
    """contents: ids of the texts of the call, among which are those that `Conversations.plan` appended."""
    if isinstance(laid, EmbedstreamError):
        return laid
    pieces = []
    for part in laid:
        piece = contents[part] if isinstance(part, int) else part
        if isinstance(piece, EmbedstreamError):
            return piece
        pieces.append(piece)
    ids = np.concatenate(pieces).astype(np.int32, copy=False)
    if len(ids) > limit:
        return TooLong(
            f"conversation {index} has {len(ids)} tokens, the model takes {limit}; a conversation is never cut: "
            "leave messages out",
            path=f"$.input[{index}]",
            items=(index,),
            given=len(ids),
            limit=limit,
        )
    return EncodedItem(ids, options)


def no_conversations(index: int) -> Unsupported:
    """The error of an item that holds messages, where the model reads none."""
    return _unsupported(
        "this model takes no messages: they are for a decoder with a classification head and a chat template in "
        "its folder; send texts",
        index,
    )


def _unsupported(why: str, index: int) -> Unsupported:
    return Unsupported(why, path=f"$.input[{index}].messages", items=(index,))


def _clean(text: str) -> str:
    """With lone surrogates replaced, which neither Jinja's loop nor the tokenizer need to see."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
