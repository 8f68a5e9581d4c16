"""SigLIP on tiny seeded folders: equal to transformers and sentence-transformers, odd folders refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import EncodedItem, ItemResult, pack, scatter
from gpu.faults import ModelLoadError
from gpu.folder.read import load_spec
from gpu.folder.towers import tower_config
from gpu.load import make_runner_factory
from schemas.errors import TooLong, Unsupported
from schemas.requests import EmbedRequest, Image, Text, TokenIds
from tests.support.models import edit_json
from tests.support.models_vision import encoded, picture, write_siglip
from tests.support.references import siglip_reference

TEXTS = ("a photo of the river", "kafka", "one two three four five six seven", "x")
PICTURES = tuple(
    encoded(picture(w, h, seed)) for seed, (w, h) in enumerate([(40, 30), (30, 40), (200, 90)])
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_siglip(tmp_path_factory.mktemp("siglip") / "m")


@pytest.fixture(scope="module")
def runner(folder: Path) -> Any:
    return make_runner_factory("m", folder)()


def encode(runner: Any, *inputs: Any, **fields: Any) -> Any:
    return runner.encoder.encode([EmbedRequest(id="r", input=inputs, **fields)])[0].items


def answer(runner: Any, items: Any) -> list[np.ndarray]:
    batch = pack(list(items))
    found = scatter(batch, runner.forward(batch))
    assert all(isinstance(one, ItemResult) for one in found), found
    return [one.dense for one in found]  # type: ignore[union-attr,misc]


def close(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(got - expected).max() <= 1e-5
    cosine = got @ expected / np.linalg.norm(got) / np.linalg.norm(expected)
    assert cosine >= 1 - 1e-6


@pytest.mark.parametrize("side", ["right", "left"])
def test_siglip_equals_transformers(tmp_path: Path, side: str) -> None:
    """Texts filled up to 64 tokens at the side that the folder says, and attending to the filling."""
    folder = write_siglip(tmp_path / "m", padding_side=side, model_max_length=None)
    runner = make_runner_factory("m", folder)()
    long = " ".join(["river"] * 90)
    got = answer(runner, encode(runner, *map(Text, TEXTS), *map(Image, PICTURES)))
    got += answer(runner, encode(runner, Text(long), truncate="right"))
    expected = [siglip_reference(folder, text, None) for text in TEXTS]
    expected += [siglip_reference(folder, None, data) for data in PICTURES]
    for one, other in zip(got, [*expected, siglip_reference(folder, long, None)], strict=True):
        close(one, other)
    assert runner.info.dimensions == 32 and runner.info.normalized is False
    assert runner.info.modalities == ("text", "image")
    assert any("filled up to 64 tokens" in note for note in runner.info.notes)


def test_siglip_equals_sentence_transformers(tmp_path: Path) -> None:
    """A folder that the library wrote, told to fill texts up; one text alone and several together."""
    from PIL import Image as Pil
    from sentence_transformers import SentenceTransformer

    folder = write_siglip(tmp_path / "m", library=True)
    library = SentenceTransformer(str(folder), device="cpu")
    library.save_pretrained(str(tmp_path / "saved"))
    expected = [
        *library.encode(list(TEXTS)),
        *library.encode([Pil.open(io.BytesIO(data)) for data in PICTURES]),
    ]
    for place in (folder, tmp_path / "saved"):
        runner = make_runner_factory("m", place)()
        got = answer(runner, encode(runner, *map(Text, TEXTS), *map(Image, PICTURES)))
        for one, other in zip(got, expected, strict=True):
            close(one, other)
        assert runner.info.normalized


def test_the_same_bytes_alone_and_in_any_batch(runner: Any) -> None:
    """A06, A07"""
    inputs = [*map(Text, TEXTS), *map(Image, PICTURES), TokenIds((5, 6, 7))]
    pool = encode(runner, *inputs)
    alone = [answer(runner, [item])[0] for item in pool]
    rng = np.random.default_rng(0)
    for _ in range(5):
        order = rng.permutation(len(pool))
        for got, i in zip(answer(runner, [pool[i] for i in order]), order, strict=True):
            assert np.array_equal(got, alone[i]), inputs[i]
    assert runner.info.packed and runner.info.linears == "onednn-prepacked"


def test_a_text_costs_its_full_length_and_one_more_is_refused(runner: Any) -> None:
    """B03, B05"""
    short, ids, over, both = encode(
        runner, Text("x"), TokenIds((5, 6)), Text("river " * 64), Image(PICTURES[0], "a text")
    )
    assert short.n_tokens == ids.n_tokens == 64
    assert isinstance(over, TooLong) and over.limit == 64
    assert isinstance(both, Unsupported)


def test_the_first_tokenizer_is_read_from_its_json_when_that_does_the_same(tmp_path: Path) -> None:
    """transformers' SiglipTokenizer needs sentencepiece; a tokenizer.json that keeps case is not it."""
    folder = write_siglip(tmp_path / "m", tokenizer_class="SiglipTokenizer")
    with pytest.raises(ModelLoadError, match="punctuation"):
        make_runner_factory("m", folder)()
    data = json.loads((folder / "tokenizer.json").read_text())
    data["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Lowercase"},
            {"type": "Replace", "pattern": {"Regex": r"[!-/:-@\[-`{-~]"}, "content": ""},
            {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
            {"type": "Strip", "strip_left": True, "strip_right": True},
        ],
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
    runner = make_runner_factory("m", folder)()
    one, other = encode(runner, Text("The RIVER!"), Text("the  river"))
    assert isinstance(one, EncodedItem) and one.input_ids.tolist() == other.input_ids.tolist()
    (folder / "tokenizer.json").rename(folder / "spiece.model")
    with pytest.raises(ModelLoadError, match=r"without a tokenizer.json; take a repository"):
        make_runner_factory("m", folder)()


