"""Token-level vectors of ColBERT folders: which tokens give one, prompts as tokens, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import pack, scatter
from gpu.faults import ModelLoadError
from gpu.folder.read import load_spec
from gpu.load import make_runner_factory
from schemas.errors import InvalidDimensions, NonFinite, TooLong, Unsupported
from schemas.requests import Document, EmbedRequest, RerankRequest, Text, TokenIds
from tests.support.models import edit_json
from tests.support.models_outputs import write_colbert

TEXTS = ["hello world", "kafka", "the capital of china is beijing", "x", "a the"]


def encode(runner: Any, texts: list[str] = TEXTS, **fields: Any) -> Any:
    request = EmbedRequest(id="r", input=tuple(Text(t) for t in texts), **fields)
    return runner.encoder.encode([request])[0]


def forward(runner: Any, items: Any) -> list[Any]:
    batch = pack(items)
    return scatter(batch, runner.forward(batch))


@pytest.fixture(scope="module")
def colbert(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_colbert(tmp_path_factory.mktemp("c") / "m", style="pylate", prefixes=True)
    return make_runner_factory("c", folder, matryoshka_dimensions=(4,))()


def test_a_colbert_model_gives_token_vectors_by_default(colbert: Any) -> None:
    info = colbert.info
    assert info.outputs == {"multivector"} and info.default_outputs == ("multivector",)
    assert (info.dimensions, info.multivector_dimensions, info.normalized) == (None, 12, True)
    items = encode(colbert).items
    for item, outcome in zip(items, forward(colbert, items), strict=True):
        vectors = outcome.multivector
        assert vectors.shape == (item.n_tokens, 12) and vectors.dtype == np.float32
        assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() <= 1e-6
        assert outcome.dense is None and outcome.sparse is None


def test_token_vectors_are_the_same_bits_in_any_batch(colbert: Any) -> None:
    """A01, A06: equal bytes alone and among others, in any order."""
    items = encode(colbert, [*TEXTS, "river " * 60]).items
    alone = [forward(colbert, [item])[0].multivector for item in items]
    for order in ([5, 2, 0, 1, 4, 3], [3, 5], [0, 4]):
        for i, one in zip(order, forward(colbert, [items[i] for i in order]), strict=True):
            assert one.multivector.tobytes() == alone[i].tobytes()


def test_sizes_are_checked_and_cut_vectors_have_norm_one(colbert: Any) -> None:
    """A08, A09: 4 of 12 is named by the settings; native is accepted; the rest is refused."""
    items = encode(colbert).items
    full = forward(colbert, items)
    for asked in (4, 12):
        for one, whole in zip(
            forward(colbert, encode(colbert, dimensions=asked).items), full, strict=True
        ):
            cut = whole.multivector[:, :asked]
            expected = cut / np.linalg.norm(cut, axis=1, keepdims=True)
            assert np.abs(one.multivector - expected).max() <= 1e-6
    for asked in (1, 5, 13, 5000):
        refused = encode(colbert, dimensions=asked)
        assert isinstance(refused, InvalidDimensions) and refused.limit == 12
        assert "4, 12" in str(refused)


def test_normalize_off_gives_the_raw_projection(colbert: Any) -> None:
    raw = forward(colbert, encode(colbert, normalize=False).items)[2].multivector
    unit = forward(colbert, encode(colbert).items)[2].multivector
    norm = np.linalg.norm(raw, axis=1, keepdims=True)
    assert np.abs(norm - 1).max() > 0.1
    assert np.abs(raw / norm - unit).max() <= 1e-6


def test_the_prefix_is_one_token_behind_the_first(colbert: Any) -> None:
    """A14: "[Q] " is a token of its own, put there once by the prompt; it survives every cut."""
    tokenizer = colbert.encoder._tokenizer
    q, d = tokenizer.token_to_id("[Q] "), tokenizer.token_to_id("[D] ")
    plain = encode(colbert).items
    for name, token in (("query", q), ("document", d)):
        encoded = encode(colbert, prompt_name=name)
        assert encoded.prompt == f"[{name[0].upper()}] "
        for item, bare in zip(encoded.items, plain, strict=True):
            assert item.input_ids[1] == token
            assert np.delete(item.input_ids, 1).tolist() == bare.input_ids.tolist()
    for side in ("right", "left"):
        item = encode(colbert, ["river " * 200], prompt_name="document", truncate=side).items[0]
        assert item.n_tokens == 128 and item.input_ids[1] == d and item.truncated
    refused = encode(colbert, ["river " * 126], prompt_name="document").items[0]
    assert isinstance(refused, TooLong) and (refused.given, refused.limit) == (129, 128)
    assert encode(colbert, ["river " * 126]).items[0].n_tokens == 128


def test_skipped_tokens_of_documents_give_no_vector_and_queries_keep_theirs(tmp_path: Path) -> None:
    folder = write_colbert(tmp_path / "m", style="pylate", skip=("the", "a"), prefixes=True)
    runner = make_runner_factory("m", folder)()
    document = encode(runner, ["the river a", "river"], prompt_name="document").items
    query = encode(runner, ["the river a", "river"], prompt_name="query").items
    bare = encode(runner, ["the river a"]).items
    assert [o.multivector.shape[0] for o in forward(runner, document)] == [4, 4]
    assert [o.multivector.shape[0] for o in forward(runner, query)] == [6, 4]
    assert forward(runner, bare)[0].multivector.shape[0] == 3
    ids = tuple(runner.encoder._tokenizer.encode("the a", add_special_tokens=False).ids)
    request = EmbedRequest(id="r", input=(TokenIds(ids),))
    nothing = forward(runner, runner.encoder.encode([request])[0].items)[0]
    assert nothing.multivector.shape == (0, 12)


def test_a_bad_row_fails_alone(colbert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A03."""
    real = colbert._forward

    def poisoned(batch: Any) -> Any:
        hidden = real(batch).clone()
        hidden[batch.cu_seqlens[2] - 1] = float("nan")
        return hidden

    monkeypatch.setattr(colbert, "_forward", poisoned)
    outcomes = colbert.forward(pack(encode(colbert).items))
    assert [isinstance(o, NonFinite) for o in outcomes] == [False, True, False, False, False]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"query_expansion": {"strategy": "fixed", "length": 8, "odd": 1}},
            "query_expansion = .*odd",
        ),
        ({"query_expansion": {"strategy": "all", "length": 8}}, "strategies fixed and min"),
        ({"query_expansion": {"strategy": "fixed", "length": 0}}, "length of queries is 0"),
        ({"query_expansion": {"strategy": "min", "length": 9}, "query_length": 8}, "below the 9"),
        ({"query_expansion": {"strategy": "fixed", "length": 8, "token": "zzz"}}, "has none"),
        ({"query_length": 500}, "filled up to 500 tokens, and the model takes 128"),
        ({"query_length": True}, "length of queries is True"),
    ],
)
def test_an_expansion_that_is_not_understood_is_refused_at_load(
    tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    """A10: a query without its mask tokens would be another query; nothing is left out silently."""
    folder = write_colbert(tmp_path / "m", style="pylate", prefixes=True, expand=True)
    edit_json(folder / "config_sentence_transformers.json", **changes)
    with pytest.raises(ModelLoadError, match=what):
        load_spec(folder)


def test_a_window_that_keeps_added_tokens_from_the_query_runs_padded(tmp_path: Path) -> None:
    """A10: ModernBERT's window of 8, queries of 32: as transformers computes them, not packed."""
    folder = write_colbert(tmp_path / "m", "modernbert", style="pylate", expand=True)
    info = make_runner_factory("m", folder)().info
    assert not info.packed and any("leaves nothing to attend to" in note for note in info.notes)


def test_a_model_that_masks_added_tokens_out_altogether_is_refused(tmp_path: Path) -> None:
    """A10: DeBERTa's embeddings and attention rows are zeroed where the mask is; nothing is guessed."""
    folder = write_colbert(
        tmp_path / "m", "deberta-v2", expand={"strategy": "fixed", "length": 24, "attend": False}
    )
    with pytest.raises(ModelLoadError, match="self-check failed packed and padded"):
        make_runner_factory("m", folder)()


def test_documents_are_scored_against_a_query_as_they_are_tokenized_for_vectors(
    colbert: Any,
) -> None:
    """A20, B04: errors name the query and the document; a long query is never cut."""

    def items(query: Any, documents: list[str], **fields: Any) -> Any:
        request = RerankRequest(
            id="r", query=query, documents=tuple(map(Document, documents)), **fields
        )
        return colbert.encoder.encode([request])[0]

    long = "river " * 200
    refused = items(long, ["x"], truncate="right")
    assert isinstance(refused, TooLong) and refused.path == "$.query"
    assert "a query is never cut" in str(refused) and refused.limit == 128
    assert items("", ["x"]).path == "$.query"
    found = items("what", ["x", "", long]).items
    assert [getattr(item, "path", None) for item in found] == [
        None, "$.documents[1]", "$.documents[2]",
    ]  # fmt: skip
    assert isinstance(found[2], TooLong)
    cut = items("what", ["x", long], truncate="right").items
    assert cut[1].n_tokens == 128 and cut[1].truncated
    assert isinstance(items("what", ["x"], instruction="find"), Unsupported)
    refused = items(TokenIds((5, 6)), ["x"])
    assert isinstance(refused, Unsupported) and refused.path == "$.query"
    outcomes = forward(colbert, [cut[0], *encode(colbert, ["x"]).items, cut[1]])
    assert [o.scores is not None for o in outcomes] == [True, False, True]
    assert forward(colbert, [cut[1]])[0].scores.tobytes() == outcomes[2].scores.tobytes()


def test_module_lists_that_are_not_colbert_are_refused(tmp_path: Path) -> None:
    """A10: a Dense without pooling in a folder that does not call itself ColBERT stays refused."""
    folder = write_colbert(tmp_path / "m", style="pylate")
    edit_json(folder / "config_sentence_transformers.json", model_type=None)
    with pytest.raises(ModelLoadError, match=r"Dense.* not supported at this place"):
        load_spec(folder)
    with pytest.raises(ModelLoadError, match="on a ColBERT model"):
        load_spec(write_colbert(tmp_path / "p", style="pylate"), pooling="mean")
    odd = write_colbert(tmp_path / "n", style="st")
    edit_json(odd / "2_MultiVectorMask" / "config.json", keep_only_token_ids=[5])
    with pytest.raises(ModelLoadError, match="keep_only_token_ids"):
        load_spec(odd)
    edit_json(odd / "2_MultiVectorMask" / "config.json", keep_only_token_ids=None)
    edit_json(odd / "1_Dense" / "config.json", in_features=33)
    with pytest.raises(ModelLoadError, match="takes 33 features"):
        load_spec(odd)


def test_the_librarys_document_length_is_the_limit(tmp_path: Path) -> None:
    folder = write_colbert(tmp_path / "m", style="pylate")
    edit_json(folder / "config_sentence_transformers.json", document_length=20)
    assert load_spec(folder).max_tokens == 20
    assert load_spec(folder, max_tokens=100).max_tokens == 100
