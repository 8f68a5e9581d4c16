"""SmolLM2-135M (Llama, 30 layers, 9 query heads on 3 key/value heads): real decoder weights.

The folder is made once by `benchmarks/convert_smollm2.py`; the weights are the published ones within
their 4-bit rounding, and transformers reads the same file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import pack, scatter
from gpu.load import make_runner_factory
from pipeline.demo.fetch import models_root
from schemas.requests import (
    ClassifyRequest,
    Document,
    EmbedRequest,
    RerankRequest,
    ScoreRequest,
    Text,
)
from tests.support.models import edit_json

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

TEXTS = [
    "The capital of France is Paris.", "queue", "def f(x):\n    return x + 1",
    "Streams of records are cut into topics, and topics into partitions. " * 6, "Ärger, 漢字 🙂",
]  # fmt: skip
TEMPLATE = (
    "<|im_start|>user\nDoes the passage answer the question?\nQuestion: {query}\nPassage: "
    "{document}\nAnswer yes or no.<|im_end|>\n<|im_start|>assistant\n"
)
QUESTION = "What is the capital of Japan?"
PASSAGES = ["The capital of Japan is Tokyo.", "A queue holds jobs.", "Paris is in France. " * 20]


@pytest.fixture(scope="module")
def folder() -> Path:
    path = models_root() / "SmolLM2-135M-Instruct"
    if not (path / "model.safetensors").is_file():
        pytest.skip(f"run `python benchmarks/convert_smollm2.py {path}` first")
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(str(folder))


def linked(folder: Path, out: Path, **config: Any) -> Path:
    """The same folder with another config.json; the weights are linked, not copied."""
    out.mkdir()
    for path in folder.iterdir():
        if path.name == "config.json":
            (out / path.name).write_text(path.read_text())
        else:
            (out / path.name).symlink_to(path)
    edit_json(out / "config.json", **config)
    return out


def test_last_token_vectors_equal_transformers(
    folder: Path, reference: Any, tmp_path: Path
) -> None:
    """A01, A22: last token of every text, in a crowd, alone, and twice: transformers' own numbers."""
    import torch

    model, tokenizer = reference
    bare = linked(folder, tmp_path / "m", architectures=["LlamaModel"])
    runner = make_runner_factory("m", bare, pooling="last_token")()
    assert runner.info.packed and runner.info.dimensions == 576
    encoded = runner.encoder.encode([EmbedRequest(id="r", input=tuple(map(Text, TEXTS)))])[0]
    for text, item in zip(TEXTS, encoded.items, strict=True):
        assert item.input_ids.tolist() == tokenizer(text).input_ids
    batch = pack(encoded.items)
    got = np.stack([o.dense for o in scatter(batch, runner.forward(batch))]).astype(np.float64)
    with torch.no_grad():
        want = [
            model.model(**tokenizer(t, return_tensors="pt"))
            .last_hidden_state[0, -1]
            .double()
            .numpy()
            for t in TEXTS
        ]
    for a, b, item in zip(got, want, encoded.items, strict=True):
        cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        assert cosine >= 1 - 1e-6
        # 1e-5 of a unit vector: activations of this model reach 40
        assert np.abs(a / np.linalg.norm(a) - b / np.linalg.norm(b)).max() <= 1e-5
        alone = runner.forward(pack([item]))[0].dense
        assert np.abs(alone / np.linalg.norm(alone) - a / np.linalg.norm(a)).max() <= 1e-6


@pytest.mark.parametrize("multi_item", [False, True])
def test_yes_or_no_equals_transformers(folder: Path, reference: Any, multi_item: bool) -> None:
    """A15: a chat prompt of the model's own around each pair; the right passage comes first."""
    import torch

    model, tokenizer = reference
    runner = make_runner_factory(
        "m", folder, rerank_template=TEMPLATE, label_tokens=("yes", "no"), multi_item=multi_item
    )()
    request = RerankRequest(id="r", query=QUESTION, documents=tuple(map(Document, PASSAGES)))
    encoded = runner.encoder.encode([request])[0]
    batch = pack(encoded.items)
    got = [float(o.scores[0]) for o in scatter(batch, runner.forward(batch))]
    ids = tokenizer.convert_tokens_to_ids(["yes", "no"])
    want = []
    for passage, item in zip(PASSAGES, encoded.items, strict=True):
        prompt = TEMPLATE.replace("{query}", QUESTION).replace("{document}", passage)
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        assert item.input_ids.tolist() == inputs.input_ids[0].tolist()
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1, ids]
        want.append(float(torch.softmax(logits, 0)[0]))
    assert np.abs(np.array(got) - want).max() <= 1e-5
    assert got[0] == max(got)


def test_label_tokens_equal_transformers(folder: Path, reference: Any) -> None:
    """Label-token scores over four words, softmax over their logits alone."""
    import torch

    model, tokenizer = reference
    labels = (" Paris", " Tokyo", " Berlin", " Rome")
    runner = make_runner_factory("m", folder, label_tokens=labels)()
    texts = ["The capital of France is", "The capital of Japan is", "The capital of Italy is"]
    request = ClassifyRequest(id="r", input=tuple(map(Text, texts)))
    batch = pack(runner.encoder.encode([request])[0].items)
    got = np.stack([o.scores for o in scatter(batch, runner.forward(batch))])
    ids = [tokenizer(label, add_special_tokens=False).input_ids[0] for label in labels]
    with torch.no_grad():
        rows = [model(**tokenizer(t, return_tensors="pt")).logits[0, -1, ids] for t in texts]
    want = torch.softmax(torch.stack(rows), -1).numpy()
    assert np.abs(got - want).max() <= 1e-5
    assert [labels[i] for i in got.argmax(1)] == [" Paris", " Tokyo", " Rome"]


def test_labels_of_a_request_equal_transformers(folder: Path, reference: Any) -> None:
    """S9: labels by text and by id, two requests in one pack, softmax over their logits and logits."""
    import torch

    model, tokenizer = reference
    runner = make_runner_factory("m", folder, rerank_template="{query} {document} is the city of")()
    places = tuple(map(Document, ("The Eiffel Tower in", "Big Ben in", "The Colosseum in")))
    labels = (" Paris", " London", " Rome", " Tokyo")
    ids = [tokenizer(label, add_special_tokens=False).input_ids[0] for label in labels]
    asked = [
        ScoreRequest(id="a", query="Known to all:", documents=places, labels=labels),
        ScoreRequest(id="b", query="Known to all:", documents=places, labels=tuple(ids[::-1]), raw_scores=True),
    ]  # fmt: skip
    items = [item for encoded in runner.encoder.encode(asked) for item in encoded.items]
    batch = pack(items)
    got = [o.scores for o in scatter(batch, runner.forward(batch))]
    texts = [f"Known to all: {place.text} is the city of" for place in places]
    with torch.no_grad():
        rows = [model(**tokenizer(t, return_tensors="pt")).logits[0, -1, ids] for t in texts]
    logits = torch.stack(rows)
    assert np.abs(np.stack(got[:3]) - logits.softmax(-1).numpy()).max() <= 1e-5
    scale = float(logits.abs().max())
    assert np.abs(np.stack(got[3:]) - logits.numpy()[:, ::-1]).max() <= 1e-5 * max(1.0, scale)
    print("SmolLM2 labels:", np.abs(np.stack(got[:3]) - logits.softmax(-1).numpy()).max())
