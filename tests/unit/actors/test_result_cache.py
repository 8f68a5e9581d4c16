"""Equal items are computed once and answered with the same bytes; what differs is never mixed up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.result_cache import ResultCache, key_of
from gpu.batch import EncodedItem, ItemOptions, ItemResult
from schemas.errors import ModelError

IDS = np.asarray([5, 6, 7], np.int32)


def item(**given: Any) -> EncodedItem:
    return EncodedItem(**{"input_ids": IDS, **given})


DIFFERENT = [
    item(),
    item(input_ids=IDS[:2]),
    item(input_ids=IDS[::-1].copy()),
    item(token_type_ids=np.zeros(3, np.int32)),
    item(token_type_ids=np.asarray([0, 0, 1], np.int32)),
    item(pooled_from=1),
    item(attended=2),
    *(
        item(options=replace(ItemOptions(), **change))
        for change in (
            {"task": "rerank"},
            {"outputs": ("sparse",)},
            {"outputs": ("dense", "sparse")},
            {"dimensions": 64},
            {"dimensions": 32},
            {"normalize": True},
            {"normalize": False},
            {"raw_scores": True},
            {"chunk_tokens": 8},
            {"labels": (1, 2)},
            {"labels": (2, 1)},
        )
    ),
    item(extras={"pixel_values": np.zeros((2, 2), np.float32)}),
    item(extras={"pixel_values": np.zeros(4, np.float32)}),
    item(extras={"pixel_values": np.ones((2, 2), np.float32)}),
    item(extras={"spans": np.asarray([[0, 1], [1, 3]], np.int32)}),
    item(extras={"spans": np.asarray([[0, 2], [2, 3]], np.int32)}),
    item(input_ids=IDS[:2], extras={"spans": np.asarray([[0, 1]], np.int32)}),
    item(extras={"spans": np.asarray([[0, 1]], np.int32)}),
    item(extras={"image_grid": np.zeros((2, 2), np.float32)}),
]


def test_whatever_a_result_depends_on_is_in_its_key() -> None:
    """A field that is added to an item without its place in the key would answer with a wrong row."""
    keys = [key_of(model, one) for model in ("a", "b") for one in DIFFERENT]
    assert None not in keys and len(set(keys)) == len(keys)
    assert key_of("a", item()) == key_of("a", item(input_ids=IDS.copy(), truncated=True))
    assert set(EncodedItem.__dataclass_fields__) == {
        "input_ids", "options", "token_type_ids", "truncated", "pooled_from", "attended", "extras",
    }  # fmt: skip
    changed = {name for one in DIFFERENT for name in _differences(one.options)}
    assert changed == set(ItemOptions.__dataclass_fields__)


def _differences(options: ItemOptions) -> set[str]:
    return {
        name
        for name in ItemOptions.__dataclass_fields__
        if getattr(options, name) != getattr(ItemOptions(), name)
    }


@pytest.mark.parametrize("extra", [3, "text", np.asarray([object()]), None])
def test_an_item_with_anything_but_numbers_is_never_shared(extra: object) -> None:
    assert key_of("a", item(extras={"prefix": extra})) is None
    cache = ResultCache(1000)
    cache.put(None, ItemResult(dense=np.zeros(1, np.float32)))
    assert cache.get(None) is None and len(cache) == 0


def test_least_lately_used_goes_first_and_memory_is_bounded() -> None:
    cache = ResultCache(3 * (400 + 400))
    for name in (b"a", b"b", b"c"):
        cache.put(name, ItemResult(dense=np.zeros(100, np.float32)))
    assert cache.get(b"a") is not None
    cache.put(b"d", ItemResult(dense=np.zeros(100, np.float32)))
    assert [name for name in (b"a", b"b", b"c", b"d") if cache.get(name)] == [b"a", b"c", b"d"]
    cache.put(b"large", ItemResult(multivector=np.zeros((10, 100), np.float32)))
    assert cache.get(b"large") is None and cache.size_bytes == 3 * (400 + 400)


def test_an_error_is_never_held() -> None:
    """A24."""
    cache = ResultCache(10_000)
    cache.put(b"a", ModelError("out of luck"))
    assert cache.get(b"a") is None and len(cache) == 0


def test_what_is_held_is_a_copy_that_nobody_writes_to() -> None:
    batch = np.ones((8, 4), np.float32)
    cache = ResultCache(10_000)
    ids = np.asarray([1], np.int32)
    cache.put(b"a", ItemResult(dense=batch[3], sparse=(ids, batch[4, :1]), scores=batch[5]))
    batch[:] = 9
    held = cache.get(b"a")
    assert held is not None and held.dense is not None and held.scores is not None and held.sparse
    for array in (held.dense, held.scores, held.sparse[1]):
        assert array.base is None and np.all(array == 1)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 2


def test_nothing_is_held_when_it_is_off() -> None:
    cache = ResultCache(0)
    cache.put(b"a", ItemResult(dense=np.zeros(0, np.float32)))
    assert not cache.enabled and cache.get(b"a") is None
