"""Long texts: chunks averaged to one vector, spans of one forward; refused where it cannot be done."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from gpu.answer.chunks import equal_spans
from gpu.batch import EncodedItem, EncodedRequest, ItemOptions, ItemResult, pack, scatter
from gpu.encode.long_texts import CHUNKS, MAX_CHUNKS, max_chunks
from schemas.errors import EmbedstreamError, EmptyInput, TooLong, Unsupported
from schemas.requests import EmbedRequest, Text, TokenIds

WORDS = (
    "the",
    "river",
    "of",
    "text",
    "and",
    "queue",
    "to",
    "kafka",
    "in",
    "stream",
    "one",
    "broker",
)


def long_text(n: int) -> str:
    return " ".join(WORDS[i * 5 % len(WORDS)] for i in range(n))


def encode(runner: Any, *inputs: Any, **fields: Any) -> Any:
    made = tuple(Text(i) if isinstance(i, str) else i for i in inputs)
    return runner.encoder.encode([EmbedRequest(id="r", input=made, **fields)])[0]


def answer(runner: Any, items: Any) -> list[Any]:
    batch = pack(list(items))
    return scatter(batch, runner.forward(batch))


def vectors(runner: Any, *inputs: Any, **fields: Any) -> list[np.ndarray]:
    encoded = encode(runner, *inputs, **fields)
    assert isinstance(encoded, EncodedRequest), encoded
    out = answer(runner, encoded.items)
    assert all(isinstance(o, ItemResult) for o in out), out
    return [o.dense for o in out]


@pytest.fixture
def short(load: Any) -> Any:
    return load("bert", pooling="mean", max_seq_length=16)


def test_chunks_are_averaged_by_their_tokens_and_renormalised(short: Any) -> None:
    """B20: specials in every chunk, real tokens counted, weights by length, fp32, unit length."""
    text = long_text(40)
    (item,) = encode(short, text, aggregate="mean").items
    assert item.extras[CHUNKS] == (16, 16, 14) and item.n_tokens == 46 and not item.truncated
    first, last = short.encoder._template.prefix, short.encoder._template.suffix
    parts = np.split(item.input_ids, [16, 32])
    for part in parts:
        assert part[0] == first[0] and part[-1] == last[0]
    body = np.concatenate([part[1:-1] for part in parts])
    whole = short.encoder._tokenizer.encode(text, add_special_tokens=False).ids
    assert body.tolist() == whole
    alone = [o.dense for o in answer(short, [EncodedItem(p.copy()) for p in parts])]
    expected = sum(v * n for v, n in zip(alone, (16, 16, 14), strict=True)) / 46
    expected /= np.linalg.norm(expected)
    (got,) = vectors(short, text, aggregate="mean")
    assert np.abs(got - expected).max() <= 1e-6
    assert abs(np.linalg.norm(got) - 1) <= 1e-6


def test_a_text_that_fits_gets_its_ordinary_bytes(short: Any) -> None:
    text = long_text(14)  # exactly the limit with its two special tokens
    assert CHUNKS not in encode(short, text, aggregate="mean").items[0].extras
    assert np.array_equal(vectors(short, text, aggregate="mean")[0], vectors(short, text)[0])


def test_an_averaged_vector_does_not_depend_on_its_neighbours(short: Any) -> None:
    """A06, A07: with other long and short items in the batch, in any order, the same bytes."""
    texts = [long_text(n) for n in (40, 5, 100, 3, 15, 14)]
    alone = [vectors(short, text, aggregate="mean")[0] for text in texts]
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 4, 0, 3, 1], [2, 0]):
        got = vectors(short, *(texts[i] for i in order), aggregate="mean")
        assert all(np.array_equal(g, alone[i]) for g, i in zip(got, order, strict=True))


def test_the_token_budget_holds_for_every_pass_over_the_device(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load("bert", {"max_batch_tokens": 40}, pooling="mean", max_seq_length=16)
    seen: list[int] = []
    original = runner._compute
    monkeypatch.setattr(
        runner, "_compute", lambda batch: (seen.append(batch.n_tokens), original(batch))[1]
    )
    vectors(runner, long_text(200), long_text(7), aggregate="mean")
    assert len(seen) > 4 and max(seen) <= 40


def test_dimensions_cut_the_average_before_it_is_normalised(load: Any) -> None:
    """A08: unit length after the cut."""
    runner = load("bert", {"matryoshka_dimensions": (8, 32)}, pooling="mean", max_seq_length=16)
    full = vectors(runner, long_text(50), aggregate="mean", normalize=False)[0]
    cut = vectors(runner, long_text(50), aggregate="mean", normalize=False, dimensions=8)[0]
    assert np.array_equal(full[:8], cut)
    unit = vectors(runner, long_text(50), aggregate="mean", dimensions=8)[0]
    assert unit.shape == (8,) and abs(np.linalg.norm(unit) - 1) <= 1e-6


def test_chunks_are_bounded_in_tokens_too() -> None:
    """A long-context model must not hold an executor thread for half a million tokens."""
    assert [max_chunks(n) for n in (16, 256, 512, 1024, 8192, 32768, 131072)] == [
        64, 64, 64, 64, 8, 2, 2,
    ]  # fmt: skip


@pytest.mark.parametrize("include_prompt", [True, False])
def test_every_chunk_has_the_prompt(load: Any, include_prompt: bool) -> None:
    runner = load(
        "bert",
        pooling="mean",
        max_seq_length=16,
        prompts={"query": "query: "},
        include_prompt=include_prompt,
    )
    (item,) = encode(runner, long_text(30), aggregate="mean", prompt_name="query").items
    prompt = runner.encoder._tokenizer.encode("query: ", add_special_tokens=False).ids
    parts = np.split(item.input_ids, np.cumsum(item.extras[CHUNKS])[:-1])
    assert len(parts) == 3
    for part in parts:
        assert part[1 : 1 + len(prompt)].tolist() == prompt
    assert item.pooled_from == (0 if include_prompt else 1 + len(prompt))


def test_verbatim_ids_keep_their_own_ends(short: Any) -> None:
    ids = (2, *range(10, 50), 3)
    (item,) = encode(short, TokenIds(ids), aggregate="mean").items
    parts = np.split(item.input_ids, np.cumsum(item.extras[CHUNKS])[:-1])
    assert all(part[0] == 2 and part[-1] == 3 and len(part) <= 16 for part in parts)
    assert np.concatenate([part[1:-1] for part in parts]).tolist() == list(range(10, 50))


def test_too_many_chunks_are_too_long_for_that_item_alone(short: Any) -> None:
    """B03, B10: given and limit are told; the neighbour is answered, and so is the longest allowed."""
    most = 14 * MAX_CHUNKS
    over, fine = encode(short, long_text(most + 1), long_text(most), aggregate="mean").items
    assert isinstance(over, TooLong) and (over.given, over.limit) == (most + 1, most)
    assert over.items == (0,)
    assert isinstance(fine, EncodedItem) and len(fine.extras[CHUNKS]) == MAX_CHUNKS
    (empty,) = encode(short, "", aggregate="mean").items
    assert isinstance(empty, EmptyInput)


def test_a_chunk_that_is_not_finite_fails_its_item_alone(
    short: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A03: one NaN among the chunks never reaches the average of another item."""
    original = short._forward.__call__

    class Spoiled:
        def __call__(self, batch: Any) -> Any:
            hidden = original(batch)
            for row, item in enumerate(batch.items):
                if 12 in item.input_ids:
                    hidden[int(batch.cu_seqlens[row])] = float("nan")
            return hidden

    monkeypatch.setattr(short, "_forward", Spoiled())
    poisoned = TokenIds((2, *([11] * 20), 12, *([11] * 20), 3))
    encoded = encode(short, long_text(40), poisoned, aggregate="mean")
    good, bad = answer(short, encoded.items)
    assert isinstance(good, ItemResult) and good.dense is not None
    assert isinstance(bad, EmbedstreamError) and bad.code == "non_finite"


