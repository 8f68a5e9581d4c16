"""Which store has which kinds of vectors is told as it is."""

from __future__ import annotations

import importlib
import inspect

import pytest

from pipeline.indexing.identity import CollectionIdentity, WrongCollection
from pipeline.indexing.sinks.base import Collection
from pipeline.indexing.sinks.registry import SINKS, is_collection, open_collection
from pipeline.indexing.vectors import METRICS, TAKEN_BY
from pipeline.settings.contradictions import contradictions
from pipeline.settings.records import RouteSettings, Settings

NAMES = {"qdrant": "Qdrant", "postgresql": "PostgreSQL", "milvus": "Milvus", "lance": "LanceDB"}


def test_the_refusal_names_exactly_the_stores_that_have_a_kind() -> None:
    found: dict[str, set[str]] = {kind: set() for kind in TAKEN_BY}
    for scheme, row in SINKS.items():
        pytest.importorskip(row.client)
        module = importlib.import_module(f"pipeline.indexing.sinks.{row.module}")
        (made,) = [
            one
            for _, one in inspect.getmembers(module, inspect.isclass)
            if issubclass(one, Collection) and one.__module__ == module.__name__
        ]
        for kind in made.kinds - {"dense"}:
            found[kind].add(NAMES[scheme])
    assert found == {kind: set(stores) for kind, stores in TAKEN_BY.items()}


def test_the_metric_says_the_kind_and_a_newer_one_is_refused() -> None:
    for kind, metric in METRICS.items():
        made = CollectionIdentity(model="m", fingerprint="f", dimensions=4, metric=metric)
        assert made.kind == kind
    newer = CollectionIdentity(model="m", fingerprint="f", dimensions=4, metric="hamming")
    with pytest.raises(WrongCollection, match="hamming"):
        _ = newer.kind
    old = CollectionIdentity.from_json('{"model": "m", "fingerprint": "f", "dimensions": 4}', "x")
    assert old.kind == "dense"


@pytest.mark.parametrize("scheme", ["elasticsearch", "weaviate", "vespa", "postgres", "pgvector"])
def test_a_store_that_is_not_there_is_refused_by_name_and_not_as_a_transport(scheme: str) -> None:
    url = f"{scheme}://user:secret@host:9200#docs"
    assert is_collection(url)
    with pytest.raises(ValueError, match=f"^{scheme}: .*; there are: chroma, ") as caught:
        open_collection(url)
    assert "secret" not in str(caught.value)
    route = RouteSettings(name="docs", source="inproc://docs", destination=url)
    problems = contradictions(Settings(routes=(route,)))
    assert any(scheme in p.message and "secret" not in p.message for p in problems)
