"""LoRA adapters: a folder that holds the differences to a base model, or several beside its weights.

Who calls it: `gpu.folder.read`; `gpu.forward.weights` merges what is read here.
What must stay true: JSON and names only; an adapter whose base is not at hand, or whose numbers this engine
would not merge as peft computes them, is refused with what to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.faults import ModelLoadError
from gpu.folder.hub import resolve_folder
from gpu.folder.keys import KeyReader
from gpu.folder.stored import ADAPTER, TOKENIZER_FILES, read_json

WEIGHTS = "adapter_model.safetensors"
# Where the base lies and which version of peft wrote the file change no number.
_NO_MEANING = ("base_model_name_or_path", "peft_version", "inference_mode", "revision")


@dataclass(frozen=True, slots=True)
class Adapter:
    """folder: where the differences lie; base: where the weights lie that they are added to. meaning: what
    the config says about them, for the fingerprint."""

    folder: Path
    base: Path
    meaning: Mapping[str, Any]

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS


def read_adapter(transformer: Path, keys: KeyReader, *, offline: bool) -> Adapter | None:
    """The adapter of a folder without weights of its own; None: an ordinary folder.

    offline: a base that is named by hub id is looked up in the local cache alone. Raises `ModelLoadError`.
    """
    if not (transformer / ADAPTER).is_file() or (transformer / "config.json").is_file():
        return None
    path = transformer / ADAPTER
    config = read_json(path)
    keys.check(path, config, ADAPTER)
    if not (transformer / WEIGHTS).is_file():
        raise ModelLoadError(f"{transformer}: {ADAPTER} without {WEIGHTS}")
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ModelLoadError(
            f"{path}: base_model_name_or_path is missing; write the base model's folder or hub id there"
        )
    near = transformer / name
    try:
        base = near if near.is_dir() else resolve_folder(name, offline=offline)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{transformer}: an adapter to {name}, which is not at hand ({error}); fetch it, or write its "
            f"folder into {ADAPTER} as base_model_name_or_path"
        ) from error
    return Adapter(transformer, base, _meaning(config))


def _meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: sorted(value) if isinstance(value, list) else value
        for name, value in config.items()
        if name not in _NO_MEANING
    }


def tokenizer_folder(transformer: Path, adapter: Adapter | None) -> Path:
    """The adapter's own folder where it brings a tokenizer, else the base model's."""
    if adapter is None or any((transformer / name).is_file() for name in TOKENIZER_FILES):
        return transformer
    return adapter.base


@dataclass(frozen=True, slots=True)
class TaskAdapter:
    """One of several adapters in a model's own folder. name: of its folder."""

    name: str
    folder: Path
    meaning: Mapping[str, Any]

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS


def read_task_adapters(
    transformer: Path, prompts: Mapping[str, str], keys: KeyReader
) -> dict[str, TaskAdapter]:
    """Prompt name -> adapter: every prompt that is named as an adapter's folder is, "." and "-" read as
    "_", and each folder's own name where no prompt is. Raises `ModelLoadError`."""
    found: dict[str, TaskAdapter] = {}
    for path in sorted(transformer.glob(f"*/{ADAPTER}")):
        config = read_json(path)
        keys.check(path, config, ADAPTER)
        if not (path.parent / WEIGHTS).is_file():
            raise ModelLoadError(f"{path.parent}: {ADAPTER} without {WEIGHTS}")
        for name in ("use_dora", "lora_bias"):
            if config.get(name):
                raise ModelLoadError(f"{path}: {name} of a task adapter is not computed here")
        if config.get("bias", "none") != "none":
            raise ModelLoadError(
                f"{path}: bias = {config['bias']!r} of a task adapter is not computed here"
            )
        name = path.parent.name
        adapter = TaskAdapter(name, path.parent, _meaning(config))
        named = [one for one in prompts if re.sub(r"[.-]", "_", one) == name]
        found |= dict.fromkeys(named or [name], adapter)
    return found


def task_fields(transformer: Path, prompts: Mapping[str, str], keys: KeyReader) -> dict[str, Any]:
    """Fields of the `ModelSpec`: the adapters, and a prompt of no text for each that has none."""
    found = read_task_adapters(transformer, prompts, keys)
    return {"task_adapters": found, "prompts": {**dict.fromkeys(found, ""), **prompts}}


def task_notes(adapters: Mapping[str, TaskAdapter]) -> tuple[str, ...]:
    """One sentence where there are some."""
    names = ", ".join(sorted(adapters))
    return (f"these prompt names pick a task adapter: {names}; without one none is used",) * bool(
        names
    )
