"""What becomes of a recorded window's marks: arithmetic, without a device or other ranks."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from fsdp_fx.metering import Meter, Metered, flatten, measurements_of, unflatten
from fsdp_fx.planning.durations import Durations
from fsdp_fx.planning.gradients import RecordedGradients
from fsdp_fx.planning.measurements import Measurements
from fsdp_fx.trace import UnitSpec
from fsdp_fx.units import Unit, allocate, mark_written
from fsdp_fx.units.accumulators import new_accumulator
from traces import trace

TWO = "c0 F0: a b; c0 B0: b a; c0 F1: a b; c0 B1: b a"
UNITS = ("c0.a", "c0.b")


class FakeUnit:
    """What a meter asks a unit for."""

    def __init__(self, name: str) -> None:
        self.spec = UnitSpec(name, "c0", 1, 1, 1, True)


class FakeCommunication:
    """The streams of the CPU: none."""

    device = torch.device("cpu")
    copy_in_stream = gather_stream = reduction_stream = None

    def wait_for_compute(self) -> None:
        """Nothing to wait for."""


class Clock:
    """A clock and an allocator that are set by hand."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def perf_counter_ns(self) -> int:
        return self.now

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.most

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.most = 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("fsdp_fx.metering.time.perf_counter_ns", clock.perf_counter_ns)
    for name in ("max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.accelerator, name, getattr(clock, name))
    return clock


def unit(name: str) -> Unit:
    return cast(Unit, FakeUnit(name))


def meter_of(memory: bool = False) -> Meter:
    return Meter(cast(Any, FakeCommunication()), memory)


def event(meter: Meter, clock: Clock, asked: Unit, position: int, at: int, gather: int) -> None:
    """An event whose unit is gathered on demand."""
    clock.now = at
    meter.expect(asked, position)
    assert meter.reach(asked) == position
    meter.begin_gather()
    meter.end_gather(asked, waited=False)
    clock.now = at + gather
    meter.end_gather(asked, waited=True)
    meter.ready(position)


def product(meter: Meter, of: Unit, size: int) -> None:
    """A product writes a gradient of so many bytes."""
    gradient = new_accumulator(torch.Size((size, 1)), torch.int8, torch.empty(0))
    meter.watch_products(of, [gradient])
    allocate(gradient)


def reduction(meter: Meter, of: Unit) -> None:
    meter.begin_reduction(of)
    meter.end_reduction(of)


# The meter


def test_event_lasts_from_its_unit_being_there_to_the_next_event(clock: Clock) -> None:
    meter, a, b = meter_of(), unit("c0.a"), unit("c0.b")
    event(meter, clock, a, 0, at=100, gather=30)
    event(meter, clock, b, 1, at=180, gather=50)
    event(meter, clock, a, 2, at=300, gather=20)
    clock.now = 405
    meter.close()
    metered = meter.evaluate({})
    assert metered.compute == {0: 50, 1: 70, 2: 85}
    assert metered.gathers == {"c0.a": 20, "c0.b": 50}  # the shortest of each
    assert metered.reductions == {}
    assert metered.allocated == {}
    assert metered.peak == 0


def test_what_is_not_expected_is_no_event(clock: Clock) -> None:
    meter, a, b = meter_of(), unit("c0.a"), unit("c0.b")
    assert meter.reach(a) is None  # a recomputation or an evaluation
    # A compiled call says in advance what it will ask for, in whatever order it then does.
    meter.expect(a, 0)
    meter.expect(b, 1)
    meter.expect(a, 2)
    assert [meter.reach(each) for each in (b, a, a, a)] == [1, 0, 2, None]


def test_event_that_was_never_there_has_no_duration(clock: Clock) -> None:
    meter, a, b = meter_of(), unit("c0.a"), unit("c0.b")
    meter.expect(a, 0)
    meter.reach(a)  # its gather raised
    event(meter, clock, b, 1, at=50, gather=10)
    clock.now = 90
    meter.close()
    assert meter.evaluate({}).compute == {1: 30}


def test_reduction_on_the_cpu_is_not_part_of_its_event(clock: Clock) -> None:
    meter, a, b = meter_of(), unit("c0.a"), unit("c0.b")

    def reduction_taking(of: Unit, spent: int) -> None:
        meter.begin_reduction(of)
        clock.now += spent
        meter.end_reduction(of)

    event(meter, clock, b, 0, at=0, gather=10)
    clock.now = 40
    reduction_taking(b, 25)
    event(meter, clock, a, 1, at=70, gather=10)
    clock.now = 100
    meter.close()
    reduction_taking(a, 12)  # left to the close: part of no event
    reduction_taking(b, 20)
    metered = meter.evaluate({})
    assert metered.compute == {0: 70 - 10 - 25, 1: 100 - 80}
    assert metered.reductions == {"c0.a": 12, "c0.b": 20}


def test_memory_is_the_most_between_two_events_and_the_close_counts_for_the_peak(
    clock: Clock,
) -> None:
    meter, a, b = meter_of(memory=True), unit("c0.a"), unit("c0.b")
    clock.most = 700  # before the first event
    event(meter, clock, a, 0, at=0, gather=1)
    clock.most = 300
    event(meter, clock, b, 1, at=10, gather=1)
    clock.most = 500
    clock.now = 20
    meter.close()
    metered = meter.evaluate({})
    assert metered.allocated == {0: 300, 1: 500}
    assert metered.peak == 700
    without = meter_of()
    event(without, clock, a, 0, at=30, gather=1)
    assert without.evaluate({}).allocated == {}


# Measurements


def durations_of(metered: Metered, text: str = TWO, **options: Any) -> Durations:
    options = {"per_window": False, "memory": False, **options}
    durations = measurements_of(trace(text), metered, **options).durations
    assert durations is not None
    return durations


def test_event_has_the_lower_median_of_its_unit_and_phase() -> None:
    three = TWO + "; c0 F2: a b; c0 B2: b a"
    #          a F      b F      b B      a B, in microbatches 0, 1 and 2
    compute = [900, 20, 30, 45, 10, 21, 31, 41, 11, 22, 32, 43]
    metered = Metered(compute=dict(enumerate(compute)))
    assert durations_of(metered, three).compute == (11, 21, 31, 43) * 3
    two = Metered(compute=dict(enumerate(compute[:8])))
    assert durations_of(two).compute == (10, 20, 30, 41) * 2


def test_event_that_was_not_metered_is_like_others_of_its_unit_and_phase() -> None:
    metered = Metered(compute={0: 7, 2: 9, 5: 3})
    assert durations_of(metered).compute == (7, 3, 9, 0, 7, 3, 9, 0)


def test_collectives_are_there_for_every_unit_and_reductions_for_trained_ones() -> None:
    window = trace(TWO, frozen={"c0.b"})
    metered = Metered(gathers={"c0.a": 5}, reductions={"c0.a": 6})
    durations = measurements_of(window, metered, per_window=False, memory=False).durations
    assert durations is not None
    assert durations.gathers == {"c0.a": 5, "c0.b": 0}
    assert durations.reductions == {"c0.a": 6}


def test_what_a_left_program_knew_stands_where_nothing_was_metered() -> None:
    before = trace("c0 F0: a b; c0 B0: b a")
    known = Measurements(
        Durations((1, 2, 3, 4), {"c0.a": 50, "c0.b": 60}, {"c0.a": 70, "c0.b": 80})
    )
    # The window followed the program for two events and was metered from there on.
    metered = Metered(compute={4: 100, 6: 300}, gathers={"c0.a": 55}, reductions={"c0.b": 85})
    durations = durations_of(metered, left=(before, known))
    # Of a unit and phase, what is measured counts, not the median with what was known.
    assert durations.compute == (100, 2, 300, 4) * 2
    assert durations.gathers == {"c0.a": 55, "c0.b": 60}
    assert durations.reductions == {"c0.a": 70, "c0.b": 85}
    # A program that was not recorded knew nothing: that of registration mode.
    assert durations_of(metered, left=(before, Measurements())).gathers == {"c0.a": 55, "c0.b": 0}


def test_room_is_what_the_recorded_peak_leaves() -> None:
    window = trace("c0 F0: a b; c0 B0: b a")
    metered = Metered(allocated={0: 400, 1: 700, 2: 900, 3: 500}, peak=1000)
    found = measurements_of(window, metered, per_window=False, memory=True)
    assert found.peak == 1000
    assert found.room == (600, 300, 100, 500)
    missing = Metered(allocated={0: 400, 2: 900, 3: 500}, peak=1000)
    found = measurements_of(window, missing, per_window=False, memory=True)
    assert found.room == (600, 0, 100, 500)  # not known: full


def test_room_of_a_left_program_stands_where_nothing_was_metered() -> None:
    before, window = trace("c0 F0: a b; c0 B0: b a"), trace(TWO)
    known = Measurements(Durations((1, 2, 3, 4), {}, {}), (11, 12, 13, 14), 1000)
    metered = Metered(allocated={2: 500, 3: 500, 5: 600, 6: 700, 7: 800}, peak=900)
    found = measurements_of(window, metered, per_window=False, memory=True, left=(before, known))
    assert found.peak == 1000
    assert found.room == (11, 12, 500, 500, 0, 400, 300, 200)


def test_what_products_wrote_is_noted_at_the_event_of_the_reduction(clock: Clock) -> None:
    meter, a, b = meter_of(), unit("c0.a"), unit("c0.b")
    event(meter, clock, b, 2, at=0, gather=1)
    product(meter, b, 40)
    product(meter, b, 30)
    # What is there already is not written.
    meter.watch_products(b, [mark_written(torch.ones(9, 1))])
    reduction(meter, b)
    event(meter, clock, a, 3, at=10, gather=1)
    reduction(meter, a)
    meter.close()
    reduction(meter, b)  # left to the close: of no event
    metered = meter.evaluate({"c0.a": 5})
    assert metered.written == {("c0.b", 2): 70, ("c0.a", 3): 0}
    assert metered.shards == {"c0.a": 5}


def test_memory_is_noted_without_what_products_had_written_by_then(clock: Clock) -> None:
    meter, a, b = meter_of(memory=True), unit("c0.a"), unit("c0.b")
    event(meter, clock, b, 2, at=0, gather=1)
    clock.most = 500  # before any product
    product(meter, b, 40)
    clock.most = 520  # beside the first: 480 without it
    product(meter, b, 30)
    clock.most = 600  # beside both: 530
    reduction(meter, b)
    clock.most = 540  # after the reduction
    event(meter, clock, a, 3, at=10, gather=1)
    clock.most = 410
    product(meter, a, 20)
    clock.most = 500
    event(meter, clock, b, 4, at=20, gather=1)
    clock.most = 700  # a's product is there still: 680 without it
    reduction(meter, a)
    meter.close()
    metered = meter.evaluate({})
    assert metered.allocated == {2: 600, 3: 500, 4: 700}
    assert metered.peak == 700
    assert metered.written == {("c0.b", 2): 70, ("c0.a", 4): 20}
    assert metered.without == {("c0.b", 2): 540, ("c0.a", 3): 480, ("c0.a", 4): 680}


def test_gradients_that_a_plan_does_without_are_by_backward_and_by_unit() -> None:
    window = trace("c0 F0: *(a); c0 B0: *(a); c0 F1: *(a); c0 B1: *(a)")
    # The parent is reduced at the event that it ends with, the child's.
    written = {("c0", 3): 30, ("c0.a", 3): 20, ("c0.a", 7): 0, ("c0", 6): 9}
    metered = Metered(
        allocated=dict.fromkeys(range(8), 100),
        peak=100,
        written=written,
        without={("c0", 3): 75, ("c0.a", 3): 10},
        shards={"c0": 0, "c0.a": 4},
    )
    found = measurements_of(window, metered, per_window=False, memory=True)
    assert found.gradients == RecordedGradients({2: 30, 3: 20}, {2: 25, 3: 20}, {"c0.a": 4})
    without = measurements_of(window, metered, per_window=False, memory=False)
    assert without.gradients == RecordedGradients()


def test_gradients_of_a_left_program_stand_where_nothing_was_metered() -> None:
    before, window = trace("c0 F0: a b; c0 B0: b a"), trace(TWO)
    known = Measurements(
        Durations((1, 2, 3, 4), {}, {}),
        (11, 12, 13, 14),
        1000,
        RecordedGradients({2: 31, 3: 32}, {2: 30}, {"c0.a": 9}),
    )
    metered = Metered(
        allocated=dict.fromkeys(range(3, 8), 500),
        peak=900,
        written={("c0.b", 2): 1, ("c0.a", 3): 2, ("c0.b", 6): 3},
        without={("c0.a", 3): 499},
        shards={"c0.b": 7},
    )
    found = measurements_of(window, metered, per_window=False, memory=True, left=(before, known))
    # When a unit was first reduced here is not when it is first reduced in a recorded window.
    assert found.gradients == RecordedGradients({2: 31, 3: 2, 6: 3}, {2: 30, 3: 1}, {})


# What ranks exchange


@pytest.mark.parametrize("room", [None, (7, 8, 9, 10)])
@pytest.mark.parametrize("frozen", [set(), {"c0.a"}, set(UNITS)])
def test_measurements_survive_being_numbers(room: tuple[int, ...] | None, frozen: set[str]) -> None:
    window = trace("c0 F0: a b; c0 B0: b a", frozen=frozen)
    reductions = {name: 60 + index for index, name in enumerate(UNITS) if name not in frozen}
    gradients = RecordedGradients()
    if room is not None and not frozen:
        gradients = RecordedGradients({3: 5, 2: 6}, {3: 4}, {"c0.b": 7})
    measured = Measurements(
        Durations((1, 2, 3, 4), {"c0.b": 51, "c0.a": 50}, reductions),
        room,
        12 if room else None,
        gradients,
    )
    numbers = flatten(window, measured)
    assert unflatten(window, numbers, measured) == measured
    # The order is that of the trace, however the dictionaries of a rank are ordered.
    assert numbers[:6] == [1, 2, 3, 4, 50, 51]
    assert len(numbers) == 4 + 2 + 2 + (4 + 2 * (2 - len(frozen)) + 2 if room else 0)
    if gradients.written:
        assert numbers[-6:] == [6, 5, 0, 4, 0, 7]
    doubled = unflatten(window, [2 * number for number in numbers], measured)
    assert doubled.durations == Durations(
        (2, 4, 6, 8),
        {"c0.a": 100, "c0.b": 102},
        {name: 2 * spent for name, spent in reductions.items()},
    )
    assert doubled.room == (None if room is None else (14, 16, 18, 20))
    if gradients.written:
        assert doubled.gradients == RecordedGradients({2: 12, 3: 10}, {3: 8}, {"c0.b": 14})
