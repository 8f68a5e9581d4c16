"""Loaded tiny models, one per session: loading is cheap, importing transformers is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu.load import make_runner_factory
from tests.support.models import write_model

Load = Callable[..., Any]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The executor's habit, and the only setting under which bits are promised."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """`load("bert", labels=1)` -> a runner of a tiny model; the same arguments give the same one."""
    known: dict[str, Any] = {}

    def build(family: str = "bert", settings: dict[str, Any] | None = None, **model: Any) -> Any:
        key = repr((family, settings, sorted(model.items())))
        if key not in known:
            folder: Path = tmp_path_factory.mktemp("model") / "m"
            write_model(folder, family, **model)
            known[key] = make_runner_factory(family, folder, **(settings or {}))()
        return known[key]

    return build