def without_fill(folder: Path) -> None:
    edit_json(folder / "sentence_bert_config.json", processing_kwargs=None)


def other_size(folder: Path) -> None:
    edit_json(folder / "preprocessor_config.json", size={"height": 48, "width": 48})


def other_class(folder: Path) -> None:
    edit_json(folder / "preprocessor_config.json", image_processor_type="CLIPImageProcessor")


def with_mask(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])


def other_method(folder: Path) -> None:
    how = {"method": "forward", "method_output_name": "pooler_output"}
    edit_json(folder / "sentence_bert_config.json", modality_config={"text": how})


def two_preprocessings(folder: Path) -> None:
    edit_json(folder / "processor_config.json", image_processor={"resample": 2})


def no_head(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["vision_use_head"] = False
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_fill, "padding = None"),
        (other_size, "the vision tower takes 32 x 32"),
        (other_class, "prepares images otherwise than siglip"),
        (with_mask, "model_input_names"),
        (other_method, "modality_config.text"),
        (two_preprocessings, "resample in preprocessor_config.json and in processor_config.json"),
        (no_head, "vision_use_head"),
    ],
)
def test_what_would_change_a_vector_is_refused_by_its_key(
    tmp_path: Path, change: Any, words: str
) -> None:
    folder = write_siglip(tmp_path / "m", library=True)
    change(folder)
    with pytest.raises(ModelLoadError, match=words):
        make_runner_factory("m", folder)()


@pytest.mark.parametrize("setting", [{"max_tokens": 32}, {"causal": True}, {"pooling": "mean"}])
def test_settings_that_would_change_a_vector_are_refused(folder: Path, setting: Any) -> None:
    with pytest.raises(ModelLoadError, match=next(iter(setting))):
        make_runner_factory("m", folder, **setting)()


@pytest.mark.parametrize("change", [{"padding_side": "left"}, {"pad_token": "<unk>"}])
def test_the_fingerprint_covers_what_fills_a_text_up(
    folder: Path, runner: Any, tmp_path: Path, change: Any
) -> None:
    """K09"""
    other = make_runner_factory("m", write_siglip(tmp_path / "o", **change))()
    assert load_spec(folder).fingerprint == load_spec(tmp_path / "o").fingerprint
    assert runner.info.fingerprint != other.info.fingerprint
    (one,), (two,) = (answer(r, encode(r, Text("kafka"))) for r in (runner, other))
    assert not np.array_equal(one, two)


@pytest.mark.parametrize("model_type", ["clip", "siglip", "qwen2_vl"])
def test_what_a_config_leaves_out_is_its_class_s_default(model_type: str) -> None:
    """Published SigLIP folders hold two empty sub-configs."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    text, vision = tower_config({}, model_type)
    for name, value in text.items():
        assert getattr(config.text_config, name) == value, name
    for name, value in vision.items():
        assert getattr(config.vision_config, name) == value, name
