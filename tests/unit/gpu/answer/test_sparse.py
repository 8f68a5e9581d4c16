"""SPLADE and BGE-M3's lexical weights: bounded memory, bits, faults, and what a request may ask."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu.answer.sparse import LOGIT_ELEMENTS_CPU, Lexical, Splade
from gpu.batch import EncodedItem, ItemOptions, pack, scatter
from gpu.faults import ModelLoadError
from gpu.folder.hub import resolve_folder
from gpu.folder.outputs import LexicalSpec, SpladeSpec
from gpu.folder.read import load_spec
from gpu.load import make_runner_factory
from gpu.pooler import segments_of
from schemas.errors import EmbedstreamError, InvalidDimensions, NonFinite, Unsupported
from schemas.requests import EmbedRequest, Text, TokenIds
from tests.support.models import edit_json, write_model
from tests.support.models_outputs import write_m3, write_splade

TEXTS = ["hello world", "kafka", "the capital of china is beijing", "one two three " * 6, "x"]


def encode(runner: Any, texts: list[str] = TEXTS, **fields: Any) -> Any:
    request = EmbedRequest(id="r", input=tuple(Text(t) for t in texts), **fields)
    return runner.encoder.encode([request])[0]


def forward(runner: Any, items: Any) -> list[Any]:
    batch = pack(items)
    return scatter(batch, runner.forward(batch))


@pytest.fixture(scope="module")
def splade(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_splade(tmp_path_factory.mktemp("splade") / "m")
    return make_runner_factory("splade", folder)()


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return out


@pytest.mark.parametrize("lengths", [[512] * 16, [8] * 1024], ids=["long", "short"])
def test_8k_tokens_by_30k_words_are_never_held_at_once(tmp_path: Path, lengths: list[int]) -> None:
    """C06, C03: the largest tensor of a pack of 8,192 tokens is one chunk, 64 MiB, not 1 GB."""
    folder = write_splade(tmp_path / "m", vocab_size=30_522, max_position_embeddings=512)
    runner = make_runner_factory("m", folder, max_tokens=512)()
    rng = np.random.default_rng(0)
    options = ItemOptions(outputs=("sparse",))
    items = [EncodedItem(rng.integers(5, 30_522, n, dtype=np.int32), options) for n in lengths]
    batch = pack(items)
    assert batch.n_tokens == 8192
    with LargestTensor() as largest:
        outcomes = runner.forward(batch)
    assert all(outcome.sparse is not None for outcome in outcomes)
    assert 30_522 * 32 <= largest.elements <= LOGIT_ELEMENTS_CPU
    assert largest.elements * 8 < 8192 * 30_522


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_weights_are_the_same_bits_in_any_batch_and_chunk(tmp_path: Path, pooling: str) -> None:
    """A01, A06: alone, among others, and with chunks of 32 tokens: equal ids and equal bytes."""
    folder = write_splade(tmp_path / "m", strategy=pooling)
    runner = make_runner_factory("m", folder)()
    items = encode(runner, [*TEXTS, "river " * 90, "red " * 31]).items
    alone = [forward(runner, [item])[0].sparse for item in items]
    runner._outputs.splade.chunk_tokens = 32
    order = [6, 2, 0, 5, 1, 4, 3]
    together = forward(runner, [items[i] for i in order])
    for i, outcome in zip(order, together, strict=True):
        assert np.array_equal(outcome.sparse[0], alone[i][0])
        if pooling == "max" or items[i].n_tokens <= 32:
            assert outcome.sparse[1].tobytes() == alone[i][1].tobytes()
        else:  # a sum in chunks adds in another order, but in the same one in every batch
            assert np.allclose(outcome.sparse[1], alone[i][1], rtol=1e-6)
            assert forward(runner, [items[i]])[0].sparse[1].tobytes() == outcome.sparse[1].tobytes()


def test_ids_ascend_and_weights_are_positive(splade: Any) -> None:
    for outcome in forward(splade, encode(splade).items):
        ids, weights = outcome.sparse
        assert ids.dtype == np.int32 and weights.dtype == np.float32
        assert (np.diff(ids) > 0).all() and (weights > 0).all() and len(ids) > 0
        assert outcome.dense is None and outcome.multivector is None


def test_a_row_with_nan_fails_alone() -> None:
    """A03, A04: NaN is greater than nothing, and must not pass for "no weight"."""
    hidden = torch.zeros(6, 4)
    hidden[2] = float("nan")
    hidden[5] = float("inf")
    weight = torch.eye(4)
    found = Splade(lambda h: h @ weight, SpladeSpec(), vocab_size=4, device=torch.device("cpu"))
    batch = pack([EncodedItem(np.zeros(2, np.int32)) for _ in range(3)])
    hidden[0, 1] = 3.0
    rows = found(hidden, segments_of(batch), [0, 1, 2])
    assert rows[0] is not None and rows[1] is None and rows[2] is None
    assert rows[0][0].tolist() == [1] and rows[0][1][0] == np.log1p(np.float32(3.0))


def test_the_runner_answers_the_neighbours_of_a_bad_row(
    splade: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A03."""
    items = encode(splade).items
    real = splade._forward

    def poisoned(batch: Any) -> torch.Tensor:
        hidden = real(batch).clone()
        hidden[batch.cu_seqlens[1]] = float("nan")
        return hidden

    monkeypatch.setattr(splade, "_forward", poisoned)
    batch = pack(items)
    outcomes = splade.forward(batch)
    assert [isinstance(o, NonFinite) for o in outcomes] == [False, True, False, False, False]


