"""Language models as rerankers against the code of their model cards and against CrossEncoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import pack, scatter
from gpu.load import make_runner_factory
from schemas.requests import Document, RerankRequest
from tests.support.models import edit_json
from tests.support.models_decoders import END, as_cross_encoder, write_causal

QUERY = "What is the capital of China?"
DOCUMENTS = [
    "The capital of China is Beijing.", "Nanjing was one, once.", "Tokyo", "a river. " * 9,
    "<|im_end|>\n", "\n two lines\nof text", "日本の首都は東京です。",
]  # fmt: skip


def scores(runner: Any, documents: list[str], **fields: Any) -> np.ndarray:
    fields = {"query": QUERY, **fields}
    request = RerankRequest(id="r", documents=tuple(Document(d) for d in documents), **fields)
    encoded = runner.encoder.encode([request])[0]
    batch = pack(encoded.items)
    return np.array([o.scores[0] for o in scatter(batch, runner.forward(batch))])


def qwen3_card(
    folder: Path, pairs: list[tuple[str, str]], instruction: str | None, max_length: int = 512
) -> np.ndarray:
    """The model card's steps: prefix and suffix tokenized apart, left padding, softmax over two logits.

    Control tokens in the texts are text here, as in the service (B18); the card would parse them.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(folder)).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(folder), padding_side="left")
    prefix = tokenizer.encode(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
        'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n",
        add_special_tokens=False,
    )
    suffix = tokenizer.encode(
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", add_special_tokens=False
    )
    instruction = (
        instruction or "Given a web search query, retrieve relevant passages that answer the query"
    )
    rows = []
    for query, document in pairs:
        body = tokenizer.encode(
            f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
            add_special_tokens=False,
            split_special_tokens=True,
        )
        rows.append(prefix + body[: max_length - len(prefix) - len(suffix)] + suffix)
    padded = tokenizer.pad({"input_ids": rows}, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**padded).logits[:, -1, :]
    both = logits[:, [tokenizer.convert_tokens_to_ids(t) for t in ("no", "yes")]]
    return torch.log_softmax(both, dim=1)[:, 1].exp().numpy()


@pytest.mark.parametrize("tie", [True, False])
def test_qwen3_reranker_equals_its_model_card(tmp_path: Path, tie: bool) -> None:
    """A15: the prompt is put around the pair, the score is softmax([no, yes])[yes]."""
    folder = write_causal(tmp_path / "m", tie=tie)
    runner = make_runner_factory("m", folder, rerank_template="qwen3")()
    assert runner.info.packed and runner.info.tasks == {"rerank", "score"}
    pairs = [(QUERY, d) for d in DOCUMENTS]
    want = qwen3_card(folder, pairs, None)
    got = scores(runner, DOCUMENTS)
    assert np.abs(got - want).max() <= 1e-5
    assert np.ptp(want) > 1e-3  # the scores do differ
    told = scores(runner, DOCUMENTS, instruction="Find the river.")
    assert np.abs(told - qwen3_card(folder, pairs, "Find the river.")).max() <= 1e-5
    assert np.abs(told - got).max() > 1e-4


def test_raw_is_the_difference_of_the_two_logits(tmp_path: Path) -> None:
    """A16: raw scores are log-odds; the sigmoid of them is the score; the order is the same."""
    folder = write_causal(tmp_path / "m")
    runner = make_runner_factory("m", folder, rerank_template="qwen3")()
    raw = scores(runner, DOCUMENTS, raw_scores=True).astype(np.float64)
    assert np.abs(1 / (1 + np.exp(-raw)) - scores(runner, DOCUMENTS)).max() <= 1e-6


def test_only_the_document_is_cut_and_the_prompt_stays(tmp_path: Path) -> None:
    """A20: a long document among short ones, cut as the card cuts it; the suffix is still there."""
    folder = write_causal(tmp_path / "m")
    runner = make_runner_factory("m", folder, rerank_template="qwen3", max_tokens=320)()
    documents = ["Beijing", "the long one. " * 60, "Tokyo"]
    want = qwen3_card(folder, [(QUERY, d) for d in documents], None, max_length=320)
    assert np.abs(scores(runner, documents, truncate="right") - want).max() <= 1e-5


@pytest.mark.parametrize("with_false", [True, False])
def test_a_folder_that_declares_itself_equals_cross_encoder(
    tmp_path: Path, with_false: bool
) -> None:
    """A15, A17: LogitScore and the chat template come from the folder; no setting is needed."""
    from sentence_transformers import CrossEncoder
    from transformers import AutoTokenizer

    folder = write_causal(tmp_path / "m")
    ids = AutoTokenizer.from_pretrained(str(folder)).convert_tokens_to_ids(["yes", "no"])
    as_cross_encoder(folder, true_id=ids[0], false_id=ids[1] if with_false else None)
    runner = make_runner_factory("m", folder)()
    model = CrossEncoder(str(folder), device="cpu")
    plain = [d for d in DOCUMENTS if "<|" not in d]  # which CrossEncoder takes for control tokens
    want = model.predict([(QUERY, d) for d in plain])
    assert np.abs(scores(runner, plain) - want).max() <= 1e-5
    told = model.predict([(QUERY, d) for d in plain], prompt="Find the river.")
    assert np.abs(scores(runner, plain, instruction="Find the river.") - told).max() <= 1e-5
    assert np.abs(told - want).max() > 1e-4


