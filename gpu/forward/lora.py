"""An adapter added to the weights of its base model, once, at load.

Who calls it: `gpu.forward.weights`; `gpu.forward.task_adapters` for those that stay apart.
What must stay true: every tensor of the adapter is used or the load fails; nothing of peft is left in the
model, so the engine runs plain linears.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import nn

from gpu.faults import ModelLoadError
from gpu.folder.adapter import WEIGHTS, Adapter


def merged(model: nn.Module, adapter: Adapter) -> nn.Module:
    """The model with the adapter in its weights. Raises `ModelLoadError`."""
    plain = peft_of(model, adapter.folder, of=adapter.base.name).merge_and_unload(safe_merge=True)
    assert isinstance(plain, nn.Module)
    return plain


def peft_of(
    model: nn.Module, folder: Path, *, of: str, name: str = "default", beside: Any = None
) -> Any:
    """peft's model with the adapter of that folder in it, under that name. of: what the base is called.
    beside: peft's model with others in it already. Raises `ModelLoadError` when peft is missing or a tensor does not fit."""
    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ImportError as error:
        raise ModelLoadError(
            f"{folder}: an adapter needs the package peft; install embedstream[peft], or merge it into its "
            "base once (peft: `PeftModel.from_pretrained(base, folder).merge_and_unload()`, then "
            "`save_pretrained`)"
        ) from error
    from safetensors.torch import load_file

    given = load_file(folder / WEIGHTS)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # peft and transformers about each other's names
        if beside is None:
            wrapped: Any = PeftModel.from_pretrained(
                model, str(folder), adapter_name=name, local_files_only=True
            )
        else:
            wrapped = beside
            wrapped.load_adapter(str(folder), adapter_name=name, local_files_only=True)
    found = get_peft_model_state_dict(wrapped, adapter_name=name)
    if set(found) != set(given):
        odd = sorted(set(found) ^ set(given))
        raise ModelLoadError(
            f"{folder}: the adapter does not fit {of}: "
            f"{', '.join(odd[:4])}{' ...' if len(odd) > 4 else ''}"
        )
    return wrapped
