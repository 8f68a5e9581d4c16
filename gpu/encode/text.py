"""The one owner of a model's tokenizer: requests in, token ids or typed errors out.

Who calls it: the tokenizer actor, from one thread.
What must stay true: one batched tokenizer call per `encode`; padding and truncation of the tokenizer
itself stay off (a `tokenizer.json` may bake both in) and nothing of it is changed after load; special
tokens survive every cut, a query is never cut; user text cannot become a control token; whatever a
sender may cause becomes an error entry, never an exception, and never touches its neighbours.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from gpu.batch import EncodedItem, EncodedRequest, Int32, ItemOptions
from gpu.encode.control import ControlTokens
from gpu.encode.conversations import Conversations, Laid, assembled, no_conversations
from gpu.encode.cut import cut_to, empty, known_ids, reraise_unless_fault, too_long
from gpu.encode.joined import as_given, joined
from gpu.encode.labels import with_labels
from gpu.encode.late import beside, both_sides, expanded, named, of_queries
from gpu.encode.long_texts import chunked
from gpu.encode.pairs import PairAssembler, PairPlan
from gpu.encode.prompts import NO_IDS, Prompts
from gpu.encode.spans import CutText, in_spans
from gpu.encode.supported import check_request
from gpu.encode.template import Template, learn_template
from gpu.faults import ModelLoadError
from gpu.folder.fingerprint import with_tokenizer
from gpu.folder.nvembed import NVEMBED
from gpu.folder.outputs import QUERY_PROMPT
from gpu.folder.spec import ModelSpec
from schemas.errors import (
    EmbedstreamError,
    ModelError,
    Unsupported,
)
from schemas.requests import (
    AnyRequest,
    ClassifyRequest,
    Conversation,
    EmbedRequest,
    Image,
    RerankRequest,
    Text,
    TokenIds,
)

EmptyPolicy = Literal["error", "embed"]
Content = Int32 | EmbedstreamError


@dataclass(slots=True)
class _Plan:
    """One admitted request on its way through the batched call.

    texts: where its texts start in the call. prompt_at: where its prompt alone stands, or None.
    lead: ids that stand for the beginning of the prompt, put before the content and never cut.
    before: the rest of the prompt, which is tokenized together with each text.
    """

    request: AnyRequest
    options: ItemOptions
    prompt: str | None = None
    texts: list[int] = field(default_factory=list)
    prompt_at: int | None = None
    lead: Int32 = field(default_factory=lambda: NO_IDS)
    before: str = ""
    prompt_name: str | None = None
    pairs: PairPlan | None = None
    laid: dict[int, Laid | EmbedstreamError] = field(default_factory=dict)
    sides: tuple[_Plan, _Plan] | None = None


class TextEncoder:
    """Implements `gpu.batch.Encoder`. Not thread-safe.

    empty_input: what to do with a text that yields no content token: "error" (an `EmptyInput` entry)
    or "embed" (the special tokens alone, as sentence-transformers does). outer: transformers' tokenizer, of a
    model that reads conversations.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokenizer: Any,
        *,
        token_types: bool,
        empty_input: EmptyPolicy,
        bos: str | None = None,
        outer: Any = None,
    ) -> None:
        if empty_input not in ("error", "embed"):
            raise ModelLoadError(f'empty_input = {empty_input!r} is not "error" or "embed"')
        self.spec = spec
        self.empty_input = empty_input
        self.limit = spec.max_tokens
        self._vocab_size = int(spec.config["vocab_size"])
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # "[SEP]" in a text is text
        self._tokenizer = tokenizer
        self._batch = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
        self._template: Template = learn_template(
            tokenizer, special_tokens=spec.calls.special_tokens
        )
        self._bare = learn_template(tokenizer, special_tokens=False)
        description = json.loads(tokenizer.to_str())
        self._control = ControlTokens(tokenizer, description["model"])
        self._strip = spec.chat is not None and spec.chat.strip
        if spec.chat is not None:
            behind = self._control.constant(spec.chat.after)
            self._template = dataclasses.replace(self._bare, suffix=behind)
        notes = spec.notes
        if self._control.spelled:
            told = f"written in a text, these are spelled out: {' '.join(self._control.spelled)}"
            notes = (*notes, told)
        self._prompts = Prompts(spec, self._control)
        pairs = "rerank" in spec.tasks and spec.multivector is None
        types = token_types and pairs
        own = self._template.as_lists(pairs=pairs, types=types)
        around = [types, own, self._control.as_lists(), self._prompts.as_lists()]
        self.conversations: Conversations | None = None
        if spec.conversation is not None:
            self.conversations = Conversations(spec.conversation, outer, self._control)
            notes = (*notes, self.conversations.note)
            around += self.conversations.as_lists()
        # What only the tokenizer could tell.
        self.spec = spec = dataclasses.replace(
            spec,
            notes=notes,
            fingerprint=with_tokenizer(spec.fingerprint, description, around),
        )
        self._token_types = token_types
        self.pairs: PairAssembler | None = None
        if spec.pairs is not None:
            self.pairs = PairAssembler(
                spec.pairs,
                tokenizer,
                bos=bos,
                limit=self.limit,
                allow_empty=empty_input == "embed",
                spell=self._control.spell,
            )
        if self.limit <= max(self._template.n_single, self._template.n_pair):
            raise ModelLoadError(
                f"max_tokens = {self.limit} leaves no room beside the special tokens"
            )

    def encode(self, requests: Sequence[AnyRequest]) -> list[EncodedRequest | EmbedstreamError]:
        """See `gpu.batch.Encoder`."""
        texts: list[str] = []
        plans = [self._plan(request, texts) for request in requests]
        contents = self._contents(texts)
        return [
            plan if isinstance(plan, EmbedstreamError) else self._assemble(plan, contents)
            for plan in plans
        ]

    def measure(self, request: EmbedRequest) -> tuple[str, str, int]:
        """The tokenizer as JSON, the prompt that goes before each text of such a request, and the
        tokens that are left beside it and the special ones. Raises `Unsupported`."""
        prompt, around = self._prompt(request) or "", self._template.n_single
        if self.spec.chat is not None:
            lead, rest = self._prompts.lead(
                request.prompt_name or self.spec.default_prompt_name, None
            )
            prompt, around = rest or "", around + len(lead)
        around += len(self._batch([prompt], add_special_tokens=False)[0])
        return self._tokenizer.to_str(), prompt, self.limit - around

    def _plan(self, request: AnyRequest, texts: list[str]) -> _Plan | EmbedstreamError:
        """Check the request, and append its texts to the batched call."""
        try:
            options = check_request(request, self.spec)
            options = with_labels(options, request, self._tokenizer, self._vocab_size)
            prompt = None if isinstance(request, RerankRequest) else self._prompt(request)
        except EmbedstreamError as error:
            return error
        plan = _Plan(request, options, prompt)

        def add(text: str) -> None:
            plan.texts.append(len(texts))
            texts.append(text)

        if isinstance(request, RerankRequest) and self.pairs is not None:
            start = len(texts)
            try:
                assert isinstance(request.query, str), "gpu.encode.supported refuses token ids here"
                documents = [document.text for document in request.documents]
                plan.pairs = self.pairs.plan(request.query, documents, request.instruction, texts)
            except EmbedstreamError as error:
                return error
            plan.texts.extend(range(start, len(texts)))
            return plan
        if isinstance(request, RerankRequest) and self.spec.multivector is not None:
            asked, given = (self._plan(side, texts) for side in both_sides(request))
            assert isinstance(asked, _Plan) and isinstance(given, _Plan)
            plan.sides = asked, given
            return plan
        if isinstance(request, RerankRequest):
            add(request.query if isinstance(request.query, str) else "")
            for document in request.documents:
                add(document.text)
            return plan
        if request.prompt is None:
            name = request.prompt_name or self.spec.default_prompt_name
            plan.prompt_name = name if self.spec.names_matter else None
            plan.lead, prompt = self._prompts.lead(name, prompt)
        plan.before = prompt or ""
        for index, item in enumerate(request.input):
            if isinstance(item, Text):
                add(plan.before + (item.text.strip() if self._strip else item.text))
            elif isinstance(item, Conversation):
                plan.laid[index] = self._lay(item, index, texts)
        if prompt and plan.texts:
            plan.prompt_at = len(texts)
            texts.append(prompt)
        return plan

    def _lay(self, item: Conversation, index: int, texts: list[str]) -> Laid | EmbedstreamError:
        if self.conversations is None:
            return no_conversations(index)
        return self.conversations.plan(item, index, texts)

    def _prompt(self, request: EmbedRequest | ClassifyRequest) -> str | None:
        """The prompt text to put before each text; None when there is none."""
        return self._prompts.text(request)

    def _contents(self, texts: list[str]) -> list[Content]:
        """[n] int32 content ids per text, without special tokens. One call for all."""
        if not texts:
            return []
        try:
            encodings = self._batch(texts, add_special_tokens=False)
        except BaseException as error:  # noqa: BLE001 - one odd text must not fail the others
            reraise_unless_fault(error)
            return [self._content(text) for text in texts]
        return [
            self._control.spell(np.asarray(encoding.ids, dtype=np.int32)) for encoding in encodings
        ]

    def _content(self, text: str) -> Content:
        """One text alone, with lone surrogates replaced (U+FFFD), which the tokenizer cannot take."""
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        try:
            ids = self._batch([clean], add_special_tokens=False)[0].ids
        except BaseException as error:  # noqa: BLE001 - whatever this text did, it did to itself
            reraise_unless_fault(error)
            return ModelError(f"the tokenizer cannot take this text: {type(error).__name__}")
        return self._control.spell(np.asarray(ids, dtype=np.int32))

    def _assemble(self, plan: _Plan, contents: list[Content]) -> EncodedRequest | EmbedstreamError:
        request = plan.request
        if plan.sides is not None:
            query, documents = (self._assemble(side, contents) for side in plan.sides)
            return beside(query, documents, plan.options)
        if isinstance(request, RerankRequest):
            return self._assemble_pairs(plan, request, contents)
        prompt_ids = None if plan.prompt_at is None else contents[plan.prompt_at]
        if isinstance(prompt_ids, EmbedstreamError):
            return prompt_ids
        items: list[EncodedItem | EmbedstreamError] = []
        places = iter(plan.texts)
        for index, item in enumerate(request.input):
            if isinstance(item, Text):
                content = contents[next(places)]
                encoded = self._single(plan, index, item.text, content, prompt_ids)
                if item.spans and isinstance(encoded, EncodedItem):
                    lengths = (
                        len(self._template.prefix) + len(plan.lead),
                        len(self._template.suffix),
                    )
                    cut = CutText(item, index, plan.before, *lengths, strip=self._strip)
                    encoded = in_spans(encoded, cut, self._tokenizer, self._control)
            elif isinstance(item, TokenIds):
                encoded = self._verbatim(plan, index, item.ids)
            elif isinstance(item, Conversation):
                encoded = assembled(plan.laid[index], contents, index, plan.options, self.limit)
            else:
                encoded = self._image(plan, index, item)
            items.append(named(encoded, plan.prompt_name) if self.spec.task_adapters else encoded)
        # Ids are used as they came: a request of ids alone had no prompt put before it.
        return EncodedRequest(tuple(items), prompt=plan.prompt if plan.texts else None)

    def _single(
        self, plan: _Plan, index: int, text: str, content: Content, prompt_ids: Int32 | None
    ) -> EncodedItem | EmbedstreamError:
        if isinstance(content, EmbedstreamError):
            return content
        if self._is_empty(text, content, prompt_ids):
            return empty(f"$.input[{index}]", index)
        free = self.spec.free_queries and plan.prompt_name == QUERY_PROMPT
        template = self._bare if free else self._template
        n_around = template.n_single + len(plan.lead)
        n_prompt = 0 if prompt_ids is None else len(prompt_ids)
        masked = not self.spec.include_prompt and n_prompt + len(plan.lead) > 0
        limit, expansion = of_queries(self.spec, plan.prompt_name)
        if len(content) + n_around > limit and _aggregates(plan.request):
            head = np.concatenate((template.prefix, plan.lead))
            return chunked(
                head,
                content,
                content[:n_prompt],
                template.suffix,
                limit=limit,
                options=plan.options,
                index=index,
                pooled_from=self._after(len(head)) + n_prompt if masked else 0,
            )
        cut = cut_to(content, limit - n_around, plan.request.truncate)
        if cut is None:
            return too_long(index, len(content) + n_around, limit)
        ids = template.single(np.concatenate((plan.lead, cut)) if len(plan.lead) else cut)
        if len(ids) == 0:
            return empty(f"$.input[{index}]", index)
        pooled_from = 0
        if masked:
            lost = len(content) - len(cut) if plan.request.truncate == "left" else 0
            kept = len(plan.lead) + min(max(n_prompt - lost, 0), len(cut))
            pooled_from = self._after(len(template.prefix)) + kept if kept else 0
        item = EncodedItem(
            ids,
            plan.options,
            truncated=len(cut) < len(content),
            pooled_from=pooled_from,
            extras={} if plan.prompt_name is None else {"prompt_name": plan.prompt_name},
        )
        return expanded(item, expansion)

    def _after(self, n_prefix: int) -> int:
        """Where a masked prompt is counted from: NV-Embed's code forgets the first token."""
        return 0 if self.spec.model_type == NVEMBED else n_prefix

    def _image(self, plan: _Plan, index: int, item: Image) -> EncodedItem | EmbedstreamError:
        return Unsupported("this model takes no images", path=f"$.input[{index}]", items=(index,))

    def _is_empty(self, text: str, content: Int32, prompt_ids: Int32 | None) -> bool:
        """No token comes from the text itself, and policy says that this is an error."""
        if self.empty_input == "embed":
            return False
        if prompt_ids is None:
            return len(content) == 0
        if np.array_equal(content, prompt_ids):
            return True
        # A blank text may still change how the prompt's last token splits.
        return not text.strip() and not self._batch([text], add_special_tokens=False)[0].ids

    def _verbatim(
        self, plan: _Plan, index: int, given: tuple[int, ...]
    ) -> EncodedItem | EmbedstreamError:
        """Ids as they came: no special tokens added; when cut, those that are there are kept."""
        path = f"$.input[{index}]"
        ids = known_ids(given, self._vocab_size, path, index)
        if isinstance(ids, EmbedstreamError):
            return ids
        if len(ids) <= self.limit:
            return EncodedItem(ids, plan.options)
        prefix, suffix = self._template.prefix, self._template.suffix
        head = len(prefix) if np.array_equal(ids[: len(prefix)], prefix) else 0
        tail = len(suffix) if len(suffix) and np.array_equal(ids[-len(suffix) :], suffix) else 0
        body = ids[head : len(ids) - tail]
        if _aggregates(plan.request):
            ends = ids[:head], body, NO_IDS, ids[len(ids) - tail :]
            return chunked(*ends, limit=self.limit, options=plan.options, index=index)
        cut = cut_to(body, self.limit - head - tail, plan.request.truncate)
        if cut is None:
            return too_long(index, len(ids), self.limit)
        ids = np.concatenate((ids[:head], cut, ids[len(ids) - tail :]))
        return EncodedItem(ids, plan.options, truncated=True)

    def _assemble_pairs(
        self, plan: _Plan, request: RerankRequest, contents: list[Content]
    ) -> EncodedRequest | EmbedstreamError:
        """Query and document as one sequence each; only documents are ever cut."""
        given = [contents[place] for place in plan.texts]
        if plan.pairs is not None:
            assert self.pairs is not None
            return self.pairs.encoded(plan.pairs, request, given, plan.options)
        query, *documents = as_given(request, given, self._vocab_size)
        return joined(
            self._template,
            query,
            documents,
            limit=self.limit,
            options=plan.options,
            truncate=request.truncate,
            token_types=self._token_types,
            allow_empty=self.empty_input == "embed",
        )


def _aggregates(request: AnyRequest) -> bool:
    return isinstance(request, EmbedRequest) and request.aggregate is not None
