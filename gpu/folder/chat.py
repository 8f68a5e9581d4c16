"""Embedders whose library puts every text through the folder's chat template, as a message of its user.

Who calls it: `gpu.folder.read` finds them; `gpu.encode.folder_tokenizer` renders the template once, at load.
What must stay true: what stands around a text is what the template renders around it, prompt by prompt; a
template that cannot be taken apart into fixed text around the content is refused. No torch here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.faults import ModelLoadError
from gpu.folder.rerankers import chat_template_of
from gpu.folder.sentence_bert import read_sentence_bert

_MARK = "\ue000t\ue000"  # private use: in no template, untouched by upper, trim and replace
_SIZES = ("padding", "truncation", "max_length", "return_tensors")


@dataclass(frozen=True, slots=True)
class ChatForm:
    """template: Jinja text. flat: contents are texts, not lists of parts. options: for the rendering.

    What rendering finds out: before: what stands before a text, by the name of the prompt that is its system
    message, None without one; after: what stands behind it; strip: the text loses surrounding white space.
    """

    template: str
    flat: bool
    options: Mapping[str, Any]
    before: Mapping[str | None, str] = field(default_factory=dict)
    after: str = ""
    strip: bool = False


def read_chat(folder: Path, transformer: Path, *, pools: bool) -> ChatForm | None:
    """The form of an embedder that takes messages; None: texts go in as they are.

    pools: the folder has a Pooling module. Raises `ModelLoadError` for what would be rendered otherwise.
    """
    config = read_sentence_bert(transformer)
    message = (config.get("modality_config") or {}).get("message")
    if message is None or not pools:
        return None
    path = transformer / "sentence_bert_config.json"
    options = dict((config.get("processing_kwargs") or {}).get("chat_template") or {})
    odd = [name for name in _SIZES if name in options]
    if odd or options.pop("restore_suffix", True) is not True or config.get("do_lower_case"):
        raise ModelLoadError(
            f"{path}: {odd[0] if odd else 'restore_suffix or do_lower_case'} beside a chat template is not "
            "supported; remove it if the model was trained without"
        )
    if message.get("format") not in ("flat", "structured"):
        raise ModelLoadError(
            f"{path}: modality_config.message.format = {message.get('format')!r} is not flat or structured"
        )
    template = chat_template_of(transformer)
    if template is None:
        raise ModelLoadError(f"{path}: texts go through a chat template, and the folder has none")
    if re.search(r"\btask\b", template):
        raise ModelLoadError(
            f"{transformer}: the chat template reads the task, by which queries and documents would be "
            "rendered apart; that is not computed here"
        )
    return ChatForm(template, message["format"] == "flat", options)


def rendered_chat(form: ChatForm, prompts: Mapping[str, str], tokenizer: Any) -> ChatForm:
    """The form with `before`, `after` and `strip` filled in. tokenizer: a transformers one.

    Raises `ModelLoadError` when the template does not carry a text as it is.
    """
    before: dict[str | None, str] = {}
    behind: set[str] = set()
    named: list[tuple[str | None, str | None]] = [(None, None), *prompts.items()]
    strip = f" {_MARK} " not in _render(form, None, f" {_MARK} ", tokenizer)
    for name, prompt in named:
        text = _render(form, prompt or None, _MARK, tokenizer)
        padded = _render(form, prompt or None, f" {_MARK} ", tokenizer)
        if text.count(_MARK) != 1 or padded.replace(f" {_MARK} ", _MARK) != text:
            raise ModelLoadError(
                "the folder's chat template does not render a user's text once and as it is"
            )
        if prompt and prompt not in text:
            raise ModelLoadError(
                f"the folder's chat template does not render the prompt {name!r} as a system message"
            )
        before[name], after = text.split(_MARK)
        behind.add(after)
    if len(behind) != 1:
        raise ModelLoadError("the folder's chat template renders different ends for its prompts")
    return dataclasses.replace(form, before=before, after=behind.pop(), strip=strip)


def _render(form: ChatForm, prompt: str | None, text: str, tokenizer: Any) -> str:
    messages = [
        {"role": role, "content": said if form.flat else [{"type": "text", "text": said}]}
        for role, said in (("system", prompt), ("user", text))
        if said is not None
    ]
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, chat_template=form.template, tokenize=False, **form.options
            )
        )
    except Exception as error:
        raise ModelLoadError(
            f"the folder's chat template cannot be rendered: {type(error).__name__}: {str(error)[:200]}"
        ) from error
