"""The first form of GTE (model type `new`) as transformers' Gte, which reads its tensors by their own names.

Who calls it: `gpu.forward.weights`.
What must stay true: the same frequencies as the folder's own code; a scaling that is not that one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu.faults import ModelLoadError

NEW = "new"
_SAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "hidden_act", "max_position_embeddings", "type_vocab_size", "layer_norm_eps",
)  # fmt: skip


def gte_config(config: Mapping[str, Any], n_labels: int | None) -> Any:
    """A `GteConfig`. config: config.json of the folder. n_labels: of its classifier.

    NTK scaling by s in modeling.py of Alibaba-NLP/new-impl: the base times s, and every frequency divided by
    s ** (2 / head size), whatever the length; which is "linear" in transformers' words. Raises `ModelLoadError`.
    """
    from transformers import GteConfig

    theta, scaling = float(config.get("rope_theta", 10000.0)), config.get("rope_scaling")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        kind, by = scaling.get("type") or scaling.get("rope_type"), scaling.get("factor")
        if set(scaling) - {"type", "rope_type", "factor"} or kind != "ntk" or not by:
            raise ModelLoadError(
                f"config.json: rope_scaling = {dict(scaling)} is not supported; ntk is"
            )
        size = int(config["hidden_size"]) // int(config["num_attention_heads"])
        factor = float(by) ** (2 / size)
        rope = {"rope_type": "linear", "rope_theta": theta * float(by), "factor": factor}
    same = {name: config[name] for name in _SAME if name in config}
    labels = {} if n_labels is None else {"num_labels": n_labels}
    return GteConfig(**same, **labels, rope_parameters=rope)
