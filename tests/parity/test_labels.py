"""Labels that a score request names: logits of a causal language model, read at any tokens."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.answer.label_rows import LabelReader
from gpu.batch import EncodedRequest, ItemResult, pack, scatter
from gpu.load import make_runner_factory
from schemas.errors import InvalidRequest, ModelError, NonFinite, Unsupported
from schemas.requests import Document, RerankRequest, ScoreRequest
from tests.support.models_decoders import chat_tokenizer, write_causal

QUERY = "Which river is the longest?"
DOCUMENTS = ["The Nile.", "Tokyo", "a river. " * 9, "x", "日本", "1 2 3"]
TEMPLATE = "<|im_start|>user\nQ: {query}\nD: {document}<|im_end|>\n<|im_start|>assistant\n"


def encode(runner: Any, labels: Any, documents: list[str] = DOCUMENTS, **fields: Any) -> Any:
    request = ScoreRequest(
        id="r", query=QUERY, documents=tuple(map(Document, documents)), labels=labels, **fields
    )
    return runner.encoder.encode([request])[0]


def run(runner: Any, items: Any) -> list[np.ndarray]:
    batch = pack(items)
    found = []
    for outcome in scatter(batch, runner.forward(batch)):
        assert isinstance(outcome, ItemResult) and outcome.scores is not None, outcome
        found.append(outcome.scores)
    return found


def reference(folder: Path, ids: list[int]) -> np.ndarray:
    """[n_documents, n_labels]: transformers' logits of the next token, each prompt alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    rows = []
    for document in DOCUMENTS:
        text = TEMPLATE.replace("{query}", QUERY).replace("{document}", document)
        given = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            rows.append(model(**given).logits[0, -1, ids].numpy())
    return np.stack(rows)


def softmax(logits: np.ndarray) -> np.ndarray:
    exps = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return np.asarray(exps / exps.sum(axis=1, keepdims=True))


@pytest.mark.parametrize(
    ("family", "tie"),
    [("qwen3", True), ("llama", False), ("gemma2", True), ("phi", False), ("granite", False),
     ("gpt_neox", False)],
)  # fmt: skip
def test_any_labels_equal_transformers(tmp_path: Path, family: str, tie: bool) -> None:
    """Texts and ids, 1 to 40 of them, as logits and as probabilities; Gemma 2 caps its logits, Phi adds a
    bias, Granite divides."""
    folder = write_causal(tmp_path / "m", family, tie=tie, bos=family == "gemma2")
    runner = make_runner_factory("m", folder, rerank_template=TEMPLATE)()
    assert runner.info.tasks == {"score"} and runner.info.packed
    vocabulary = chat_tokenizer()[0]
    texts = ("yes", "no", "x", "Yes", " a")
    ids = [vocabulary.encode(text).ids[0] for text in texts]
    many = tuple(range(3, 43))
    for labels, wanted in (
        (texts, ids),
        (tuple(ids), ids),
        (many, list(many)),
        (("yes",), ids[:1]),
    ):
        logits = reference(folder, wanted)
        raw = np.stack(run(runner, encode(runner, labels, raw_scores=True).items))
        assert np.abs(raw - logits).max() <= 1e-5
        given = np.stack(run(runner, encode(runner, labels).items))
        want = softmax(logits) if len(wanted) > 1 else 1 / (1 + np.exp(-logits))
        assert np.abs(given - want).max() <= 1e-5
        assert np.ptp(logits) > 1e-3


