"""Sparse, token-level and static outputs of seeded tiny folders against their own libraries."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu.batch import pack, scatter
from gpu.faults import ModelLoadError
from gpu.folder.families import FAMILIES
from gpu.folder.read import load_spec
from gpu.load import make_runner_factory
from schemas.requests import Document, EmbedRequest, RerankRequest, Text
from tests.support.models import FAMILY_NAMES, edit_json
from tests.support.models_outputs import (
    write_colbert,
    write_m3,
    write_router,
    write_splade,
    write_static,
)

TEXTS = [
    "hello world", "kafka", "the capital of china is beijing, a large river in blue",
    "one two three four five " * 4, "What is a stream? A queue on a topic.", "x",
]  # fmt: skip


def outcomes(runner: Any, texts: list[str] = TEXTS, **fields: Any) -> list[Any]:
    request = EmbedRequest(id="r", input=tuple(Text(t) for t in texts), **fields)
    batch = pack(runner.encoder.encode([request])[0].items)
    return scatter(batch, runner.forward(batch))


def full(row: tuple[np.ndarray, np.ndarray], size: int) -> np.ndarray:
    out = np.zeros(size, np.float32)
    out[row[0]] = row[1]
    return out


MLM = [name for name in FAMILY_NAMES if FAMILIES[name].mlm is not None]


@pytest.mark.parametrize(
    ("strategy", "activation"), [("max", "relu"), ("sum", "log1p_relu")], ids=["max", "sum"]
)
@pytest.mark.parametrize("family", MLM)
def test_splade_equals_sparse_encoder(
    tmp_path: Path, family: str, strategy: str, activation: str
) -> None:
    """A10, J07: every family with a masked-LM head; the same ids, weights within 1e-5 of size."""
    from sentence_transformers import SparseEncoder

    folder = write_splade(tmp_path / "m", family, strategy=strategy, activation=activation)
    runner = make_runner_factory("m", folder)()
    model = SparseEncoder(str(folder), device="cpu")
    want = model.encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    for outcome, expected in zip(outcomes(runner), want, strict=True):
        got = full(outcome.sparse, len(expected))
        assert np.abs(got - expected).max() <= 1e-5 * max(1.0, expected.max())
        assert outcome.sparse[0].tolist() == np.flatnonzero(expected > 0).tolist()


def test_inference_free_splade_equals_sparse_encoder(tmp_path: Path) -> None:
    """A10, A06, J07: documents through the model, queries through the table, in one pack too."""
    from sentence_transformers import SparseEncoder

    folder = write_router(tmp_path / "m")
    runner = make_runner_factory("m", folder)()
    model = SparseEncoder(str(folder), device="cpu")
    texts = [*TEXTS, "the the the river"]
    items = {}
    for side, encode in (("query", model.encode_query), ("document", model.encode_document)):
        want = encode(texts, convert_to_sparse_tensor=False).numpy()
        request = EmbedRequest(id="r", input=tuple(map(Text, texts)), prompt_name=side)
        items[side] = runner.encoder.encode([request])[0].items
        for outcome, expected in zip(outcomes(runner, texts, prompt_name=side), want, strict=True):
            assert outcome.sparse[0].tolist() == np.flatnonzero(expected > 0).tolist()
            got = full(outcome.sparse, len(expected))
            assert np.abs(got - expected).max() <= 1e-5 * max(1.0, expected.max())
    mixed = pack([items["query"][0], items["document"][1], items["query"][2], items["document"][0]])
    for got, item in zip(runner.forward(mixed), mixed.items, strict=True):
        (alone,) = runner.forward(pack([item]))
        assert [part.tobytes() for part in got.sparse] == [part.tobytes() for part in alone.sparse]
    assert (
        outcomes(runner)[0].sparse[1].tobytes()
        == outcomes(runner, prompt_name="document")[0].sparse[1].tobytes()
    ), "a text without a prompt name is a document"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"parameters": {"default_route": "query"}}, "default_route = 'query'"),
        ({"parameters": {"default_route": "document", "odd": 1}}, "odd .*ignore_keys"),
        (
            {"structure": {"query": ["query_0_SparseStaticEmbedding"]}},
            "is not supported; supported is",
        ),
        ({"odd": 1}, "odd .*ignore_keys"),
    ],
)
def test_another_router_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, change: dict[str, Any], what: str
) -> None:
    known = tmp_path_factory.getbasetemp() / "router"
    if not known.is_dir():
        write_router(known)
    folder = Path(shutil.copytree(known, tmp_path / "m"))
    edit_json(folder / "router_config.json", **change)
    with pytest.raises(ModelLoadError, match=what):
        load_spec(folder)


def test_mlm_families_are_those_that_tests_write() -> None:
    assert len(MLM) >= 9


@pytest.mark.parametrize("style", ["st", "pylate"])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_colbert_equals_multi_vector_encoder(tmp_path: Path, family: str, style: str) -> None:
    """A10, J07: documents with a skip list, and queries, in both published layouts."""
    from sentence_transformers import MultiVectorEncoder

    folder = write_colbert(
        tmp_path / "m", family, style=style, skip=("the", "a"), prefixes=style == "pylate"
    )
    runner = make_runner_factory("m", folder)()
    model = MultiVectorEncoder(str(folder), device="cpu")
    names = ("document", "query") if style == "pylate" else (None,)
    for name in names:
        encode = model.encode_query if name == "query" else model.encode_document
        got = outcomes(runner, prompt_name=name)
        for outcome, expected in zip(got, encode(TEXTS), strict=True):
            assert outcome.multivector.shape == tuple(expected.shape)
            assert np.abs(outcome.multivector - expected.numpy()).max() <= 1e-5


FIXED = {"strategy": "fixed", "length": 24, "attend": False}
EXPANDED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "pylate": ("bert", "pylate", {"query_length": 24}),
    "pylate-default": ("bert", "pylate", {"attend_to_expansion_tokens": None}),
    "pylate-attend": ("bert", "pylate", {"query_length": 24, "attend_to_expansion_tokens": True}),
    "st": ("bert", "st", FIXED),
    "st-min": ("bert", "st", {**FIXED, "strategy": "min"}),
    "modernbert": ("modernbert", "pylate", {"query_length": 24}),
    "xlm-roberta": ("xlm-roberta", "st", FIXED),
    "mpnet": ("mpnet", "st", FIXED),
    "qwen3": ("qwen3", "st", FIXED),
    "token": ("bert", "st", {**FIXED, "token": "a"}),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_expanded_queries_and_their_scores_equal_multi_vector_encoder(
    tmp_path: Path, name: str
) -> None:
    """A10, J07: mask tokens up to the length, attended to or not; MaxSim of both sides; the same bytes
    in any pack."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.util.similarity import maxsim

    family, style, expand = EXPANDED[name]
    fields = {"local_attention": 64} if family == "modernbert" else {}
    folder = write_colbert(
        tmp_path / "m", family, style=style, skip=(".", "a"), prefixes=style == "pylate",
        expand=expand, **fields,
    )  # fmt: skip
    runner = make_runner_factory("m", folder)()
    assert runner.info.packed and {"rerank", "score"} <= runner.info.tasks
    model = MultiVectorEncoder(str(folder), device="cpu")
    queries = [*TEXTS, "one two three four five " * 6]
    want = model.encode_query(queries)
    request = EmbedRequest(
        id="r", input=tuple(map(Text, queries)), prompt_name="query", truncate="right"
    )
    items = runner.encoder.encode([request])[0].items
    batch = pack(items)
    got = [outcome.multivector for outcome in scatter(batch, runner.forward(batch))]
    for ours, theirs, item in zip(got, want, items, strict=True):
        assert ours.shape == tuple(theirs.shape)
        assert np.abs(ours - theirs.numpy()).max() <= 1e-5
        alone = runner.forward(pack([item]))[0].multivector
        assert alone.tobytes() == ours.tobytes()
    request = RerankRequest(id="r", query=TEXTS[0], documents=tuple(map(Document, TEXTS)))
    batch = pack(runner.encoder.encode([request])[0].items)
    scores = [float(outcome.scores[0]) for outcome in scatter(batch, runner.forward(batch))]
    expected = maxsim(want[0], model.encode_document(TEXTS))[0]
    assert np.abs(np.array(scores) - expected.numpy()).max() <= 1e-5 * len(want[0])


