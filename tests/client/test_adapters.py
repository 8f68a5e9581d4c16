"""The adapters inside the real libraries, against the real service with a fake model.

Libraries are imported in the tests: together they take seconds.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from embedstream_client import Client
from embedstream_client.errors import EmptyInput
from tests.support.client import background_service
from tests.support.fakes import fake_ids, fake_vector
from tests.support.servers import ServerInfo, redis_ladder, unique

pytestmark = [
    pytest.mark.redis,
    pytest.mark.timeout(180),  # importing a library takes seconds, many on a busy machine
    # what the libraries warn of is theirs to mend
    pytest.mark.filterwarnings("default"),
]
os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
DOCUMENTS = ["a one", "b two three", "c", "d four"]


@pytest.fixture(scope="module")
def redis_info() -> Iterator[ServerInfo]:
    yield from redis_ladder()


@pytest.fixture(scope="module")
def url(redis_info: ServerInfo) -> Iterator[str]:
    """The address of a service that runs on an event loop of its own, as in another process."""
    stream = unique("embedstream.adapters")
    with background_service(f"redis://{redis_info.address}/{stream}"):
        yield f"redis://{redis_info.address}/0?stream={stream}"


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client.from_url(url) as one:
        yield one


def expected(text: str) -> list[float]:
    vector: list[float] = fake_vector(fake_ids(text)).tolist()
    return vector


def score(query: str, text: str) -> float:
    return expected(f"{query} {text}")[0]


def best_first(query: str, texts: list[str] = DOCUMENTS) -> list[str]:
    return sorted(texts, key=lambda text: -score(query, text))


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- LangChain ---------------------------------------------------------------------------------------


async def test_langchain_embeddings_feed_a_vector_store(client: Client, quiet: None) -> None:
    from langchain_core.vectorstores import InMemoryVectorStore

    from embedstream_client.langchain import EmbedstreamEmbeddings

    embeddings = EmbedstreamEmbeddings(client=client)
    assert embeddings.embed_query("x y") == expected("x y")
    assert await embeddings.aembed_query("x y") == expected("x y")
    assert embeddings.embed_documents([]) == []
    many = [f"text {i}" for i in range(150)]
    assert embeddings.embed_documents(many) == [expected(text) for text in many]
    assert await embeddings.aembed_documents(many) == [expected(text) for text in many]
    with pytest.raises(EmptyInput):
        embeddings.embed_documents(["fine", ""])

    store = InMemoryVectorStore(embeddings)
    await store.aadd_texts(DOCUMENTS)
    (found,) = await store.asimilarity_search(DOCUMENTS[1], k=1)
    assert found.page_content == DOCUMENTS[1]
    (found,) = store.similarity_search(DOCUMENTS[2], k=1)
    assert found.page_content == DOCUMENTS[2]


async def test_langchain_reranker_compresses_what_a_retriever_found(
    client: Client, url: str, quiet: None
) -> None:
    from langchain_core.documents import Document

    from embedstream_client.langchain import EmbedstreamReranker

    documents = [Document(text, metadata={"n": i}) for i, text in enumerate(DOCUMENTS)]
    reranker = EmbedstreamReranker(client=client, top_n=2)
    wanted = best_first("q")[:2]
    for found in (
        reranker.compress_documents(documents, "q"),
        await reranker.acompress_documents(documents, "q"),
    ):
        assert [d.page_content for d in found] == wanted
        assert found[0].metadata["relevance_score"] == pytest.approx(score("q", wanted[0]))
        assert found[0].metadata["n"] == DOCUMENTS.index(wanted[0])
    assert "relevance_score" not in documents[0].metadata
    assert reranker.compress_documents([], "q") == []
    named = EmbedstreamReranker(url=url.replace("://", "://:secret@"))
    assert "secret" not in repr(named) and "secret" not in named.model_dump_json()


# --- LlamaIndex --------------------------------------------------------------------------------------


async def test_llama_index_embedding_and_reranker(client: Client, url: str, quiet: None) -> None:
    from llama_index.core import VectorStoreIndex
    from llama_index.core.schema import NodeWithScore, TextNode

    from embedstream_client.llama_index import EmbedstreamEmbedding, EmbedstreamRerank

    embedding = EmbedstreamEmbedding(client=client, embed_batch_size=3)
    assert embedding.get_query_embedding("x y") == expected("x y")
    assert await embedding.aget_query_embedding("x y") == expected("x y")
    assert embedding.get_text_embedding("z") == expected("z")
    many = [f"text {i}" for i in range(10)]
    assert embedding.get_text_embedding_batch(many) == [expected(text) for text in many]
    assert await embedding.aget_text_embedding_batch(many) == [expected(text) for text in many]
    assert "redis" not in embedding.to_json() and EmbedstreamEmbedding(url=url).dimensions is None

    nodes = [TextNode(text=text, id_=str(i)) for i, text in enumerate(DOCUMENTS)]
    index = VectorStoreIndex(nodes, embed_model=embedding)
    retriever = index.as_retriever(similarity_top_k=4)
    found = await asyncio.to_thread(retriever.retrieve, DOCUMENTS[3])
    assert found[0].node.get_content() == DOCUMENTS[3]

    reranker = EmbedstreamRerank(client=client, top_n=3)
    for ranked in (
        reranker.postprocess_nodes(found, query_str="q"),
        await reranker.apostprocess_nodes(found, query_str="q"),
    ):
        assert [n.node.get_content() for n in ranked] == best_first("q")[:3]
        assert ranked[0].score == pytest.approx(score("q", best_first("q")[0]))
    assert reranker.postprocess_nodes([], query_str="q") == []
    with pytest.raises(ValueError, match="needs the query"):
        reranker.postprocess_nodes([NodeWithScore(node=nodes[0])])


# --- Haystack ----------------------------------------------------------------------------------------


async def test_haystack_components_in_a_pipeline(
    url: str, quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from haystack import Document, Pipeline
    from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
    from haystack.document_stores.in_memory import InMemoryDocumentStore
    from haystack.utils import Secret

    from embedstream_client.haystack import (
        EmbedstreamDocumentEmbedder,
        EmbedstreamRanker,
        EmbedstreamTextEmbedder,
    )

    monkeypatch.setenv("EMBEDSTREAM_URL", url)
    secret = Secret.from_env_var("EMBEDSTREAM_URL")
    documents = [
        Document(content=text, meta={"title": f"t{i}"}) for i, text in enumerate(DOCUMENTS)
    ]
    embedder = EmbedstreamDocumentEmbedder(url)
    embedded = embedder.run(documents)["documents"]
    assert [d.embedding for d in embedded] == [expected(text) for text in DOCUMENTS]
    assert (await embedder.run_async(documents))["documents"] == embedded
    assert documents[0].embedding is None
    titled = EmbedstreamDocumentEmbedder(
        url, meta_fields_to_embed=["title"], embedding_separator=" "
    )
    assert titled.run(documents[:1])["documents"][0].embedding == expected("t0 a one")
    with pytest.raises(TypeError):
        embedder.run("a text")  # type: ignore[arg-type]

    store = InMemoryDocumentStore()
    store.write_documents(embedded)
    pipeline = Pipeline()
    pipeline.add_component("query", EmbedstreamTextEmbedder(secret))
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store))
    pipeline.add_component("ranker", EmbedstreamRanker(secret, top_k=2))
    pipeline.connect("query.embedding", "retriever.query_embedding")
    pipeline.connect("retriever.documents", "ranker.documents")

    saved = pipeline.dumps()
    assert url not in saved and "EMBEDSTREAM_URL" in saved
    ranker = EmbedstreamRanker.from_dict(EmbedstreamRanker(secret, top_k=2).to_dict())
    assert ranker.top_k == 2 and ranker.url == secret

    asked = {"query": {"text": "q"}, "ranker": {"query": "q"}}
    found = (await asyncio.to_thread(pipeline.run, asked))["ranker"]["documents"]
    assert [d.content for d in found] == best_first("q")[:2]
    assert found[0].score == pytest.approx(score("q", found[0].content))
    again = await ranker.run_async("q", documents, top_k=1)
    assert [d.content for d in again["documents"]] == best_first("q")[:1]
    assert ranker.run("q", [])["documents"] == []
    with pytest.raises(ValueError, match="from_env_var"):
        EmbedstreamRanker("redis://:secret@h").to_dict()


# --- sentence-transformers ---------------------------------------------------------------------------


def test_stand_ins_take_what_sentence_transformers_takes(quiet: None) -> None:
    from sentence_transformers import CrossEncoder, SentenceTransformer

    from embedstream_client.sentence_transformers import (
        RemoteCrossEncoder,
        RemoteSentenceTransformer,
    )

    def parameters(function: Callable[..., Any]) -> dict[str, Any]:
        found = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in found if p.kind is not p.VAR_KEYWORD}

    for ours, theirs in (
        (RemoteSentenceTransformer.encode, SentenceTransformer.encode),
        (RemoteCrossEncoder.predict, CrossEncoder.predict),
    ):
        mine, real = parameters(ours), parameters(theirs)
        assert list(mine) == list(real), "by position too"
        del mine["batch_size"], real["batch_size"]  # a matter of speed
        assert mine == real


def test_encode(client: Client, quiet: None) -> None:
    import torch

    from embedstream_client.sentence_transformers import RemoteSentenceTransformer

    model = RemoteSentenceTransformer(client=client)
    one, many = model.encode("x y"), model.encode(["x y", "z"], batch_size=1)
    assert one.shape == (8,) and many.shape == (2, 8) and many.dtype == np.float32
    np.testing.assert_array_equal(many, [expected("x y"), expected("z")])
    assert isinstance(model.encode(["z"], convert_to_tensor=True), torch.Tensor)
    assert isinstance(model.encode(["z"], convert_to_numpy=False)[0], torch.Tensor)
    assert model.encode([]).shape == (0,)
    cut = model.encode(["z"], truncate_dim=3, normalize_embeddings=True)
    np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(model.encode("z", truncate_dim=3), expected("z")[:3])
    bits = model.encode(["z"], precision="ubinary")
    np.testing.assert_array_equal(np.unpackbits(bits, axis=1)[0], np.array(expected("z")) > 0)
    signed = model.encode(["z"], precision="binary")
    assert signed.dtype == np.int8 and int(signed[0, 0]) + 128 == int(bits[0, 0])
    assert model.get_sentence_embedding_dimension() == 8
    for refused in ({"precision": "int8"}, {"output_value": "token_embeddings"}, {"pool": {}}):
        with pytest.raises(ValueError):
            model.encode("x", **refused)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        model.encode("x", dimensionz=3)  # type: ignore[call-arg]


def test_predict_and_rank(client: Client, quiet: None) -> None:
    import torch

    from embedstream_client.sentence_transformers import RemoteCrossEncoder

    model = RemoteCrossEncoder(client=client)
    pairs = [("q", "a"), ("q", "b"), ("r", "a"), ("q", "c")]
    wanted = [score(query, text) for query, text in pairs]
    np.testing.assert_allclose(model.predict(pairs), wanted, rtol=1e-6)
    np.testing.assert_allclose(model.predict(pairs, batch_size=1), wanted, rtol=1e-6)
    assert float(model.predict(("q", "a"))) == pytest.approx(wanted[0])
    activated = model.predict(pairs, activation_fn=torch.nn.Sigmoid())
    np.testing.assert_allclose(activated, 1 / (1 + np.exp(-np.array(wanted))), rtol=1e-5)
    ranked = model.rank("q", DOCUMENTS, top_k=3, return_documents=True)
    assert [r["text"] for r in ranked] == best_first("q")[:3]
    assert [DOCUMENTS[r["corpus_id"]] for r in ranked] == best_first("q")[:3]
    with pytest.raises(ValueError):
        model.predict(pairs, apply_softmax=True)
