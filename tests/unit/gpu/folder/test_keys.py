"""The allow-list: every key of a folder's files is honoured, without effect, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gpu.faults import ModelLoadError
from gpu.folder.families import FAMILIES, VISION_FAMILIES
from gpu.folder.key_rows import ROWS
from gpu.folder.keys import KeyReader, table
from gpu.folder.read import load_spec
from tests.support import config_keys
from tests.support.models import FAMILY_NAMES, edit_json, write_model
from tests.support.models_encoders import ENCODERS
from tests.support.models_more import MORE_NAMES
from tests.support.models_vision import write_clip, write_gme, write_siglip

COMMON: dict[str, Any] = {
    "_name_or_path": "x", "architectures": ["X"], "transformers_version": "4.40.0", "torch_dtype": "float32",
    "initializer_range": 0.02, "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 512, "use_cache": True,
}  # fmt: skip
BERT: dict[str, Any] = {
    **COMMON, "attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1, "hidden_act": "gelu",
    "layer_norm_eps": 1e-12, "pad_token_id": 0, "type_vocab_size": 2, "gradient_checkpointing": False,
    "position_embedding_type": "absolute", "classifier_dropout": None,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    **COMMON, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "rope_scaling": None, "tie_word_embeddings": True, "pretraining_tp": 1, "mlp_bias": False,
}  # fmt: skip
# What published checkpoints of each type hold beside the usual: none of it may stop a load.
HONEST: dict[str, dict[str, Any]] = {
    "bert": {
        **BERT, "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3, "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
        "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "output_past": True,
        "transformers.js_config": {"dtype": "q8"}, "task_specific_params": None, "language": "en",
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.0.1"},
        "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
        "_attn_implementation_autoset": True, "problem_type": None, "matryoshka_dimensions": [16],
    },
    "xlm-roberta": {**BERT, "bos_token_id": 0, "eos_token_id": 2, "output_past": True},
    "modernbert": {
        **COMMON, "hidden_activation": "gelu", "initializer_cutoff_factor": 2.0, "layer_norm_eps": 1e-5,
        "position_embedding_type": "absolute", "mlp_dropout": 0.0, "pad_token_id": 3, "attention_bias": False, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
        "local_attention": 128, "local_rope_theta": 10000.0, "mlp_bias": False, "norm_eps": 1e-5,
        "reference_compile": None, "repad_logits_with_grad": False, "sparse_prediction": False,
        "sparse_pred_ignore_index": -100, "deterministic_flash_attn": False, "decoder_bias": True,
        "classifier_activation": "gelu", "classifier_bias": False, "classifier_pooling": "mean",
        "cls_token_id": 1, "sep_token_id": 2, "embedding_dropout": 0.0, "norm_bias": False,
    },
    "deberta-v2": {
        **BERT, "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm",
        "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": -1,
        "position_biased_input": False, "pooler_dropout": 0, "pooler_hidden_act": "gelu",
        "pooler_hidden_size": 768, "summary_type": "first", "legacy": True,
    },
    "llama": {**LLAMA, "is_llama_config": True, "rope_interleaved": False, "unsloth_fixed": True},
    "mistral": {**LLAMA, "sliding_window": None, "head_dim": 8, "attn_implementation": "sdpa"},
    "qwen2": {
        **LLAMA, "auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}, "is_causal": False,
        "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False,
        "use_mrope": False,
    },
    "phi3": {
        **LLAMA, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 4096,
        "sliding_window": 2047, "partial_rotary_factor": 1.0,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
    },
    "gemma2": {
        **LLAMA, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid",
        "sliding_window": 4096,
    },
    "gemma3_text": {
        **LLAMA, "hidden_activation": "gelu_pytorch_tanh", "_sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000.0, "layer_types": ["full_attention"],
        "use_bidirectional_attention": True, "attn_logit_softcapping": None, "sliding_window": 512,
        "final_logit_softcapping": None,
    },
    "t5": {
        "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "n_positions": 512,
        "feed_forward_proj": "relu", "dropout_rate": 0.1, "layer_norm_epsilon": 1e-6, "vocab_size": 9,
        "relative_attention_num_buckets": 32, "is_encoder_decoder": True, "decoder_start_token_id": 0,
        "output_past": True, "task_specific_params": {}, "initializer_factor": 1.0, "is_gated_act": False,
        "dense_act_fn": "relu", "num_decoder_layers": 2, "relative_attention_max_distance": 128,
    },
}  # fmt: skip


def test_the_snapshot_is_what_the_installed_transformers_reads() -> None:
    """Another version reads other keys: `python -m tests.support.config_keys` writes the file anew."""
    from gpu.folder.config_keys import READ_BY_ALL, READ_BY_TYPE

    common, found = config_keys.read_keys()
    assert set(READ_BY_ALL.split()) == common
    assert {name: set(keys.split()) for name, keys in READ_BY_TYPE.items()} == found


def test_no_key_has_two_rows_for_one_file() -> None:
    rows = Counter((row.file, row.name) for file in ROWS for row in table() if row.file == file)
    twice = [key for key, n in rows.items() if n > len(ROWS) and key[0] != "config.json"]
    assert not twice
    assert {row.status for row in table()} <= {"honoured", "without effect", "refused"}


@pytest.mark.parametrize("model_type", sorted(HONEST))
def test_keys_of_published_checkpoints_stop_no_load(model_type: str) -> None:
    config = {**HONEST[model_type], "model_type": model_type}
    KeyReader(Path()).check_config(Path("config.json"), config, model_type)


@pytest.mark.parametrize("model_type", sorted(HONEST))
@pytest.mark.parametrize(
    ("key", "value"),
    [("lora_rank", 4), ("attention_scale", 0.5), ("position_embedding_type", "relative_key")],
)
def test_one_foreign_key_is_refused_by_name(model_type: str, key: str, value: Any) -> None:
    config = {**HONEST[model_type], key: value}
    with pytest.raises(ModelLoadError, match=key):
        KeyReader(Path()).check_config(Path("config.json"), config, model_type)


def test_a_foreign_key_of_the_rope_is_refused_by_name() -> None:
    config = {**HONEST["llama"], "rope_scaling": {"rope_type": "linear", "factor": 2.0, "warp": 2}}
    with pytest.raises(ModelLoadError, match=r"rope_scaling.warp"):
        KeyReader(Path()).check_config(Path("config.json"), config, "llama")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("family", [*FAMILY_NAMES, *ENCODERS, *MORE_NAMES])
def test_every_family_refuses_one_foreign_key_and_only_then(folders: Path, family: str) -> None:
    """Each row of the table of families: read as it is, refused with a key that nobody knows, and read
    again when the operator vouches for it."""
    folder = write_model(folders / family, family, pooling="mean", max_seq_length=64)
    assert load_spec(folder).honoured
    edit_json(folder / "config.json", scale_of_the_moon=2)
    with pytest.raises(ModelLoadError, match=r"scale_of_the_moon .*ignore_keys"):
        load_spec(folder)
    spec = load_spec(folder, ignore_keys=("scale_of_the_moon",))
    assert any("scale_of_the_moon (ignored" in line for line in spec.honoured)


VISION: dict[str, Any] = {"clip": write_clip, "siglip": write_siglip, "qwen2_vl": write_gme}


@pytest.mark.parametrize("part", ["", "text_config", "vision_config"])
@pytest.mark.parametrize("family", VISION)
def test_every_family_with_images_refuses_one_foreign_key(
    folders: Path, family: str, part: str
) -> None:
    """In the config of the whole and in those of its towers."""
    folder = folders / family
    if not folder.is_dir():
        VISION[family](folder)
    kept = (folder / "config.json").read_text()
    config = json.loads(kept)
    assert load_spec(folder).honoured
    (config[part] if part else config)["scale_of_the_moon"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    try:
        with pytest.raises(ModelLoadError, match=r"scale_of_the_moon .*ignore_keys"):
            load_spec(folder)
        assert load_spec(folder, ignore_keys=("scale_of_the_moon",))
    finally:
        (folder / "config.json").write_text(kept)


def test_every_family_of_the_table_is_tried_above() -> None:
    assert set(VISION_FAMILIES) == set(VISION)
    tried = (
        {*FAMILY_NAMES, *ENCODERS, *MORE_NAMES}
        | {
            "internlm2",
            "nvembed",
            "llama_bidirec",
            "minicpm",
            "new",
        }
    )  # all bring code; tests/parity tries the last three: test_bidirectional, test_layerwise, test_new_gte
    assert set(FAMILIES) <= tried


@pytest.fixture
def bert(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    known = tmp_path_factory.getbasetemp() / "bert-with-everything"
    if not known.is_dir():
        write_model(known, "bert", dense=8, max_seq_length=64, prompts={"query": "query: "})
    return Path(shutil.copytree(known, tmp_path / "m"))


FILES = {
    "tokenizer_config.json": "tokenizer_config.json",
    "sentence_bert_config.json": "sentence_bert_config.json",
    "config_sentence_transformers.json": "config_sentence_transformers.json",
    "1_Pooling/config.json": "Pooling",
    "2_Dense/config.json": "Dense",
}


@pytest.mark.parametrize("file", FILES)
def test_a_foreign_key_in_any_file_is_refused_by_name(bert: Path, file: str) -> None:
    load_spec(bert)
    edit_json(bert / file, wobble=0.5)
    with pytest.raises(ModelLoadError, match=rf"{file}: the key wobble \(= 0.5\)"):
        load_spec(bert)


def test_a_foreign_key_of_a_module_is_refused_by_name(bert: Path) -> None:
    modules = json.loads((bert / "modules.json").read_text())
    modules[0]["kwargs"] = ["task"]
    (bert / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelLoadError, match=r"modules.json: kwargs = \['task'\]"):
        load_spec(bert)


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("sentence_bert_config.json", {"modality_config": {"message": {"method": "forward"}}}, "modality_config.message"),
        ("sentence_bert_config.json", {"modality_config": {"text": {"method": "pool", "method_output_name": "x"}}}, "modality_config.text"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "fixed", "length": 32}}, "query_expansion"),
        ("sentence_bert_config.json", {"config_args": {"num_hidden_layers": 1}}, "num_hidden_layers"),
        ("sentence_bert_config.json", {"tokenizer_args": {"do_lower_case": True}}, "do_lower_case"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"stride": 3}}}, "stride"),
        ("sentence_bert_config.json", {"processing_kwargs": {"words": {}}}, "words"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length"),
        ("config_sentence_transformers.json", {"truncate_dim": 16}, "truncate_dim = 16"),
        ("config.json", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("config.json", {"vocab_size": None}, "vocab_size"),
        ("1_Pooling/config.json", {"word_embedding_dimension": 768}, "word_embedding_dimension = 768.*gives 32"),
        ("2_Dense/config.json", {"in_features": 64}, "in_features = 64.*gives 32"),
        ("2_Dense/config.json", {"in_features": None}, "in_features = None"),
        ("adapter_config.json", {"peft_type": "LORA"}, "adapter_config.json.*merge"),
    ],
)  # fmt: skip
def test_what_would_be_served_wrong_is_refused(
    bert: Path, file: str, changes: dict[str, Any], words: str
) -> None:
    """K17, K18, K19, K22, K23, K25: each names the file and the key."""
    edit_json(bert / file, **changes)
    with pytest.raises(ModelLoadError, match=words):
        load_spec(bert)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "uint8"])
def test_numbers_without_their_scales_are_refused(bert: Path, dtype: str) -> None:
    """K23"""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(bert / "model.safetensors")
    name = "encoder.layer.0.attention.self.query.weight"
    tensors[name] = (tensors[name] * 10).to(getattr(torch, dtype))
    save_file(tensors, bert / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"{name} is stored as"):
        load_spec(bert)


def test_an_encoder_with_a_class_of_its_own_is_refused_without_trust(bert: Path) -> None:
    """K21"""
    edit_json(bert / "config.json", auto_map={"AutoModel": "modeling_own.BertModel"})
    with pytest.raises(ModelLoadError, match=r"class of its own \(BertModel\).*trust_remote_code"):
        load_spec(bert)
    assert load_spec(bert, trust_remote_code=True).model_type == "bert"


@pytest.mark.parametrize("family", ["nomic_bert", "eurobert"])
def test_code_that_transformers_took_over_is_not_needed(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path / "m", family, pooling="mean")
    names = {"nomic_bert": "NomicBertModel", "eurobert": "EuroBertModel"}
    edit_json(folder / "config.json", auto_map={"AutoModel": f"modeling.{names[family]}"})
    assert any("is not run" in note for note in load_spec(folder).notes)


def test_what_was_honoured_is_told_by_file(bert: Path) -> None:
    """What `embedstream check` prints; keys without effect are not in it."""
    honoured = load_spec(bert).honoured
    for line in (
        "config.json: hidden_act",
        "sentence_bert_config.json: max_seq_length",
        "1_Pooling/config.json: include_prompt",
        "2_Dense/config.json: activation_function",
        "config_sentence_transformers.json: prompts",
    ):
        assert line in honoured
    edit_json(bert / "config.json", gradient_checkpointing=True)
    assert load_spec(bert).honoured == honoured


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"crop_pct": 0.9}, "crop_pct .*ignore_keys"),
        ({"image_processor_type": "BlipImageProcessor"}, "would prepare the images otherwise"),
        ({"do_pad": True}, "do_pad = True is not supported"),
    ],
)
def test_how_images_are_prepared_is_read_by_allow_list(
    tmp_path: Path, change: dict[str, Any], what: str
) -> None:
    folder = write_clip(tmp_path / "m")
    assert any("preprocessor_config.json: size" in line for line in load_spec(folder).honoured)
    edit_json(folder / "preprocessor_config.json", **change)
    with pytest.raises(ModelLoadError, match=what):
        load_spec(folder)
