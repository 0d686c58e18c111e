"""What is kept, by hand: which events pay for it, and what becomes of the intervals."""

from __future__ import annotations

from dataclasses import replace

from fsdp_fx.planning.lookahead import covered_from
from fsdp_fx.planning.memory import Interval, on_demand
from fsdp_fx.planning.residency import Kept, carry, keep, lookahead_bytes, merge, move
from fsdp_fx.trace import Trace
from traces import trace

# 200 bytes of parameters and 400 of gradients each.
WINDOW = trace("m F0: a b c; m B0: c b a")
ACCUMULATION = trace("m F0: a; m B0: a; m F1: a; m B1: a")


def kept(
    window: Trace,
    room: list[int],
    forward: int | None = 0,
    backward: int | None = 0,
    gradients: bool = False,
    carries: bool = False,
) -> Kept:
    covered = covered_from(window, forward, backward)
    return keep(window, on_demand(window), covered, room, gradients=gradients, carries=carries)


# The lookahead's bytes


def test_the_lookahead_takes_the_bytes_of_what_it_covers_and_is_not_in_use() -> None:
    intervals = on_demand(WINDOW)
    assert lookahead_bytes(WINDOW, intervals, covered_from(WINDOW, 0, 0)) == [0] * 6
    # At event 2 the unit c is in use, and it is the next one too.
    assert lookahead_bytes(WINDOW, intervals, covered_from(WINDOW, None, None)) == [
        *(200, 200, 0),
        *(200, 200, 0),
    ]


def test_the_lookahead_counts_a_unit_from_the_end_of_its_use_before() -> None:
    # At event 3 the lookahead takes 200 elements: b and a. In use at 2 it counts once.
    intervals = on_demand(WINDOW)
    covered = covered_from(WINDOW, 0, 200)
    assert covered == [0, 1, 2, 3, 3, 3]
    assert lookahead_bytes(WINDOW, intervals, covered) == [0, 0, 0, 400, 200, 0]


# What is kept


def test_a_gap_is_paid_for_at_every_event_inside() -> None:
    # b is away at events 2 and 3, a at 1 to 4; c is never away.
    assert kept(WINDOW, [0] * 6).gathers == {3}
    assert kept(WINDOW, [0, 0, 200, 200, 0, 0]).gathers == {3, 4}
    assert kept(WINDOW, [200, 0, 200, 199, 200, 200]).gathers == {3}
    assert kept(WINDOW, [0, 200, 400, 400, 200, 0]).gathers == {3, 4, 5}
    assert kept(WINDOW, [0, 199, 400, 400, 200, 0]).gathers == {3, 4}


def test_where_the_lookahead_has_its_room_a_gap_costs_nothing_more() -> None:
    # One ahead: event 3 covers b, so that b is paid for at event 2 alone.
    room = [200, 200, 0, 200, 200, 0]  # what the lookahead takes
    assert kept(WINDOW, room, None, None).gathers == {3}
    assert kept(WINDOW, [200, 200, 200, 200, 200, 0], None, None).gathers == {3, 4}


def test_where_the_lookahead_lacks_room_a_gap_is_paid_for() -> None:
    # At event 3 the lookahead wants 200 for b and there is 100: nothing is kept over it.
    assert kept(WINDOW, [200, 200, 200, 100, 200, 0], None, None).gathers == {3}


def test_where_the_lookahead_lacks_room_what_there_is_goes_to_what_is_kept() -> None:
    # At event 3 the lookahead wants 400, for b and a. There is room for one, and b stays in it.
    assert kept(WINDOW, [0, 0, 200, 200, 0, 0], 0, 200).gathers == {3, 4}
    assert kept(WINDOW, [0, 0, 200, 199, 0, 0], 0, 200).gathers == {3}


def test_of_gaps_that_compete_those_that_save_the_most_bytes_are_kept() -> None:
    # Of a and c, whose gaps do not overlap, 200 bytes each; of b 500, at one event of each.
    window = trace("m F0: a b c a b c", {"m.b": 250})
    assert kept(window, [500] * 6).gathers == {4}
    assert kept(window, [499] * 6).gathers == {3, 5}
    assert kept(window, [700] * 6).gathers == {3, 4, 5}


