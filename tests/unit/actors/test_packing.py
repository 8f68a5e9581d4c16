"""The packing policy: budget, lanes, lookahead, deadlines. Pure, so plain values in and out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages import Entry
from actors.packing import MAX_SHARES, SHARE_TOKENS, Packer, PackingPolicy
from tests.support.stations import entry


def packer(**given: object) -> Packer:
    return Packer(PackingPolicy(**{"max_batch_tokens": 100, "linger_s": 1.0, **given}))  # type: ignore[arg-type]


def lengths(entries: list[Entry]) -> list[int]:
    return [one.n_tokens for one in entries]


def test_the_budget_bounds_a_batch() -> None:
    """C02: eight long items never share a batch above the token budget."""
    box = packer()
    box.add([entry(40) for _ in range(8)], "bulk")
    batches = []
    while (take := box.next_batch(0.0, 0, idle=True)).batch:
        batches.append(lengths(take.batch))
    assert batches == [[40, 40]] * 4
    assert box.queued_tokens() == 0


def test_an_item_above_the_budget_travels_alone() -> None:
    """anchors trap 11: an item above the budget is a batch of one, not an endless loop."""
    box = packer()
    box.add([entry(5), entry(400), entry(5)], "bulk")
    assert lengths(box.next_batch(0.0, 0, idle=True).batch) == [5, 5]
    assert lengths(box.next_batch(0.0, 0, idle=True).batch) == [400]
    assert box.next_batch(0.0, 0, idle=True).batch == []


def test_small_items_are_coalesced_into_few_batches() -> None:
    """C14: 64 queued single-text messages need at most ceil(tokens / budget) forwards."""
    box = packer()
    box.add([entry(7) for _ in range(64)], "bulk")
    n = 0
    while box.next_batch(0.0, 0, idle=True).batch:
        n += 1
    assert n == -(-64 * 7 // 98)


def test_idle_threads_divide_what_waits() -> None:
    """A request of ten documents alone on the machine is computed by four threads, not by one."""
    box = packer(max_batch_tokens=512)
    box.add([entry(40) for _ in range(10)], "interactive")
    taken = [lengths(box.next_batch(0.0, 0, idle=idle).batch) for idle in (4, 3, 2, 1)]
    assert taken == [[40, 40], [40, 40], [40, 40, 40], [40, 40, 40]]
    assert not len(box)


def test_what_is_little_is_not_divided() -> None:
    box = packer(max_batch_tokens=512)
    box.add([entry(10) for _ in range(6)], "interactive")
    assert lengths(box.next_batch(0.0, 0, idle=16).batch) == [10] * 6


def test_idle_threads_leave_a_full_batch_full() -> None:
    box = packer(max_batch_tokens=512)
    box.add([entry(64) for _ in range(64)], "bulk")
    assert [len(box.next_batch(0.0, 0, idle=idle).batch) for idle in (4, 3, 2, 1)] == [8] * 4


@settings(deadline=None)
@given(
    interactive=st.lists(st.integers(1, 600), max_size=40),
    bulk=st.lists(st.integers(1, 600), max_size=40),
    threads=st.integers(1, 16),
    floor=st.floats(0, 0.9),
)
def test_divided_or_not_everything_leaves_within_the_budget(
    interactive: list[int], bulk: list[int], threads: int, floor: float
) -> None:
    """However many threads are idle: budgets hold, every batch has an item, the oldest one goes first."""
    box = packer(max_batch_tokens=512, bulk_floor=floor)
    box.add([entry(n) for n in interactive], "interactive")
    box.add([entry(n) for n in bulk], "bulk")
    left: list[int] = []
    while len(box):
        for idle in range(threads, 0, -1):
            waiting = box.queued_tokens()
            batch = lengths(box.next_batch(0.0, 0, idle=idle).batch)
            assert bool(batch) == bool(waiting)
            fair = max(SHARE_TOKENS, -(-waiting // min(idle, MAX_SHARES)))
            assert len(batch) < 2 or sum(batch) <= min(512, fair)
            left += batch
    assert sorted(left) == sorted(interactive + bulk)


def test_a_busy_executor_waits_for_a_full_batch_or_the_linger() -> None:
    box = packer()
    box.add([entry(30, at=10.0)], "bulk")
    assert box.next_batch(10.5, 0, idle=False).batch == []
    assert box.ready_at(idle=False) == 11.0
    assert lengths(box.next_batch(11.0, 0, idle=False).batch) == [30]
    box.add([entry(60, at=12.0), entry(60, at=12.0)], "bulk")
    assert lengths(box.next_batch(12.0, 0, idle=False).batch) == [60]


def test_interactive_goes_first_and_bulk_keeps_its_floor() -> None:
    box = packer(bulk_floor=0.25)
    box.add([entry(10) for _ in range(200)], "interactive")
    box.add([entry(10) for _ in range(200)], "bulk")
    bulk_share = []
    for _ in range(20):
        before = box.queued_items("bulk")
        take = box.next_batch(0.0, 0, idle=True)
        assert sum(lengths(take.batch)) <= 100
        bulk_share.append(before - box.queued_items("bulk"))
    assert sum(bulk_share) * 10 == 0.25 * 20 * 100


def test_bulk_fills_what_interactive_leaves() -> None:
    box = packer(bulk_floor=0.0)
    box.add([entry(30)], "interactive")
    box.add([entry(50), entry(50)], "bulk")
    assert lengths(box.next_batch(0.0, 0, idle=True).batch) == [30, 50]


def test_expired_and_ended_items_are_dropped_before_compute() -> None:
    """G10: expired requests never reach a forward."""
    box = packer()
    late, ended, good = entry(5, deadline_ms=1000), entry(5), entry(5)
    ended.owner.closed = True
    box.add([late, good, ended], "bulk")
    take = box.next_batch(0.0, 1000, idle=True)
    assert take.batch == [good] and set(map(id, take.dropped)) == {id(late), id(ended)}
    assert box.queued_tokens() == 0


def test_lookahead_is_bounded_and_the_oldest_is_always_taken() -> None:
    box = packer(max_reorder_items=2)
    items = [entry(60), entry(61), entry(62), entry(63), entry(30)]
    box.add(items, "bulk")
    taken = []
    while (take := box.next_batch(0.0, 0, idle=True)).batch:
        taken.append(lengths(take.batch))
    # The 30 is out of sight of the first batch, and fills the second one's gap.
    assert taken == [[60], [61, 30], [62], [63]]


def test_padded_models_group_near_lengths() -> None:
    box = packer(group_lengths=True)
    box.add([entry(20), entry(90), entry(21), entry(80), entry(19), entry(22)], "bulk")
    assert sorted(lengths(box.next_batch(0.0, 0, idle=True).batch)) == [19, 20, 21, 22]


@given(
    interactive=st.lists(st.integers(1, 150), max_size=40),
    bulk=st.lists(st.integers(1, 150), max_size=40),
    floor=st.floats(0, 0.9),
    grouped=st.booleans(),
)
def test_every_item_leaves_exactly_once_and_budgets_hold(
    interactive: list[int], bulk: list[int], floor: float, grouped: bool
) -> None:
    """A07 (no item lost or doubled), C02, I01 (token counts return to zero, never negative)."""
    box = packer(bulk_floor=floor, group_lengths=grouped)
    entries = {"interactive": [entry(n) for n in interactive], "bulk": [entry(n) for n in bulk]}
    box.add(entries["interactive"], "interactive")
    box.add(entries["bulk"], "bulk")
    seen: list[int] = []
    for _ in range(len(interactive) + len(bulk)):
        heads = [box.oldest_at("interactive"), box.oldest_at("bulk")]
        take = box.next_batch(0.0, 0, idle=True)
        assert take.batch or heads == [None, None]
        total = sum(lengths(take.batch))
        assert total <= 100 or len(take.batch) == 1
        assert box.queued_tokens("interactive") >= 0 and box.queued_tokens("bulk") >= 0
        seen.extend(id(one) for one in take.batch)
    assert sorted(seen) == sorted(id(one) for lane in entries.values() for one in lane)
    assert box.queued_tokens() == 0 and len(box) == 0


def test_a_long_bulk_item_is_not_starved_by_a_busy_interactive_lane() -> None:
    """Bulk's credit grows until its head fits, also when the head is far above the budget."""
    box = packer(bulk_floor=0.2)
    box.add([entry(900)], "bulk")
    for _ in range(100):
        box.add([entry(100)], "interactive")
        if 900 in lengths(box.next_batch(0.0, 0, idle=True).batch):
            return
    raise AssertionError("the long bulk item never travelled")


