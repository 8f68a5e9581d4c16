"""The contestants of `benchmarks.engine`: each turns a list of texts into an array of vectors.

Who calls it: `benchmarks.engine`.
What must stay true: every contestant starts from strings and ends with float32 vectors of the same
model, cut at the same length; threads are those of the machine, split as each engine does best; none sees
the texts before its call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.messages import Entry
from actors.packing import Packer, PackingPolicy
from actors.tokenizer import SLICE_ITEMS
from benchmarks._common import cores
from gpu.batch import EncodedItem, EncodedRequest, ItemResult, pack, scatter
from gpu.executor import ModelExecutor
from gpu.load import make_runner_factory
from schemas.requests import EmbedRequest, Text

Engine = Callable[[Sequence[str]], np.ndarray]


@dataclass(slots=True, eq=False)
class _Owner:
    """The part of an in-flight request that the packer looks at."""

    closed: bool = False

    def expired(self, epoch_ms: int) -> bool:
        return False


class OurEngine:
    """Tokenizer, packer and executor as the service joins them, without its actors and brokers.

    One thread encodes slices of `SLICE_ITEMS` texts ahead of the executor, as the tokenizer actor does.
    """

    def __init__(self, folder: Path, *, workers: int | None = None, **settings: Any) -> None:
        self.executor = ModelExecutor({"m": make_runner_factory("m", folder, **settings)}, workers)
        self.runner = self.executor.load("m").result()
        self.info = self.runner.info
        self.workers = self.executor.width
        self._tokenizer = ThreadPoolExecutor(1)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        packer = Packer(PackingPolicy(self.info.max_batch_tokens))
        out = np.empty((len(texts), self.info.dimensions or 0), np.float32)
        slices = deque(
            self._tokenizer.submit(self._encode, texts, start)
            for start in range(0, len(texts), SLICE_ITEMS)
        )
        free = threading.Semaphore(self.workers + 1)
        running: list[Future[Any]] = []
        while slices or len(packer):
            while slices and (
                slices[0].done() or packer.queued_tokens() < self.info.max_batch_tokens
            ):
                packer.add(slices.popleft().result(), "bulk")
            free.acquire()
            entries = packer.next_batch(0.0, 0, idle=True).batch
            running.append(self._submit(entries, out, free))
        for future in running:
            future.result()
        return out

    def _encode(self, texts: Sequence[str], start: int) -> list[Entry]:
        wanted = tuple(Text(text) for text in texts[start : start + SLICE_ITEMS])
        (encoded,) = self.runner.encoder.encode(
            [EmbedRequest(id="r", input=wanted, truncate="right")]
        )
        assert isinstance(encoded, EncodedRequest), encoded
        owner: Any = _Owner()
        entries = []
        for i, item in enumerate(encoded.items):
            assert isinstance(item, EncodedItem), item
            entries.append(Entry(item, owner, start + i, 0.0, item.n_tokens))
        return entries

    def _submit(
        self, entries: list[Entry], out: np.ndarray, free: threading.Semaphore
    ) -> Future[Any]:
        batch = pack([entry.item for entry in entries])
        stored: Future[Any] = Future()

        def store(future: Future[Any]) -> None:
            try:
                for entry, row in zip(entries, scatter(batch, future.result()), strict=True):
                    assert isinstance(row, ItemResult), row
                    out[entry.index] = row.dense
                stored.set_result(None)
            except BaseException as error:
                stored.set_exception(error)
            finally:
                free.release()

        self.executor.submit("m", batch).add_done_callback(store)
        return stored

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text after the cut."""
        return [
            entry.n_tokens
            for start in range(0, len(texts), SLICE_ITEMS)
            for entry in self._encode(texts, start)
        ]

    def close(self) -> None:
        """Stop the threads."""
        self._tokenizer.shutdown()
        self.executor.close(10.0)


class OrtEngine:
    """ONNX Runtime on the fused graph: one session with one thread per core, plain Python around it.

    group: texts per call. 1 is unpadded; above it texts are sorted by length first, then padded.
    """

    def __init__(self, folder: Path, *, group: int, max_tokens: int = 256) -> None:
        import onnxruntime as ort
        from tokenizers import Tokenizer

        self.group = group
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(max_tokens)
        graph = onnx_graph(folder, masked=group > 1)
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.sessions = [
            ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
            for _ in range(cores())
        ]

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        ids = [np.asarray(e.ids, np.int32) for e in self.tokenizer.encode_batch_fast(list(texts))]
        order = list(range(len(ids)))
        if self.group > 1:
            order.sort(key=lambda i: len(ids[i]))
        groups = deque(order[i : i + self.group] for i in range(0, len(order), self.group))
        out = np.empty((len(ids), 384), np.float32)

        def work(session: Any) -> None:
            while True:
                try:
                    rows = groups.pop()
                except IndexError:
                    return
                out[rows] = self._vectors(session, [ids[row] for row in rows])

        with ThreadPoolExecutor(len(self.sessions)) as pool:
            for done in [pool.submit(work, session) for session in self.sessions]:
                done.result()
        return out

    def _vectors(self, session: Any, rows: list[np.ndarray]) -> np.ndarray:
        longest = max(len(row) for row in rows)
        ids = np.zeros((len(rows), longest), np.int32)
        feeds = {"input_ids": ids, "token_types": np.zeros_like(ids)}
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        mask = np.ones_like(ids)
        if self.group > 1:
            for i, row in enumerate(rows):
                mask[i, len(row) :] = 0
            feeds["mask"] = mask
        (hidden,) = session.run(["hidden"], feeds)
        weights = mask[:, :, None].astype(np.float32)
        pooled = (hidden * weights).sum(axis=1) / weights.sum(axis=1)
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)

    def close(self) -> None:
        """Drop the sessions."""
        self.sessions.clear()


def onnx_graph(folder: Path, *, masked: bool, exported: bool = False) -> bytes:
    """The folder's model; exported: with the inputs and the output that exporters give it."""
    import json

    from safetensors.numpy import load_file

    from benchmarks._onnx_graph import fused_bert

    config = json.loads((folder / "config.json").read_text("utf-8"))
    return fused_bert(
        load_file(folder / "model.safetensors"),
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        eps=config["layer_norm_eps"],
        masked=masked,
        exported=exported,
    )


class SentenceTransformersEngine:
    """`SentenceTransformer.encode` with its own sorting and batch size, all cores inside one call."""

    def __init__(self, folder: Path) -> None:
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(str(folder), device="cpu")

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(cores())
        try:
            vectors: np.ndarray = self.model.encode(list(texts), show_progress_bar=False)
        finally:
            torch.set_num_threads(threads)
        return vectors

    def close(self) -> None:
        """Drop the model."""
        del self.model
