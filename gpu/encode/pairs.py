"""How a query and a document become one text for a language model, and that text token ids.

Who calls it: `gpu.encode.text`, for models with a `PairPrompt`.
What must stay true: the prompt around the texts is never cut, and neither is the query; only a document
loses tokens; control tokens come from the prompt alone (a "<|im_end|>" inside a text is text); where the
query ends and the document begins is known from how the ids were built, never looked for in them.
No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu.batch import EncodedItem, EncodedRequest, Int32, ItemOptions
from gpu.encode.cut import too_long
from gpu.faults import ModelLoadError
from gpu.folder.prompts import CUT, N_SHARED, SLOT, SLOTS, PairPrompt, check_slots
from schemas.errors import EmbedstreamError, EmptyInput, TooLong, Unsupported
from schemas.requests import RerankRequest, Truncate


@dataclass(frozen=True, slots=True)
class _Segment:
    """Tokenized on its own. ids: a constant, or None for `parts`, which alternate literal and slot:
    parts[0] is a literal, parts[1] a slot name, parts[2] a literal, ..."""

    ids: Int32 | None
    parts: tuple[str, ...] = ()

    @property
    def has_document(self) -> bool:
        return "document" in self.parts[1::2]

    def render(self, values: dict[str, str]) -> str:
        return "".join(
            part if place % 2 == 0 else values[part] for place, part in enumerate(self.parts)
        )


@dataclass(frozen=True, slots=True)
class _Layout:
    """A parsed template: segments before the document's, its own in two halves, and those after."""

    before: tuple[_Segment, ...]
    lead: _Segment  # what stands before the document inside its own segment
    tail: str  # and what stands behind it
    tail_ids: Int32
    after: tuple[_Segment, ...]
    takes_instruction: bool


@dataclass(slots=True)
class PairPlan:
    """One request on its way through the batched tokenizer call; made by `PairAssembler.plan`."""

    layout: _Layout
    values: dict[str, str]
    instruction: str | None
    n_texts: int = 0
    slots: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class PairIds:
    """One assembled pair. n_shared: leading tokens that every document of the request shares."""

    ids: Int32
    n_shared: int
    truncated: bool