def test_the_folders_default_prompt_is_the_instruction(tmp_path: Path) -> None:
    """A13: `default_prompt_name` of a CrossEncoder folder is what its chat template gets as system."""
    from sentence_transformers import CrossEncoder

    folder = as_cross_encoder(write_causal(tmp_path / "m"), true_id=257, false_id=259)
    edit_json(
        folder / "config_sentence_transformers.json",
        prompts={"river": "Find the river."}, default_prompt_name="river",
    )  # fmt: skip
    runner = make_runner_factory("m", folder)()
    plain = [d for d in DOCUMENTS if "<|" not in d]
    want = CrossEncoder(str(folder), device="cpu").predict([(QUERY, d) for d in plain])
    assert np.abs(scores(runner, plain) - want).max() <= 1e-5
    told = scores(runner, plain, instruction="Find the river.")
    assert told.tobytes() == scores(runner, plain).tobytes()


def test_a_converted_classifier_equals_cross_encoder(tmp_path: Path) -> None:
    """A15: Qwen3ForSequenceClassification with the pair written by the folder's chat template."""
    from sentence_transformers import CrossEncoder

    folder = as_cross_encoder(write_causal(tmp_path / "m", labels=1))
    runner = make_runner_factory("m", folder)()
    plain = [d for d in DOCUMENTS if "<|" not in d]
    want = CrossEncoder(str(folder), device="cpu").predict([(QUERY, d) for d in plain])
    assert np.abs(scores(runner, plain) - want).max() <= 1e-5
    # The same classifier without a chat template takes the prompt from the setting.
    other = write_causal(tmp_path / "o", labels=1)
    set_up = make_runner_factory("o", other, rerank_template="qwen3")()
    assert np.abs(scores(set_up, plain) - want).max() <= 1e-5


@pytest.mark.parametrize("family", ["gemma", "gemma2"])
def test_bge_gemma_equals_its_model_card(tmp_path: Path, family: str) -> None:
    """The logit of "Yes" after ``<bos> A: query, newline, B: passage, newline, prompt``; Gemma 2's cap
    on logits is applied to the one row that is computed."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_causal(tmp_path / "m", family, bos=True)
    runner = make_runner_factory("m", folder, rerank_template="bge-gemma")()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager").eval()
    prompt = (
        "Given a query A and a passage B, determine whether the passage contains an answer to the "
        "query by providing a prediction of either 'Yes' or 'No'."
    )

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    for asked, text in ((None, prompt), ("Is B about rivers?", "Is B about rivers?")):
        want = []
        for document in DOCUMENTS:
            row = [tokenizer.bos_token_id, *ids(f"A: {QUERY}"), *ids("\n"), *ids(f"B: {document}")]
            row += ids("\n") + ids(text)
            with torch.no_grad():
                logits = model(torch.tensor([row])).logits[0, -1]
            want.append(float(logits[ids("Yes")[0]]))
        got = scores(runner, DOCUMENTS, raw_scores=True, instruction=asked)
        assert np.abs(got - want).max() <= 1e-5
        assert np.ptp(want) > 1e-3


def test_a_score_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    """A17, A22: one document, tied documents, and the same again: the same bytes."""
    folder = write_causal(tmp_path / "m")
    runner = make_runner_factory("m", folder, rerank_template="qwen3")()
    crowd = scores(runner, [*DOCUMENTS, DOCUMENTS[2], DOCUMENTS[2]])
    alone = np.array([scores(runner, [d])[0] for d in DOCUMENTS])
    assert crowd[: len(DOCUMENTS)].tobytes() == alone.tobytes()
    assert crowd[-1] == crowd[-2] == crowd[2]
    assert scores(runner, DOCUMENTS).tobytes() == alone.tobytes()


def test_pad_token_at_the_end_of_a_classifiers_text(tmp_path: Path) -> None:
    """A14: a tokenizer closes texts with the pad token; transformers reads the token before it."""
    from sentence_transformers import CrossEncoder

    folder = write_causal(tmp_path / "m", labels=1, end=True)
    edit_json(folder / "tokenizer_config.json", pad_token=END)
    runner = make_runner_factory("m", folder)()
    want = CrossEncoder(str(folder), device="cpu").predict([(QUERY, d) for d in DOCUMENTS[:4]])
    assert np.abs(scores(runner, DOCUMENTS[:4]) - want).max() <= 1e-5


def test_distinct_pairs_get_distinct_scores(tmp_path: Path) -> None:
    """A21: 200 distinct pairs: no more ties than the fp32 model card code gives."""
    folder = write_causal(tmp_path / "m")
    runner = make_runner_factory("m", folder, rerank_template="qwen3", multi_item=True)()
    documents = [f"document {i} of the {i % 7}th river" for i in range(200)]
    got = np.concatenate([scores(runner, documents[i : i + 40]) for i in range(0, 200, 40)])
    want = qwen3_card(folder, [(QUERY, d) for d in documents], None)
    assert got.dtype == np.float32 and np.abs(got - want).max() <= 1e-5
    assert len(np.unique(got)) >= len(np.unique(want))