# ------------------------------------------------------------------------------------ late chunking


def late(runner: Any, text: str, chunk_tokens: int, **fields: Any) -> Any:
    encoded = encode(runner, text, chunk_tokens=chunk_tokens, **fields)
    return answer(runner, encoded.items)[0]


def test_late_chunks_are_means_of_spans_of_one_forward(load: Any) -> None:
    import torch

    runner = load("bert", pooling="mean")
    text = long_text(50)
    outcome = late(runner, text, 20)
    assert outcome.dense is None and outcome.multivector.shape == (3, 32)
    assert outcome.spans == ((0, 17), (17, 34), (34, 52))
    (item,) = encode(runner, text).items
    with torch.inference_mode():
        hidden = runner._forward(pack([item])).double().numpy()
    for (start, end), row in zip(outcome.spans, outcome.multivector, strict=True):
        mean = hidden[start:end].mean(0)
        assert np.abs(row - mean / np.linalg.norm(mean)).max() <= 1e-6


def test_one_late_chunk_is_the_ordinary_vector(load: Any) -> None:
    runner = load("bert", pooling="mean")
    outcome = late(runner, long_text(30), 1000)
    assert outcome.spans == ((0, 32),)
    assert np.array_equal(outcome.multivector[0], vectors(runner, long_text(30))[0])


