"""`check --verify`: the second opinion agrees on right folders, and says so when it does not."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.load import make_runner_factory
from gpu.verify import TEXTS, second_opinion
from tests.support.models import FAMILY_NAMES, edit_json, write_model
from tests.support.models_encoders import ENCODER_NAMES
from tests.support.models_more import MORE_NAMES
from tests.support.models_outputs import (
    write_colbert,
    write_m3,
    write_router,
    write_splade,
    write_static,
)

FOLDERS: dict[str, dict[str, Any]] = {
    "bert": {"dense": 8},
    "xlm-roberta": {"labels": 1, "pooling": None},
    "modernbert": {"pooling": "cls"},
    "mpnet": {"max_seq_length": 60},  # its library counts two positions more than there are
    "qwen3": {"pooling": "lasttoken"},
    "gemma3_text": {},
    "llama": {"pooling": "lasttoken"},
    "eurobert": {},
    "gte": {"pooling": "cls"},
    "albert": {},
}


SEEDED = [*FAMILY_NAMES, *ENCODER_NAMES, *MORE_NAMES]


@pytest.mark.parametrize("family", SEEDED)
def test_the_library_agrees_on_seeded_folders(tmp_path: Path, family: str) -> None:
    """One folder of every family of the table."""
    folder = write_model(tmp_path / "m", family, **FOLDERS.get(family, {}))
    edit_json(folder / "tokenizer_config.json", model_max_length=60)
    opinion = second_opinion(make_runner_factory("m", folder)())
    assert opinion.agrees and opinion.worst is not None and opinion.worst <= 1e-5, opinion
    assert f"over {len(TEXTS)} texts" in opinion.told()


WRITERS: dict[str, Callable[[Path], Path]] = {
    "labels": lambda folder: write_model(folder, "distilbert", labels=3),
    "splade": write_splade,
    "router": write_router,
    "colbert": lambda folder: write_colbert(folder, skip=(".", ",")),
    "pylate": lambda folder: write_colbert(folder, style="pylate", prefixes=True, expand=True),
    "m3": write_m3,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_the_library_agrees_on_other_kinds(tmp_path: Path, kind: str) -> None:
    folder = WRITERS[kind](tmp_path / "m")
    if (folder / "tokenizer_config.json").is_file():
        edit_json(folder / "tokenizer_config.json", model_max_length=60)
    opinion = second_opinion(make_runner_factory("m", folder)())
    assert opinion.agrees and opinion.worst is not None and opinion.worst <= 1e-5, opinion


def test_a_folder_that_is_served_wrong_is_told(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "bert")
    runner = make_runner_factory("m", folder)()
    edit_json(
        folder / "1_Pooling" / "config.json",
        pooling_mode_mean_tokens=False,
        pooling_mode_cls_token=True,
    )
    opinion = second_opinion(runner)
    assert not opinion.agrees and "DIFFERS" in opinion.told()


def test_no_opinion_is_no_agreement(tmp_path: Path) -> None:
    runner = make_runner_factory("m", write_model(tmp_path / "m", "qwen3", pooling=None))()
    opinion = second_opinion(runner)
    assert opinion.worst is None and not opinion.agrees
    assert "would guess the pooling" in opinion.told()


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        "all-MiniLM-L6-v2",
        "bge-small-en-v1.5",
        "e5-small-v2",
        "ms-marco-MiniLM-L-12-v2",
        "splade-tiny",
    ],
)
def test_the_library_agrees_on_packaged_models(
    packaged_model: Callable[[str], Path], name: str
) -> None:
    opinion = second_opinion(make_runner_factory("m", packaged_model(name))())
    print(name, opinion)
    assert opinion.worst is not None and np.isfinite(opinion.worst) and opinion.agrees, opinion


@pytest.mark.parametrize("where", ["tokenizer_config.json", "tokenizer.json"])
def test_texts_are_cut_where_the_folders_tokenizer_cuts(tmp_path: Path, where: str) -> None:
    """A request says the side itself; the library takes its tokenizer's, and agrees."""
    folder = write_model(tmp_path / "m", "bert", max_seq_length=20)
    if where == "tokenizer.json":
        cut = {"direction": "Left", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        edit_json(folder / where, truncation=cut)
    else:
        edit_json(folder / where, truncation_side="left")
    assert second_opinion(make_runner_factory("m", folder)()).agrees


def test_a_static_model_is_compared_with_the_library_that_its_layout_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model2Vec drops unknown tokens and Sentence-Transformers counts them: neither judges the other's."""
    from tests.parity.test_outputs_tiny import model2vec

    static = make_runner_factory("s", write_static(tmp_path / "s", layout="st"))()
    opinion = second_opinion(static)
    assert opinion.library == "sentence-transformers" and opinion.agrees, opinion
    folder = write_static(tmp_path / "m")
    runner = make_runner_factory("m", folder)()
    monkeypatch.setitem(sys.modules, "model2vec", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "model2vec is not installed" in second_opinion(runner).told()

    class StaticModel:
        @classmethod
        def from_pretrained(cls, path: str) -> StaticModel:
            return cls()

        def encode(self, texts: list[str]) -> np.ndarray:
            return np.stack([model2vec(folder, text) for text in texts])

    library = types.ModuleType("model2vec")
    library.StaticModel = StaticModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "model2vec", library)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    opinion = second_opinion(runner)
    assert opinion.library == "model2vec" and opinion.agrees, opinion