def test_a_request_without_outputs_gets_the_models_own(splade: Any) -> None:
    assert splade.info.outputs == {"sparse"} and splade.info.default_outputs == ("sparse",)
    assert splade.info.dimensions is None and splade.info.pooling is None
    assert encode(splade).items[0].options.outputs == ("sparse",)


@pytest.mark.parametrize(
    ("fields", "error", "path"),
    [
        ({"outputs": ("dense",)}, Unsupported, "$.outputs"),
        ({"outputs": ("sparse", "multivector")}, Unsupported, "$.outputs"),
        ({"normalize": True}, Unsupported, "$.normalize"),
        ({"dimensions": 8}, InvalidDimensions, "$.dimensions"),
    ],
)
def test_what_a_sparse_model_cannot_is_refused_by_name(
    splade: Any, fields: dict[str, Any], error: type[EmbedstreamError], path: str
) -> None:
    """A09."""
    refused = encode(splade, **fields)
    assert isinstance(refused, error) and refused.path == path
    assert "sparse" in str(refused)


def test_the_runner_itself_refuses_an_output_that_it_lacks(splade: Any) -> None:
    """A10."""
    item = EncodedItem(np.array([1, 2], np.int32), ItemOptions(outputs=("dense",)))
    assert isinstance(forward(splade, [item])[0], Unsupported)


def test_a_plain_masked_lm_needs_the_setting(tmp_path: Path) -> None:
    folder = write_splade(tmp_path / "m", modules=False)
    with pytest.raises(ModelLoadError, match="says nothing about its vectors"):
        load_spec(folder)
    runner = make_runner_factory("m", folder, pooling="splade")()
    described = make_runner_factory("m", write_splade(tmp_path / "n"))()
    for one, other in zip(
        forward(runner, encode(runner).items), forward(described, encode(described).items),
        strict=True,
    ):  # fmt: skip
        assert one.sparse[1].tobytes() == other.sparse[1].tobytes()
    edit_json(folder / "config_sentence_transformers.json", model_type="SparseEncoder")
    assert load_spec(folder).outputs == ("sparse",)


def test_what_is_not_splade_is_refused(tmp_path: Path) -> None:
    """A10."""
    folder = write_splade(tmp_path / "m")
    edit_json(folder / "1_Pool" / "config.json", pooling_strategy="mean")
    with pytest.raises(ModelLoadError, match="SpladePooling with 'mean'"):
        load_spec(folder)
    edit_json(folder / "1_Pool" / "config.json", pooling_strategy="max")
    with pytest.raises(ModelLoadError, match="on a SPLADE model"):
        load_spec(folder, pooling="cls")
    with pytest.raises(ModelLoadError, match="needs a \\*ForMaskedLM"):
        load_spec(write_model(tmp_path / "b", pooling=None), pooling="splade")


def test_the_fingerprint_follows_pooling_and_heads(tmp_path: Path) -> None:
    """J07, A24: anything that changes a weight changes the name."""
    folder = write_splade(tmp_path / "m")
    first = load_spec(folder).fingerprint
    edit_json(folder / "1_Pool" / "config.json", activation_function="log1p_relu")
    assert load_spec(folder).fingerprint != first
    m3 = write_m3(tmp_path / "m3")
    before = load_spec(m3).fingerprint
    state = torch.load(m3 / "sparse_linear.pt", weights_only=True)
    torch.save({name: tensor + 1 for name, tensor in state.items()}, m3 / "sparse_linear.pt")
    assert load_spec(m3).fingerprint != before


# ------------------------------------------------------------------------------------------ BGE-M3


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_runner_factory("m3", write_m3(tmp_path_factory.mktemp("m3") / "m"))()


