"""The encoder: ids, cuts, empties, refusals; all on tiny tokenizers."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from gpu.encode.folder_tokenizer import load_encoder
from gpu.encode.text import TextEncoder
from gpu.faults import ModelLoadError
from gpu.folder.read import load_spec
from schemas.errors import (
    EmbedstreamError,
    EmptyInput,
    InvalidDimensions,
    InvalidRequest,
    ModelError,
    TooLong,
    Unsupported,
)
from schemas.requests import (
    ClassifyRequest,
    Document,
    EmbedRequest,
    Image,
    RerankRequest,
    ScoreRequest,
    Text,
    TokenIds,
)
from tests.support.models import _bytes, edit_json, write_model, write_tokenizer


def embed(*items: Any, **fields: Any) -> EmbedRequest:
    return EmbedRequest(
        id="r", input=tuple(Text(i) if isinstance(i, str) else i for i in items), **fields
    )


def rerank(query: str, *documents: str, **fields: Any) -> RerankRequest:
    return RerankRequest(
        id="r", query=query, documents=tuple(Document(d) for d in documents), **fields
    )


def one(encoder: TextEncoder, request: Any) -> Any:
    return encoder.encode([request])[0]


@pytest.fixture(scope="module")
def bert(load: Any) -> TextEncoder:
    return load("bert", max_seq_length=32).encoder


@pytest.fixture(scope="module")
def cross(load: Any) -> TextEncoder:
    return load("bert", labels=1).encoder


def reference(encoder: TextEncoder) -> Tokenizer:
    """The folder's own tokenizer, untouched but for padding and truncation."""
    tokenizer = Tokenizer.from_file(str(encoder.spec.folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


WORDS_30 = "the " * 30  # one token each; with [CLS] and [SEP] exactly the limit of 32


def test_ids_are_those_of_the_folders_tokenizer_in_input_order(bert: TextEncoder) -> None:
    """A07."""
    texts = ["hello world", "kafka redis stream!", "Ärger 漢字 x9", "the"]
    encoded = one(bert, embed(*texts))
    for text, item in zip(texts, encoded.items, strict=True):
        assert item.input_ids.tolist() == reference(bert).encode(text).ids
        assert item.token_type_ids is None and not item.truncated


def test_one_tokenizer_call_for_all_texts_of_all_requests(bert: TextEncoder) -> None:
    """C12."""
    calls: list[int] = []
    inner = bert._batch

    def counting(texts: list[str], **kwargs: Any) -> Any:
        calls.append(len(texts))
        return inner(texts, **kwargs)

    bert._batch = counting
    try:
        bert.encode([embed(*["hello"] * 16), embed("world", "kafka")])
    finally:
        bert._batch = inner
    assert calls == [18]


@pytest.mark.parametrize("n", [3, 126, 127, 198])
def test_padding_and_truncation_of_tokenizer_json_are_reset(tmp_path: Path, n: int) -> None:
    """A23: a tokenizer.json that pads and cuts to 128 neither pads nor cuts here."""
    folder = write_model(tmp_path / "m", "bert", max_position_embeddings=300)
    path = str(folder / "tokenizer.json")
    baked = Tokenizer.from_file(path)
    baked.enable_padding(length=128)
    baked.enable_truncation(128)
    baked.save(path)
    item = one(load_encoder(load_spec(folder)), embed("the " * n)).items[0]
    assert item.n_tokens == n + 2


def test_lengths_stay_exact_with_two_encoders_in_two_threads(tmp_path: Path) -> None:
    """B15: every thread owns its tokenizer, and no call changes its settings."""
    folder = write_model(tmp_path / "m", "bert")
    wrong: list[int] = []

    def work(limit: int) -> None:
        encoder = load_encoder(load_spec(folder, max_tokens=limit))
        for _ in range(100):
            item = one(encoder, embed("the " * 300, truncate="right")).items[0]
            if item.n_tokens != limit:
                wrong.append(item.n_tokens)

    threads = [threading.Thread(target=work, args=(limit,)) for limit in (32, 128)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_limit_is_accepted_and_limit_plus_one_is_not(bert: TextEncoder) -> None:
    """B05."""
    encoded = one(bert, embed("the " * 29, WORDS_30, "the " * 31))
    assert [item.n_tokens for item in encoded.items[:2]] == [31, 32]
    error = encoded.items[2]
    assert isinstance(error, TooLong)


def test_too_long_says_what_was_given_and_what_to_do(bert: TextEncoder) -> None:
    """B03, D06."""
    error = one(bert, embed("hello", "the " * 50)).items[1]
    assert isinstance(error, TooLong)
    assert (error.given, error.limit, error.items) == (52, 32, (1,))
    assert "truncate" in error.message and "the the" not in error.message


@pytest.mark.parametrize("side", ["right", "left"])
def test_cuts_keep_special_tokens_and_say_so(bert: TextEncoder, side: str) -> None:
    """B04, B16."""
    text = "hello " + "the " * 60 + "world"
    item = one(bert, embed(text, truncate=side)).items[0]
    whole = reference(bert).encode(text).ids
    kept = whole[1:31] if side == "right" else whole[-31:-1]
    assert item.input_ids.tolist() == [whole[0], *kept, whole[-1]]
    assert item.truncated


def test_truncate_is_the_same_for_one_text_and_for_a_list(bert: TextEncoder) -> None:
    """B01."""
    text = "hello world" * 7777
    alone = one(bert, embed(text, truncate="right")).items[0]
    listed = one(bert, embed("the", text, truncate="right")).items[1]
    assert alone.input_ids.tolist() == listed.input_ids.tolist()


def test_a_long_text_is_cut_by_tokens_not_by_characters(bert: TextEncoder) -> None:
    """B02."""
    item = one(bert, embed("hello world " * 6000, truncate="right")).items[0]
    assert item.n_tokens == 32


def test_the_last_token_is_the_end_token_after_a_cut(load: Any) -> None:
    """B16, A14: last-token pooling reads the end token, which is there once."""
    encoder = load("qwen3", pooling="lasttoken", max_seq_length=20).encoder
    end = encoder.spec.config["eos_token_id"]
    for text in ("hello", "hello <|endoftext|>", "the " * 60):
        for side in ("right", "left"):
            ids = one(encoder, embed(text, truncate=side)).items[0].input_ids.tolist()
            assert ids[-1] == end and ids.count(end) == 1


@pytest.mark.parametrize(
    "text", ["[SEP] [CLS] hi", "</s>", "[MASK]", "x [SEP] y"]
)  # B18: also inside a document, where it would fake the boundary
def test_user_text_never_becomes_a_control_token(
    bert: TextEncoder, cross: TextEncoder, text: str
) -> None:
    """B18."""
    control = {0, 2, 3, 4}  # [PAD] [CLS] [SEP] [MASK]
    ids = one(bert, embed(text)).items[0].input_ids.tolist()
    assert not control & set(ids[1:-1])
    pair = one(cross, rerank("query", text)).items[0].input_ids.tolist()
    assert [i for i in pair if i in control] == [2, 3, 3]


def test_markers_with_bars_stay_text(load: Any) -> None:
    """B18."""
    encoder = load("qwen3", pooling="lasttoken", max_seq_length=40).encoder
    ids = one(encoder, embed("a<|endoftext|>b")).items[0].input_ids.tolist()
    assert ids.count(encoder.spec.config["eos_token_id"]) == 1


@pytest.mark.parametrize("text", ["", " ", "\n\t", "​", "﻿"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_empty_text_is_its_own_error(bert: TextEncoder, text: str, place: int) -> None:
    """B10, B11, B12: n results for n items, wherever the empty one stands."""
    texts = ["hello", "world"]
    texts.insert(place, text)
    items = one(bert, embed(*texts)).items
    assert len(items) == 3
    for i, item in enumerate(items):
        assert isinstance(item, EmptyInput) == (i == place)
    assert items[place].items == (place,)


def test_empty_may_be_embedded_when_asked(tmp_path: Path) -> None:
    """B10."""
    folder = write_model(tmp_path / "m", "bert")
    encoder = load_encoder(load_spec(folder), empty_input="embed")
    assert one(encoder, embed("")).items[0].input_ids.tolist() == [2, 3]


def test_a_tokenizer_without_special_tokens_gives_no_empty_segment(tmp_path: Path) -> None:
    """B12: zero tokens are flagged even where empty texts are to be embedded."""
    folder = write_model(tmp_path / "m", "llama", pooling="lasttoken")
    bare, names = _bytes(end=False)
    write_tokenizer(folder, bare, names)
    encoder = load_encoder(load_spec(folder), empty_input="embed")
    items = one(encoder, embed("a", "")).items
    assert items[0].n_tokens == 1 and isinstance(items[1], EmptyInput)
    assert [type(i) for i in one(encoder, embed("", "a")).items] == [EmptyInput, type(items[0])]


def test_a_lone_surrogate_costs_nobody(bert: TextEncoder) -> None:
    """B13."""
    items = one(bert, embed("hello", "a\ud800b", "world")).items
    assert not any(isinstance(item, EmbedstreamError) for item in items)
    assert items[0].input_ids.tolist() == reference(bert).encode("hello").ids
    assert items[1].input_ids.tolist() == reference(bert).encode("a�b").ids


def test_token_ids_are_used_verbatim_and_range_checked(bert: TextEncoder) -> None:
    """B19."""
    size = bert.spec.config["vocab_size"]
    items = one(
        bert, embed(TokenIds((5, 6)), TokenIds((size,)), TokenIds((-1,)), TokenIds(()), "the")
    ).items
    assert items[0].input_ids.tolist() == [5, 6] and items[0].input_ids.dtype == np.int32
    assert isinstance(items[1], InvalidRequest) and items[1].limit == size - 1
    assert isinstance(items[2], InvalidRequest)
    assert isinstance(items[3], EmptyInput)
    assert items[4].n_tokens == 3


def test_too_many_token_ids_follow_the_same_policy(bert: TextEncoder) -> None:
    """B19."""
    ids = TokenIds((2, *range(10, 60), 3))
    assert isinstance(one(bert, embed(ids)).items[0], TooLong)
    cut = one(bert, embed(ids, truncate="right")).items[0]
    assert cut.input_ids.tolist() == [2, *range(10, 40), 3] and cut.truncated
    left = one(bert, embed(ids, truncate="left")).items[0]
    assert left.input_ids.tolist() == [2, *range(30, 60), 3]
    plain = one(bert, embed(TokenIds(tuple(range(10, 60))), truncate="left")).items[0]
    assert plain.input_ids.tolist() == list(range(28, 60))


def test_tokens_used_are_real_tokens(bert: TextEncoder) -> None:
    """B20."""
    assert one(bert, embed("hello")).items[0].n_tokens == 3


@pytest.mark.parametrize("n", [64, 65])
def test_roberta_positions_leave_two_places_unused(load: Any, n: int) -> None:
    """B09: max_position_embeddings 66 means 64 tokens, enforced before the forward."""
    encoder = load("xlm-roberta", pooling="cls").encoder
    assert encoder.limit == 64
    item = one(encoder, embed(TokenIds((5,) * n))).items[0]
    assert isinstance(item, TooLong) == (n == 65)
    pair = load("xlm-roberta", labels=1).encoder
    items = one(pair, rerank(*(" ".join(["the"] * n) for n in (30, 30, 31)))).items
    assert items[0].n_tokens == 64 and isinstance(items[1], TooLong)


@pytest.mark.parametrize("side", ["right", "left"])
def test_only_the_document_is_cut_and_segments_follow(cross: TextEncoder, side: str) -> None:
    """A19, A20: query and closing tokens stay, the segment boundary is right on either side."""
    query, document = "kafka stream", " ".join(["hello", *["the"] * 200, "world"])
    item = one(cross, rerank(query, "short", document, truncate=side)).items[1]
    tokenizer = reference(cross)
    a = tokenizer.encode(query, add_special_tokens=False).ids
    b = tokenizer.encode(document, add_special_tokens=False).ids
    room = cross.limit - 3 - len(a)
    kept = b[:room] if side == "right" else b[-room:]
    assert item.input_ids.tolist() == [2, *a, 3, *kept, 3]
    assert item.token_type_ids.tolist() == [0] * (len(a) + 2) + [1] * (room + 1)
    assert item.truncated


def test_a_query_is_never_cut(cross: TextEncoder) -> None:
    """A20."""
    refused = one(cross, rerank("the " * 125, "hello", truncate="right"))
    assert isinstance(refused, TooLong) and refused.path == "$.query"
    fits = one(cross, rerank("the " * 124, "hello world", truncate="right"))
    assert fits.items[0].n_tokens == cross.limit and fits.items[0].truncated


def test_pairs_equal_the_tokenizers_own(cross: TextEncoder, load: Any) -> None:
    for encoder in (cross, load("xlm-roberta", labels=1).encoder):
        item = one(encoder, rerank("hello world", "kafka redis")).items[0]
        own = reference(encoder).encode("hello world", "kafka redis")
        assert item.input_ids.tolist() == own.ids
        types = [0] * item.n_tokens if item.token_type_ids is None else item.token_type_ids.tolist()
        assert types == own.type_ids


def test_rerank_of_empty_texts(cross: TextEncoder) -> None:
    """B10 for pairs: an empty document is its item's error, an empty query the request's."""
    items = one(cross, rerank("query", "hello", " ")).items
    assert isinstance(items[1], EmptyInput) and items[0].n_tokens > 0
    assert isinstance(one(cross, rerank("", "hello")), EmptyInput)


def test_two_labels_are_no_score(load: Any) -> None:
    """A18: rerank and score on a two-label head are refused with the reason; classify is not."""
    encoder = load("bert", labels=2).encoder
    for request in (rerank("query", "hello"), ScoreRequest(id="r", query="q", documents=())):
        refused = one(encoder, request)
        assert isinstance(refused, Unsupported) and "2 labels" in refused.message
    good = one(encoder, ClassifyRequest(id="r", input=(Text("hello"),)))
    assert good.items[0].options.task == "classify"


def test_tasks_outputs_images_and_instructions_are_refused_by_name(
    bert: TextEncoder, cross: TextEncoder
) -> None:
    assert "embed" in one(bert, rerank("q", "d")).message
    assert isinstance(one(cross, embed("hello")), Unsupported)
    sparse = one(bert, embed("hello", outputs=("dense", "sparse")))
    assert isinstance(sparse, Unsupported) and "sparse" in sparse.message
    items = one(bert, embed("hello", Image(b"\x89PNG"))).items
    assert items[0].n_tokens == 3 and isinstance(items[1], Unsupported)
    told = one(cross, rerank("q", "d", instruction="be kind"))
    assert isinstance(told, Unsupported) and told.path == "$.instruction"


@pytest.mark.parametrize(
    ("asked", "good"),
    [(0, False), (-1, False), (1, False), (16, True), (31, False), (32, True), (33, False)],
)
def test_a_matryoshka_model_takes_its_sizes_only(load: Any, asked: int, good: bool) -> None:
    """A09."""
    encoder = load("bert", settings={"matryoshka_dimensions": (8, 16)}).encoder
    result = one(encoder, embed("hello", dimensions=asked))
    assert isinstance(result, InvalidDimensions) != good
    if not good:
        assert "8, 16, 32" in result.message and result.given == asked


@pytest.mark.parametrize(("asked", "good"), [(0, False), (16, False), (32, True), (5000, False)])
def test_another_model_takes_its_native_size_only(
    bert: TextEncoder, asked: int, good: bool
) -> None:
    """A09."""
    result = one(bert, embed("hello", dimensions=asked))
    assert isinstance(result, InvalidDimensions) != good


def test_prompts_are_chosen_by_the_request_and_echoed(load: Any) -> None:
    """A13."""
    encoder = load("bert", prompts={"query": "query: ", "passage": "passage: "}).encoder
    plain = one(encoder, embed("hello"))
    query = one(encoder, embed("hello", prompt_name="query"))
    own = one(encoder, embed("hello", prompt="answer "))
    assert (plain.prompt, query.prompt, own.prompt) == (None, "query: ", "answer ")
    tokenizer = reference(encoder)
    assert query.items[0].input_ids.tolist() == tokenizer.encode("query: hello").ids
    assert own.items[0].input_ids.tolist() == tokenizer.encode("answer hello").ids
    unknown = one(encoder, embed("hello", prompt_name="nope"))
    assert isinstance(unknown, Unsupported) and "passage, query" in unknown.message


def test_the_default_prompt_is_used_echoed_and_can_be_switched_off(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "bert", prompts={"query": "query: "})
    edit_json(folder / "config_sentence_transformers.json", default_prompt_name="query")
    encoder = load_encoder(load_spec(folder))
    assert one(encoder, embed("hello")).prompt == "query: "
    off = one(encoder, embed("hello", prompt=""))
    assert off.prompt == "" and off.items[0].n_tokens == 3


def test_a_prompt_can_be_left_out_of_the_mean(load: Any) -> None:
    encoder = load("bert", prompts={"query": "query: "}, include_prompt=False).encoder
    item = one(encoder, embed("hello world", prompt_name="query")).items[0]
    assert item.pooled_from == 3  # [CLS] query :
    assert one(encoder, embed("hello world")).items[0].pooled_from == 0


def test_a_prompt_does_not_fill_an_empty_text(load: Any) -> None:
    """B10."""
    encoder = load("bert", prompts={"query": "query: "}, include_prompt=False).encoder
    items = one(encoder, embed("", " ", "hello", prompt_name="query")).items
    assert [isinstance(i, EmptyInput) for i in items] == [True, True, False]


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "qwen3"])
def test_a_megabyte_without_spaces_is_cut_in_bounded_time(load: Any, family: str) -> None:
    """C08: 1 MB of one letter, of CJK, of base64: tokenized whole, then cut. The bound is loose
    (a quadratic tokenizer would need hours); measured: 0.2 to 0.6 s per MB."""
    encoder = load(family, pooling="cls").encoder
    texts = ["a" * 1_000_000, "漢字" * 166_000, "QUJDREVGabc0+/" * 71_000]
    started = time.monotonic()
    items = one(encoder, embed(*texts, truncate="right")).items
    assert time.monotonic() - started < 30
    assert all(item.n_tokens <= encoder.limit for item in items)


def test_many_requests_at_once_keep_their_order_and_errors(bert: TextEncoder) -> None:
    """B06."""
    requests = [embed("hello"), embed("x", dimensions=7), embed("", "world"), rerank("q", "d")]
    results = bert.encode(requests)
    assert results[0].items[0].n_tokens == 3
    assert isinstance(results[1], InvalidDimensions)
    assert isinstance(results[2].items[0], EmptyInput) and results[2].items[1].n_tokens == 3
    assert isinstance(results[3], Unsupported)
    assert bert.encode([]) == []
    assert one(bert, embed()).items == ()


def test_a_limit_without_room_for_content_is_refused_at_load(tmp_path: Path) -> None:
    """B17: special tokens alone would fill every item."""
    folder = write_model(tmp_path / "m", "bert")
    with pytest.raises(ModelLoadError, match="leaves no room"):
        load_encoder(load_spec(folder, max_tokens=3))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "bert")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_encoder(load_spec(folder))


def test_a_panic_of_the_tokenizer_costs_its_text_only(
    bert: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never an exception for what a sender may cause: a panic is no `Exception` in Python."""
    PanicException = type("PanicException", (BaseException,), {})
    inner = bert._batch

    def panics(texts: list[str], **kwargs: Any) -> Any:
        if any("boom" in text for text in texts):
            raise PanicException("index out of bounds")
        return inner(texts, **kwargs)

    monkeypatch.setattr(bert, "_batch", panics)
    good, bad, other = one(bert, embed("hello", "boom", "world")).items
    assert good.n_tokens == other.n_tokens == 3
    assert isinstance(bad, ModelError) and "boom" not in bad.message


def test_ids_alone_get_no_prompt_and_echo_none(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "bert", prompts={"query": "query: "})
    edit_json(folder / "config_sentence_transformers.json", default_prompt_name="query")
    encoded = one(load_encoder(load_spec(folder)), embed(TokenIds((5, 6))))
    assert encoded.prompt is None and encoded.items[0].input_ids.tolist() == [5, 6]