def test_late_chunks_have_the_same_bytes_in_any_batch(load: Any) -> None:
    runner = load("bert", pooling="mean")
    alone = late(runner, long_text(50), 7)
    (item,) = encode(runner, long_text(50), chunk_tokens=7).items
    others = encode(runner, *(long_text(n) for n in (3, 50, 52, 60))).items
    mixed = answer(runner, [others[0], item, *others[1:], item])
    for outcome in (mixed[1], mixed[-1]):
        assert np.array_equal(outcome.multivector, alone.multivector)
    assert mixed[0].dense is not None and mixed[0].multivector is None


def test_late_chunks_leave_out_a_prompt_that_is_not_pooled(load: Any) -> None:
    runner = load("bert", pooling="mean", prompts={"query": "query: "}, include_prompt=False)
    outcome = late(runner, long_text(20), 10, prompt_name="query")
    n_prompt = len(runner.encoder._tokenizer.encode("query: ", add_special_tokens=False).ids)
    assert outcome.spans[0][0] == 1 + n_prompt


def test_spans_cover_everything_once_and_differ_by_one_at_most() -> None:
    for length in range(1, 60):
        for size in (1, 2, 7, 59, 100):
            spans = equal_spans(0, length, size)
            assert spans[0][0] == 0 and spans[-1][1] == length
            assert all(a[1] == b[0] for a, b in pairwise(spans))
            lengths = [b - a for a, b in spans]
            assert max(lengths) <= size and max(lengths) - min(lengths) <= 1


def test_models_that_cannot_do_it_refuse_by_name(load: Any) -> None:
    cls = load("bert", pooling="cls")
    error = encode(cls, "text", chunk_tokens=8)
    assert isinstance(error, Unsupported) and error.path == "$.chunk_tokens"
    assert "cls" in str(error)
    assert isinstance(encode(cls, long_text(300), aggregate="mean"), EncodedRequest)
    scorer = load("bert", labels=1)
    assert isinstance(encode(scorer, "text", aggregate="mean"), Unsupported)


def test_without_either_a_long_text_is_too_long(short: Any) -> None:
    """B03: nothing is averaged that was not asked for."""
    assert isinstance(encode(short, long_text(40)).items[0], TooLong)
    assert ItemOptions().chunk_tokens is None