class PairAssembler:
    """Assembles pairs for one model. Not thread-safe (it owns nothing but uses the tokenizer).

    Args:
        prompt: with its template filled in.
        tokenizer: a `tokenizers.Tokenizer` whose `encode_special_tokens` is already on.
        bos: text of the first token, or None when the tokenizer has none.
        limit: tokens of a whole pair.
        allow_empty: a text without a token is scored, not refused.
        spell: see `gpu.encode.control.ControlTokens.spell`.

    Raises `ModelLoadError` when the prompt does not fit the tokenizer or the limit.
    """

    def __init__(
        self,
        prompt: PairPrompt,
        tokenizer: Any,
        *,
        bos: str | None,
        limit: int,
        allow_empty: bool,
        spell: Callable[[Int32], Int32] = lambda ids: ids,
    ) -> None:
        self.prompt, self.limit, self.allow_empty = prompt, limit, allow_empty
        self._tokenizer, self._spell = tokenizer, spell
        self._with = self._parse(prompt.template, bos)
        self._without = None if prompt.without is None else self._parse(prompt.without, bos)
        if not any(mark in prompt.template for mark in (CUT, "{bos}")):
            self._verify()

    # -- at load ------------------------------------------------------------------------------

    def _parse(self, template: str, bos: str | None) -> _Layout:
        check_slots(template)
        if "{bos}" in template:
            if bos is None:
                raise ModelLoadError(
                    f"the rerank template {self.prompt.name!r} starts with the tokenizer's first "
                    "token, and this tokenizer has none"
                )
            template = template.replace("{bos}", bos)
        segments = [one for piece in template.split(CUT) if piece for one in self._segments(piece)]
        place = next(i for i, segment in enumerate(segments) if segment.has_document)
        parts = segments[place].parts
        at = parts.index("document", 1)
        tail = parts[at + 1]
        if len(parts) > at + 2:
            raise ModelLoadError(
                "a rerank template needs {cut} or a control token between {document} and {instruction}"
            )
        layout = _Layout(
            before=tuple(segments[:place]),
            lead=_Segment(None, parts[:at]),
            tail=tail,
            tail_ids=self._ids(tail),
            after=tuple(segments[place + 1 :]),
            takes_instruction="{instruction}" in template,
        )
        n_fixed = len(self._ids(layout.lead.render(dict.fromkeys(SLOTS, "")))) + len(tail)
        n_fixed += sum(len(s.ids) for s in (*layout.before, *layout.after) if s.ids is not None)
        if n_fixed + 2 > self.limit:
            raise ModelLoadError(
                f"max_tokens = {self.limit} leaves no room beside the rerank template "
                f"{self.prompt.name!r}, which needs {n_fixed}"
            )
        return layout

    def _verify(self) -> None:
        """A prompt without {cut} gives the ids of its text tokenized whole, control tokens parsed."""
        sample = {"instruction": "find it", "query": "what is it?", "document": "It is one."}
        texts: list[str] = []
        plan = self.plan(
            sample["query"],
            [sample["document"]],
            sample["instruction"] if self._with.takes_instruction else None,
            texts,
        )
        contents = [self._ids(text) for text in texts]
        limit, self.limit = self.limit, 1_000_000  # the sample may be longer than what is served
        built = self.assemble(plan, [sample["document"]], contents, "error")
        self.limit = limit
        whole = SLOT.sub(lambda match: sample[match.group(1)], self.prompt.template)
        literal = self._tokenizer.encode_special_tokens
        self._tokenizer.encode_special_tokens = False
        expected = self._ids(whole)
        self._tokenizer.encode_special_tokens = literal
        one = built[0] if isinstance(built, list) else built
        if isinstance(one, PairIds) and one.ids.tolist() == expected.tolist():
            return
        raise ModelLoadError(
            f"the tokenizer joins texts across the control tokens of the prompt {self.prompt.name!r}; "
            "set `rerank_template` with {cut} where it shall not"
        )

    def _segments(self, piece: str) -> list[_Segment]:
        """Split at control tokens, each of which becomes a constant; so do literals without slots."""
        control = self._control_tokens()
        pattern = "|".join(re.escape(text) for text in sorted(control, key=len, reverse=True))
        pieces = re.split(f"({pattern})", piece) if control else [piece]
        found: list[_Segment] = []
        for i, text in enumerate(pieces):
            if i % 2 == 1:
                found.append(_Segment(np.asarray([control[text][0]], dtype=np.int32)))
                continue
            if i > 0 and control[pieces[i - 1]][2]:
                text = text.lstrip()
            if i + 1 < len(pieces) and control[pieces[i + 1]][1]:
                text = text.rstrip()
            if not text:
                continue
            parts = tuple(SLOT.split(text))
            found.append(_Segment(self._ids(text)) if len(parts) == 1 else _Segment(None, parts))
        return found

    def _control_tokens(self) -> dict[str, tuple[int, bool, bool]]:
        """Text of every special token -> id, strips to its left, strips to its right."""
        return {
            token.content: (token_id, token.lstrip, token.rstrip)
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }

    def _ids(self, text: str) -> Int32:
        if not text:
            return np.zeros(0, dtype=np.int32)
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = self._tokenizer.encode(clean, add_special_tokens=False).ids
        return np.asarray(ids, dtype=np.int32)

    def _text_ids(self, text: str) -> Int32:
        """Of a text that holds a sender's words."""
        return self._spell(self._ids(text))

    # -- per request --------------------------------------------------------------------------

    def plan(
        self, query: str, documents: Sequence[str], instruction: str | None, texts: list[str]
    ) -> PairPlan:
        """Append what has to be tokenized to `texts`; `assemble` takes it from there.

        Raises `Unsupported` for an instruction that the prompt has no place for.
        """
        asked = instruction
        instruction = self.prompt.instruction if asked is None else asked
        layout = self._with
        if instruction is None and self._without is not None:
            layout = self._without
        if asked is not None and not layout.takes_instruction:
            raise Unsupported("the model takes no instruction", path="$.instruction")
        trim = str.strip if self.prompt.strip else str
        values = {"instruction": trim(instruction or ""), "query": trim(query), "document": ""}
        used = instruction if layout.takes_instruction else None
        plan = PairPlan(layout, values, used)
        start = len(texts)
        around = (*layout.before, *layout.after)
        texts.extend(segment.render(values) for segment in around if segment.ids is None)
        lead = layout.lead.render(values)
        texts.append(lead.rstrip(" "))  # alone: how many leading tokens are no document's
        texts.append(values["query"])
        texts.extend(lead + trim(document) + layout.tail for document in documents)
        plan.n_texts = len(texts) - start
        return plan

    def assemble(
        self,
        plan: PairPlan,
        documents: Sequence[str],
        contents: Sequence[Int32 | EmbedstreamError],
        truncate: Truncate,
    ) -> list[PairIds | EmbedstreamError] | EmbedstreamError:
        """One entry per document; an error alone fails the whole request.

        contents: ids of the texts that `plan` appended, in order.
        """
        pieces: list[Int32] = []
        for content in contents[: plan.n_texts - len(documents)]:
            if isinstance(content, EmbedstreamError):
                return content
            pieces.append(content)
        *rendered, lead, query = pieces
        if len(query) == 0 and not self.allow_empty:
            return EmptyInput("the query holds no token", path="$.query")
        given = iter(rendered)
        before, after = (
            np.concatenate(
                [s.ids if s.ids is not None else next(given) for s in side]
                or [np.zeros(0, np.int32)]
            ).astype(np.int32, copy=False)
            for side in (plan.layout.before, plan.layout.after)
        )
        n_fixed = len(before) + len(lead) + len(plan.layout.tail_ids) + len(after)
        if n_fixed + 1 > self.limit:
            return TooLong(
                "the query and the prompt leave no room for a document, and neither is ever cut; "
                "shorten the query",
                path="$.query",
                given=n_fixed,
                limit=self.limit - 1,
            )
        bodies = contents[plan.n_texts - len(documents) :]
        return [
            self._one(plan, (before, lead, after), index, documents[index], body, truncate)
            for index, body in enumerate(bodies)
        ]

    def encoded(
        self,
        plan: PairPlan,
        request: RerankRequest,
        contents: Sequence[Int32 | EmbedstreamError],
        options: ItemOptions,
    ) -> EncodedRequest | EmbedstreamError:
        """As `assemble`, ready to be packed."""
        documents = [document.text for document in request.documents]
        built = self.assemble(plan, documents, contents, request.truncate)
        if isinstance(built, EmbedstreamError):
            return built
        items = tuple(
            one
            if isinstance(one, EmbedstreamError)
            else EncodedItem(
                one.ids, options, truncated=one.truncated, extras={N_SHARED: one.n_shared}
            )
            for one in built
        )
        return EncodedRequest(items, prompt=plan.instruction)

    def _one(
        self,
        plan: PairPlan,
        around: tuple[Int32, Int32, Int32],
        index: int,
        document: str,
        body: Int32 | EmbedstreamError,
        truncate: Truncate,
    ) -> PairIds | EmbedstreamError:
        before, lead, after = around
        if isinstance(body, EmbedstreamError):
            return body
        if not self.allow_empty and not document.strip() and self._is_empty(document):
            return EmptyInput(
                f'item {index} holds no token; send text, or set `empty_input` to "embed" for this '
                "model",
                path=f"$.documents[{index}]",
                items=(index,),
            )
        # Where the document's first character merges with the prompt, that token is the document's.
        shared = _common_prefix(lead, body)
        room = self.limit - len(before) - len(after)
        whole = len(body)
        if whole > room:
            if truncate == "error":
                given = whole + len(before) + len(after)
                return too_long(index, given, self.limit, "with query and prompt")
            body = self._cut(plan, document, body, shared, room, truncate)
        ids = np.concatenate((before, body, after)).astype(np.int32, copy=False)
        return PairIds(ids, len(before) + shared, truncated=whole > room)

    def _cut(
        self,
        plan: PairPlan,
        document: str,
        body: Int32,
        shared: int,
        room: int,
        truncate: Truncate,
    ) -> Int32:
        """The body with fewer document tokens: `room` in all."""
        if truncate == "left":
            return np.concatenate((body[:shared], body[len(body) - (room - shared) :]))
        tail = plan.layout.tail_ids
        if not len(tail):
            return body[:room]
        trim = str.strip if self.prompt.strip else str
        without_tail = self._text_ids(plan.layout.lead.render(plan.values) + trim(document))
        return np.concatenate((without_tail[: room - len(tail)], tail))

    def _is_empty(self, document: str) -> bool:
        return len(self._ids(document)) == 0


def _common_prefix(a: Int32, b: Int32) -> int:
    """Length of the longest common beginning."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n