@pytest.mark.parametrize("modules", [True, False])
def test_m3_equals_the_published_formulas(tmp_path: Path, modules: bool) -> None:
    """A10, J07: FlagEmbedding's three formulas on transformers' own hidden states."""
    from transformers import AutoModel, AutoTokenizer

    folder = write_m3(tmp_path / "m", modules=modules)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    heads = {}
    for name in ("sparse", "colbert"):
        state = torch.load(folder / f"{name}_linear.pt", weights_only=True)
        linear = torch.nn.Linear(state["weight"].shape[1], state["weight"].shape[0])
        linear.load_state_dict(state)
        heads[name] = linear
    runner = make_runner_factory("m", folder)()
    got = outcomes(runner, outputs=("dense", "sparse", "multivector"))
    unused = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    unused.add(tokenizer.unk_token_id)
    n_weights = 0
    with torch.inference_mode():
        for text, outcome in zip(TEXTS, got, strict=True):
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            hidden = model(ids).last_hidden_state[0]
            dense = torch.nn.functional.normalize(hidden[0], dim=-1).numpy()
            assert np.abs(outcome.dense - dense).max() <= 1e-5
            weights: dict[int, float] = {}
            scores = torch.relu(heads["sparse"](hidden))[:, 0].tolist()
            for i, w in zip(ids[0].tolist(), scores, strict=True):
                if i not in unused and w > weights.get(i, 0.0):
                    weights[i] = w
            assert outcome.sparse[0].tolist() == sorted(weights)
            expected = np.array([weights[i] for i in sorted(weights)])
            assert np.abs(outcome.sparse[1] - expected).max(initial=0.0) <= 1e-5
            n_weights += len(expected)
            vectors = torch.nn.functional.normalize(heads["colbert"](hidden[1:]), dim=-1).numpy()
            assert np.abs(outcome.multivector - vectors).max() <= 1e-5
    assert n_weights >= 10


