"""How many bytes may be resident beyond the units in use: the arithmetic, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_fx.planning.memory import Interval
from fsdp_fx.planning.room import (
    budgeted_room,
    interval_bytes,
    recorded_room,
    reduction_buffers,
)
from fsdp_fx.trace import Trace
from traces import trace, windows

# Parameters of a take 20 bytes and its gradient 40, of b twice as much.
SIZES = {"m.a": 10, "m.b": 20}
WINDOW = trace("m F0: a b; m B0: b a; m F1: a b; m B1: b a", SIZES)
BUFFERS = [0, 0, 80, 80, 40, 40, 80, 80]


def test_the_buffer_of_a_reduction_stays_until_the_next_is_issued() -> None:
    # At the backward of a both buffers are there at some time, not at once.
    assert reduction_buffers(WINDOW) == BUFFERS


def test_a_parent_is_reduced_where_its_use_ends_and_after_its_children() -> None:
    window = trace("m B0: *(b a); m F0: a", {"m": 5, **SIZES})
    # b at its own event; a at its own, and the parent's there after it.
    assert window.ends == (2, 1, 2, 3)
    assert reduction_buffers(window) == [0, 80, 80, 20]


def test_frozen_units_and_missing_contributions_have_no_buffer() -> None:
    frozen = trace("m F0: a b; m B0: b a", SIZES, frozen={"m.b"})
    assert reduction_buffers(frozen) == [0, 0, 0, 40]
    missing = trace("m F0: a b; m B0: b- a", SIZES)
    assert reduction_buffers(missing) == [0, 0, 0, 40]


def test_the_room_is_what_is_missing_to_the_peak() -> None:
    window = trace("m F0: a b a", SIZES)
    assert recorded_room(window, [300, 1000, 700], 1000, False) == [700, 0, 300]
    # The peak may lie outside of the events, at the close.
    assert recorded_room(window, [300, 1000, 700], 1100, False) == [800, 100, 400]


def test_inputs_of_reductions_are_in_what_is_recorded() -> None:
    assert recorded_room(WINDOW, [100] * 8, 1000, False) == [900] * 8


def test_gradients_kept_while_recording_left_no_buffer_before_the_close() -> None:
    assert recorded_room(WINDOW, [100] * 8, 1000, True) == [
        *(900, 900, 820, 820),
        *(820, 820, 820, 820),
    ]


def test_there_is_no_less_room_than_none() -> None:
    allocated = [1000, 1000, 1000, 1000, 980, 900, 1000, 1000]
    assert recorded_room(WINDOW, allocated, 1000, True) == [0, 0, 0, 0, 0, 20, 0, 0]


def test_a_curve_has_a_value_per_event() -> None:
    with pytest.raises(ValueError, match="2 values of allocated memory for 8 events"):
        recorded_room(WINDOW, [1, 2], 10, False)


def test_a_curve_above_its_peak_is_refused_by_event() -> None:
    with pytest.raises(
        ValueError, match=r"12 bytes allocated at event 2 \(m\.b B0\) are more than the peak of 10"
    ):
        recorded_room(WINDOW, [10, 11, 12, 0, 0, 0, 0, 0], 10, False)


def test_a_window_without_events_has_no_room_to_speak_of() -> None:
    assert recorded_room(Trace((), (), (), frozenset()), [], 0, False) == []


def test_a_budget_is_for_what_is_kept_beside_the_lookahead() -> None:
    assert budgeted_room(100, [0, 20, 40]) == [100, 120, 140]


def test_intervals_take_their_units_bytes_from_the_gather_to_the_free() -> None:
    intervals = (Interval("m.a", 0, 1, (1, 3), 3), Interval("m.b", 2, 2, (2,), 7))
    assert interval_bytes(WINDOW, intervals) == [20, 20, 60, 60, 40, 40, 40, 40]


@given(windows(), st.data())
def test_the_room_falls_by_what_is_allocated_more(window: Trace, data: st.DataObject) -> None:
    curve = st.lists(st.integers(0, 10**6), min_size=len(window), max_size=len(window))
    allocated, per_window = data.draw(curve), data.draw(st.booleans())
    peak = 10**6 + data.draw(st.integers(0, 10**6))
    room = recorded_room(window, allocated, peak, per_window)
    less = recorded_room(window, [max(0, each - 7) for each in allocated], peak, per_window)
    most = max(unit.gradient_bytes for unit in window.units)
    for there, left, more in zip(allocated, room, less, strict=True):
        assert max(0, peak - there - most * per_window) <= left <= peak - there
        assert 0 <= more - left <= 7
