"""A checkpoint of BERT and its kin into `gpu.forward.encoder`'s classes.

Who calls it: `gpu.forward.weights`, which asks here first.
What must stay true: None for anything that is not understood to the last key, so that transformers
loads it, or refuses it in its own words; nothing here guesses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gpu.device.pages import FilePages
from gpu.folder.spec import ModelSpec
from gpu.forward.encoder import (
    PREFIXES,
    EncoderClassifier,
    EncoderConfig,
    EncoderModel,
    encoder_config,
    tensor_names,
)


def load_own(
    spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> tuple[nn.Module, dict[str, Any]] | None:
    """The model on the CPU, and which tensors of the checkpoint it left (`unexpected_keys`)."""
    config = None if device.type != "cpu" else _config(spec, trust_remote_code)
    if config is None:
        return None
    found = _tensors(spec)
    prefix = PREFIXES[config.model_type]
    if not any(name.startswith(prefix) for name in found):
        prefix = ""
    wanted = _wanted(config, prefix, head=spec.head)
    if not {name for parts in wanted.values() for name in parts} <= set(found):
        return None
    with _NoInit():
        model = EncoderClassifier(config) if spec.head else EncoderModel(config)
    pages = FilePages()
    state = {name: _joined(found, parts, pages).to(dtype) for name, parts in wanted.items()}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if shapes != {name: tensor.shape for name, tensor in state.items()}:
        return None
    model.load_state_dict(state, assign=True)
    used = {name for parts in wanted.values() for name in parts}
    # transformers' base model has a pooler too, which nothing here reads.
    left = [name for name in set(found) - used if not name.startswith(f"{prefix}pooler.")]
    return model, {"unexpected_keys": sorted(left)}


class _NoInit(TorchFunctionMode):
    """Modules made inside keep the memory of their parameters untouched: the checkpoint replaces it. torch's
    "meta" device would do, but its random numbers import a compiler."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _config(spec: ModelSpec, trust_remote_code: bool) -> EncoderConfig | None:
    family = spec.family
    others = (
        spec.has_mlm_head, spec.adapter, spec.task_adapters, spec.causal is not None,
        spec.label_head, family.remote, family.wrapper, family.loads_as,
        trust_remote_code and "auto_map" in spec.config,
    )  # fmt: skip
    if spec.model_type not in PREFIXES or any(others):
        return None
    if not spec.weights or any(path.suffix != ".safetensors" for path in spec.weights):
        return None
    return encoder_config(
        spec.config,
        model_type=spec.model_type,
        n_labels=len(spec.labels) if spec.head else 0,
    )


def _tensors(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Every tensor, in the pages of its file: nothing is read yet."""
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    for path in spec.weights:
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    return found


def _wanted(config: EncoderConfig, prefix: str, *, head: bool) -> dict[str, tuple[str, ...]]:
    """Parameter of the model -> tensors of the checkpoint."""
    outer = "base_model." if head else ""
    wanted = {
        outer + here: tuple(prefix + name for name in parts)
        for here, parts in tensor_names(config).items()
    }
    if not head:
        return wanted
    modules = {"base_model.pooler.dense": f"{prefix}pooler.dense", "classifier": "classifier"}
    if config.model_type != "bert":
        modules = {name: name for name in ("classifier.dense", "classifier.out_proj")}
    for here, there in modules.items():
        for kind in ("weight", "bias"):
            wanted[f"{here}.{kind}"] = (f"{there}.{kind}",)
    return wanted


def _joined(
    found: Mapping[str, torch.Tensor], parts: tuple[str, ...], pages: FilePages
) -> torch.Tensor:
    """Several are copied, and the file's pages let go of."""
    if len(parts) == 1:
        return found[parts[0]]
    joined = torch.cat([found[name] for name in parts])
    for name in parts:
        pages.release(found[name])
    return joined