@pytest.mark.parametrize("multi_item", [False, True])
def test_labels_of_one_request_do_not_reach_another(tmp_path: Path, multi_item: bool) -> None:
    """A22: requests with other labels, raw and not, and one that names none, in one pack: each the same bytes
    as alone (and within 1e-5 where documents share their query)."""
    folder = write_causal(tmp_path / "m")
    runner = make_runner_factory(
        "m", folder, rerank_template=TEMPLATE, label_tokens=("yes", "no"), multi_item=multi_item
    )()
    assert runner.info.tasks == {"rerank", "score"}
    asked: list[tuple[Any, dict[str, Any]]] = [
        (("yes", "no"), {}), (("no", "yes"), {}), ((5, 6, 7), {"raw_scores": True}), ((), {}),
        (("x",), {}), ((), {"raw_scores": True}), (("yes", "no", "x"), {}),
    ]  # fmt: skip
    alone = []
    for labels, fields in asked:
        items = encode(runner, labels, **fields).items
        alone.append([run(runner, [item])[0] for item in items])
    items = [item for labels, fields in asked for item in encode(runner, labels, **fields).items]
    order = np.random.default_rng(0).permutation(len(items))
    crowd = run(runner, [items[i] for i in order])
    for place, i in enumerate(order):
        want = alone[i // len(DOCUMENTS)][i % len(DOCUMENTS)]
        assert crowd[place].shape == want.shape
        if multi_item:
            assert np.abs(crowd[place] - want).max() <= 1e-5
        else:
            assert crowd[place].tobytes() == want.tobytes()
    yes_first, no_first, _, own = alone[0], alone[1], alone[2], alone[3]
    for a, b, score in zip(yes_first, no_first, own, strict=True):
        assert a[::-1].tobytes() == b.tobytes() and len(score) == 1
        assert (
            abs(float(a[0]) - float(score[0])) <= 1e-6
        )  # the same question, asked by the folder's labels


def test_three_label_tokens_of_a_model_are_scored_by_name(tmp_path: Path) -> None:
    """A template and any number of `label_tokens`: a score per label; there is nothing to rank by."""
    folder = write_causal(tmp_path / "m")
    runner = make_runner_factory(
        "m", folder, rerank_template=TEMPLATE, label_tokens=("yes", "no", "x")
    )()
    assert runner.info.tasks == {"score"} and runner.info.labels == ("yes", "no", "x")
    own = run(runner, encode(runner, ()).items)
    named = run(runner, encode(runner, ("yes", "no", "x")).items)
    assert np.abs(np.stack(own) - np.stack(named)).max() <= 1e-6
    assert np.abs(np.stack(own).sum(axis=1) - 1).max() <= 1e-6
    refused = runner.encoder.encode([
        RerankRequest(id="r", query=QUERY, documents=(Document("x"),))
    ])[0]  # fmt: skip
    assert isinstance(refused, Unsupported) and "can: score" in refused.message


@pytest.mark.parametrize(
    ("labels", "path", "why"),
    [
        (("yes", "maybe"), "$.labels[1]", "5 tokens"),
        (("yes", " "), None, None),
        ((1, 10**6), "$.labels[1]", "vocabulary of"),
        (("y", "yes", "Ġa", " a"), "$.labels[3]", "same token as label 2"),
        (("\ud800",), "$.labels[0]", "tokens"),
    ],
)
def test_a_label_is_one_token_or_the_request_is_refused(
    tmp_path: Path, labels: Any, path: str | None, why: str | None
) -> None:
    """The reason in words, the place as a path, and nothing of what the sender wrote."""
    folder = write_causal(tmp_path / "m")
    runner = make_runner_factory("m", folder, rerank_template=TEMPLATE)()
    answer = encode(runner, labels)
    if path is None:
        assert isinstance(answer, EncodedRequest)
        return
    assert isinstance(answer, InvalidRequest) and answer.path == path
    assert why is not None and why in answer.message and "maybe" not in answer.message


def test_models_without_a_vocabulary_head_refuse_labels(tmp_path: Path) -> None:
    """Classifiers by their reason; a model without labels of its own wants them named."""
    classifier = make_runner_factory("c", write_causal(tmp_path / "c", labels=1))()
    answer = encode(classifier, ("yes",))
    assert isinstance(answer, Unsupported) and answer.path == "$.labels"
    bare = make_runner_factory("b", write_causal(tmp_path / "b"), rerank_template=TEMPLATE)()
    assert any("requests of the task score name their `labels`" in n for n in bare.info.notes)
    answer = encode(bare, ())
    assert isinstance(answer, Unsupported) and answer.path == "$.labels"


def test_weights_replaced_under_a_running_model_give_no_score(tmp_path: Path) -> None:
    """Rows are read when a label is first named: never from a file that is another than at load, also not
    with the same size. Labels that were read before, and the model's own, are answered as ever."""
    folder = write_causal(tmp_path / "m", tie=False)
    runner = make_runner_factory(
        "m", folder, rerank_template=TEMPLATE, label_tokens=("yes", "no")
    )()
    before = run(runner, encode(runner, (5, 6)).items)
    path = folder / "model.safetensors"
    copy = path.read_bytes()
    other = tmp_path / "other.safetensors"
    other.write_bytes(copy)
    os.replace(other, path)
    batch = pack([*encode(runner, (5, 6)).items, *encode(runner, (7, 8)).items])
    outcomes = scatter(batch, runner.forward(batch))
    n = len(DOCUMENTS)
    assert [o.scores.tobytes() for o in outcomes[:n]] == [o.tobytes() for o in before]  # type: ignore[union-attr]
    assert all(isinstance(o, ModelError) and "restart" in o.message for o in outcomes[n:])
    path.unlink()
    assert isinstance(runner.forward(pack(encode(runner, (9,)).items))[0], ModelError)
    assert run(runner, encode(runner, ()).items)


def test_labels_are_read_from_the_weights_that_transformers_reads(tmp_path: Path) -> None:
    """Beside them: a copy with another head under names that sort before and behind; the scores are the same."""
    from safetensors.torch import load_file, save_file

    folder = write_causal(tmp_path / "m", "llama", tie=False)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["lm_head.weight"] * 3 + 1
    for name in (
        "model.fp16.safetensors",
        "model-00001-of-00002.safetensors",
        "model2.safetensors",
    ):
        save_file(state, folder / name, metadata={"format": "pt"})
    logits = reference(folder, [5, 6])
    for settings in ({}, {"label_tokens": ("yes", "no")}):
        runner = make_runner_factory("m", folder, rerank_template=TEMPLATE, **settings)()  # type: ignore[arg-type]
        raw = np.stack(run(runner, encode(runner, (5, 6), raw_scores=True).items))
        assert np.abs(raw - logits).max() <= 1e-5
    own = np.stack(run(runner, encode(runner, (), raw_scores=True).items))[:, 0]
    ids = [chat_tokenizer()[0].token_to_id(text) for text in ("yes", "no")]
    pair = reference(folder, ids)
    assert np.abs(own - (pair[:, 0] - pair[:, 1])).max() <= 1e-5


def test_rows_are_kept_within_bounds_and_read_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More labels than are kept, from four threads at once: everyone has their own scores."""
    from gpu.answer import label_rows

    monkeypatch.setattr(label_rows, "_KEPT_ROWS", 7)
    folder = write_causal(tmp_path / "m")
    runner = make_runner_factory("m", folder, rerank_template=TEMPLATE)()
    sets = [tuple(range(start, start + 5)) for start in range(3, 43, 5)]
    batches = [pack(encode(runner, labels, ["a river"]).items) for labels in sets]
    want = [runner.forward(batch)[0].scores.tobytes() for batch in batches]
    wrong: list[int] = []

    def ask(first: int) -> None:
        for turn in range(24):
            i = (first + turn) % len(sets)
            if runner.forward(batches[i])[0].scores.tobytes() != want[i]:
                wrong.append(i)

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = runner._head
    assert wrong == [] and isinstance(reader, LabelReader) and len(reader._kept) <= 7


def test_a_label_that_is_not_finite_fails_its_items_alone(tmp_path: Path) -> None:
    """B12: one row of the vocabulary holds infinity; whoever does not name it is answered."""
    from safetensors.torch import load_file, save_file

    folder = write_causal(tmp_path / "m", tie=False)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"][20] = float("inf")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    runner = make_runner_factory("m", folder, rerank_template=TEMPLATE)()
    batch = pack([*encode(runner, (19, 20)).items, *encode(runner, (18, 19)).items])
    outcomes = scatter(batch, runner.forward(batch))
    n = len(DOCUMENTS)
    assert all(isinstance(outcome, NonFinite) for outcome in outcomes[:n])
    assert all(isinstance(outcome, ItemResult) for outcome in outcomes[n:])
