"""Who is unsharded, in flight, or in use.

Every gather and free of the package goes through one :class:`Residency`, whoever
asks for it: an eager hook, a compiled graph, an evaluation, a recomputation. It
makes both idempotent, keeps a count of uses so that nobody frees what another
still reads, and counts what happened.

It knows no order: when something is gathered or freed is the program's decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .metering import Meter
from .units import Unit

__all__ = ["Residency", "Stats"]

_PARTING = 1.0  # seconds


@dataclass
class Stats:
    """Counters since the context was made, as plain numbers.

    Attributes:
        gathers: all-gathers started.
        on_demand_gathers: those started at the event that needed them.
        prefetched_gathers: those started ahead of need.
        dropped_gathers: those whose unit was freed before anything used it.
        bytes_gathered: bytes of full parameters that the gathers produced.
        frees: times that a unit's full parameters were freed.
        reductions: gradient reductions started.
        bytes_reduced: bytes of full gradients that the reductions took.
        all_reductions: those of replicated units that were all-reduced over the replicas.
        windows: windows closed.
        recorded_windows: windows that became a new trace.
        replayed_windows: windows that followed a known program to their end.
        divergences: windows that left the program they had started with for one
            that was not known yet.
        switches: windows that went on with another known program.
        aborts: windows discarded by ``abort()``.
        resident_bytes: bytes of full parameters gathered or in flight now.
        peak_resident_bytes: the most that ``resident_bytes`` has been.
        kept_gradient_bytes: bytes of full gradients that wait for their reduction now.
        peak_kept_gradient_bytes: the most that ``kept_gradient_bytes`` has been where
            compute needed a unit.
    """

    gathers: int = 0
    on_demand_gathers: int = 0
    prefetched_gathers: int = 0
    dropped_gathers: int = 0
    bytes_gathered: int = 0
    frees: int = 0
    reductions: int = 0
    bytes_reduced: int = 0
    all_reductions: int = 0
    windows: int = 0
    recorded_windows: int = 0
    replayed_windows: int = 0
    divergences: int = 0
    switches: int = 0
    aborts: int = 0
    resident_bytes: int = 0
    peak_resident_bytes: int = 0
    kept_gradient_bytes: int = 0
    peak_kept_gradient_bytes: int = 0


class Residency:
    """The gathered units of one context.

    Args:
        stats: counters to keep.

    Attributes:
        on_failure: told of a collective that raised: what it was, the unit, and the
            error, which goes on unless this raises another.
        on_waiting: called now and then while the host waits for a gather.
        meter: measures the window that is being written down.
    """

    def __init__(self, stats: Stats) -> None:
        self.stats = stats
        self.on_failure: Callable[[str, Unit, Exception], None] | None = None
        self.on_waiting: Callable[[], None] | None = None
        self.meter: Meter | None = None
        self._kept: dict[Unit, int] = {}  # bytes of the full gradients that wait, by unit

    def prefetch(self, unit: Unit) -> None:
        """Start a gather ahead of need, unless the unit is there or on its way."""
        # Named by the program, the unit is wanted again: a free that was put off
        # until its present use ends must not happen.
        unit.free_at_release = False
        if not (unit.unsharded or unit.in_flight):
            self._start(unit)
            self.stats.prefetched_gathers += 1

    def acquire(self, unit: Unit) -> bool:
        """Begin a use: gather the unit if it is absent and make compute wait for it.

        Returns:
            Whether the unit was absent.
        """
        unit.free_at_release = False
        absent = not (unit.unsharded or unit.in_flight)
        stats = self.stats
        if stats.kept_gradient_bytes > stats.peak_kept_gradient_bytes:
            # Here, not where they are kept: two backwards of a unit may end at once.
            stats.peak_kept_gradient_bytes = stats.kept_gradient_bytes
        meter = self.meter
        position = meter.reach(unit) if meter is not None else None
        if absent:
            if meter is not None and position is not None:
                meter.begin_gather()
            self._start(unit)
            if meter is not None and position is not None:
                meter.end_gather(unit, waited=False)
            stats.on_demand_gathers += 1
        if not unit.unsharded:
            try:
                unit.wait(self.on_waiting)
            except Exception as error:
                self._failed("gather", unit, error)
                raise
        if meter is not None and position is not None:
            if absent:
                meter.end_gather(unit, waited=True)
            meter.ready(position)
        unit.holds += 1
        return absent

    def release(self, unit: Unit) -> None:
        """End a use. The unit stays until :meth:`free`, or goes now if that came before."""
        unit.holds -= 1
        if unit.holds == 0 and unit.free_at_release:
            self.free(unit)

    def free(self, unit: Unit) -> None:
        """Free the unit; put off while it is in use; nothing if it is sharded."""
        if unit.holds:
            unit.free_at_release = True
            return
        unit.free_at_release = False
        if unit.in_flight:
            self.stats.dropped_gathers += 1
        elif not unit.unsharded:
            return
        unit.free()
        self.stats.frees += 1
        self.stats.resident_bytes -= unit.spec.bytes

    def free_idle(self, units: Sequence[Unit]) -> None:
        """Free those of ``units`` that nobody uses."""
        for unit in units:
            if not unit.holds:
                self.free(unit)

    def reduce(self, unit: Unit, all_reduce: bool = True) -> None:
        """Start the reduction of the unit's gradients, if any backward contributed to them.

        Whether this rank has gradients decides only where no backward said so.

        Args:
            unit: the unit.
            all_reduce: whether to all-reduce over the replicas, of what is reduced now
                and of the partial sums from before, even if nothing is reduced now.
        """
        if unit.contributed or unit.has_gradients or (all_reduce and unit.has_partial_sums):
            meter = self.meter
            if meter is not None:
                meter.begin_reduction(unit)
            try:
                unit.reduce(all_reduce)
            except Exception as error:
                self._failed("reduction", unit, error)
                raise
            if meter is not None:
                meter.end_reduction(unit)
            self.stats.kept_gradient_bytes -= self._kept.pop(unit, 0)
            self.stats.reductions += 1
            self.stats.bytes_reduced += unit.spec.gradient_bytes
            if all_reduce and unit.spec.replicas > 1:
                self.stats.all_reductions += 1

    def accumulators(self, unit: Unit, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients for products to add to. See :meth:`Unit.accumulators`."""
        return self._watched(unit, unit.accumulators(parameters))

    def transient_gradients(
        self, unit: Unit, parameters: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Gradients for products to write. See :meth:`Unit.transient_gradients`."""
        return self._watched(unit, unit.transient_gradients(parameters))

    def _watched(self, unit: Unit, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.meter is not None:
            self.meter.watch_products(unit, gradients)
        return gradients

    def keep_gradients(self, unit: Unit) -> None:
        """Keep the unit's gradients full, in the dtype that they are reduced in."""
        if unit.has_gradients:
            unit.keep_gradients()
        if unit not in self._kept:
            # Of a rank that has none, too: the plan is for all ranks.
            self._kept[unit] = unit.spec.kept_gradient_bytes
            self.stats.kept_gradient_bytes += unit.spec.kept_gradient_bytes

    def keeps_gradients(self, unit: Unit) -> bool:
        """Whether full gradients of the unit wait for their reduction."""
        return unit in self._kept

    def reset(self, units: Sequence[Unit]) -> None:
        """Free every unit whoever uses it, and drop gradients that are not reduced."""
        deadline = time.monotonic() + _PARTING
        for unit in units:
            if unit.unsharded or unit.in_flight:
                self.stats.frees += 1
                self.stats.resident_bytes -= unit.spec.bytes
            self.stats.kept_gradient_bytes -= self._kept.pop(unit, 0)
            unit.reset(deadline)

    def forget(self, unit: Unit) -> None:
        """The unit's module is gone, and its memory with it."""
        if unit.unsharded or unit.in_flight:
            unit.abandon()
            self.stats.resident_bytes -= unit.spec.bytes
        self.stats.kept_gradient_bytes -= self._kept.pop(unit, 0)

    def _start(self, unit: Unit) -> None:
        try:
            unit.gather()
        except Exception as error:
            self._failed("gather", unit, error)
            raise
        stats, size = self.stats, unit.spec.bytes
        stats.gathers += 1
        stats.bytes_gathered += size
        stats.resident_bytes += size
        if stats.resident_bytes > stats.peak_resident_bytes:
            stats.peak_resident_bytes = stats.resident_bytes

    def _failed(self, what: str, unit: Unit, error: Exception) -> None:
        if self.on_failure is not None:
            self.on_failure(what, unit, error)
