"""What a folder says, and what is refused because it does not say it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu.faults import ModelLoadError
from gpu.folder.families import FAMILIES
from gpu.folder.hub import resolve_folder
from gpu.folder.read import load_spec
from gpu.load import make_runner_factory
from tests.support.models import FAMILY_NAMES, HIDDEN, edit_json, write_model
from tests.support.models_encoders import ENCODER_NAMES
from tests.support.models_more import MORE_NAMES


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("t") / "m", "bert", max_seq_length=100)


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    """A private copy to spoil."""
    return Path(shutil.copytree(template, tmp_path / "m"))


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("pooling_mode_cls_token", "cls"),
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_lasttoken", "last_token"),
    ],
)
def test_pooling_comes_from_the_folder(folder: Path, flag: str, expected: str) -> None:
    """A10, J07: never from the architecture."""
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({flag: True}))
    spec = load_spec(folder)
    assert (spec.pooling, spec.normalize, spec.dimensions) == (expected, True, HIDDEN)


def test_pooling_is_read_from_the_newer_config_form_too(folder: Path) -> None:
    """A10."""
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    assert load_spec(folder).pooling == "last_token"


@pytest.mark.parametrize(
    "config",
    [
        {"pooling_mode": "attention"},
        {"pooling_mode": ["mean", "attention"]},
        {"pooling_mode": []},
    ],
)
def test_unknown_pooling_is_refused_by_name(folder: Path, config: dict[str, Any]) -> None:
    """A10."""
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"pooling (mean\+)?(attention)? ?is not"):
        load_spec(folder)


@pytest.mark.parametrize("kind", ["LSTM", "WeightedLayerPooling", "Router", "my_code.Magic"])
def test_an_unknown_module_is_refused_by_name(folder: Path, kind: str) -> None:
    """A10."""
    modules = json.loads((folder / "modules.json").read_text())
    modules.insert(
        2, {"idx": 2, "name": "x", "path": "2_X", "type": f"sentence_transformers.{kind}"}
    )
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelLoadError, match=kind.rsplit(".", maxsplit=1)[-1]):
        load_spec(folder)


def test_a_dense_module_sets_the_vector_size(tmp_path: Path) -> None:
    """A10."""
    spec = load_spec(write_model(tmp_path / "m", "bert", dense=12))
    assert spec.dimensions == 12
    assert [(d.in_features, d.out_features, d.activation) for d in spec.dense] == [
        (HIDDEN, 12, "Tanh")
    ]


@pytest.mark.parametrize(
    "change",
    [{"activation_function": "os.system"}, {"module_input_name": "x"}],
)
def test_an_odd_dense_module_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """A10."""
    folder = write_model(tmp_path / "m", "bert", dense=12)
    edit_json(folder / "2_Dense" / "config.json", **change)
    with pytest.raises(ModelLoadError, match=next(iter(change))):
        load_spec(folder)


def test_a_bare_encoder_needs_its_pooling_named(tmp_path: Path) -> None:
    """A10: nothing is guessed; the error names the setting."""
    folder = write_model(tmp_path / "m", "bert", pooling=None)
    with pytest.raises(ModelLoadError, match="set `pooling"):
        load_spec(folder)
    assert load_spec(folder, pooling="cls").pooling == "cls"
    with pytest.raises(ModelLoadError, match="'sum' is not one of cls, mean, last_token, max"):
        load_spec(folder, pooling="sum")


def test_a_bare_decoder_is_pooled_at_its_last_token(tmp_path: Path) -> None:
    spec = load_spec(write_model(tmp_path / "m", "qwen3", pooling=None))
    assert spec.pooling == "last_token" and "last_token" in spec.notes[0]


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "BertForTokenClassification"])
def test_an_architecture_without_a_task_is_refused(tmp_path: Path, architecture: str) -> None:
    folder = write_model(tmp_path / "m", "bert", pooling=None)
    edit_json(folder / "config.json", architectures=[architecture])
    with pytest.raises(ModelLoadError, match=architecture):
        load_spec(folder)


def test_an_unknown_model_type_is_refused_with_the_known_ones(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="gpt_oss")
    with pytest.raises(ModelLoadError, match=r"gpt_oss.*bert.*xlm-roberta"):
        load_spec(folder)


def test_every_family_that_tests_write_has_its_row() -> None:
    from_folder = {
        "llama_bidirec",
        "minicpm",
        "new",
        "internlm2",
        "nvembed",
    }  # what they are comes with the model folder
    assert {*FAMILY_NAMES, *ENCODER_NAMES, *MORE_NAMES} == set(FAMILIES) - from_folder


@pytest.mark.parametrize(
    ("sentence", "tokenizer", "expected"),
    [(None, None, 128), (100, None, 100), (None, 90, 90), (100, 90, 100), (500, 1e30, 128)],
)
def test_the_limit_is_the_librarys_bounded_by_the_positions(
    folder: Path, sentence: int | None, tokenizer: float | None, expected: int
) -> None:
    """J07, B09."""
    edit_json(folder / "sentence_bert_config.json", max_seq_length=sentence)
    edit_json(folder / "tokenizer_config.json", model_max_length=tokenizer)
    assert load_spec(folder).max_tokens == expected


@pytest.mark.parametrize("family", ["xlm-roberta", "roberta", "camembert", "mpnet"])
def test_the_position_offset_is_taken_off_the_limit(tmp_path: Path, family: str) -> None:
    """B09: 514 positions hold 512 tokens."""
    spec = load_spec(write_model(tmp_path / "m", family, max_position_embeddings=514))
    assert (spec.max_tokens, spec.position_offset) == (512, 2)


def test_max_tokens_may_be_overridden_up_to_the_position_table(folder: Path) -> None:
    assert load_spec(folder, max_tokens=128).max_tokens == 128
    for bad in (0, 129):
        with pytest.raises(ModelLoadError, match=f"max_tokens = {bad}"):
            load_spec(folder, max_tokens=bad)


def test_matryoshka_sizes_are_read_set_or_refused(folder: Path) -> None:
    """A09."""
    assert load_spec(folder).allowed_dimensions is None
    edit_json(folder / "config.json", matryoshka_dimensions=[16, 8])
    assert load_spec(folder).allowed_dimensions == (8, 16, HIDDEN)
    assert load_spec(folder, matryoshka_dimensions=(4,)).allowed_dimensions == (4, HIDDEN)
    edit_json(folder / "config.json", matryoshka_dimensions=None, is_matryoshka=True)
    assert load_spec(folder).allowed_dimensions == tuple(range(1, HIDDEN + 1))
    with pytest.raises(ModelLoadError, match="matryoshka_dimensions"):
        load_spec(folder, matryoshka_dimensions=(0, 33))


@pytest.mark.parametrize(
    ("change", "score", "label"),
    [
        ({}, "sigmoid", "sigmoid"),
        ({"problem_type": "regression"}, "sigmoid", "identity"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            "identity",
            "identity",
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            "identity",
            "identity",
        ),
    ],
)
def test_the_activation_comes_from_the_config(
    tmp_path: Path, change: dict[str, Any], score: str, label: str
) -> None:
    """A16, A17."""
    folder = write_model(tmp_path / "m", "bert", labels=1)
    edit_json(folder / "config.json", **change)
    spec = load_spec(folder)
    assert (spec.score_activation, spec.label_activation) == (score, label)
    assert spec.tasks == {"rerank", "score"}


def test_one_score_is_a_label_only_where_the_folder_names_it(tmp_path: Path) -> None:
    """K36: a reranker classifies nothing; a detector of one thing does, and still scores."""
    folder = write_model(tmp_path / "m", "bert", labels=1)
    edit_json(folder / "config.json", id2label={"0": "LABEL_0"})
    assert load_spec(folder).tasks == {"rerank", "score"}
    edit_json(folder / "config.json", id2label={"0": "toxic"})
    assert load_spec(folder).tasks == {"rerank", "score", "classify"}


def test_labels_come_by_name_and_never_twice(tmp_path: Path) -> None:
    """A18."""
    folder = write_model(tmp_path / "m", "bert", labels=3)
    edit_json(folder / "config.json", id2label={"0": "no", "1": "yes", "2": "maybe"})
    spec = load_spec(folder)
    assert spec.labels == ("no", "yes", "maybe")
    assert spec.tasks == {"classify"} and spec.label_activation == "softmax"
    edit_json(folder / "config.json", problem_type="multi_label_classification")
    assert load_spec(folder).label_activation == "sigmoid"
    edit_json(folder / "config.json", id2label={"0": "no", "1": "no", "2": "maybe"})
    with pytest.raises(ModelLoadError, match="twice"):
        load_spec(folder)


def test_an_activation_that_is_code_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "bert", labels=1)
    edit_json(folder / "config.json", sbert_ce_default_activation_function="my.module.Boom")
    with pytest.raises(ModelLoadError, match="Boom"):
        load_spec(folder)


def test_prompts_are_read_merged_and_checked(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "bert", prompts={"query": "q: ", "passage": "p: "})
    spec = load_spec(folder, prompts={"query": "Q: ", "own": "o: "})
    assert spec.prompts == {"query": "Q: ", "passage": "p: ", "own": "o: "}
    with pytest.raises(ModelLoadError, match="default_prompt_name"):
        load_spec(folder, default_prompt_name="nope")


def test_the_fingerprint_follows_the_numbers_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    """J05: same weights, tokenizer and meaning: same name, wherever the folder lies."""
    first = load_spec(folder).fingerprint
    assert first == load_spec(shutil.copytree(folder, tmp_path / "other")).fingerprint
    seen = {first}
    edit_json(folder / "sentence_bert_config.json", max_seq_length=64)
    seen.add(load_spec(folder).fingerprint)
    seen.add(load_spec(folder, pooling="cls").fingerprint)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(bytes(data))
    seen.add(load_spec(folder).fingerprint)
    assert len(seen) == 4


@pytest.mark.parametrize("broken", ["{", "\xff"])
def test_broken_json_is_named(folder: Path, broken: str) -> None:
    (folder / "config.json").write_bytes(broken.encode("latin-1"))
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_spec(folder)


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no weights"):
        load_spec(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match="missing"):
        load_spec(folder)
    with pytest.raises(ModelLoadError, match="not a folder"):
        load_spec(tmp_path / "nothing")


@pytest.mark.parametrize("path", ["no/such/folder/here", "/no/such", "../x y"])
def test_a_path_that_is_neither_folder_nor_id_is_refused(path: str) -> None:
    with pytest.raises(ModelLoadError, match="no such folder"):
        resolve_folder(path)


def test_a_hub_id_is_looked_up_in_the_cache_only(tmp_path: Path, monkeypatch: Any) -> None:
    """G08: offline, a hub id that is not cached is an error with both remedies, not a connection."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match="offline"):
        resolve_folder("somebody/some-model-that-is-not-cached")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_batch_tokens", 0),
        ("max_batch_tokens", -5),
        ("max_tokens", 0),
        ("empty_input", "maybe"),
        ("no_such_setting", 1),
    ],
)
def test_senseless_settings_are_refused_before_anything_is_read(setting: str, value: Any) -> None:
    """C13."""
    with pytest.raises(ModelLoadError, match=setting):
        make_runner_factory("m", "/nowhere", **{setting: value})


