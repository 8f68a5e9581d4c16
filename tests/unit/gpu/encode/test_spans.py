"""Late chunking where the sender cuts: vectors of spans against transformers, alone and in any pack."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.answer.outputs import spans_of
from gpu.batch import EncodedItem, ItemResult
from gpu.encode.control import ControlTokens
from gpu.encode.spans import SPANS
from gpu.load import make_runner_factory
from schemas.errors import InvalidRequest, TooLong, Unsupported
from schemas.requests import EmbedRequest, Text
from tests.support.models import write_model
from tests.unit.gpu.encode.test_control import control_of, word_level
from tests.unit.gpu.encode.test_long_texts import answer, encode, long_text, vectors

PARTS = (
    "The river of text. ",
    "A queue, and a broker!\n\n",
    "One stream in kafka; ",
    "to the river",
)
TEXT = "".join(PARTS)


def spans_of_parts(parts: tuple[str, ...] = PARTS) -> tuple[tuple[int, int], ...]:
    """Where the parts lie, without the white space behind them."""
    at, found = 0, []
    for part in parts:
        found.append((at, at + len(part.rstrip())))
        at += len(part)
    return tuple(found)


SPANNED = Text(TEXT, spans_of_parts())


def late(runner: Any, item: Text = SPANNED, **fields: Any) -> ItemResult:
    (outcome,) = answer(runner, encode(runner, item, **fields).items)
    assert isinstance(outcome, ItemResult), outcome
    assert outcome.multivector is not None and outcome.dense is None
    return outcome


def reference(folder: Path, text: str, spans: Any, prompt: str = "") -> np.ndarray:
    """Hidden states of the whole document by transformers, the mean over each span, normalised.

    The special tokens and the prompt count for the chunk that begins, or ends, where the text does."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModel

    encoding = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt + text)
    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        ids = torch.tensor([encoding.ids])
        states = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    rows = []
    for start, end in spans:
        a, b = start + len(prompt), end + len(prompt)
        inside = [
            i
            for i, (x, y) in enumerate(encoding.offsets)
            if x < b and y > a and not encoding.special_tokens_mask[i]
        ]
        first = 0 if start == 0 else inside[0]
        last = len(encoding.ids) if end == len(text) else inside[-1] + 1
        mean = states[first:last].double().mean(0)
        rows.append((mean / mean.norm()).float().numpy())
    return np.stack(rows)


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "modernbert", "qwen3"])
@pytest.mark.parametrize("prompt", ["", "passage: "])
def test_each_span_is_the_mean_of_its_tokens_in_the_whole_document(
    tmp_path: Path, family: str, prompt: str
) -> None:
    folder = write_model(tmp_path / "m", family, pooling="mean")
    runner = make_runner_factory("m", folder)()
    outcome = late(runner, prompt=prompt or None)
    wanted = reference(folder, TEXT, SPANNED.spans, prompt)
    assert outcome.multivector is not None and outcome.multivector.shape == wanted.shape
    assert np.abs(outcome.multivector - wanted).max() <= 1e-5
    plain = vectors(runner, *(part.strip() for part in PARTS), prompt=prompt or None)
    assert np.abs(np.stack(plain) - wanted).max() > 1e-3, "the surroundings change a chunk"


@pytest.mark.parametrize("settings_", [{}, {"include_prompt": False}, {"dense": 8}])
def test_one_span_over_all_is_the_ordinary_vector(load: Any, settings_: dict[str, Any]) -> None:
    """Dense modules work on the pooled vector, as they do for a text."""
    runner = load("bert", pooling="mean", prompts={"p": "query: "}, **settings_)
    outcome = late(runner, Text(TEXT, ((0, len(TEXT)),)), prompt_name="p")
    (ordinary,) = vectors(runner, TEXT, prompt_name="p")
    assert outcome.multivector is not None and np.array_equal(outcome.multivector[0], ordinary)


def test_a_prompt_that_is_not_pooled_is_in_no_span(load: Any) -> None:
    runner = load("bert", pooling="mean", prompts={"p": "query: "}, include_prompt=False)
    outcome = late(runner, prompt_name="p")
    n_prompt = len(runner.encoder._tokenizer.encode("query: ", add_special_tokens=False).ids)
    assert outcome.spans is not None and outcome.spans[0][0] == 1 + n_prompt


