"""The model part of `gpu_check`: seeded models of real shapes, packed against padded.

Who calls it: `benchmarks.gpu_check.check_models`.
What must stay true: packed and padded use one set of weights and one dtype; the comparison that decides
is between states of the same tokens; the runner itself is loaded through its own factory, so its
self-check runs too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu.attention import backends_for, register
from gpu.batch import EncodedItem, ItemResult, PackedBatch, pack
from tests.support.models import edit_json, write_model

# Rounding in 16 bits through 6 to 28 layers gives 0.999 and more; a leak gives 0.9 and less.
HALF_COSINE = 0.99
FP32_DIFF = 1e-3


@dataclass(frozen=True)
class Shape:
    """A model family at the size of a well-known model. texts: lengths of one measured batch."""

    name: str
    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    tokens: int = 16384
    mean: int = 128


def shapes(dry: bool) -> list[Shape]:
    """Sizes as published by the models named; small ones for a dry run."""
    if dry:
        return [
            Shape("bert, tiny", "bert", {}, 200, 12),
            Shape("mistral, tiny", "mistral", {}, 200, 12),
            Shape("modernbert, tiny", "modernbert", {}, 200, 12),
        ]
    bert = {"max_position_embeddings": 512, "initializer_range": 0.02}
    return [
        Shape(
            "bert of MiniLM-L6's size (head 32)",
            "bert",
            bert
            | {
                "hidden_size": 384,
                "num_hidden_layers": 6,
                "num_attention_heads": 12,
                "intermediate_size": 1536,
            },
        ),
        Shape(
            "bert of BGE-large's size (head 64)",
            "bert",
            bert
            | {
                "hidden_size": 1024,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "intermediate_size": 4096,
            },
        ),
        Shape(
            "qwen3 of Qwen3-Embedding-0.6B's size (head 128, 16:8)",
            "qwen3",
            {
                "hidden_size": 1024,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 3072,
                "max_position_embeddings": 8192,
                "initializer_range": 0.02,
            },
            mean=256,
        ),
        Shape(
            "modernbert of ModernBERT-base's size (windows)",
            "modernbert",
            {
                "hidden_size": 768,
                "num_hidden_layers": 22,
                "num_attention_heads": 12,
                "intermediate_size": 1152,
                "local_attention": 128,
                "global_attn_every_n_layers": 3,
                "max_position_embeddings": 8192,
                "initializer_range": 0.02,
            },
            mean=256,
        ),
    ]


def check_model(report: Any, place: Any, shape: Shape, folder: Path) -> None:
    """Rows for one shape: states packed against padded, the runner alone against in a pack, speed."""
    path = folder_of(shape, folder)
    batch = _batch(shape, path)
    for dtype in dict.fromkeys([torch.float32, place.dtype]):
        _states(report, place, shape, path, batch, dtype)
    _runner(report, place, shape, path, batch)


def folder_of(shape: Shape, folder: Path) -> Path:
    """The seeded model, written to a folder of its own."""
    path = write_model(folder / str(abs(hash(shape.name))), shape.family, **shape.fields)
    hidden = shape.fields.get("hidden_size")
    if hidden is not None:
        edit_json(path / "1_Pooling" / "config.json", word_embedding_dimension=hidden)
    return path


def _batch(shape: Shape, path: Path) -> PackedBatch:
    """One pack of about `shape.tokens` tokens with long-tailed lengths."""
    from gpu.folder.read import load_spec

    spec = load_spec(path)
    rng = np.random.default_rng(0)
    low, high = 5, int(spec.config["vocab_size"])
    items, total = [], 0
    while total < shape.tokens:
        drawn = int(rng.lognormal(np.log(shape.mean), 0.6))
        n = max(1, min(drawn, spec.max_tokens, shape.tokens - total))
        items.append(EncodedItem(rng.integers(low, high, n, dtype=np.int32)))
        total += n
    return pack(items)


def _states(
    report: Any, place: Any, shape: Shape, path: Path, batch: PackedBatch, dtype: torch.dtype
) -> None:
    """Token states and seconds of the packed and of the padded forward over the same weights."""
    from gpu.folder.read import load_spec
    from gpu.forward.packed import PackedForward, PaddedForward
    from gpu.forward.weights import load_model

    spec = load_spec(path)
    loaded = load_model(
        spec, dtype=dtype, device=place.device, allow_pickle=False, trust_remote_code=False
    )
    packed = PackedForward(
        loaded.base,
        device=place.device,
        position_offset=spec.position_offset,
        token_types=False,
        backends=backends_for(place.device, dtype),
    )
    padded = PaddedForward(
        loaded.base,
        device=place.device,
        pad_token_id=int(getattr(loaded.config, "pad_token_id", None) or 0),
        max_tokens=spec.max_tokens,
        token_types=False,
    )
    model: Any = loaded.model
    model.set_attn_implementation("sdpa")
    want = padded(batch).float()
    padded_s = place.seconds(lambda: padded(batch))
    model.set_attn_implementation(register())
    states, context = packed.run(batch)
    packed_s = place.seconds(lambda: packed(batch))
    got = states.float()
    cosine = float(torch.cosine_similarity(got, want, dim=-1).min())
    worst = float((got - want).abs().max() / want.abs().max())
    right = worst <= FP32_DIFF if dtype is torch.float32 else cosine >= HALF_COSINE
    report.add(
        "model",
        f"{shape.name}: {str(dtype).removeprefix('torch.')}, packed against padded",
        ok=right and context.masks_seen == 0,
        min_cosine=cosine,
        max_relative_diff=worst,
        served_by="+".join(sorted(set(context.served_by.values()))),
        packed_texts_per_s=batch.n_items / packed_s,
        padded_texts_per_s=batch.n_items / padded_s,
        speed_up=padded_s / packed_s,
    )


def _runner(report: Any, place: Any, shape: Shape, path: Path, batch: PackedBatch) -> None:
    """The whole runner: vectors in a pack against vectors alone, and texts per second."""
    from gpu.load import make_runner_factory

    dtype = str(place.dtype).removeprefix("torch.")
    for invariant in (False, True):
        start = time.perf_counter()
        factory = make_runner_factory(
            "check",
            path,
            device=str(place.device),
            dtype=dtype,
            max_batch_tokens=shape.tokens,
            batch_invariant=invariant,
        )
        runner = factory()
        load_s = time.perf_counter() - start
        together = vectors_of(runner.forward(batch))
        picked = range(0, batch.n_items, max(1, batch.n_items // 12))
        alone = np.stack([vectors_of(runner.forward(pack([batch.items[i]])))[0] for i in picked])
        part = together[list(picked)]
        cosine = float((part * alone).sum(1).min())
        same = int((part == alone).all(axis=1).sum())
        seconds = place.seconds(lambda r=runner: r.forward(batch))
        report.add(
            "runner",
            f"{shape.name}: {dtype}{', batch-invariant' if invariant else ''}, alone against pack",
            ok=cosine >= (1 - 1e-6 if dtype == "float32" else HALF_COSINE) and runner.info.packed,
            min_cosine=cosine,
            same_bits=f"{same}/{len(alone)}",
            texts_per_s=batch.n_items / seconds,
            load_s=load_s,
        )
        runner.close()


def vectors_of(outcomes: list[Any]) -> np.ndarray:
    """[n_items, dimensions] float32. Raises what the runner answered instead of a vector."""
    rows = []
    for outcome in outcomes:
        if not isinstance(outcome, ItemResult):
            raise outcome
        assert outcome.dense is not None
        rows.append(outcome.dense)
    return np.stack(rows)
