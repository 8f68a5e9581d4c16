"""An adapter added to the weights of its base model, once, at load.

Who calls it: `gpu.forward.weights`.
What must stay true: every tensor of the adapter is used or the load fails; nothing of peft is left in the
model, so the engine runs plain linears.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from gpu.faults import ModelLoadError
from gpu.folder.adapter import Adapter


def merged(model: nn.Module, adapter: Adapter) -> nn.Module:
    """The model with the adapter in its weights. Raises `ModelLoadError`."""
    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ImportError as error:
        raise ModelLoadError(
            f"{adapter.folder}: an adapter to {adapter.base.name} needs the package peft; install "
            "embedstream[peft], or merge it into its base once (peft: `PeftModel.from_pretrained(base, "
            "folder).merge_and_unload()`, then `save_pretrained`)"
        ) from error
    from safetensors.torch import load_file

    given = load_file(adapter.weights)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # peft and transformers about each other's names
        wrapped: Any = PeftModel.from_pretrained(model, str(adapter.folder), local_files_only=True)
    found = get_peft_model_state_dict(wrapped)
    if set(found) != set(given):
        odd = sorted(set(found) ^ set(given))
        raise ModelLoadError(
            f"{adapter.folder}: the adapter does not fit {adapter.base.name}: "
            f"{', '.join(odd[:4])}{' ...' if len(odd) > 4 else ''}"
        )
    plain = wrapped.merge_and_unload(safe_merge=True)
    assert isinstance(plain, nn.Module)
    return plain