def test_grouping_by_length_never_passes_the_oldest_item_over() -> None:
    """Padded models: an item of an odd length travels although near lengths keep coming."""
    box = packer(group_lengths=True, max_reorder_items=16)
    box.add([entry(10, at=0.0), entry(90, at=0.0)], "bulk")
    for now in range(1, 50):
        box.add([entry(10, at=float(now)) for _ in range(10)], "bulk")
        if 90 in lengths(box.next_batch(float(now), 0, idle=True).batch):
            return
    raise AssertionError("the long item never travelled")


# --- batches that are put back -----------------------------------------------------------------------


def state(box: Packer) -> tuple[object, ...]:
    return (
        {lane: list(queue) for lane, queue in box._lanes.items()},
        dict(box._tokens),
        box._bulk_credit,
    )


def test_interactive_items_take_the_place_of_bulk_beyond_its_share() -> None:
    box = packer(bulk_floor=0.2)
    bulk = [entry(20) for _ in range(10)]
    box.add(bulk, "bulk")
    take = box.next_batch(0.0, 0, idle=False)
    assert take.batch == bulk[:5] and take.spare_tokens == take.n_tokens == 100
    assert not box.would_gain(take)
    question = entry(30)
    box.add([question], "interactive")
    assert box.would_gain(take)
    box.put_back(take)
    # One item of bulk has earned its place, and one more fits.
    again = box.next_batch(0.0, 0, idle=False)
    assert again.batch == [bulk[0], question, *bulk[1:3]] and again.spare_tokens == 40
    box.add([entry(60)], "interactive")
    assert not box.would_gain(again)  # neither room nor spare for so long a one


