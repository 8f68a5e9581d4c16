"""A layerwise MiniCPM reranker as transformers' Granite: the same layers with other names for its numbers.

Who calls it: `gpu.forward.weights`.
What must stay true: only the layers up to the one that is read are loaded; every other tensor of the folder
is a known one, or the load is refused with its name.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from gpu.faults import ModelLoadError
from gpu.folder.layerwise import CUTOFF
from gpu.folder.spec import ModelSpec

_HEAD = re.compile(r"^lm_head\.(?:(\d+)\.)?linear_head\.weight$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def load_layerwise(spec: ModelSpec, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """The model on the host, and a report of keys like transformers' `output_loading_info`.

    What is MiniCPM's in FlagEmbedding's modeling_minicpm_reranker.py: embeddings times `scale_emb`, both
    residual branches times ``scale_depth / sqrt(num_hidden_layers)`` of the whole model, the final norm before
    the head of whichever layer is read. Raises `ModelLoadError` for pickled weights.
    """
    from transformers import GraniteConfig
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.models.granite.modeling_granite import GranitePreTrainedModel

    class GraniteScorer(GenericForSequenceClassification, GranitePreTrainedModel):
        """Granite with one score of its last token, a class that transformers leaves out."""

    c = spec.config
    heads = int(c["num_attention_heads"])
    config = GraniteConfig(
        **{name: c[name] for name in _SAME},
        num_hidden_layers=int(c[CUTOFF]),
        num_key_value_heads=c["num_key_value_heads"] or heads,
        embedding_multiplier=float(c["scale_emb"]),
        residual_multiplier=float(c["scale_depth"]) / int(c["num_hidden_layers"]) ** 0.5,
        attention_multiplier=(int(c["hidden_size"]) // heads) ** -0.5,
        rope_parameters={"rope_type": "default", "rope_theta": float(c["rope_theta"])},
        bos_token_id=None,
        eos_token_id=None,
        num_labels=1,
    )
    with torch.device("meta"):
        model: Any = GraniteScorer(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    state, unexpected = _own(spec, dtype)
    wanted = model.state_dict()
    wrong = [name for name, t in state.items() if name in wanted and wanted[name].shape != t.shape]
    fitting = {name: tensor for name, tensor in state.items() if name not in wrong}
    found = model.load_state_dict(fitting, strict=False, assign=True)
    return model, {
        "missing_keys": [name for name in found.missing_keys if name not in wrong],
        "unexpected_keys": [*found.unexpected_keys, *unexpected],
        "mismatched_keys": wrong,
    }


_SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "hidden_act",
    "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip


def _own(spec: ModelSpec, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], list[str]]:
    """(the tensors that are read, by Granite's names; names that nobody knows)."""
    from safetensors.torch import load_file

    c = spec.config
    cut, start, last = (int(c[name]) for name in (CUTOFF, "start_layer", "num_hidden_layers"))
    chosen = str(cut - start) if c["head_multi"] else None
    state: dict[str, torch.Tensor] = {}
    unknown = []
    for path in spec.weights:
        if path.suffix != ".safetensors":
            raise ModelLoadError(f"{path}: a layerwise reranker's weights have to be safetensors")
        for name, tensor in load_file(path).items():
            if head := _HEAD.match(name):
                if head[1] == chosen:
                    state["score.weight"] = tensor.to(dtype)
                elif head[1] is None or chosen is None or int(head[1]) > last - start:
                    unknown.append(name)
            elif not (layer := _LAYER.match(name)) or not cut <= int(layer[1]) < last:
                state[name] = tensor.to(dtype)
    return state, unknown
