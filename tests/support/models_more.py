"""Tiny configs of further families, in the form of `tests.support.models`' own table.

Who calls it: `tests.support.models.write_model`; the one suite that tries each of them.
What must stay true: plain values; sizes as in the other families; attention far from uniform.
"""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.3,
}
_DECODER: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 256}
_LAYERS = ["sliding_attention", "full_attention"]
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

# family -> (config class, tokenizer, config fields)
MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "embedding_gemma2_text": (
        "EmbeddingGemma2TextConfig",
        "bytes_end",
        {
            **_DECODER, "hidden_size": 48, "head_dim": 8, "sliding_window": 7, "layer_types": _LAYERS,
            "hidden_size_per_layer_input": 16, "embedding_dim": 32, "global_head_dim": 16,
            "num_global_key_value_heads": 1,
        },
    ),
    "ernie": (
        "ErnieConfig",
        "wordpiece",
        {**_SIZES, "max_position_embeddings": 128, "use_task_id": True, "task_type_vocab_size": 3},
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        "bytes_end",
        {**_SIZES, "max_position_embeddings": 256, "rotary_pct": 0.5},
    ),
    "granite": (
        "GraniteConfig",
        "bytes_end",
        {
            **_DECODER, "attention_multiplier": 0.4, "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7, "logits_scaling": 2.0,
        },
    ),
    "ministral": (
        "MinistralConfig",
        "bytes_end",
        {**_DECODER, "head_dim": 8, "sliding_window": 8, "layer_types": _LAYERS},
    ),
    "ministral3": (
        "Ministral3Config",
        "bytes_end",
        {**_DECODER, "head_dim": 8, "rope_parameters": _YARN},
    ),
    "modernbert-decoder": (
        "ModernBertDecoderConfig",
        "bytes_end",
        {
            **_SIZES, "max_position_embeddings": 256, "local_attention": 16,
            "global_attn_every_n_layers": 2,
        },
    ),
    "nemotron": ("NemotronConfig", "bytes_end", {**_DECODER, "head_dim": 8}),
    "olmo2": ("Olmo2Config", "bytes_end", _DECODER),
    "phi": ("PhiConfig", "bytes_end", {**_DECODER, "qk_layernorm": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "bytes_end",
        {
            **_DECODER, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "decoder_sparse_step": 1, "norm_topk_prob": True,
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        "bytes_end",
        {**_DECODER, "no_rope_layers": [1, 0]},
    ),
}  # fmt: skip
MORE_NAMES = tuple(MORE)
