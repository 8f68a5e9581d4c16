"""CLIP and GME on tiny seeded folders: equal to transformers, packed, bad items alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import EncodedItem, ItemResult, pack, scatter
from gpu.encode.vision import GRID, PIXELS, POSITIONS, rope_positions
from gpu.faults import ModelLoadError
from gpu.folder.read import load_spec
from gpu.load import make_runner_factory
from schemas.errors import EmbedstreamError, InvalidRequest, ItemTooLarge, TooLong, Unsupported
from schemas.requests import EmbedRequest, Image, Text, TokenIds
from tests.support.models import edit_json
from tests.support.models_vision import SIZE, encoded, picture, write_clip, write_gme
from tests.support.references import clip_reference, gme_reference

TEXTS = ("a photo of the river", "kafka", "one two three four five six seven", "x")
PICTURES = tuple(
    encoded(picture(w, h, seed))
    for seed, (w, h) in enumerate([(40, 30), (30, 40), (200, 90), (64, 64)])
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    return {
        "clip": write_clip(root / "clip"),
        "qwen": write_gme(root / "qwen"),
        "gme": write_gme(root / "gme", gme=True),
    }


@pytest.fixture(scope="module")
def runners(folders: dict[str, Path]) -> dict[str, Any]:
    return {
        "clip": make_runner_factory("clip", folders["clip"])(),
        "qwen": make_runner_factory("qwen", folders["qwen"])(),
        "gme": make_runner_factory("gme", folders["gme"])(),
    }


def encode(runner: Any, *inputs: Any, **fields: Any) -> Any:
    return runner.encoder.encode([EmbedRequest(id="r", input=inputs, **fields)])[0]


def answer(runner: Any, items: Any) -> list[Any]:
    batch = pack(list(items))
    return scatter(batch, runner.forward(batch))


def vectors(runner: Any, *inputs: Any, **fields: Any) -> list[np.ndarray]:
    out = answer(runner, encode(runner, *inputs, **fields).items)
    assert all(isinstance(o, ItemResult) for o in out), out
    return [o.dense for o in out]


def close(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(got - expected).max() <= 1e-5
    cosine = got @ expected / np.linalg.norm(got) / np.linalg.norm(expected)
    assert cosine >= 1 - 1e-6


MIXED = (
    Text(TEXTS[0]), Image(PICTURES[0]), Text(TEXTS[2]), Image(PICTURES[2]), Text(TEXTS[3]),
    Image(PICTURES[1]), TokenIds((5, 6, 7)),
)  # fmt: skip


@pytest.mark.parametrize("kind", ["clip", "qwen", "gme"])
def test_the_same_bytes_alone_and_in_any_batch(runners: Any, kind: str) -> None:
    """A06, A07: texts, images, ids, and both in one item where the model can."""
    runner = runners[kind]
    inputs = list(MIXED)
    if kind != "clip":
        inputs.append(Image(PICTURES[3], "with words"))
    pool = encode(runner, *inputs).items
    alone = [answer(runner, [item])[0].dense for item in pool]
    rng = np.random.default_rng(0)
    for _ in range(5):
        order = rng.permutation(len(pool))
        for got, i in zip(answer(runner, [pool[i] for i in order]), order, strict=True):
            assert np.array_equal(got.dense, alone[i]), inputs[i]
    assert not any("depend" in note for note in runner.info.notes)
    assert runner.info.packed and runner.info.attention == "sdpa"
    assert runner.info.linears == "onednn-prepacked"


# --------------------------------------------------------------------------------------------- CLIP


@pytest.mark.parametrize("legacy_end", [False, True])
def test_clip_equals_transformers(tmp_path: Path, legacy_end: bool) -> None:
    folder = write_clip(tmp_path / "m", legacy_end=legacy_end)
    runner = make_runner_factory("m", folder)()
    inputs = [*map(Text, TEXTS), *map(Image, PICTURES)]
    got = vectors(runner, *inputs)
    expected = [clip_reference(folder, text, None) for text in TEXTS]
    expected += [clip_reference(folder, None, data) for data in PICTURES]
    for one, other in zip(got, expected, strict=True):
        close(one, other)
    assert runner.info.dimensions == 24 and runner.info.normalized is False
    assert runner.info.modalities == ("text", "image")


def test_clip_equals_sentence_transformers(folders: Any, runners: Any) -> None:
    """As its CLIPModel: the projection as it is, no normalisation that nobody asked for."""
    import io

    from PIL import Image as Pil
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules.clip_model import CLIPModel

    edit_json(folders["clip"] / "processor_config.json", processor_class="CLIPProcessor")
    try:
        reference = SentenceTransformer(
            modules=[CLIPModel(str(folders["clip"]), _from_auto_load=True)], device="cpu"
        )
    except Exception as error:  # torchvision is not here; its loader may want it
        pytest.skip(f"sentence-transformers cannot build CLIP here: {type(error).__name__}")
    texts = reference.encode(list(TEXTS))
    pictures = reference.encode([Pil.open(io.BytesIO(data)) for data in PICTURES])
    got = vectors(runners["clip"], *map(Text, TEXTS), *map(Image, PICTURES))
    for one, other in zip(got, [*texts, *pictures], strict=True):
        close(one, other)


def test_preprocessing_is_the_folders_own_formula(runners: Any) -> None:
    """Resize the short edge (bicubic), crop the middle, (x / 255 - mean) / std."""
    from PIL import Image as Pil

    (item,) = encode(runners["clip"], Image(PICTURES[2])).items
    source = Pil.fromarray(picture(200, 90, 2))
    width = int(SIZE * 200 / 90)
    resized = np.asarray(source.resize((width, SIZE), Pil.Resampling.BICUBIC), dtype=np.float64)
    left = (width - SIZE) // 2
    cropped = resized[:, left : left + SIZE] / 255
    expected = (cropped - [0.48, 0.46, 0.41]) / [0.27, 0.26, 0.28]
    import torch

    from gpu.forward.pixels import Pixels

    floats = Pixels(runners["clip"].spec.config["preprocessing"], torch.device("cpu"))
    got = floats(item.extras[PIXELS]).numpy()
    assert np.abs(got - expected.transpose(2, 0, 1)).max() <= 1e-5


def test_an_image_costs_its_patches(runners: Any) -> None:
    (item,) = encode(runners["clip"], Image(PICTURES[0])).items
    assert item.n_tokens == (SIZE // 8) ** 2 + 1


def test_clip_has_no_joint_vector_and_says_so(runners: Any) -> None:
    both, fine = encode(runners["clip"], Image(PICTURES[0], "a text"), Text("kafka")).items
    assert isinstance(both, Unsupported) and "two items" in str(both) and both.items == (0,)
    assert isinstance(fine, EncodedItem)


def test_texts_past_the_position_table_follow_the_policy(runners: Any) -> None:
    """B03, B05, B04: 77 tokens with the two special ones; one more is refused or cut."""
    runner = runners["clip"]
    fits, over = encode(runner, Text("x" * 75), Text("x" * 76)).items
    assert fits.n_tokens == 77 and isinstance(over, TooLong)
    (cut,) = encode(runner, Text("x" * 200), truncate="right").items
    assert cut.n_tokens == 77 and cut.truncated and cut.input_ids[-1] == fits.input_ids[-1]


# ---------------------------------------------------------------------------------------------- GME


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("a river", None),
        ("\n leading white space", None),
        (None, PICTURES[0]),
        (None, PICTURES[2]),
        ("what is on the picture", PICTURES[1]),
    ],
)
@pytest.mark.parametrize("kind", ["qwen", "gme"])
@pytest.mark.parametrize("instruction", [None, "Find a picture that matches the text."])
def test_gme_equals_transformers(
    folders: Any,
    runners: Any,
    text: str | None,
    data: bytes | None,
    instruction: str | None,
    kind: str,
) -> None:
    """A11, A14: template, instruction, image tokens, positions by grid (Qwen2-VL) or in one row (GME's
    own code, vllm pull request 30478), end token once."""
    item = Text(text or "") if data is None else Image(data, text)
    (got,) = vectors(runners[kind], item, prompt=instruction)
    told = instruction or "You are a helpful assistant."
    close(got, gme_reference(folders[kind], text, data, told, gme=kind == "gme"))
    assert abs(np.linalg.norm(got) - 1) <= 1e-6


def test_positions_are_those_of_get_rope_index(folders: Any) -> None:
    import torch
    from transformers import Qwen2VLModel

    model = Qwen2VLModel.from_pretrained(folders["gme"])
    image = model.config.image_token_id
    for grids in ([(1, 4, 4)], [(1, 2, 8), (1, 6, 2)], [(1, 2, 2), (1, 2, 2), (1, 10, 4)]):
        ids = [1, 2, 3]
        for _, rows, columns in grids:
            ids += [image] * (rows * columns // 4) + [9, 8]
        given = np.array(ids, dtype=np.int32)
        tensor = torch.from_numpy(given.astype(np.int64))[None]
        expected, _ = model.get_rope_index(
            tensor, (tensor == image).int(), image_grid_thw=torch.tensor(grids)
        )
        assert np.array_equal(rope_positions(given, image, grids, 2), expected[:, 0].numpy())


def test_gme_image_items_hold_what_the_model_needs(runners: Any) -> None:
    (item,) = encode(runners["gme"], Image(PICTURES[0], "hello")).items
    _, rows, columns = item.extras[GRID]
    assert 256 <= rows * columns // 4 <= 1280 and item.n_tokens > rows * columns // 4
    assert item.extras[POSITIONS].shape == (3, item.n_tokens)
    assert item.extras[PIXELS].shape == (rows * columns, 3, 14, 14)
    assert item.extras[PIXELS].dtype == np.uint8  # a quarter of the memory while it waits


def test_a_text_never_becomes_an_image_token(runners: Any) -> None:
    """B18: control tokens in a text are text; as ids without an image they are refused."""
    runner = runners["gme"]
    (item,) = encode(runner, Text("<|image_pad|><|im_end|>")).items
    image = runner.spec.config["image_token_id"]
    assert image not in item.input_ids
    ids = encode(runner, TokenIds((3, image, 4))).items
    (error,) = answer(runner, ids)
    assert isinstance(error, InvalidRequest)


def test_an_image_with_a_text_that_does_not_fit_is_cut_in_its_text(folders: Any) -> None:
    runner = make_runner_factory("m", folders["gme"], max_tokens=400)()
    data = encoded(picture(40, 40))  # 256 tokens
    (fits,) = encode(runner, Image(data, "short")).items
    over, no_room = encode(runner, Image(data, "w" * 400), Image(PICTURES[2])).items
    assert isinstance(fits, EncodedItem)
    assert isinstance(over, TooLong) and over.limit == 400
    assert isinstance(no_room, EncodedItem | TooLong)
    (cut,) = encode(runner, Image(data, "w" * 400), truncate="right").items
    assert cut.n_tokens == 400 and cut.truncated
    assert cut.input_ids[-1] == fits.input_ids[-1]


def test_a_bidirectional_gme_attends_both_ways(folders: Any, runners: Any) -> None:
    both_ways = make_runner_factory("m", folders["gme"], causal=False)()
    (one,), (other,) = (vectors(r, Text("a river of text")) for r in (both_ways, runners["gme"]))
    assert np.abs(one - other).max() > 1e-3
    assert "is_causal" not in str(runners["gme"].spec.config.get("is_causal"))


# --------------------------------------------------------------------------------------------- both


@pytest.mark.parametrize("kind", ["clip", "gme"])
def test_one_bad_image_costs_nobody_else(runners: Any, kind: str) -> None:
    """B10: corrupt, huge and thin images fail alone; the others get the bytes they get alone."""
    good = encoded(picture(50, 50))
    bad = [b"not an image", good[: len(good) // 2], encoded(picture(201, 1))]
    items = encode(runners[kind], Image(bad[0]), Image(good), *map(Image, bad[1:])).items
    errors = [item for item in items if isinstance(item, EmbedstreamError)]
    assert [error.items for error in errors] == [(0,), (2,), (3,)]
    assert all(isinstance(error, InvalidRequest) for error in errors)
    (vector,) = vectors(runners[kind], Image(good))
    assert np.array_equal(answer(runners[kind], [items[1]])[0].dense, vector)


def test_caps_are_settings_of_the_model(folders: Any) -> None:
    data = encoded(picture(50, 50))
    for setting in ({"max_image_pixels": 2499}, {"max_image_bytes": len(data) - 1}):
        runner = make_runner_factory("m", folders["clip"], **setting)()
        (error,) = encode(runner, Image(data)).items
        assert isinstance(error, ItemTooLarge)
    with pytest.raises(ModelLoadError, match="max_image_pixels"):
        make_runner_factory("m", folders["clip"], max_image_pixels=0)


@pytest.mark.parametrize("kind", ["clip", "gme"])
def test_long_text_fields_are_refused_by_name(runners: Any, kind: str) -> None:
    for fields in ({"aggregate": "mean"}, {"chunk_tokens": 4}):
        error = encode(runners[kind], Text("a"), **fields)
        assert isinstance(error, Unsupported) and error.path == f"$.{next(iter(fields))}"


def test_a_text_model_takes_no_images(load: Any) -> None:
    (error,) = (
        load("bert").encoder.encode([EmbedRequest(id="r", input=(Image(PICTURES[0]),))])[0].items
    )
    assert isinstance(error, Unsupported)


def test_folders_that_lack_something_are_refused(tmp_path: Path) -> None:
    folder = write_clip(tmp_path / "m")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelLoadError, match="preprocessor_config"):
        load_spec(folder)
    other = write_clip(tmp_path / "o")
    edit_json(other / "config.json", model_type="siglip2")
    with pytest.raises(ModelLoadError, match="siglip2"):
        load_spec(other)


def test_the_fingerprint_covers_the_preprocessing(tmp_path: Path) -> None:
    folder = write_clip(tmp_path / "m")
    before = load_spec(folder).fingerprint
    edit_json(folder / "preprocessor_config.json", resample=2)
    assert load_spec(folder).fingerprint != before
