"""What a language model reads and is read at: the prompt around a pair, and its label tokens.

Who calls it: `gpu.folder.read` and `gpu.folder.rerankers` make these records, `gpu.encode.pairs` and `gpu.answer.label_rows`
use them.
What must stay true: plain values; the built-in prompts are, letter by letter, what the models were
trained on. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu.faults import ModelLoadError

SLOTS = ("instruction", "query", "document")
CUT = "{cut}"
N_SHARED = "n_shared"
"""Key in `EncodedItem.extras`: leading tokens that the items of one request have in common."""
SLOT = re.compile(r"\{(instruction|query|document)\}")


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """What a model was trained to read.

    name: built-in name, "template" (from the settings) or "chat" (from the model folder).
    template: literal text with the slots {query}, {document} and, optionally, {instruction}, the query
        before the document. What stands between two {cut} marks is tokenized on its own, as a control
        token's neighbours are anyway. {bos} is the tokenizer's first token.
    instruction: used when a request brings none; None together with an {instruction} slot means that
        `without` is used then.
    without: the template for requests without an instruction, when that is another text.
    strip: texts lose surrounding white space first (a chat template may do so).
    chat_template: the folder's Jinja text; `template` is then still empty and is rendered from it at load.
    chat_options: what sentence-transformers passes to it, and "format" of message contents.
    """

    name: str
    template: str = ""
    instruction: str | None = None
    without: str | None = None
    strip: bool = False
    chat_template: str | None = None
    chat_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LabelHead:
    """A causal language model as a scorer: logits of a few vocabulary tokens after the last token.

    tokens: each a text (which must be one token) or an id.
        None of them: every request names its own.
    difference: two tokens make one score, the first's logit minus the second's, whose sigmoid is the
        softmax over the two; otherwise every token is a score of its own.
    """

    tokens: tuple[str | int, ...]
    difference: bool = False

    @property
    def ids(self) -> list[int]:
        """Of a resolved head."""
        assert all(isinstance(token, int) for token in self.tokens), (
            "resolve the label tokens first"
        )
        return [int(token) for token in self.tokens]

    def resolved(self, tokenizer: Any, vocab_size: int) -> LabelHead:
        """With ids for texts. Raises `ModelLoadError` for a label that is not one token.

        tokenizer: a `tokenizers.Tokenizer`.
        """
        ids: list[str | int] = []
        for token in self.tokens:
            found = tokens_of(token, tokenizer)
            if len(found) != 1 or not 0 <= found[0] < vocab_size:
                raise ModelLoadError(
                    f"label_tokens: {token!r} is not one token of this model's vocabulary"
                )
            ids.append(found[0])
        return LabelHead(tuple(ids), self.difference)


def tokens_of(label: str | int, tokenizer: Any) -> list[int]:
    """The ids that a label stands for; it is of use when there is one. tokenizer: a `tokenizers.Tokenizer`.

    A text that is a token's own name is that token, control tokens and leading space marks included.
    """
    if isinstance(label, int):
        return [label]
    clean = label.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    known = tokenizer.token_to_id(clean)
    if known is not None:
        return [known]
    return list(tokenizer.encode(clean, add_special_tokens=False).ids)


# The model card of Qwen3-Reranker: prefix, body and suffix are tokenized apart.
QWEN3 = PairPrompt(
    "qwen3",
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "{cut}<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}{cut}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
# The model card of bge-reranker-v2-gemma: every piece is tokenized apart.
BGE_GEMMA = PairPrompt(
    "bge-gemma",
    "{bos}{cut}A: {query}{cut}\n{cut}B: {document}{cut}\n{cut}{instruction}",
    instruction="Given a query A and a passage B, determine whether the passage contains an answer to "
    "the query by providing a prediction of either 'Yes' or 'No'.",
)
PLAIN = PairPrompt("plain", "{bos}{cut}{query}{cut}{document}")
BUILT_IN: dict[str, PairPrompt] = {prompt.name: prompt for prompt in (QWEN3, BGE_GEMMA, PLAIN)}
BUILT_IN_LABELS: dict[str, tuple[str, ...]] = {"qwen3": ("yes", "no"), "bge-gemma": ("Yes",)}


def pair_prompt(setting: str) -> PairPrompt:
    """The prompt that the setting `rerank_template` asks for: a built-in name, or a template.

    Raises `ModelLoadError`.
    """
    if setting in BUILT_IN:
        return BUILT_IN[setting]
    if "{document}" not in setting:
        raise ModelLoadError(
            f"rerank_template = {setting[:60]!r} is neither one of {', '.join(sorted(BUILT_IN))} nor a "
            "template with {query} and {document}"
        )
    check_slots(setting)
    return PairPrompt("template", setting)


def check_slots(template: str) -> None:
    """Raises `ModelLoadError` for a template that cannot be assembled."""
    slots = SLOT.findall(template)
    if slots.count("query") != 1 or slots.count("document") != 1 or slots.count("instruction") > 1:
        raise ModelLoadError(
            "a rerank template has {query} once, {document} once and {instruction} at most once"
        )
    if slots.index("query") > slots.index("document"):
        raise ModelLoadError(
            "a rerank template has {query} before {document}: only what stands at the end of a text "
            "can be cut without touching the query"
        )