def test_spans_have_the_same_bytes_in_any_pack(load: Any) -> None:
    runner = load("bert", pooling="mean")
    alone = late(runner)
    (item,) = encode(runner, SPANNED).items
    others = encode(runner, *(long_text(n) for n in (3, 21, 22, 60))).items
    mixed = answer(runner, [others[0], item, *others[1:], item])
    for outcome in (mixed[1], mixed[-1]):
        assert np.array_equal(outcome.multivector, alone.multivector)
        assert outcome.spans == alone.spans
    assert mixed[0].dense is not None and mixed[0].multivector is None


def test_sizes_and_norms_are_those_of_the_request(load: Any) -> None:
    runner = load("bert", {"matryoshka_dimensions": (8,)}, pooling="mean")
    whole, cut, raw = late(runner), late(runner, dimensions=8), late(runner, normalize=False)
    assert whole.multivector is not None and cut.multivector is not None
    assert raw.multivector is not None
    assert cut.multivector.shape == (len(PARTS), 8)
    expected = whole.multivector[:, :8]
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.abs(cut.multivector - expected).max() <= 1e-6
    norms = np.linalg.norm(raw.multivector, axis=1)
    assert np.abs(raw.multivector / norms[:, None] - whole.multivector).max() <= 1e-6


def test_what_cannot_be_answered_is_an_error_of_that_item_with_its_path(load: Any) -> None:
    """B03: never cut; a span of blanks holds nothing to average."""
    runner = load("bert", pooling="mean", max_seq_length=16)
    long = long_text(40)
    too_long, blank, fine = encode(
        runner, Text(long, ((0, 3),)), Text("a   b", ((0, 1), (2, 3))), Text("a b", ((0, 1),))
    ).items
    assert isinstance(too_long, TooLong) and too_long.items == (0,)
    assert isinstance(blank, InvalidRequest)
    assert (blank.path, blank.items) == ("$.input[1].spans[1]", (1,))
    assert isinstance(fine, EncodedItem) and spans_of(fine) == [(0, 2)]
    (odd,) = encode(runner, Text("a \ud800 b", ((0, 1),))).items
    assert not isinstance(odd, EncodedItem) and odd.code == "model_error"


def test_models_that_pool_otherwise_refuse_spans_by_name(load: Any) -> None:
    for pooling in ("cls", "lasttoken"):
        error = encode(load("bert", pooling=pooling), "text", SPANNED)
        assert isinstance(error, Unsupported) and error.path == "$.input[1].spans"
        assert "mean pooling" in str(error)


def test_a_token_that_is_spelled_out_moves_the_spans_behind_it() -> None:
    """K20: a control token in a text is several tokens of the item."""
    tokenizer, _ = word_level()
    tokenizer.encode_special_tokens = True
    control: ControlTokens = control_of(tokenizer)
    ids = np.asarray(tokenizer.encode("a [SEP] b", add_special_tokens=False).ids, np.int32)
    places = control.places(ids)
    assert places.tolist() == [0, 1, 3, 4] and places[-1] == len(control.spell(ids))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_token_of_a_text_is_in_a_span_that_has_one_of_its_characters(data: Any) -> None:
    runner = make_shared()
    text = data.draw(st.text("ab é.,\n名", min_size=1, max_size=40))
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=4))})
    spans = tuple(pairwise(cuts))
    (item,) = encode(runner, Text(text, spans)).items
    if isinstance(item, InvalidRequest):
        start, end = spans[int(str(item.path).rpartition("[")[2][:-1])]
        alone = runner.encoder._tokenizer.encode(text[start:end], add_special_tokens=False)
        assert not text[start:end].strip() or not alone.ids
        return
    if not isinstance(item, EncodedItem):
        assert item.code == "empty_input" and not text.strip()
        return
    found = item.extras[SPANS]
    assert found[0][0] == 0 and found[-1][1] == item.n_tokens
    covered = {i for a, b in found for i in range(a, b)}
    assert covered == set(range(item.n_tokens))


_SHARED: list[Any] = []


def make_shared() -> Any:
    """One runner for all examples."""
    import tempfile

    if not _SHARED:
        folder = Path(tempfile.mkdtemp()) / "m"
        _SHARED.append(make_runner_factory("m", write_model(folder, "bert", pooling="mean"))())
    return _SHARED[0]


def test_a_request_without_spans_is_encoded_as_ever(load: Any) -> None:
    runner = load("bert", pooling="mean")
    (item,) = runner.encoder.encode([EmbedRequest(id="r", input=(Text(TEXT),))])[0].items
    assert SPANS not in item.extras and item.options.outputs == ("dense",)