def _modules(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    path = folder / "modules.json"
    entries = json.loads(path.read_text())
    change(entries)
    path.write_text(json.dumps(entries))


def test_a_list_of_modules_that_its_library_reads_otherwise_is_refused(tmp_path: Path) -> None:
    """Two of one name, of which the library keeps the last; a path out of the folder; no maps."""
    named = write_model(tmp_path / "named", "bert", dense=32)
    _modules(named, lambda entries: entries.insert(2, entries[2]))
    with pytest.raises(ModelLoadError, match="two modules have the name"):
        load_spec(named)
    for path in ("../P1", "/P1", "1_Pooling/../../P1"):
        outside = write_model(tmp_path / path.replace("/", "_"), "bert")
        _modules(outside, lambda entries, path=path: entries[1].update(path=path))  # type: ignore[misc]
        with pytest.raises(ModelLoadError, match="leads out of the folder"):
            load_spec(outside)
    outside = write_model(tmp_path / "x", "bert")
    _modules(outside, lambda entries: entries.append("x"))  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match="no map of name"):
        load_spec(outside)


@pytest.mark.parametrize("prompts", [{"query": 3}, ["q: "], "q: ", {"query": ["q"]}])
def test_prompts_are_texts(tmp_path: Path, prompts: object) -> None:
    folder = write_model(tmp_path / "m", "bert", prompts={"query": "q: "})
    edit_json(folder / "config_sentence_transformers.json", prompts=prompts)
    with pytest.raises(ModelLoadError, match="no map of names to texts"):
        load_spec(folder)


@pytest.mark.parametrize("kind", ["SparseEncoder", "CrossEncoder", "Foreign"])
def test_the_kind_of_a_folder_fits_its_modules(tmp_path: Path, kind: str) -> None:
    folder = write_model(tmp_path / "m", "bert")
    edit_json(folder / "config_sentence_transformers.json", model_type="SentenceTransformer")
    assert load_spec(folder).pooling == "mean"
    edit_json(folder / "config_sentence_transformers.json", model_type=kind)
    with pytest.raises(ModelLoadError, match=kind):
        load_spec(folder)
