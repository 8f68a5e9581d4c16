"""The commit watermark as a pure value: random interleavings against an obvious model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.transports.kafka.progress import Progress, parse
from pipeline.transports.kafka.watermark import PartitionWatermark, Watermarks


def test_out_of_order_settles_hold_the_watermark() -> None:
    """E05: message 0 is slow, 1..9 are done: nothing may be committed past 0."""
    marks: Watermarks[str] = Watermarks(window=100)
    marks.assign(["p"])
    epoch = marks["p"].epoch
    for offset in range(10):
        marks["p"].hand_out(offset)
    for offset in range(1, 10):
        assert marks.settle("p", epoch, offset)
    assert marks.to_commit() == {}
    assert marks["p"].oldest_unsettled == 0
    assert marks.settle("p", epoch, 0)
    assert marks.to_commit() == {"p": 10}


def test_stuck_record_bounds_the_window() -> None:
    """E06: one stuck record and 100,000 behind it: what is tracked stays at the bound."""
    mark = PartitionWatermark(1, window=50)
    handed = 0
    for offset in range(100_000):
        if not mark.room:
            break
        mark.hand_out(offset)
        handed += 1
        if offset:
            mark.settle(offset)
    assert handed == 50
    assert mark.in_flight == 1
    with pytest.raises(ValueError, match="window"):
        mark.hand_out(50)
    mark.settle(0)
    assert (mark.room, mark.committable) == (50, 50)


def test_older_epoch_changes_nothing() -> None:
    """E01, E02: a settle that comes after a rebalance is ignored, whoever owns the partition now."""
    marks: Watermarks[str] = Watermarks(window=10)
    marks.assign(["p", "q"])
    old = marks["p"].epoch
    marks["p"].hand_out(5)
    assert marks.revoke(["p"]) == 1
    assert not marks.settle("p", old, 5)
    marks.assign(["p"])
    marks["p"].hand_out(5)
    assert not marks.settle("p", old, 5)
    assert marks.to_commit() == {}
    assert marks.settle("p", marks["p"].epoch, 5)


def test_committed_never_goes_back() -> None:
    """E18: an acknowledgement that arrives late does not rewind; one of an old epoch is ignored."""
    marks: Watermarks[str] = Watermarks(window=10)
    marks.assign(["p"])
    epochs = marks.epochs(["p"])
    for offset in range(4):
        marks["p"].hand_out(offset)
        marks.settle("p", epochs["p"], offset)
    versions = {"p": marks["p"].version}
    marks.mark_committed({"p": 4}, epochs, versions)
    marks.mark_committed({"p": 2}, epochs, versions)
    assert marks["p"].committed == 4
    assert marks.to_commit() == {}
    marks.assign(["p"])
    marks.mark_committed({"p": 9}, epochs, versions)
    assert marks["p"].committed is None


def test_what_is_to_be_remembered_is_committed_although_nothing_moved() -> None:
    """E05, E07: finished work behind a stuck record, and the attempts of that record."""
    marks: Watermarks[str] = Watermarks(window=10)
    marks.assign(["p"])
    mark = marks["p"]
    mark.recall(5, Progress())
    assert marks.to_commit() == {}
    for offset in range(5, 9):
        mark.hand_out(offset)
    mark.settle(7)
    mark.note_attempt(5, +1)
    assert marks.to_commit() == {"p": 5}
    found = parse(5, mark.memory(clean=False))
    assert (found.done, found.attempts) == ({7}, {5: 1})
    marks.mark_committed({"p": 5}, marks.epochs(["p"]), {"p": mark.version})
    assert marks.to_commit() == {}
    mark.note_attempt(5, -1)
    assert parse(5, mark.memory(clean=True)).attempts == {}


def test_a_clean_hand_over_leaves_no_suspicion() -> None:
    mark = PartitionWatermark(1, window=10)
    mark.recall(5, Progress())
    mark.reserve(100)
    assert parse(5, mark.memory(clean=False)).handed_out == 100
    assert mark.memory(clean=True) == ""


def test_what_was_finished_before_us_outlives_us_too() -> None:
    """E05: two deaths in a row: the second process commits before it comes to what the first one had
    finished out of order, and the third one does not do that again."""
    second = PartitionWatermark(epoch=1, window=10)
    second.recall(4, Progress(9, frozenset({6, 7}), {}))
    second.reserve(20)
    assert parse(4, second.memory(clean=False)).done == {6, 7}
    for offset in (4, 5, 6):
        second.hand_out(offset)
    assert parse(4, second.memory(clean=False)).done == {7}
    second.settle(6)  # known, so at once
    assert parse(4, second.memory(clean=True)).done == {6, 7}
    second.settle(4)
    assert second.committable == 5
    later = second.with_settled([5])
    assert later.committable == 7
    assert parse(7, later.memory(clean=False)).done == {7}


def test_offsets_must_ascend() -> None:
    mark = PartitionWatermark(1, window=10)
    mark.hand_out(7)
    with pytest.raises(ValueError, match="epoch"):
        mark.hand_out(7)


@given(
    gaps=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    window=st.integers(1, 12),
    picks=st.lists(st.integers(0, 10**6), max_size=200),
)
def test_watermark_equals_the_obvious_model(gaps: list[int], window: int, picks: list[int]) -> None:
    """E05, E18: committable == lowest unsettled offset (or last + 1), and it never goes back."""
    mark = PartitionWatermark(1, window)
    todo = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    handed: list[int] = []
    settled: set[int] = set()
    before = -1
    for pick in picks:
        if todo and mark.room and pick % 2:
            offset = todo.pop(0)
            mark.hand_out(offset)
            handed.append(offset)
        elif handed:
            offset = handed[pick % len(handed)]
            assert mark.settle(offset) == (offset not in settled)
            settled.add(offset)
        unsettled = [offset for offset in handed if offset not in settled]
        assert mark.in_flight == len(unsettled)
        assert mark.oldest_unsettled == (min(unsettled) if unsettled else None)
        done_below = [o for o in handed if not unsettled or o < min(unsettled)]
        expected = max(done_below) + 1 if done_below else None
        assert mark.committable == expected
        assert 0 <= mark.room <= window
        if expected is not None:
            assert expected >= before
            before = expected


@given(
    st.lists(st.tuples(st.sampled_from("ars"), st.integers(0, 2), st.integers(0, 9)), max_size=60)
)
def test_epochs_isolate_assignments(steps: list[tuple[str, int, int]]) -> None:
    """E01: whatever the order of assign, revoke and late settles, only current work counts."""
    marks: Watermarks[int] = Watermarks(window=100)
    live: dict[tuple[int, int, int], bool] = {}
    seen: list[tuple[int, int, int]] = []
    for action, partition, choice in steps:
        if action == "a":
            marks.assign([partition])
            live = {key: v for key, v in live.items() if key[0] != partition}
            for offset in range(3):
                marks[partition].hand_out(offset)
                key = (partition, marks[partition].epoch, offset)
                live[key] = True
                seen.append(key)
        elif action == "r":
            expected = sum(1 for key, held in live.items() if key[0] == partition and held)
            assert marks.revoke([partition]) == expected
            live = {key: v for key, v in live.items() if key[0] != partition}
        elif seen:
            key = seen[choice % len(seen)]
            assert marks.holds(*key) == live.get(key, False)
            assert marks.settle(*key) == live.get(key, False)
            if key in live:
                live[key] = False


@given(st.sets(st.integers(0, 30), min_size=1), st.data())
def test_what_a_transaction_would_commit_is_what_is_committable_once_it_is_through(
    handed: set[int], data: st.DataObject
) -> None:
    mark = PartitionWatermark(1, 100)
    mark.begin_at(0)
    for offset in sorted(handed):
        mark.hand_out(offset)
    before = data.draw(st.sets(st.sampled_from(sorted(handed))))
    now = data.draw(st.sets(st.sampled_from(sorted(handed))))
    for offset in before:
        mark.settle(offset)
    memory, version = mark.memory(clean=False), mark.version
    later = mark.with_settled(now)
    assert (mark.memory(clean=False), mark.version) == (memory, version), "this one does not change"
    for offset in now:
        mark.settle(offset)
    assert later.committable == mark.committable and later.version == mark.version
    assert later.memory(clean=False) == mark.memory(clean=False)
    assert later.in_flight == mark.in_flight
