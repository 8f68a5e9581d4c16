"""Rows of `gpu.folder.keys` for config.json, by model type: what checkpoints of one type hold beside what
transformers' class reads, and what classes read that are not transformers'.

Who calls it: `gpu.folder.keys` alone.
What must stay true: as in `gpu.folder.key_rows`.
"""

from __future__ import annotations

from typing import Any

from gpu.folder.key_rows import NOT_YET, OFF, TF

_EXPERTS = (
    "these are the experts of nomic-embed-text-v2-moe, which transformers' class has not (nor its biases and "
    "plain layers); take nomic-embed-text-v1.5"
)

FOLDER_CONFIG: dict[str, dict[str, Any]] = {
    "new": {
        "library": "Alibaba's code",
        "honoured": """vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size
            hidden_act type_vocab_size layer_norm_eps rope_theta rope_scaling""",
        "inert": """max_position_embeddings pad_token_id unpad_inputs use_memory_efficient_attention
            attention_probs_dropout_prob hidden_dropout_prob classifier_dropout logn_attention_clip1
            pack_qkv""",
        "only": {
            "position_embedding_type": (("rope",), NOT_YET),
            "layer_norm_type": (("layer_norm",), NOT_YET),
            "logn_attention_scale": (OFF, NOT_YET),
        },
    },
    "minicpm": {
        "library": "FlagEmbedding",
        "honoured": """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
            num_key_value_heads hidden_act rms_norm_eps rope_theta scale_emb scale_depth start_layer
            max_position_embeddings""",
        "inert": "dim_model_base pad_token_id",  # the first is for the heads that are refused
        "only": {
            "head_type": (("simple",), "its heads give a score for every token of the vocabulary"),
            "head_multi": ((True, False), ""),
            "rope_scaling": ((None,), NOT_YET),
        },
    },
    "llama_bidirec": {
        "library": "NVIDIA's code",
        "honoured": "temperature",
        "only": {"pooling": (("avg", "cls", "last"), NOT_YET)},
    },
    "albert": {
        "library": TF,
        "only": {
            "net_structure_type": ((0,), NOT_YET),
            "num_memory_blocks": ((0,), NOT_YET),
            "gap_size": ((0,), NOT_YET),
            "down_scale_factor": ((1,), NOT_YET),
            "layers_to_keep": (([],), NOT_YET),
        },
    },
    "eurobert": {
        "library": TF,
        "only": {"clf_pooling": (("late",), "say it as classifier_pooling")},
    },
    "gemma": {
        "library": TF,
        "only": {"hidden_activation": ((None, "gelu_pytorch_tanh"), "say it as hidden_act")},
    },
    "gemma2": {"library": TF, "inert": "hidden_act"},
    "gemma3_text": {"library": TF, "inert": "hidden_act _sliding_window_pattern"},
    "modernbert": {"library": TF, "inert": "layer_norm_eps"},
    "mpnet": {"library": TF, "inert": "type_vocab_size"},
    "nomic_bert": {
        "library": TF,
        # The names of the folder's first code. transformers' class has these values built in.
        "inert": """fused_bias_fc fused_dropout_add_ln use_xentropy pad_vocab_size_multiple
            dense_seq_output""",
        "only": {
            "activation_function": (("swiglu",), NOT_YET),
            "causal": ((False,), NOT_YET),
            "mlp_fc1_bias": ((False,), NOT_YET),
            "mlp_fc2_bias": ((False,), NOT_YET),
            "qkv_proj_bias": ((False,), NOT_YET),
            "parallel_block": ((False,), NOT_YET),
            "prenorm": ((False,), NOT_YET),
            "rotary_emb_interleaved": ((False,), NOT_YET),
            "use_rms_norm": ((False, None), NOT_YET),
            **dict.fromkeys(
                ("num_experts", "moe_every_n_layers", "moe_top_k"), ((0, None), _EXPERTS)
            ),
        },
    },
    "nvembed": {
        "library": "the folder's own code",
        "honoured": """latent_attention_config text_config is_mask_instruction padding_side hidden_size
            num_labels""",
        "inert": "add_eos add_pad_token",  # always done here, as there
        "only": {"mask_type": (("b",), "attention is bidirectional in the published code")},
    },
    "phi3": {
        "library": TF,
        "only": {
            "full_attn_mod": ((1,), NOT_YET),
        },
    },
    "qwen2_vl": {"library": TF, "inert": "vision_token_id max_window_layers"},
    "clip": {"library": TF, "inert": "logit_scale_init_value"},
    "siglip": {"library": TF, "inert": "initializer_factor logit_scale_init_value"},
    "xlm-roberta": {
        "library": TF,
        "only": dict.fromkeys(
            (
                "load_trained_adapters",
                "lora_adaptations",
                "task_instructions",
                "lora_rank",
                "emb_pooler",
            ),
            (
                (),
                "this is jina-embeddings-v3 with code of its own; take jinaai/jina-embeddings-v3-hf",
            ),
        ),
    },
    "t5": {"library": TF, "inert": "n_positions"},
    "mt5": {"library": TF, "inert": "n_positions"},
    "umt5": {"library": TF, "inert": "n_positions"},
}
