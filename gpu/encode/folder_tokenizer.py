"""From a model folder to the encoder that owns its tokenizer.

Who calls it: `gpu.load`, on the thread that loads the model.
What must stay true: nothing is fetched; what the folder's tokenizer would do differently from what its
library does with it (end token, chat template) is settled here, once, and said in the notes.
transformers builds every tokenizer but BERT's ordinary one (`gpu.encode.wordpiece`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu.encode.template import learn_template
from gpu.encode.text import EmptyPolicy, TextEncoder
from gpu.encode.wordpiece import plain_wordpiece
from gpu.faults import ModelLoadError
from gpu.folder.chat import rendered_chat
from gpu.folder.nvembed import NVEMBED
from gpu.folder.odd import odd_tokenizer
from gpu.folder.rerankers import rendered
from gpu.folder.spec import ModelSpec
from gpu.folder.stored import TOKENIZER_FILES, read_json, refuse_pointer
from gpu.folder.towers import SIGLIP

SLOW_SIGLIP = "SiglipTokenizer"


def folder_tokenizer(spec: ModelSpec, *, trust_remote_code: bool = False) -> Any:
    """transformers' tokenizer of the folder, a fast one, never from the network.

    Raises `ModelLoadError` when there is none.
    """
    found_files = [path for name in TOKENIZER_FILES if (path := spec.transformer / name).is_file()]
    for path in found_files:
        refuse_pointer(path)
    if not found_files:
        # transformers would build an empty tokenizer for some model types, without a word.
        raise ModelLoadError(f"{spec.transformer}: no tokenizer ({', '.join(TOKENIZER_FILES)})")
    if odd := odd_tokenizer(spec.transformer, slow=is_slow_siglip(spec)):
        raise ModelLoadError(odd)
    with unusable(spec, "no usable tokenizer"):
        from transformers import AutoTokenizer

        if is_slow_siglip(spec):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(
                str(spec.transformer), local_files_only=True
            )
        found = AutoTokenizer.from_pretrained(
            str(spec.transformer), local_files_only=True, trust_remote_code=trust_remote_code
        )
    if getattr(found, "backend_tokenizer", None) is None:
        raise ModelLoadError(f"{spec.transformer}: the tokenizer has no fast version")
    return found


def is_slow_siglip(spec: ModelSpec) -> bool:
    """The folder names SigLIP's first tokenizer class, which reads its sentencepiece file alone and has no
    fast version; the tokenizer.json beside it is read instead, and tried by `gpu.encode.vision`."""
    named = read_json(spec.transformer / "tokenizer_config.json").get("tokenizer_class")
    return spec.model_type == SIGLIP and named in (None, SLOW_SIGLIP)


@contextmanager
def unusable(spec: ModelSpec, what: str) -> Iterator[None]:
    """What transformers raises for a broken folder becomes a `ModelLoadError` of one line."""
    try:
        yield
    except Exception as error:
        first_line = str(error).strip().split("\n")[0][:300]
        raise ModelLoadError(f"{spec.transformer}: {what}: {first_line}") from error


def load_encoder(
    spec: ModelSpec, *, empty_input: EmptyPolicy = "error", trust_remote_code: bool = False
) -> TextEncoder:
    """The encoder of a text model. Raises `ModelLoadError` when its tokenizer cannot serve it."""
    outer: Any = None
    templates = (spec.chat, spec.pairs, spec.conversation)  # rendered by transformers
    if spec.model_type == "bert" and not any(templates):
        outer = plain_wordpiece(spec.transformer)
    if outer is None:
        outer = folder_tokenizer(spec, trust_remote_code=trust_remote_code)
    fast = outer.backend_tokenizer
    if spec.calls.lower_case:
        _lower_case_first(fast)
    always = spec.model_type == NVEMBED
    if spec.chat is not None:
        spec = dataclasses.replace(
            spec,
            chat=rendered_chat(spec.chat, spec.prompts, outer),
            include_prompt=True,  # its library loses track of a prompt inside a template
            notes=(*spec.notes, "texts go through the folder's chat template"),
        )
    elif (spec.family.causal or always) and (
        note := _close_with_end_token(fast, spec.transformer, always=always)
    ):
        spec = dataclasses.replace(spec, notes=(*spec.notes, note))
    if spec.pairs is not None:
        told = f"pairs are written as the prompt {spec.pairs.name!r} says"
        spec = dataclasses.replace(
            spec, pairs=rendered(spec.pairs, outer), notes=(*spec.notes, told)
        )
    if spec.label_head is not None:
        spec = dataclasses.replace(
            spec, label_head=spec.label_head.resolved(fast, int(spec.config["vocab_size"]))
        )
    return TextEncoder(
        spec,
        fast,
        token_types="token_type_ids" in outer.model_input_names
        and int(spec.config.get("type_vocab_size") or 0) > 1,
        empty_input=empty_input,
        bos=outer.bos_token,
        outer=outer,
    )


def _lower_case_first(tokenizer: Any) -> None:
    """`do_lower_case` of sentence_bert_config.json, as sentence-transformers carries it out."""
    from tokenizers.normalizers import Lowercase, Sequence

    own = tokenizer.normalizer
    parts: list[Any] = [] if own is None else [own]
    if isinstance(own, Sequence):
        parts = list(own)  # type: ignore[call-overload]  # the stubs do not say that it iterates
    if not any(isinstance(part, Lowercase) for part in parts):
        tokenizer.normalizer = Sequence([Lowercase(), *parts])


def _close_with_end_token(tokenizer: Any, folder: Path, *, always: bool = False) -> str | None:
    """Make the tokenizer end every text with its end token where the folder says so; the note, or None.

    `add_eos_token` in tokenizer_config.json was obeyed by transformers 4 and is dropped by version 5
    when there is a tokenizer.json (gte-Qwen2 relied on it, through a tokenizer class of its own). A
    tokenizer that closes texts already is left alone: the end token stands once.
    always: the model's own code does it, whatever the tokenizer's files say (NV-Embed).
    """
    config = read_json(folder / "tokenizer_config.json")
    end = config.get("eos_token")
    end = end.get("content") if isinstance(end, Mapping) else end
    end_id = tokenizer.token_to_id(end) if isinstance(end, str) else None
    if not (always or config.get("add_eos_token") is True) or end_id is None:
        return None
    from tokenizers.processors import TemplateProcessing

    template = learn_template(tokenizer)
    if len(template.suffix):
        return None
    special = {tokenizer.id_to_token(int(i)): int(i) for i in template.prefix} | {end: end_id}
    start = " ".join(tokenizer.id_to_token(int(i)) for i in template.prefix)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A {end}".strip(),
        pair=f"{start} $A {end} {start} $B:1 {end}:1".strip().replace("  ", " "),
        special_tokens=list(special.items()),
    )
    return f"texts are closed with {end}, as tokenizer_config.json says (add_eos_token)"
