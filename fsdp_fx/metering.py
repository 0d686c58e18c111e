"""What a window takes while it is written down: time, and memory.

A :class:`Meter` marks when each event is reached and when its unit is there, how long the
collectives of each unit run, and how much memory is allocated in between. Marks are device
events on a device, which nobody waits for before the close, and clock readings on the CPU.
Nothing is measured in replay: units are there before they are waited for.

What comes of the marks is plain data for :mod:`fsdp_fx.planning`; what is planned with it is
not decided here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median_low

import torch

from .planning.durations import Durations
from .planning.gradients import RecordedGradients
from .planning.measurements import Measurements
from .planning.memory import contributions
from .planning.room import recorded_room
from .trace import Phase, Trace
from .units import Communication, Unit, is_fresh, when_allocated

__all__ = ["Meter", "Metered", "flatten", "measurements_of", "unflatten"]

_Mark = torch.Event | int


@dataclass(frozen=True)
class Metered:
    """The marks of one window, evaluated. Times are in nanoseconds.

    Args:
        compute: by position, the time from the moment its unit was there to the next event.
        gathers: by unit, the shortest time that a gather of it took.
        reductions: by unit, the shortest time that a reduction of it took.
        allocated: by position, the most bytes allocated from that event to the next.
        peak: the most bytes allocated at any time that was metered, the close included.
        written: by unit and the event under way when it was reduced: bytes of its full
            gradients that products had written.
        without: by unit and event, the most bytes allocated from that event to the next, less
            what products had written of the unit's full gradients at that time.
        shards: by unit, bytes of the reduced gradients that came in the window.
    """

    compute: dict[int, int] = field(default_factory=dict)
    gathers: dict[str, int] = field(default_factory=dict)
    reductions: dict[str, int] = field(default_factory=dict)
    allocated: dict[int, int] = field(default_factory=dict)
    peak: int = 0
    written: dict[tuple[str, int], int] = field(default_factory=dict)
    without: dict[tuple[str, int], int] = field(default_factory=dict)
    shards: Mapping[str, int] = field(default_factory=dict)


class Meter:
    """Marks what happens in a window that is written down.

    Args:
        communication: the streams that collectives run on.
        memory: whether to note allocated memory. It resets the device's peak at each event.
    """

    def __init__(self, communication: Communication, memory: bool) -> None:
        self._communication = communication
        self._device = communication.device
        self._memory = memory
        self._expected: list[tuple[Unit, int]] = []
        self._at: int | None = None  # the event under way
        self._reached: dict[int, _Mark] = {}
        self._ready: dict[int, _Mark] = {}
        self._order: list[int] = []
        self._closed: _Mark | None = None
        self._gathers: list[tuple[str, _Mark, _Mark]] = []
        self._reductions: list[tuple[str, _Mark, _Mark, int | None]] = []
        self._begun: _Mark | None = None
        self._products: dict[str, int] = {}  # bytes of each unit that are there now
        self._written: dict[tuple[str, int], int] = {}
        self._without: dict[tuple[str, int], int] = {}
        self._allocated: dict[int, int] = {}
        self._peak = 0
        if memory:
            torch.accelerator.reset_peak_memory_stats(self._device)

    def expect(self, unit: Unit, position: int) -> None:
        """The next acquisition of ``unit`` is event ``position`` of the window."""
        self._expected.append((unit, position))

    def reach(self, unit: Unit) -> int | None:
        """Compute asks for ``unit``.

        Returns:
            The position of the event; None where it is none.
        """
        for index, (expected, position) in enumerate(self._expected):
            if expected is unit:
                del self._expected[index]
                self._note_memory()
                self._at = position
                self._products = {name: size for name, size in self._products.items() if size}
                self._order.append(position)
                self._reached[position] = self._mark(None)
                return position
        return None

    def ready(self, position: int) -> None:
        """The unit of event ``position`` is there."""
        self._ready[position] = self._mark(None)

    def begin_gather(self) -> None:
        """A gather is about to be issued."""
        # What is gathered in place waits for compute, which is not the gather's own time.
        self._communication.wait_for_compute()
        self._begun = self._mark(self._communication.copy_in_stream)

    def end_gather(self, unit: Unit, waited: bool) -> None:
        """The gather was issued, or on the CPU waited for.

        Args:
            unit: the unit.
            waited: whether compute waits for it now.
        """
        begun = self._begun
        if begun is not None and waited == (self._device.type == "cpu"):
            ended = self._mark(self._communication.gather_stream)
            self._gathers.append((unit.spec.name, begun, ended))
            self._begun = None

    def begin_reduction(self, unit: Unit) -> None:
        """A reduction of ``unit`` is about to be issued."""
        self._begun = self._mark(None)
        if self._at is not None and self._closed is None:
            self._written[unit.spec.name, self._at] = self._products.get(unit.spec.name, 0)

    def end_reduction(self, unit: Unit) -> None:
        """The reduction was issued; on the CPU it has run."""
        if self._begun is not None:
            ended = self._mark(self._communication.reduction_stream)
            at = self._at if self._closed is None else None
            self._reductions.append((unit.spec.name, self._begun, ended, at))
            self._begun = None
        if self._products.get(unit.spec.name):
            self._note_memory()
            self._products[unit.spec.name] = 0

    def watch_products(self, unit: Unit, gradients: Sequence[torch.Tensor]) -> None:
        """Products are about to write those of ``gradients``, of ``unit``, that hold nothing."""
        for gradient in gradients:
            if is_fresh(gradient):
                when_allocated(gradient, partial(self._product, unit.spec.name, gradient.nbytes))

    def _product(self, name: str, size: int) -> None:
        self._note_memory()
        if name not in self._products and self._at is not None:
            self._without[name, self._at] = self._allocated.get(self._at, 0)
        self._products[name] = self._products.get(name, 0) + size

    def close(self) -> None:
        """The window's last event is over. Reductions may still be issued."""
        self._closed = self._mark(None)

    def evaluate(self, shards: Mapping[str, int]) -> Metered:
        """Wait for the device and read the marks.

        Args:
            shards: by unit, bytes of the reduced gradients that have come in the window.
        """
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self._note_memory()
        result = Metered(
            allocated=dict(self._allocated),
            peak=self._peak,
            written=dict(self._written),
            without=dict(self._without),
            shards=shards,
        )
        marks = [self._reached[position] for position in self._order]
        if self._closed is not None:
            marks.append(self._closed)
        for position, after in zip(self._order, marks[1:], strict=False):
            if position in self._ready:
                result.compute[position] = _elapsed(self._ready[position], after)
        # In-order streams: a collective that was issued behind another starts after it.
        before: _Mark | None = None
        for name, begun, ended in self._gathers:
            result.gathers[name] = min(
                _since(before, begun, ended), result.gathers.get(name, 1 << 62)
            )
            before = ended
        before = None
        for name, begun, ended, at in self._reductions:
            spent = _since(before, begun, ended)
            result.reductions[name] = min(spent, result.reductions.get(name, 1 << 62))
            before = ended
            if self._device.type == "cpu" and at is not None and at in result.compute:
                # It ran where it was issued, between the marks of that event.
                result.compute[at] = max(0, result.compute[at] - spent)
        return result

    def _mark(self, stream: torch.Stream | None) -> _Mark:
        if self._device.type == "cpu":
            return time.perf_counter_ns()
        event = torch.Event(self._device, enable_timing=True)
        event.record(stream or torch.accelerator.current_stream(self._device))
        return event

    def _note_memory(self) -> None:
        if not self._memory:
            return
        most = torch.accelerator.max_memory_allocated(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._peak = max(self._peak, most)
        if self._at is not None:
            self._allocated[self._at] = max(most, self._allocated.get(self._at, 0))
            for name, size in self._products.items():
                key = name, self._at
                self._without[key] = max(most - size, self._without.get(key, 0))


def _elapsed(start: _Mark, end: _Mark) -> int:
    if isinstance(start, int):
        assert isinstance(end, int)
        return max(0, end - start)
    assert isinstance(end, torch.Event)
    return max(0, round(start.elapsed_time(end) * 1e6))


def _since(before: _Mark | None, begun: _Mark, ended: _Mark) -> int:
    spent = _elapsed(begun, ended)
    return spent if before is None else min(spent, _elapsed(before, ended))


def measurements_of(
    trace: Trace,
    metered: Metered,
    per_window: bool,
    memory: bool,
    left: tuple[Trace, Measurements] | None = None,
) -> Measurements:
    """What planning reads of a metered window.

    An event's time is the median of all events of its unit and phase: one that compiled, or
    waited for another rank, does not count for more than itself.

    Args:
        trace: the window's.
        metered: its marks.
        per_window: whether gradients were kept until the close.
        memory: whether memory was noted.
        left: the program that the window followed in its beginning, where nothing was
            metered, and what had been measured of it.
    """
    times: dict[tuple[str, Phase], list[int]] = {}
    if left is not None and left[1].durations is not None:
        for event, spent in zip(left[0], left[1].durations.compute, strict=True):
            times[event.unit, event.phase] = [spent]
    measured: dict[tuple[str, Phase], list[int]] = {}
    for position, spent in sorted(metered.compute.items()):
        event = trace[position]
        measured.setdefault((event.unit, event.phase), []).append(spent)
    times.update(measured)
    gathers, reductions = {}, {}
    before = left[1].durations if left is not None else None
    for unit in trace.units:
        known = before.gathers.get(unit.name, 0) if before is not None else 0
        gathers[unit.name] = metered.gathers.get(unit.name, known)
        if unit.trainable:
            known = before.reductions.get(unit.name, 0) if before is not None else 0
            reductions[unit.name] = metered.reductions.get(unit.name, known)
    durations = Durations(
        tuple(median_low(times.get((event.unit, event.phase), [0])) for event in trace),
        gathers,
        reductions,
    )
    if not memory:
        return Measurements(durations)
    peak = metered.peak
    if left is not None and left[1].peak is not None:
        peak = max(peak, left[1].peak)
    allocated = [metered.allocated.get(position, peak) for position in range(len(trace))]
    room = recorded_room(trace, allocated, peak, per_window)
    if left is not None and left[1].room is not None:
        for position in range(min(len(room), len(left[1].room))):
            if position not in metered.allocated:
                room[position] = left[1].room[position]
    return Measurements(durations, tuple(room), peak, _recorded_gradients(trace, metered, left))


def _recorded_gradients(
    trace: Trace, metered: Metered, left: tuple[Trace, Measurements] | None
) -> RecordedGradients:
    written, spared = {}, {}
    for position in contributions(trace):
        end = trace.ends[position]
        key = trace[position].unit, end
        before = left[1].gradients if left is not None else RecordedGradients()
        if end in metered.allocated:
            most = metered.allocated[end]
            written[position] = metered.written.get(key, 0)
            less = most - metered.without.get(key, most)
            spared[position] = min(written[position], max(0, less))
        else:
            written[position] = before.written.get(position, 0)
            spared[position] = before.spared.get(position, 0)
    # The program that the window began with may have reduced a unit for the first time later
    # than a window that follows none.
    shards = (
        {} if left is not None else {name: size for name, size in metered.shards.items() if size}
    )
    return RecordedGradients(_positive(written), _positive(spared), shards)


def _positive(sizes: Mapping[int, int]) -> dict[int, int]:
    return {position: size for position, size in sizes.items() if size}


def flatten(trace: Trace, measurements: Measurements) -> list[int]:
    """The numbers of ``measurements`` in an order that is the same on all ranks."""
    durations = measurements.durations
    assert durations is not None
    names = [unit.name for unit in trace.units]
    return [
        *durations.compute,
        *(durations.gathers[name] for name in names),
        *(durations.reductions.get(name, 0) for name in names),
        *(measurements.room or ()),
        *(
            (
                *(measurements.gradients.written.get(at, 0) for at in contributions(trace)),
                *(measurements.gradients.spared.get(at, 0) for at in contributions(trace)),
                *(measurements.gradients.shards.get(name, 0) for name in names),
            )
            if measurements.room is not None
            else ()
        ),
    ]


def unflatten(trace: Trace, numbers: Sequence[int], measurements: Measurements) -> Measurements:
    """Undo :func:`flatten`: ``measurements`` with other numbers."""
    events, units = len(trace), len(trace.units)
    compute, rest = numbers[:events], numbers[events:]
    gathers, reductions, rest = rest[:units], rest[units : 2 * units], rest[2 * units :]
    assert measurements.durations is not None
    names = [unit.name for unit in trace.units]
    durations = Durations(
        tuple(compute),
        dict(zip(names, gathers, strict=True)),
        {
            name: spent
            for name, spent in zip(names, reductions, strict=True)
            if name in measurements.durations.reductions
        },
    )
    if measurements.room is None:
        return Measurements(durations)
    room, products, shards = rest[:events], rest[events:-units], rest[-units:]
    backwards = contributions(trace)
    written, spared = products[: len(backwards)], products[len(backwards) :]
    gradients = RecordedGradients(
        _positive(dict(zip(backwards, written, strict=True))),
        _positive(dict(zip(backwards, spared, strict=True))),
        {name: size for name, size in zip(names, shards, strict=True) if size},
    )
    return Measurements(durations, tuple(room), measurements.peak, gradients)
