"""Token-count buckets: which one a pack falls into, how it is filled up, packs to try one with.
Has never run on a GPU: docs/attention.md says what is unknown.

Who calls it: `gpu.forward.cuda_graphs`; no torch here.
What must stay true: a pack's own rows stay where they are and as they are; filler is made of items of its
own, within the model's limits, so that attention keeps it apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu.batch import EncodedItem, PackedBatch, pack

SMALLEST_BUCKET = 16
# Above this the kernels of a 0.6B model should take longer than the Python between them (an estimate
# from 0.5 ms of Python per layer; nobody has measured it on a GPU).
LARGEST_BUCKET = 4096
FILLER_TOKENS = 16  # of one filler item: short ones, because attention over one long one costs more


def buckets(max_batch_tokens: int) -> tuple[int, ...]:
    """Powers of two from 16 up to the pack budget, at most `LARGEST_BUCKET`."""
    largest = min(max_batch_tokens, LARGEST_BUCKET)
    found = []
    size = SMALLEST_BUCKET
    while size <= largest:
        found.append(size)
        size *= 2
    return tuple(found)


def bucket_of(n_tokens: int, sizes: Sequence[int]) -> int | None:
    """The smallest bucket that holds so many tokens; None when the pack is larger than all."""
    return next((size for size in sizes if n_tokens <= size), None)


def filled(batch: PackedBatch, size: int, longest: int) -> PackedBatch:
    """The pack and, behind it, filler items up to `size` tokens; the pack's own rows do not move.

    longest: tokens an item of this model may have.
    """
    missing = size - batch.n_tokens
    assert missing >= 0, f"a pack of {batch.n_tokens} tokens in a bucket of {size}"
    if not missing:
        return batch
    step = min(FILLER_TOKENS, longest)
    lengths = [step] * (missing // step) + ([missing % step] if missing % step else [])
    ends = np.cumsum(lengths, dtype=np.int32) + np.int32(batch.n_tokens)
    zeros = np.zeros(missing, dtype=np.int32)
    types = batch.token_type_ids
    return PackedBatch(
        input_ids=np.concatenate((batch.input_ids, zeros)),
        positions=np.concatenate((batch.positions, np.arange(missing, dtype=np.int32) % step)),
        token_type_ids=None if types is None else np.concatenate((types, zeros)),
        cu_seqlens=np.concatenate((batch.cu_seqlens, ends.astype(np.int32))),
        max_seqlen=max(batch.max_seqlen, step if missing >= step else missing),
        item_index=np.arange(batch.n_items + len(lengths), dtype=np.int32),
        items=(*batch.items, *(EncodedItem(zeros[:length]) for length in lengths)),
    )


def probe(size: int, vocab_size: int, longest: int) -> PackedBatch:
    """A pack of `size` tokens with items of many lengths, the same at every call."""
    rng = np.random.default_rng(size)
    items: list[EncodedItem] = []
    left = size
    while left:
        n = min(int(rng.integers(1, 65)), longest, left)
        items.append(EncodedItem(rng.integers(0, vocab_size, size=n, dtype=np.int32)))
        left -= n
    return pack(items)
