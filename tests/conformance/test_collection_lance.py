"""LanceDB under the suite of collections."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.collection_suite import CollectionConformance


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for the whole module."""
    folder: Path = tmp_path_factory.mktemp("lance")
    return f"lance://{folder}#NAME"


class TestLance(CollectionConformance):
    """The embedded default."""


class TestMultivector(TestLance):
    """One vector per token, compared by MaxSim."""

    kind = "multivector"
