"""Qdrant under the suite of collections: the client's local mode. No package carries the server.

What the imitation does not show (HTTP errors, back-pressure, size limits) is tested against recorded
answers of the HTTP interface.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from pipeline.indexing.sinks.base import StoreRefused, StoreUnavailable
from pipeline.indexing.sinks.qdrant import told
from tests.conformance.collection_suite import CollectionConformance


class TestLocalMode(CollectionConformance):
    """A folder for each collection: local mode locks it for one client at a time."""

    exact = False
    one_client = True
    examples = 8

    @pytest.fixture
    def address(self, tmp_path: Path) -> str:
        """Under the test's own folder."""
        return f"qdrant://{tmp_path}/NAME#NAME"


class TestSparse(TestLocalMode):
    """Sparse vectors, which are kept as they are."""

    kind = "sparse"
    exact = True


class TestMultivector(TestLocalMode):
    """One vector per token."""

    kind = "multivector"


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, StoreRefused),  # wrong dimension
        (413, StoreRefused),  # above 32 MiB: with one document left, it is the document
        (422, StoreRefused),
        (404, StoreUnavailable),  # the collection was dropped
        (403, StoreUnavailable),
        (500, StoreUnavailable),
        (503, StoreUnavailable),
    ],
)
def test_answers_of_the_server_are_sorted_into_now_and_never(
    status: int, expected: type[Exception]
) -> None:
    """H02, H03, H08."""
    body = b'{"status":{"error":"a text of a sender"}}'
    with pytest.raises(expected) as caught, told():
        raise UnexpectedResponse(status, "Reason", body, httpx.Headers())
    assert "a text of a sender" not in str(caught.value)
    with pytest.raises(StoreUnavailable), told():
        raise ResponseHandlingException(httpx.ConnectError("refused"))