def model2vec(folder: Path, text: str) -> np.ndarray:
    """The published formula, written down again: rows, times weights, averaged, normalised."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    tensors = load_file(folder / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    unknown = tokenizer.token_to_id("[UNK]")
    ids = [i for i in tokenizer.encode(text, add_special_tokens=False).ids if i != unknown]
    mapping = tensors.get("mapping")
    rows = tensors["embeddings"][ids if mapping is None else mapping[ids]].astype(np.float64)
    if "weights" in tensors:
        rows = rows * tensors["weights"][ids][:, None]
    vector = rows.mean(axis=0)
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize(
    "fields",
    [{}, {"weights": True}, {"weights": True, "mapping": True}, {"mapping": True},
     {"dtype": "float16"}, {"dtype": "int8"}],
    ids=["plain", "weights", "weights+mapping", "mapping", "float16", "int8"],
)  # fmt: skip
def test_static_equals_model2vec(tmp_path: Path, fields: dict[str, Any]) -> None:
    """A10."""
    folder = write_static(tmp_path / "m", **fields)
    runner = make_runner_factory("m", folder)()
    texts = ["hello world", "kafka unheard redis", "stream queue " * 30]
    for text, outcome in zip(texts, outcomes(runner, texts), strict=True):
        assert np.abs(outcome.dense - model2vec(folder, text)).max() <= 1e-6


@pytest.mark.parametrize("normalize", [True, False])
def test_static_embedding_equals_sentence_transformers(tmp_path: Path, normalize: bool) -> None:
    """A10."""
    from sentence_transformers import SentenceTransformer

    folder = write_static(tmp_path / "m", layout="st", normalize=normalize)
    runner = make_runner_factory("m", folder)()
    texts = ["hello world", "kafka unheard redis", "stream queue " * 400]
    want = SentenceTransformer(str(folder), device="cpu").encode(texts)
    got = np.stack([o.dense for o in outcomes(runner, texts)])
    assert np.abs(got - want).max() <= 1e-5
