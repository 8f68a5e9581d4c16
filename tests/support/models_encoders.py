"""Tiny configs of further encoder families, in the form of `tests.support.models`' own table.

Who calls it: `tests.support.models.write_model`.
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
_T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "n_positions": 128,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "initializer_factor": 2.0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
# family -> (config class, tokenizer, config fields, model class of an embedding folder or None for AutoModel)
ENCODERS: dict[str, tuple[str, str, dict[str, Any], str | None]] = {
    "albert": (
        "AlbertConfig",
        "wordpiece",
        {**_SIZES, "embedding_size": 16, "max_position_embeddings": 128, "hidden_act": "gelu_new"},
        None,
    ),
    "gte": (
        "GteConfig",
        "unigram",
        {**_SIZES, "max_position_embeddings": 128, "pad_token_id": 1},
        None,
    ),
    "jina_embeddings_v3": (
        "JinaEmbeddingsV3Config",
        "unigram",
        {**_SIZES, "max_position_embeddings": 128, "pad_token_id": 1},
        None,
    ),
    "eurobert": (
        "EuroBertConfig",
        "bytes_end",
        {**_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 128},
        None,
    ),
    "deberta-v2": (
        "DebertaV2Config",
        "unigram",
        {
            **_SIZES,
            "max_position_embeddings": 128,
            "relative_attention": True,
            "position_biased_input": False,
            "position_buckets": 8,
            "max_relative_positions": 64,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["c2p", "p2c"],
            "pad_token_id": 1,
        },
        None,
    ),
    "rembert": (
        "RemBertConfig",
        "unigram",
        {**_SIZES, "input_embedding_size": 16, "max_position_embeddings": 128, "pad_token_id": 1},
        None,
    ),
    "t5": ("T5Config", "unigram", _T5, "T5EncoderModel"),
    "mt5": ("MT5Config", "unigram", {**_T5, "feed_forward_proj": "gated-gelu"}, "MT5Model"),
    "umt5": (
        "UMT5Config",
        "unigram",
        {**_T5, "feed_forward_proj": "gated-gelu"},
        "UMT5EncoderModel",
    ),
}
ENCODER_NAMES = tuple(ENCODERS)
WITHOUT_HEAD = ("t5", "mt5", "umt5")