def test_a_gradient_is_paid_for_to_the_end_of_the_next_backward() -> None:
    # Reduced after 1 or not: kept it is there at 2 and, while more is added to it, at 3.
    assert kept(ACCUMULATION, [0, 0, 400, 400], gradients=True).reductions == {1}
    assert kept(ACCUMULATION, [0, 0, 400, 399], gradients=True).reductions == frozenset()
    assert kept(ACCUMULATION, [0, 0, 399, 400], gradients=True).reductions == frozenset()
    assert kept(ACCUMULATION, [0, 0, 400, 400]).reductions == frozenset()


def test_the_last_reduction_of_a_unit_is_never_saved() -> None:
    room = [10**6] * 4
    assert 3 not in kept(ACCUMULATION, room, gradients=True).reductions


def test_a_gradient_of_a_parent_is_kept_from_the_end_of_its_use() -> None:
    window = trace("m B0: *(a); m B1: *(a)")
    # The parent's backward ends with event 1, and its next one with event 3.
    assert kept(window, [0, 0, 400, 400], gradients=True).reductions in ({0}, {1})
    assert kept(window, [0, 0, 800, 800], gradients=True).reductions == {0, 1}
    assert kept(window, [0, 0, 800, 799], gradients=True).reductions in ({0}, {1})


def test_a_carried_unit_is_paid_for_before_its_first_and_after_its_last_use() -> None:
    window = trace("m F0: b a; m B0: b", frozen={"m.a"})
    assert kept(window, [200, 0, 200], carries=True).carried == {"m.a"}
    assert kept(window, [199, 0, 200], carries=True).carried == frozenset()
    assert kept(window, [200, 0, 199], carries=True).carried == frozenset()
    assert kept(window, [200, 0, 200]).carried == frozenset()


def test_a_carried_unit_costs_nothing_where_the_lookahead_has_its_room() -> None:
    # One ahead: event 0 covers a, and event 1 covers b. Only event 2 is left to pay for.
    window = trace("m F0: b a; m B0: b", frozen={"m.a"})
    assert kept(window, [200, 200, 200], None, None, carries=True).carried == {"m.a"}
    assert kept(window, [200, 200, 199], None, None, carries=True).carried == frozenset()


def test_a_frozen_unit_that_opens_and_closes_the_window_is_carried_for_nothing() -> None:
    window = trace("m F0: a b; m B0: a", frozen={"m.a"})
    assert kept(window, [0, 0, 0], carries=True) == Kept(carried=frozenset({"m.a"}))


def test_a_gap_between_uses_that_end_late_begins_where_they_end() -> None:
    window = replace(trace("m F0: a b c a"), ends=(1, 1, 2, 3))
    assert kept(window, [0, 0, 200, 0]).gathers == {3}
    assert kept(window, [200, 200, 199, 200]).gathers == frozenset()


# The intervals


def test_saved_gathers_join_the_interval_before() -> None:
    intervals = on_demand(WINDOW)
    assert merge(intervals, frozenset()) == intervals
    merged = merge(intervals, frozenset({3, 5}))
    assert merged == (
        Interval("m.a", 0, 0, (0, 5), 5),
        Interval("m.b", 1, 1, (1,), 1),
        Interval("m.c", 2, 2, (2, 3), 3),
        Interval("m.b", 4, 4, (4,), 4),
    )


def test_three_intervals_become_one() -> None:
    intervals = on_demand(ACCUMULATION)
    assert merge(intervals, frozenset({1, 2, 3})) == (Interval("m.a", 0, 0, (0, 1, 2, 3), 3),)


def test_moved_gathers_are_in_the_order_in_which_they_are_issued() -> None:
    window = trace("m F0: a b c")
    moved = move(on_demand(window), {0: 0, 1: 1, 2: 0})
    assert [(each.unit, each.gathered) for each in moved] == [
        ("m.a", 0),
        ("m.c", 0),
        ("m.b", 1),
    ]
    # At one event those behind it in the order of their uses.
    assert [each.unit for each in move(on_demand(window), {0: 0, 1: 0, 2: 0})] == [
        *("m.a", "m.b", "m.c"),
    ]


def test_a_carried_unit_is_there_from_the_start_to_the_end() -> None:
    window = trace("m F0: b a b a b", frozen={"m.a"})
    carried = carry(window, on_demand(window), frozenset({"m.a"}))
    assert [each for each in carried if each.unit == "m.a"] == [
        Interval("m.a", 0, 1, (1,), 1),
        Interval("m.a", 3, 3, (3,), 4),
    ]
    assert carry(window, on_demand(window), frozenset()) == on_demand(window)
