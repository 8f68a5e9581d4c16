"""Seeded tiny models of every family against sentence-transformers on the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import pack, scatter
from gpu.folder.families import FAMILIES
from gpu.load import make_runner_factory
from schemas.requests import ClassifyRequest, Document, EmbedRequest, RerankRequest, Text, TokenIds
from tests.support.models import FAMILY_NAMES, edit_json, write_model
from tests.support.models_more import MORE_NAMES

TEXTS = [
    "hello world", "kafka", "the capital of china is beijing, a large river in blue",
    "one two three four five " * 4, "What is a stream? A queue on a topic.", "x",
]  # fmt: skip


def vectors(runner: Any, texts: list[str], **fields: Any) -> np.ndarray:
    request = EmbedRequest(id="r", input=tuple(Text(t) for t in texts), **fields)
    encoded = runner.encoder.encode([request])[0]
    batch = pack(encoded.items)
    return np.stack([o.dense for o in scatter(batch, runner.forward(batch))])


def reference(folder: Path, **kwargs: Any) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", **kwargs)


def close(got: np.ndarray, want: np.ndarray) -> None:
    """max abs 1e-5 and cosine >= 1 - 1e-6, in fp64."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= 1e-5
    cosine = (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    assert cosine.min() >= 1 - 1e-6


def fitting(texts: list[str], encoder: Any) -> list[str]:
    """Texts that fit, so that both sides see the same tokens."""
    return [t for t in texts if len(encoder._tokenizer.encode(t).ids) <= encoder.limit]


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_equals_sentence_transformers(
    tmp_path: Path, family: str, pooling: str
) -> None:
    """A10, A11, A12: cosine, order and bytes of text to vector, through both tokenizers."""
    folder = write_model(tmp_path / "m", family, pooling=pooling)
    runner = make_runner_factory("m", folder)()
    texts = fitting(TEXTS, runner.encoder)
    assert len(texts) >= 4
    close(vectors(runner, texts), reference(folder).encode(texts))


@pytest.mark.parametrize("family", MORE_NAMES)
def test_further_families_run_packed_and_equal_their_library(tmp_path: Path, family: str) -> None:
    """A01, A02, A06, A10: vectors and logits, alone and in any pack the same bytes; one test a family."""
    import torch
    from transformers import AutoModelForSequenceClassification

    pooling = "mean" if FAMILIES[family].default_pooling != "last_token" else "lasttoken"
    folder = write_model(tmp_path / "m", family, pooling=pooling, max_seq_length=120)
    runner = make_runner_factory("m", folder)()
    assert runner.info.packed, runner.info.notes
    texts = fitting(TEXTS, runner.encoder)
    close(vectors(runner, texts), reference(folder).encode(texts))
    items = list(
        runner.encoder.encode([EmbedRequest(id="r", input=tuple(map(Text, texts)))])[0].items
    )
    same_bytes(runner, items)
    if FAMILIES[family].head is None:
        return
    folder = write_model(tmp_path / "c", family, labels=2)
    runner = make_runner_factory("m", folder)()
    request = ClassifyRequest(id="r", input=tuple(map(Text, texts)), raw_scores=True)
    items = list(runner.encoder.encode([request])[0].items)
    same_bytes(runner, items)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for item in items:
        with torch.no_grad():
            ids = torch.from_numpy(item.input_ids.astype(np.int64))[None]
            want = model(input_ids=ids).logits[0].numpy()
        (got,) = runner.forward(pack([item]))
        assert np.abs(got.scores - want).max() <= 1e-5


def same_bytes(runner: Any, items: list[Any]) -> None:
    """Of vectors or scores, alone, in a pack and in the pack in reverse."""

    def values(part: list[Any]) -> list[bytes]:
        batch = pack(part)
        found = scatter(batch, runner.forward(batch))
        return [(o.scores if o.dense is None else o.dense).tobytes() for o in found]

    alone = [values([item])[0] for item in items]
    assert values(items) == alone
    assert values(items[::-1]) == alone[::-1]


def test_dense_and_prompts_equal_sentence_transformers(tmp_path: Path) -> None:
    """A10, A13: Dense before Normalize; prompts by name; a prompt outside the mean."""
    for include in (True, False):
        folder = write_model(
            tmp_path / f"m{include}", "bert", dense=12, include_prompt=include,
            prompts={"query": "query: "},
        )  # fmt: skip
        runner, st = make_runner_factory("m", folder)(), reference(folder)
        close(vectors(runner, TEXTS), st.encode(TEXTS))
        close(vectors(runner, TEXTS, prompt_name="query"), st.encode(TEXTS, prompt_name="query"))


POOLINGS: dict[str, dict[str, Any]] = {
    "max": {"pooling_mode": "max"},
    "weightedmean": {"pooling_mode": "weightedmean"},
    "mean_sqrt_len": {"pooling_mode": "mean_sqrt_len_tokens"},
    "cls+max+lasttoken": {
        "pooling_mode_max_tokens": True, "pooling_mode_cls_token": True,
        "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", POOLINGS)
def test_every_pooling_equals_sentence_transformers(tmp_path: Path, name: str) -> None:
    """A10, A13, A06: with a prompt left out of it, and the same bytes in any pack."""
    folder = write_model(
        tmp_path / "m", "bert", prompts={"query": "query: "}, include_prompt=False, normalize=False
    )
    edit_json(folder / "1_Pooling" / "config.json", **POOLINGS[name])
    runner, st = make_runner_factory("m", folder)(), reference(folder)
    assert runner.info.pooling == name.replace("lasttoken", "last_token")
    for prompt in (None, "query"):
        close(vectors(runner, TEXTS, prompt_name=prompt), st.encode(TEXTS, prompt_name=prompt))
        request = EmbedRequest(id="r", input=tuple(map(Text, TEXTS)), prompt_name=prompt)
        same_bytes(runner, list(runner.encoder.encode([request])[0].items))


@pytest.mark.parametrize("size", [32, 12])
def test_dense_with_a_residual_equals_sentence_transformers(tmp_path: Path, size: int) -> None:
    """A10: added as it is, or through a linear of its own where the sizes differ."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = write_model(tmp_path / "m", "bert", dense=size)
    edit_json(
        folder / "2_Dense" / "config.json",
        use_residual=True, activation_function="torch.nn.modules.activation.GELU",
    )  # fmt: skip
    weights = folder / "2_Dense" / "model.safetensors"
    if size != 32:
        torch.manual_seed(3)
        save_file(load_file(weights) | {"residual.weight": torch.randn(size, 32)}, weights)
    runner = make_runner_factory("m", folder)()
    close(vectors(runner, TEXTS), reference(folder).encode(TEXTS))


def test_matryoshka_equals_truncate_dim(tmp_path: Path) -> None:
    """A08."""
    folder = write_model(tmp_path / "m", "bert")
    runner = make_runner_factory("m", folder, matryoshka_dimensions=(8,))()
    want = reference(folder, truncate_dim=8).encode(TEXTS, normalize_embeddings=True)
    close(vectors(runner, TEXTS, dimensions=8), want)


def test_truncation_right_equals_sentence_transformers(tmp_path: Path) -> None:
    """B04."""
    folder = write_model(tmp_path / "m", "bert", max_seq_length=16)
    runner = make_runner_factory("m", folder)()
    long = [t * 5 for t in TEXTS]
    close(vectors(runner, long, truncate="right"), reference(folder).encode(long))


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "electra", "mpnet", "modernbert"])
def test_scores_equal_cross_encoder(tmp_path: Path, family: str) -> None:
    """A16, A17, A19: default activation of CrossEncoder, once; segment ids; order kept."""
    from sentence_transformers import CrossEncoder

    folder = write_model(tmp_path / "m", family, labels=1)
    runner = make_runner_factory("m", folder)()
    documents = ["kafka topic", "the river", "beijing is the capital of china", "queue " * 9]
    for raw in (False, True):
        request = RerankRequest(
            id="r",
            query="capital of china",
            documents=tuple(Document(d) for d in documents),
            raw_scores=raw,
        )
        batch = pack(runner.encoder.encode([request])[0].items)
        got = np.array([float(o.scores[0]) for o in scatter(batch, runner.forward(batch))])
        import torch

        model = CrossEncoder(str(folder), device="cpu")
        activation = torch.nn.Identity() if raw else None
        want = model.predict([(request.query, d) for d in documents], activation_fn=activation)
        assert np.abs(got - want).max() <= 1e-5


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "qwen3"])
def test_token_ids_of_a_pair_score_as_their_texts(tmp_path: Path, family: str) -> None:
    """A16: the same ids come out, special tokens and segment ids included; a wrong id is its item's
    error, and a query is one for all."""
    folder = write_model(tmp_path / "m", family, labels=1)
    encoder = make_runner_factory("m", folder)().encoder
    query, texts = "capital of china", ["kafka topic", "the river", "queue " * 9]
    ids = [
        tuple(encoder._tokenizer.encode(t, add_special_tokens=False).ids) for t in (query, *texts)
    ]

    def items(query: Any, documents: list[Document], **fields: Any) -> Any:
        request = RerankRequest(id="r", query=query, documents=tuple(documents), **fields)
        return encoder.encode([request])[0]

    plain = items(query, [Document(t) for t in texts]).items
    given = items(TokenIds(ids[0]), [Document(ids=i) for i in ids[1:]]).items
    mixed = items(query, [Document(texts[0]), Document(ids=ids[2]), Document(texts[2])]).items
    for one, other, third in zip(plain, given, mixed, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist() == third.input_ids.tolist()
        types = [
            None if i.token_type_ids is None else i.token_type_ids.tolist() for i in (one, other)
        ]
        assert types[0] == types[1]
    odd = items(query, [Document(ids=(10**6,)), Document(texts[0]), Document(ids=())]).items
    assert [getattr(item, "path", None) for item in odd] == [
        "$.documents[0]",
        None,
        "$.documents[2]",
    ]
    assert items(TokenIds((10**6,)), [Document("x")]).path == "$.query"


def test_classify_equals_the_transformers_pipeline(tmp_path: Path) -> None:
    """A18."""
    from transformers import pipeline

    folder = write_model(tmp_path / "m", "distilbert", labels=3)
    edit_json(folder / "config.json", id2label={"0": "no", "1": "yes", "2": "maybe"})
    runner = make_runner_factory("m", folder)()
    request = ClassifyRequest(id="r", input=tuple(Text(t) for t in TEXTS))
    batch = pack(runner.encoder.encode([request])[0].items)
    got = [o.scores for o in scatter(batch, runner.forward(batch))]
    classify = pipeline("text-classification", model=str(folder), top_k=None, device="cpu")
    for scores, want in zip(got, classify(TEXTS), strict=True):
        by_label = {entry["label"]: entry["score"] for entry in want}
        for label, score in zip(runner.info.labels, scores, strict=True):
            assert abs(by_label[label] - float(score)) <= 1e-5
