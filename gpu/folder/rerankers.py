"""Which language models are rerankers or label scorers here, and what they read: from files and settings.

Who calls it: `gpu.folder.read` while it reads a folder; `gpu.encode.text` renders a chat template at load.
What must stay true: a reranker is declared, by the folder's modules.json or by a setting; nothing is
concluded from the wording of a chat template. A template that cannot be taken apart into literal text
around its slots is refused. No torch here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu.faults import ModelLoadError
from gpu.folder.prompts import BUILT_IN_LABELS, LabelHead, PairPrompt, pair_prompt
from gpu.folder.sentence_bert import read_sentence_bert
from gpu.folder.stored import read_json

# Private-use characters: in no template, untouched by upper, trim and replace.
_MARKS = {"instruction": "\ue000i\ue000", "query": "\ue000q\ue000", "document": "\ue000d\ue000"}


JOINED = (
    "the folder has no form for pairs, so query and document follow each other with nothing between; set "
    "`rerank_template` if the model was trained on one"
)


NO_LABELS = "`label_tokens` is not set, so there is no score to rank by: requests of the task score name their `labels`"


def declared_prompt(
    folder: Path, transformer: Path, setting: str | None, *, scoring_decoder: bool = False
) -> PairPrompt | None:
    """How pairs are written for this model: as the setting says, else as the folder says, else None
    (the tokenizer's own pair form). Raises `ModelLoadError`.

    scoring_decoder: a decoder with a classification head and no modules.json, whose library renders the
    chat template when that has the roles of a pair.
    """
    if setting is not None:
        return pair_prompt(setting)
    bert_config = read_sentence_bert(transformer)
    message = (bert_config.get("modality_config") or {}).get("message")
    chat_template = chat_template_of(transformer)
    if scoring_decoder and not message and _has_pair_roles(chat_template):
        return PairPrompt("chat", chat_template=chat_template, chat_options={"format": "auto"})
    if not message or not _is_cross_encoder(folder):
        return None
    if chat_template is None:
        raise ModelLoadError(
            f"{folder}: sentence_bert_config.json wants a chat template for pairs and the folder has "
            "none; set `rerank_template` for this model"
        )
    options = dict((bert_config.get("processing_kwargs") or {}).get("chat_template") or {})
    options.pop("restore_suffix", None)  # sentence-transformers' own; we never cut the suffix
    st_config = read_json(folder / "config_sentence_transformers.json")
    default = st_config.get("default_prompt_name")
    return PairPrompt(
        "chat",
        instruction=(st_config.get("prompts") or {}).get(default) if default else None,
        chat_template=chat_template,
        chat_options={"format": message.get("format", "structured"), **options},
    )


def is_scorer(architecture: str) -> bool:
    """A model with a classification head."""
    return architecture.endswith("ForSequenceClassification")


def _is_cross_encoder(folder: Path) -> bool:
    st_config = read_json(folder / "config_sentence_transformers.json")
    return st_config.get("model_type") == "CrossEncoder"


def chat_template_of(folder: Path) -> str | None:
    """The folder's chat template; of several, the one named "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        named = {str(entry.get("name")): entry.get("template") for entry in found}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _has_pair_roles(chat_template: str | None) -> bool:
    return chat_template is not None and all(
        re.search(rf"[\"']{role}[\"']", chat_template) for role in ("query", "document")
    )


def label_head(
    folder: Path,
    logit_score: Mapping[str, Any] | None,
    rerank_template: str | None,
    label_tokens: tuple[str, ...] | None,
    *,
    architecture: str,
) -> LabelHead | None:
    """The scoring tokens of a causal language model, or None when nothing declares any.

    logit_score: config of the folder's LogitScore module. A model with a classification head needs
    none: a template alone may be set for it. Raises `ModelLoadError`.
    """
    if not architecture.endswith("ForCausalLM"):
        if label_tokens or logit_score is not None:
            raise ModelLoadError(
                f"{folder}: label tokens are read off a *ForCausalLM model, not off {architecture}"
            )
        if rerank_template is not None and not is_scorer(architecture):
            raise ModelLoadError(
                f"{folder}: rerank_template is for *ForCausalLM and *ForSequenceClassification "
                f"models, not for {architecture}"
            )
        return None
    if label_tokens and rerank_template is None:
        if len(set(label_tokens)) != len(label_tokens) or len(label_tokens) < 2:
            raise ModelLoadError(
                "label_tokens without rerank_template names two or more different labels"
            )
        return LabelHead(tuple(label_tokens))
    if rerank_template is not None:
        chosen = tuple(label_tokens or BUILT_IN_LABELS.get(rerank_template, ()))
        if len(set(chosen)) != len(chosen):
            raise ModelLoadError("label_tokens names a label twice")
        return LabelHead(chosen, difference=len(chosen) == 2)
    if logit_score is None:
        return None
    yes, no = logit_score.get("true_token_id"), logit_score.get("false_token_id")
    if not isinstance(yes, int) or not (no is None or isinstance(no, int)):
        raise ModelLoadError(f"{folder}: its LogitScore module names no true_token_id")
    return LabelHead((yes,) if no is None else (yes, no), difference=no is not None)


def rendered(prompt: PairPrompt, tokenizer: Any) -> PairPrompt:
    """The prompt with its template taken from the folder's chat template, once, by rendering marks.

    tokenizer: a transformers tokenizer. A prompt that has its template already comes back unchanged.
    Raises `ModelLoadError` when the chat template does not carry a query and a document.
    """
    if prompt.chat_template is None:
        return prompt
    if prompt.chat_options.get("format") == "auto":
        prompt = dataclasses.replace(prompt, chat_options=_guessed_format(prompt, tokenizer))
    bare = _render(prompt, tokenizer, with_system=False, pad="")
    spaced = _render(prompt, tokenizer, with_system=False, pad=" ")
    told = _render(prompt, tokenizer, with_system=True, pad="")
    strip = spaced == bare
    template = _as_template(bare)
    if "{query}" not in template or "{document}" not in template:
        raise ModelLoadError(
            "the folder's chat template does not render the roles query and document; set "
            "`rerank_template` for this model"
        )
    if not strip and _unspaced(spaced) != bare:
        raise ModelLoadError(
            "the folder's chat template changes the texts it is given; set `rerank_template`"
        )
    instructed = _as_template(told)
    if "{instruction}" not in instructed:
        return dataclasses.replace(prompt, template=template, strip=strip)
    return dataclasses.replace(prompt, template=instructed, without=template, strip=strip)


def _guessed_format(prompt: PairPrompt, tokenizer: Any) -> dict[str, Any]:
    """Contents as lists of parts, or as plain text: whichever the template can carry."""
    for form in ("structured", "flat"):
        options = {**prompt.chat_options, "format": form}
        given = dataclasses.replace(prompt, chat_options=options)
        try:
            text = _render(given, tokenizer, with_system=False, pad="")
        except ModelLoadError:
            continue
        # A template that knows no parts prints the list as it is.
        if all(_MARKS[slot] in text for slot in ("query", "document")) and "'type'" not in text:
            return options
    return {**prompt.chat_options, "format": "flat"}


def _render(prompt: PairPrompt, tokenizer: Any, *, with_system: bool, pad: str) -> str:
    options = dict(prompt.chat_options)
    flat = options.pop("format", "structured") == "flat"
    roles = {"query": "query", "document": "document"}
    if with_system:
        roles = {"system": "instruction", **roles}
    messages = []
    for role, slot in roles.items():
        text = pad + _MARKS[slot] + pad
        messages.append(
            {"role": role, "content": text if flat else [{"type": "text", "text": text}]}
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, chat_template=prompt.chat_template, tokenize=False, **options
            )
        )
    except Exception as error:
        raise ModelLoadError(
            f"the folder's chat template cannot be rendered: {type(error).__name__}: "
            f"{str(error)[:200]}"
        ) from error


def _unspaced(text: str) -> str:
    for mark in _MARKS.values():
        text = text.replace(f" {mark} ", mark)
    return text


def _as_template(text: str) -> str:
    for slot, mark in _MARKS.items():
        text = text.replace(mark, "{" + slot + "}")
    return text