ALL = ("dense", "sparse", "multivector")


def test_m3_gives_three_outputs_from_one_forward(m3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A10: dense, sparse and multivector of mixed requests in one pack, one forward."""
    calls = []
    real = m3._forward
    monkeypatch.setattr(m3, "_forward", lambda batch: calls.append(batch) or real(batch))
    wanted = [ALL, ("dense",), ("sparse",), ("multivector",), ("sparse", "dense")]
    items = [encode(m3, ["hello kafka"], outputs=outputs).items[0] for outputs in wanted]
    outcomes = forward(m3, items)
    assert len(calls) == 1
    for outputs, outcome in zip(wanted, outcomes, strict=True):
        assert {name for name in ALL if getattr(outcome, name) is not None} == set(outputs)
    full = outcomes[0]
    assert outcomes[1].dense.tobytes() == outcomes[4].dense.tobytes() == full.dense.tobytes()
    assert outcomes[2].sparse[1].tobytes() == full.sparse[1].tobytes()
    assert outcomes[3].multivector.tobytes() == full.multivector.tobytes()


def test_m3_says_what_it_can(m3: Any) -> None:
    info = m3.info
    assert info.outputs == set(ALL) and info.default_outputs == ("dense",)
    assert info.multivector_dimensions == info.dimensions == 32 and info.normalized
    assert encode(m3).items[0].options.outputs == ("dense",)


def test_m3_drops_special_tokens_and_keeps_the_largest_weight(tmp_path: Path) -> None:
    """Every token has a weight here, so only the rule can leave one out."""
    folder = write_m3(tmp_path / "m")
    state = torch.load(folder / "sparse_linear.pt", weights_only=True)
    torch.save({**state, "bias": torch.full((1,), 20.0)}, folder / "sparse_linear.pt")
    m3 = make_runner_factory("m", folder)()
    items = encode(m3, ["kafka kafka kafka river", "☃ ☃ red"], outputs=("sparse",)).items
    assert {0, 2} <= set(items[0].input_ids.tolist()) and 3 in items[1].input_ids
    for item, outcome in zip(items, forward(m3, items), strict=True):
        ids, weights = outcome.sparse
        assert ids.tolist() == sorted(set(item.input_ids.tolist()) - {0, 1, 2, 3})
        assert (weights > 0).all()
    batch = pack(items[:1])
    with torch.inference_mode():
        hidden = m3._forward(batch)
    scores = (hidden @ state["weight"][0] + 20.0).numpy()
    kafka = np.flatnonzero(batch.input_ids == np.bincount(batch.input_ids).argmax())
    ids, weights = forward(m3, items[:1])[0].sparse
    largest = weights[ids.tolist().index(int(batch.input_ids[kafka[0]]))]
    assert len(kafka) == 3 and abs(largest - scores[kafka].max()) <= 1e-5


def test_m3_takes_8192_of_8194_positions(tmp_path: Path) -> None:
    """B09: position 8193 of an item is outside the table; the limit is 8192."""
    spec = load_spec(write_m3(tmp_path / "m", max_position_embeddings=8194))
    assert spec.max_tokens == 8192
    small = make_runner_factory("m", write_m3(tmp_path / "n"))()
    assert small.info.max_tokens == 64
    ids = tuple(5 + i % 40 for i in range(64))
    request = EmbedRequest(id="r", input=(TokenIds(ids), TokenIds((*ids, 5))), outputs=ALL)
    items = small.encoder.encode([request])[0].items
    assert isinstance(items[1], EmbedstreamError) and items[1].limit == 64
    assert forward(small, [items[0]])[0].multivector.shape == (63, 32)


def test_m3_a_single_token_has_no_token_vector(m3: Any) -> None:
    request = EmbedRequest(id="r", input=(TokenIds((5,)), TokenIds((0,))), outputs=ALL)
    for outcome in forward(m3, m3.encoder.encode([request])[0].items):
        assert outcome.multivector.shape == (0, 32) and np.isfinite(outcome.dense).all()
    alone = EmbedRequest(id="r", input=(TokenIds((5,)),), outputs=("multivector",))
    items = m3.encoder.encode([alone])[0].items
    assert forward(m3, items)[0].multivector.shape == (0, 32)


def test_m3_heads_are_read_without_running_anything(tmp_path: Path) -> None:
    """I-cases: a pickle that would run code, another shape, and half a pair are refused by name."""
    folder = write_m3(tmp_path / "m")
    good = (folder / "sparse_linear.pt").read_bytes()

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (folder / "sparse_linear.pt").write_bytes(pickle.dumps({"weight": Evil()}))
    with pytest.raises(ModelLoadError, match=r"sparse_linear\.pt: not a plain state dict"):
        make_runner_factory("m", folder)()
    assert not (tmp_path / "ran").exists()
    torch.save({"weight": torch.zeros(1, 5), "bias": torch.zeros(1)}, folder / "sparse_linear.pt")
    with pytest.raises(ModelLoadError, match=r"sparse_linear\.pt: holds"):
        make_runner_factory("m", folder)()
    (folder / "sparse_linear.pt").write_bytes(good)
    (folder / "colbert_linear.pt").unlink()
    with pytest.raises(ModelLoadError, match="without its other half"):
        load_spec(folder)


def test_lexical_weights_of_1024_features_do_not_depend_on_the_row_count(
    tmp_path: Path,
) -> None:
    """A06: torch's matrix-vector product rounds by the number of rows at this width; ours must not."""
    generator = torch.Generator().manual_seed(0)
    state = {"weight": torch.randn(1, 1024, generator=generator), "bias": torch.full((1,), 99.0)}
    torch.save(state, tmp_path / "sparse_linear.pt")
    lexical = Lexical(LexicalSpec(tmp_path / "sparse_linear.pt", ()), 1024)
    ids = np.arange(200, dtype=np.int32)
    hidden = torch.randn(200, 1024, generator=generator)
    ((_, together),) = lexical(hidden, pack([EncodedItem(ids)]), [0])  # type: ignore[misc]
    for start, n in ((0, 1), (0, 2), (7, 3), (7, 5), (100, 17), (136, 64)):
        part = pack([EncodedItem(ids[start : start + n])])
        ((_, alone),) = lexical(hidden[start : start + n], part, [0])  # type: ignore[misc]
        assert alone.tobytes() == together[start : start + n].tobytes()


def test_a_hub_id_brings_the_extra_heads_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """A10: without them a BGE-M3 would load as a dense model, and nobody would be told."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda path, **kwargs: asked.update(kwargs) or "/x"
    )
    resolve_folder("BAAI/bge-m3", offline=False)
    wanted = {
        "config.json", "1_Pooling/config.json", "model.safetensors", "sparse_linear.pt",
        "colbert_linear.pt", "0_StaticEmbedding/tokenizer.json", "1_Dense/model.safetensors",
        "sentencepiece.bpe.model",
    }  # fmt: skip
    files = [*wanted, "onnx/model.onnx", "pytorch_model.bin", "imgs/a.jpg"]
    assert set(filter_repo_objects(files, allow_patterns=asked["allow_patterns"])) == wanted
    resolve_folder("BAAI/bge-m3", offline=False, allow_pickle=True)  # it has no safetensors
    with_pickle = set(filter_repo_objects(files, allow_patterns=asked["allow_patterns"]))
    assert with_pickle == wanted | {"pytorch_model.bin"}


def test_m3_without_modules_uses_its_librarys_defaults(tmp_path: Path) -> None:
    spec = load_spec(write_m3(tmp_path / "m", modules=False))
    assert (spec.pooling, spec.normalize, spec.outputs) == ("cls", True, ALL)


def test_m3_dimensions_speak_of_the_dense_vector(tmp_path: Path) -> None:
    """A09."""
    folder = write_m3(tmp_path / "m")
    runner = make_runner_factory("m", folder, matryoshka_dimensions=(8,))()
    items = encode(runner, outputs=("dense", "sparse"), dimensions=8).items
    assert forward(runner, items)[0].dense.shape == (8,)
    for outputs in (("dense", "multivector"), ("multivector",), ("sparse",)):
        refused = encode(runner, outputs=outputs, dimensions=8)
        assert isinstance(refused, InvalidDimensions) and refused.path == "$.dimensions"
    assert not isinstance(encode(runner, outputs=ALL, dimensions=32), EmbedstreamError)


def test_m3_gives_the_same_bits_in_any_batch(m3: Any) -> None:
    """A01, A06: dense, sparse and multivector of an item alone and among others: equal bytes."""
    items = encode(m3, [*TEXTS, "river " * 40, "red"], outputs=ALL).items
    alone = [forward(m3, [item])[0] for item in items]
    for order in ([6, 2, 0, 5, 1, 4, 3], [3, 5], [0, 6, 4]):
        for i, one in zip(order, forward(m3, [items[i] for i in order]), strict=True):
            assert one.dense.tobytes() == alone[i].dense.tobytes()
            assert one.sparse[0].tolist() == alone[i].sparse[0].tolist()
            assert one.sparse[1].tobytes() == alone[i].sparse[1].tobytes()
            assert one.multivector.tobytes() == alone[i].multivector.tobytes()