def test_only_the_latest_batch_can_be_put_back() -> None:
    box = packer()
    box.add([entry(100) for _ in range(3)], "bulk")
    first, second = (box.next_batch(0.0, 0, idle=True) for _ in range(2))
    box.add([entry(1)], "interactive")
    assert not box.would_gain(first) and box.would_gain(second)
    box.put_back(second)
    assert not box.would_gain(second)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("interactive"), st.lists(st.integers(1, 150), min_size=1, max_size=5)),
        st.tuples(st.just("bulk"), st.lists(st.integers(1, 150), min_size=1, max_size=20)),
        st.tuples(st.just("take"), st.booleans()),
        st.tuples(st.just("back"), st.just(True)),
        st.tuples(st.just("end"), st.integers(0, 200)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(steps=steps, floor=st.floats(0, 0.9), grouped=st.booleans())
def test_a_batch_that_is_put_back_leaves_no_trace(
    steps: list[tuple[str, object]], floor: float, grouped: bool
) -> None:
    """A07, I01: over any sequence of arrivals, ends, batches and batches put back, every item leaves once
    or is dropped, and the queues, counts and credit are those of a packer that never packed that batch."""
    box = packer(bulk_floor=floor, group_lengths=grouped)
    everything: list[Entry] = []
    left: list[Entry] = []
    latest, before, dropped = None, None, []
    for step, given_ in steps:
        if step in ("interactive", "bulk"):
            new = [entry(n) for n in given_]  # type: ignore[attr-defined]
            box.add(new, step)  # type: ignore[arg-type]
            everything += new
            if before is not None:
                before[0][step].extend(new)
                before[1][step] += sum(lengths(new))
        elif step == "end" and everything:
            everything[int(given_) % len(everything)].owner.closed = True  # type: ignore[call-overload]
        elif step == "take":
            lanes, tokens, credit = state(box)
            before = (lanes, tokens, credit)
            latest = box.next_batch(0.0, 0, idle=bool(given_))
            dropped = latest.dropped
            left += latest.batch + latest.dropped
        elif step == "back" and latest is not None and before is not None:
            gained = box.would_gain(latest)
            box.put_back(latest)
            left = left[: len(left) - len(latest.batch) - len(dropped)] + dropped
            lanes, tokens, credit = state(box)
            for lane, queue in lanes.items():  # type: ignore[attr-defined]
                expected = [one for one in before[0][lane] if one not in dropped]
                assert set(map(id, queue)) == set(map(id, expected))
                assert grouped or queue == expected
                assert tokens[lane] == sum(lengths(queue)) >= 0  # type: ignore[index]
            assert credit == before[2]
            if gained:
                oldest = box._lanes["interactive"][0]
                again = box.next_batch(0.0, 0, idle=True)
                assert oldest in again.batch or oldest in again.dropped or grouped
                left += again.batch + again.dropped
            latest = before = None
    while (take := box.next_batch(0.0, 0, idle=True)).batch:
        left += take.batch + take.dropped
    left += take.dropped
    assert len(left) == len(everything) and set(map(id, left)) == set(map(id, everything))
    assert box.queued_tokens() == 0


@settings(deadline=None)
@given(waiting=st.lists(st.integers(1, 100), min_size=1, max_size=15), floor=st.floats(0.05, 0.9))
def test_bulk_keeps_its_floor_however_often_its_batch_is_put_back(
    waiting: list[int], floor: float
) -> None:
    """Putting back costs bulk no credit and earns it none: its share is one of batches that are computed."""
    patient, pushed = packer(bulk_floor=floor), packer(bulk_floor=floor)
    for box in (patient, pushed):
        box.add([entry(10) for _ in range(80)], "bulk")
    shares: dict[Packer, list[int]] = {patient: [], pushed: []}
    for n_tokens in waiting:
        for box in (patient, pushed):
            if box is pushed:
                box.put_back(box.next_batch(0.0, 0, idle=True))
            box.add([entry(n_tokens)], "interactive")
            before = box.queued_tokens("bulk")
            box.next_batch(0.0, 0, idle=True)
            shares[box].append(before - box.queued_tokens("bulk"))
    assert shares[patient] == shares[pushed]


def test_bulk_fills_a_batch_less_while_interactive_items_are_expected() -> None:
    """An interactive item waits for the batch that runs: it is kept to what takes `brisk_s`."""
    box = packer(brisk_s=0.5)
    box.note_forward(100, 1.0)
    box.add([entry(10) for _ in range(40)], "bulk")
    assert len(box.next_batch(10.0, 0, idle=True).batch) == 10
    box.add([entry(20, at=10.0)], "interactive")
    assert sum(lengths(box.next_batch(10.0, 0, idle=True).batch)) == 50
    assert sum(lengths(box.next_batch(11.0, 0, idle=True).batch)) == 50
    assert sum(lengths(box.next_batch(13.0, 0, idle=True).batch)) == 100
    box.add([entry(20, at=13.0) for _ in range(9)], "interactive")
    assert sum(lengths(box.next_batch(13.0, 0, idle=True).batch)) == 100


def test_bulk_keeps_a_part_of_the_budget_however_slow_forwards_are() -> None:
    box = packer(brisk_s=0.1)
    box.note_forward(1, 100.0)
    box.add([entry(1, at=0.0)], "interactive")
    box.add([entry(5) for _ in range(40)], "bulk")
    box.next_batch(0.0, 0, idle=True)
    assert sum(lengths(box.next_batch(0.0, 0, idle=True).batch)) == 25
