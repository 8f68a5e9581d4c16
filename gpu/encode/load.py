"""From a model folder to the encoder that owns its tokenizer.

Who calls it: `gpu.load`, on the thread that loads the model.
What must stay true: nothing is fetched; what the folder's tokenizer would do differently from what its
library does with it (end token, chat template) is settled here, once, and said in the notes.
"""

from __future__ import annotations

import dataclasses

from gpu.encode.text import EmptyPolicy, TextEncoder
from gpu.faults import ModelLoadError
from gpu.folder.decoders import close_with_end_token
from gpu.folder.fingerprint import TOKENIZER_FILES
from gpu.folder.nvembed import NVEMBED
from gpu.folder.read import ModelSpec
from gpu.folder.rerankers import rendered


def load_encoder(
    spec: ModelSpec, *, empty_input: EmptyPolicy = "error", trust_remote_code: bool = False
) -> TextEncoder:
    """The folder's fast tokenizer, exactly as transformers builds it, and never from the network.

    Raises `ModelLoadError` when there is none.
    """
    from transformers import AutoTokenizer

    if not any((spec.transformer / name).is_file() for name in TOKENIZER_FILES):
        # transformers would build an empty tokenizer for some model types, without a word.
        raise ModelLoadError(f"{spec.transformer}: no tokenizer ({', '.join(TOKENIZER_FILES)})")
    try:
        outer = AutoTokenizer.from_pretrained(
            str(spec.transformer), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        first_line = str(error).strip().split("\n")[0][:300]
        raise ModelLoadError(f"{spec.transformer}: no usable tokenizer: {first_line}") from error
    fast = getattr(outer, "backend_tokenizer", None)
    if fast is None:
        raise ModelLoadError(f"{spec.transformer}: the tokenizer has no fast version")
    always = spec.model_type == NVEMBED
    if (spec.family.causal or always) and (
        note := close_with_end_token(fast, spec.transformer, always=always)
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
    )
