"""The packaged models are the models they claim to be: published hashes, logits and similarities."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

Folder = Callable[[str], Path]

BERLIN = "How many people live in Berlin?"
PASSAGES = (
    "Berlin had a population of 3,520,031 registered inhabitants in an area of 891.82 "
    "square kilometers.",
    "Berlin is well known for its museums.",
)


def test_minilm_is_the_published_checkpoint(packaged_model: Folder) -> None:
    weights = packaged_model("all-MiniLM-L6-v2") / "model.safetensors"
    with weights.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    assert digest == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def test_the_reranker_loads_strictly_and_scores_as_published(packaged_model: Folder) -> None:
    """9.2189 and -4.0780 are on the model card; the dequantised weights stay within 0.2 of them."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    folder = packaged_model("ms-marco-MiniLM-L-12-v2")
    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    logits = []
    with torch.inference_mode():
        for passage in PASSAGES:
            inputs = tokenizer(BERLIN, passage, return_tensors="pt", padding=False)
            logits.append(float(model.eval()(**inputs).logits[0, 0]))
    assert logits == pytest.approx([9.0851, -3.9343], abs=1e-3)
    assert logits == pytest.approx([9.218911, -4.0780287], abs=0.2)
    chosen = AutoConfig.from_pretrained(folder).sentence_transformers["activation_fn"]
    assert chosen.endswith(".Sigmoid"), "scores are in [0, 1] unless raw ones are asked for"


@pytest.mark.parametrize(
    ("name", "pooling", "tokens"),
    [("bge-small-en-v1.5", "cls", 512), ("e5-small-v2", "mean", 512)],
)
def test_the_small_encoders_put_like_beside_like(
    packaged_model: Folder, name: str, pooling: str, tokens: int
) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(packaged_model(name)), device="cpu")
    assert model.max_seq_length == tokens
    assert model[1].pooling_mode == pooling
    cat, kitten, stocks = model.encode(
        ["a cat sat on the mat", "a kitten rested on a rug", "stock prices fell"]
    )
    assert cat @ kitten > cat @ stocks + 0.1
    assert cat @ cat == pytest.approx(1.0, abs=1e-5)


def test_splade_expands_a_query_to_its_terms(packaged_model: Folder) -> None:
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(str(packaged_model("splade-tiny")), device="cpu")
    terms = dict(model.decode(model.encode(["what is a pointer in C"])[0], top_k=3))
    assert {"pointer", "c"} <= set(terms)
    assert terms["pointer"] > 2
