"""Contestants of `benchmarks.engine` that ask for older libraries than ours: fastembed and Infinity's engine.

Who calls it: `benchmarks.engine`, for those that are installed.
What must stay true: they are given the weights and the graph that the others have, nothing is downloaded,
and they batch as they do by themselves. Their packages name huggingface_hub below 2 and numpy below 2, so
they live in an environment over the other one (`make bench`), installed without what they depend on.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import cores
from benchmarks._engines import onnx_graph

BATCH = 32  # texts a batch; Infinity's default, and faster here for fastembed than its own 256


class FastEmbedEngine:
    """`TextEmbedding.embed` on one session with all cores. It pads what lies together and does not sort."""

    def __init__(self, folder: Path, *, max_tokens: int = 256) -> None:
        from fastembed import TextEmbedding

        self._folder = Path(tempfile.mkdtemp(prefix="embedstream-fastembed-"))
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(folder / name, self._folder)
        settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        settings |= {"model_max_length": max_tokens, "max_length": max_tokens}
        (self._folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
        special = folder / "special_tokens_map.json"
        text = special.read_text("utf-8") if special.is_file() else "{}"
        (self._folder / special.name).write_text(text, "utf-8")
        (self._folder / "model.onnx").write_bytes(onnx_graph(folder, masked=True, exported=True))
        self.model: Any = TextEmbedding(
            "sentence-transformers/all-MiniLM-L6-v2",
            specific_model_path=str(self._folder),
            threads=cores(),
        )

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        return np.stack(list(self.model.embed(list(texts), batch_size=BATCH)))

    def close(self) -> None:
        """Drop the model and its files."""
        self.model = None
        shutil.rmtree(self._folder)


class InfinityEngine:
    """Infinity's engine as a library, with its torch backend, which sorts what waits by length."""

    def __init__(self, folder: Path) -> None:
        os.environ["INFINITY_ANONYMOUS_USAGE_STATS"] = "0"
        import torch
        from infinity_emb import AsyncEmbeddingEngine, EngineArgs

        arguments = EngineArgs(
            model_name_or_path=str(folder),
            engine="torch",
            device="cpu",
            dtype="float32",
            bettertransformer=False,
            model_warmup=False,
            batch_size=BATCH,
        )
        self._loop = asyncio.Runner()
        self.engine: Any = AsyncEmbeddingEngine.from_args(arguments)
        threads = torch.get_num_threads()
        torch.set_num_threads(cores())  # its own threads take what holds at their first product
        try:
            self._loop.run(self.engine.astart())
            self(["a text"])
        finally:
            torch.set_num_threads(threads)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        vectors, _ = self._loop.run(self.engine.embed(sentences=list(texts)))
        return np.stack(vectors)

    def close(self) -> None:
        """Stop its threads."""
        self._loop.run(self.engine.astop())
        self._loop.close()


PEERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "fastembed": ("fastembed", FastEmbedEngine),
    "Infinity's engine": ("infinity_emb", InfinityEngine),
}
"""Name in the table -> package to import, and the contestant."""


def installed(package: str) -> bool:
    """Whether the package can be imported here."""
    return importlib.util.find_spec(package) is not None
