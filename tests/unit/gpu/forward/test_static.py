"""Static models behind the runner's contract: limits, bad rows, empty texts, refusals at load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gpu.batch import EncodedItem, ItemOptions, pack, scatter
from gpu.faults import ModelLoadError
from gpu.folder.read import load_spec
from gpu.forward.static import CHUNK_TOKENS
from gpu.load import make_runner_factory
from schemas.errors import (
    EmptyInput,
    InvalidDimensions,
    InvalidRequest,
    NonFinite,
    TooLong,
    Unsupported,
    ZeroVector,
)
from schemas.requests import EmbedRequest, RerankRequest, Text, TokenIds
from tests.support.models import _dump, edit_json
from tests.support.models_outputs import write_static

TEXTS = ["hello world", "kafka", "the red river of paris", "x"]


def encode(runner: Any, texts: list[str], **fields: Any) -> Any:
    request = EmbedRequest(id="r", input=tuple(Text(t) for t in texts), **fields)
    return runner.encoder.encode([request])[0]


def forward(runner: Any, items: Any) -> list[Any]:
    batch = pack(items)
    return scatter(batch, runner.forward(batch))


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_static(tmp_path_factory.mktemp("s") / "m")
    return make_runner_factory("s", folder, matryoshka_dimensions=(4,))()


def test_the_contract_is_that_of_every_runner(static: Any) -> None:
    info = static.info
    assert (info.dimensions, info.pooling, info.normalized, info.max_tokens) == (
        16, "mean", True, 512,
    )  # fmt: skip
    assert info.tasks == {"embed"} and info.outputs == {"dense"} and info.device == "cpu"
    assert info.allowed_dimensions == (4, 16) and info.fingerprint.startswith("sha256:")
    outcome = forward(static, encode(static, ["hello"]).items)[0]
    assert outcome.dense.dtype == np.float32 and outcome.dense.shape == (16,)
    assert abs(np.linalg.norm(outcome.dense) - 1) <= 1e-6
    static_again = make_runner_factory("other", static.spec.folder, matryoshka_dimensions=(4,))()
    assert static_again.info.fingerprint == info.fingerprint
    static_again.close()


def test_order_and_bits_do_not_depend_on_the_batch(static: Any) -> None:
    """A01, A06, A07: equal bytes alone and among others; result i belongs to input i."""
    items = encode(static, ["hello world", "kafka", "river " * 300, "hello world", "red"]).items
    alone = [forward(static, [item])[0].dense.tobytes() for item in items]
    for order in ([4, 2, 0, 3, 1], [1, 0], [2, 4]):
        got = forward(static, [items[i] for i in order])
        assert [one.dense.tobytes() for one in got] == [alone[i] for i in order]
    assert alone[0] == alone[3] != alone[1]


def test_bad_rows_fail_alone(static: Any) -> None:
    """A03, B12, B19: each wrong item gets its error, the others their vectors."""
    good = EncodedItem(np.array([3, 4], np.int32))
    items = [
        good,
        EncodedItem(np.zeros(0, np.int32)),
        EncodedItem(np.array([3, 10_000], np.int32)),
        EncodedItem(np.array([-1], np.int32)),
        EncodedItem(np.ones(513, np.int32)),
        EncodedItem(np.array([3], np.int32), ItemOptions(outputs=("sparse",))),
        EncodedItem(np.array([3], np.int32), ItemOptions(task="rerank")),
        good,
    ]
    kinds = [type(outcome) for outcome in forward(static, items)]
    assert kinds[1:7] == [
        EmptyInput, InvalidRequest, InvalidRequest, TooLong, Unsupported, Unsupported,
    ]  # fmt: skip
    first, *_, last = forward(static, items)
    assert first.dense.tobytes() == last.dense.tobytes()


def test_empty_and_unknown_texts_are_errors_of_their_own(static: Any) -> None:
    """B10, B11: model2vec drops unknown tokens, so a text of nothing else holds no token."""
    encoded = encode(static, ["hello", "", "  ", "qwertz", "hello qwertz"])
    kinds = [isinstance(item, EmptyInput) for item in encoded.items]
    assert kinds == [False, True, True, True, False]
    assert encoded.items[4].input_ids.tolist() == encoded.items[0].input_ids.tolist()


def test_the_limit_is_model2vecs_own(static: Any) -> None:
    """B03, B05."""
    texts = ["red " * n for n in (511, 512, 513)]
    items = encode(static, texts).items
    assert [getattr(item, "n_tokens", None) for item in items] == [511, 512, None]
    assert isinstance(items[2], TooLong) and (items[2].given, items[2].limit) == (513, 512)
    cut = encode(static, texts, truncate="right").items[2]
    assert cut.n_tokens == 512 and cut.truncated


def test_long_items_are_gathered_in_chunks(tmp_path: Path) -> None:
    """C08: 20,000 tokens in one item: the mean is that of one gather, without holding the rows."""
    folder = write_static(tmp_path / "m", layout="st")
    runner = make_runner_factory("m", folder)()
    ids = np.random.default_rng(0).integers(2, 40, 20_000, dtype=np.int32)
    assert len(ids) > 4 * CHUNK_TOKENS
    table = load_file(folder / "0_StaticEmbedding" / "model.safetensors")["embedding.weight"]
    want = table[ids].astype(np.float64).mean(axis=0)
    got = forward(runner, [EncodedItem(ids)])[0].dense
    assert np.abs(got - want / np.linalg.norm(want)).max() <= 1e-6


def test_a_table_with_nan_names_no_value(tmp_path: Path) -> None:
    """A03."""
    folder = write_static(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings"][7] = np.nan
    save_file(tensors, folder / "model.safetensors")
    runner = make_runner_factory("m", folder)()
    items = [EncodedItem(np.array([i], np.int32)) for i in (6, 7, 8)]
    outcomes = forward(runner, items)
    assert [isinstance(o, NonFinite) for o in outcomes] == [False, True, False]


def test_a_zero_vector_is_answered_as_it_is_and_never_called_normalised(tmp_path: Path) -> None:
    """K24"""
    folder = write_static(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings"][7] = 0
    save_file(tensors, folder / "model.safetensors")
    runner = make_runner_factory("m", folder)()
    asked = (EncodedItem(np.array([7], np.int32), ItemOptions(normalize=n)) for n in (False, True))
    plain, unit = forward(runner, list(asked))
    assert not plain.dense.any() and isinstance(unit, ZeroVector)


def test_a_static_vector_is_cut_then_normalised(static: Any) -> None:
    """A08, A09: the renormalised prefix, or a refusal that names the sizes."""
    full = forward(static, encode(static, TEXTS[:3]).items)
    cut = forward(static, encode(static, TEXTS[:3], dimensions=4).items)
    for one, whole in zip(cut, full, strict=True):
        prefix = whole.dense[:4] / np.linalg.norm(whole.dense[:4])
        assert np.abs(one.dense - prefix).max() <= 1e-6
    raw = forward(static, encode(static, TEXTS[:1], normalize=False).items)[0].dense
    assert abs(np.linalg.norm(raw) - 1) > 1e-3
    refused = encode(static, TEXTS, dimensions=5)
    assert isinstance(refused, InvalidDimensions) and "4, 16" in str(refused)


def test_other_tasks_and_ids_outside_the_table_are_refused(static: Any) -> None:
    rerank = RerankRequest(id="r", query="q", documents=())
    assert isinstance(static.encoder.encode([rerank])[0], Unsupported)
    ids = EmbedRequest(id="r", input=(TokenIds((2, 3)), TokenIds((2, 999))))
    items = static.encoder.encode([ids])[0].items
    assert items[0].input_ids.tolist() == [2, 3] and isinstance(items[1], InvalidRequest)


def test_prompts_are_put_before_texts(tmp_path: Path) -> None:
    folder = write_static(tmp_path / "m", layout="st")
    _dump(folder / "config_sentence_transformers.json", {"prompts": {"query": "query "}})
    runner = make_runner_factory("m", folder)()
    encoded = encode(runner, ["river"], prompt_name="query")
    assert encoded.prompt == "query "
    assert (
        encoded.items[0].input_ids.tolist()
        == encode(runner, ["query river"]).items[0].input_ids.tolist()
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda:0"}, "runs on the CPU"),
        ({"dtype": "bfloat16"}, "computes in float32"),
        ({"pooling": "cls"}, "a mean of vectors"),
        ({"speed": "bf16"}, "for text models"),
        ({"matryoshka_dimensions": (17,)}, "outside 1 to 16"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    folder = write_static(tmp_path / "m")
    with pytest.raises(ModelLoadError, match=message):
        make_runner_factory("m", folder, **settings)()


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """A10: a table for another tokenizer, a mapping outside it, other tensors, other modules."""
    folder = write_static(tmp_path / "m", mapping=True)
    good = load_file(folder / "model.safetensors")

    def refused(match: str, **tensors: Any) -> None:
        save_file({**good, **tensors}, folder / "model.safetensors")
        with pytest.raises(ModelLoadError, match=match):
            make_runner_factory("m", folder)()

    refused("mapping points outside", mapping=good["mapping"] + 1000)
    refused("mapping for", mapping=good["mapping"][:5])
    refused("weights for", weights=np.ones(3, np.float32))
    refused("holds", surplus=np.ones(3, np.float32))
    save_file({"embeddings": good["embeddings"]}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match="vectors for"):
        make_runner_factory("m", folder)()
    save_file({"other": good["embeddings"]}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match="no table of vectors"):
        load_spec(folder)
    (folder / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ModelLoadError, match="not a readable"):
        load_spec(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no weights"):
        load_spec(folder)
    st = write_static(tmp_path / "st", layout="st")
    entries = [{"path": "0_StaticEmbedding", "type": "x.StaticEmbedding"}, {"type": "x.Dense"}]
    _dump(st / "modules.json", entries)
    with pytest.raises(ModelLoadError, match="StaticEmbedding, Dense"):
        load_spec(st)


def test_a_missing_tokenizer_is_an_error_at_load(tmp_path: Path) -> None:
    folder = write_static(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        make_runner_factory("m", folder)()


def test_the_config_may_name_another_length(tmp_path: Path) -> None:
    folder = write_static(tmp_path / "m", max_length=64)
    assert load_spec(folder).max_tokens == 64
    edit_json(folder / "config.json", max_length=None)
    assert load_spec(folder).max_tokens == 512
    assert load_spec(folder, max_tokens=10_000).max_tokens == 10_000
