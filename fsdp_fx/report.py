"""What ran how: the transformed graphs, and what fell back.

Executors write here; ``FSDPContext.explain`` reads. Nothing here decides anything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from .calls import ForwardCall
from .occupancy import outline_of, peak_resident_bytes
from .passes import PassOptions
from .planning.memory import format_bytes, kept_gradient_bytes
from .program import Program
from .residency import Stats
from .torch_internals import graph_break_reasons

__all__ = ["Fallback", "GraphKey", "Report"]

logger = logging.getLogger("fsdp_fx")

_LINES = 32
_SHOWN = 4


class GraphKey(NamedTuple):
    """Which transformed graph: of which chunk, direction and variant.

    Attributes:
        chunk: name of the chunk that it ran for.
        direction: ``"forward"``, ``"backward"`` or ``"inference"``.
        graph: number of the captured graph among the context's; a graph break gives
            a chunk several, identical chunks share one.
        variant: ``"on demand"``; ``"slice N"`` for a distinct slice of a program that
            the graph was combined with; ``"evaluation N"`` for an evaluation among
            units that a program has gathered.
    """

    chunk: str
    direction: str
    graph: int
    variant: str


@dataclass(frozen=True)
class Fallback:
    """Something that did not run as a part of a compiled graph, or of the program.

    Attributes:
        where: the chunk or unit.
        what: what ran instead.
        why: the reason.
    """

    where: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: {self.why}"


class Report:
    """What executors write down.

    Attributes:
        graphs: the transformed graphs that ran.
        fallbacks: each distinct fallback once, in the order of their first time.
        captured_graphs: times that torch.compile has called the backend.
        region_uses: regions in the graphs.
        distinct_regions: how many of them are different.
        cached_regions: how many of those were in Inductor's persistent cache.
        compile_seconds: time that cutting graphs and compiling regions took.
        first_step_seconds: from the first event to the close of the first window in which
            something was captured; None before.
    """

    def __init__(self) -> None:
        self.graphs: dict[GraphKey, fx.GraphModule] = {}
        self.fallbacks: dict[Fallback, int] = {}
        self.compile_seconds = 0.0
        self.captured_graphs = 0
        self.region_uses = 0
        self.distinct_regions = 0
        self.cached_regions = 0
        self.first_step_seconds: float | None = None
        self._window_opened = 0.0
        # What there is already came of other models.
        self._reasons = graph_break_reasons()
        self._why = "torch.compile did not capture it"

    @property
    def compiled_regions(self) -> int:
        """Distinct regions that were compiled, and not found in a persistent cache."""
        return self.distinct_regions - self.cached_regions

    def window_opened(self) -> None:
        """Note that a window begins."""
        self._window_opened = time.perf_counter()

    def window_closed(self) -> None:
        """Note that the window that began last is over, and was whole."""
        if self.first_step_seconds is None and self.captured_graphs:
            self.first_step_seconds = time.perf_counter() - self._window_opened

    def compiled_call(self, call: ForwardCall) -> None:
        """Note what of a forward of a compiled chunk was not captured, and why.

        Nothing at all, some units, or no unit, but what lies between two graphs.
        """
        chunk = f"compiled chunk {call.chunk}"
        if not call.captured:
            self._left_to_eager(chunk, "ran eagerly")
        for unit in call.ran_eagerly if call.captured else ():
            self._left_to_eager(f"unit {unit} in {chunk}", "ran from its hooks")
        if call.captured > 1 and not call.ran_eagerly:
            self._left_to_eager(chunk, "was captured in parts, what lies between ran eagerly")

    def _left_to_eager(self, where: str, what: str) -> None:
        reasons = graph_break_reasons()
        # What is new, or has happened again, since something last ran eagerly.
        fresh = [why for why, times in reasons.items() if times != self._reasons.get(why)]
        self._reasons = reasons
        if fresh:
            # A frame that is left alone has others below it that break for reasons of their own.
            self._why = "; ".join(fresh)
        hint = "TORCH_LOGS=graph_breaks,recompiles tells more"
        self.fall_back(Fallback(where, what, f"{self._why} ({hint})"))

    def leave_program(self, window: int, why: str) -> None:
        """Note that a window left its program and was recorded as a new one; one log line each.

        A run that meets more kinds of windows than programs are kept does so again and
        again: after some the log has had enough.
        """
        what = "left its program and was recorded as a new one"
        known = next((each for each in self.fallbacks if each.what == what), None)
        count = self.fallbacks.pop(known) if known is not None else 0
        fallback = Fallback(f"window {window}", what, why)
        self.fallbacks[fallback] = count + 1
        if count < _LINES:
            more = "; further ones are counted in explain()" if count == _LINES - 1 else ""
            logger.warning("fell back: %s%s", fallback, more)

    def fall_back(self, fallback: Fallback) -> None:
        """Note ``fallback``; one log line at the first time of its place.

        torch.compile may give other reasons for the same place later: the first is kept.
        """
        for known in self.fallbacks:
            if (known.where, known.what) == (fallback.where, fallback.what):
                self.fallbacks[known] += 1
                return
        logger.warning("fell back: %s", fallback)
        self.fallbacks[fallback] = 1

    def explain(
        self,
        mode: str,
        options: PassOptions,
        stats: Stats,
        chunks: Sequence[str],
        programs: Sequence[Program],
        peaks: Sequence[int | None] = (),
        obstacles: Mapping[str, tuple[str | None, str | None]] | None = None,
    ) -> str:
        """The whole story as text.

        Args:
            mode: the context's mode.
            options: what it plans with.
            stats: its counters.
            chunks: names of its chunks.
            programs: the programs that it knows, the latest last.
            peaks: of each, the peak of allocated memory that it was planned under, if any.
            obstacles: by unit, why it is not gathered and not reduced in place; None where it is.
        """
        lines = [
            f"{mode} mode, {_count(len(chunks), 'chunk')}, "
            f"{_count(len(programs), 'program')} known",
            f"options: {', '.join(f'{k}={v!r}' for k, v in vars(options).items())}",
            f"windows: {stats.windows} closed ({stats.recorded_windows} recorded, "
            f"{stats.replayed_windows} replayed), {stats.aborts} aborted; {stats.divergences} left "
            f"their program for a new one, {stats.switches} for a known one",
            f"gathers: {stats.gathers}, {stats.on_demand_gathers} on demand, "
            f"{stats.prefetched_gathers} ahead of need, {stats.dropped_gathers} dropped unused",
            f"reductions: {stats.reductions}",
            *_in_place(obstacles or {}),
        ]
        for index, program in enumerate(programs):
            trace, outline = program.trace, outline_of(program)
            lines.append(
                f"program {index}: {_count(len(trace), 'event')} in "
                f"{_count(len(trace.calls), 'call')}, "
                f"fingerprint {trace.fingerprint[:12]}; {_count(len(outline.gathers), 'gather')}, "
                f"{_count(len(outline.reductions), 'reduction')}, "
                f"peak {format_bytes(peak_resident_bytes(program))} of parameters"
            )
            if kept := max(kept_gradient_bytes(trace, outline.reductions), default=0):
                lines[-1] += f", {format_bytes(kept)} of gradients kept"
            if program.carried:
                lines[-1] += f", {_count(len(program.carried), 'unit')} kept from window to window"
            if index < len(peaks) and (peak := peaks[index]) is not None:
                lines[-1] += f"; planned from a recorded peak of {format_bytes(peak)} allocated"
            if program.capacity is not None and not program.unproven:
                lines[-1] += "; proven to save the most"
            if program.unproven:
                lines[-1] += (
                    f"; not proven to be the best: another choice might save up to "
                    f"{format_bytes(program.unproven)} more"
                )
        if not chunks:
            lines.append("no chunk is adopted: call adopt() before the first forward")
        elif stats.gathers and not stats.windows:
            lines.append(
                "no window was closed: nothing has trained in train mode, or finish_grad_sync() was "
                "not called before the optimizer step"
            )
        compiled = {key.chunk for key in self.graphs}
        for chunk in chunks:
            if chunk not in compiled:
                lines.append(f"chunk {chunk}: eager, scheduled from hooks")
                continue
            keys = [key for key in self.graphs if key.chunk == chunk]
            graphs = sorted({(key.graph, key.direction) for key in keys})
            lines.append(
                f"chunk {chunk}: compiled, "
                + ", ".join(
                    f"graph {graph} {direction} in "
                    + _count(
                        sum(k.graph == graph and k.direction == direction for k in keys), "variant"
                    )
                    for graph, direction in graphs
                )
            )
        if self.region_uses:
            lines.append(
                f"regions: {self.region_uses} in {_count(self.captured_graphs, 'captured graph')}, "
                f"{self.distinct_regions} distinct, {self.cached_regions} of these taken from the "
                f"cache, {self.compiled_regions} compiled; graphs made in "
                f"{self.compile_seconds:.1f} s"
            )
            if self.first_step_seconds is not None:
                lines[-1] += f", first step in {self.first_step_seconds:.1f} s"
        if self.fallbacks:
            lines.append("fallbacks:")
            lines.extend(
                f"  {fallback} ({_count(n, 'time')})" for fallback, n in self.fallbacks.items()
            )
        else:
            lines.append("fallbacks: none")
        return "\n".join(lines)


def _in_place(obstacles: Mapping[str, tuple[str | None, str | None]]) -> list[str]:
    """How many units' collectives need no copies, and which need them why."""
    copied: dict[tuple[str, str], list[str]] = {}
    for unit, (gather, reduction) in obstacles.items():
        if gather is not None and gather == reduction:
            copied.setdefault(("gathers and reductions", gather), []).append(unit)
            continue
        for what, why in (("gathers", gather), ("reductions", reduction)):
            if why is not None:
                copied.setdefault((what, why), []).append(unit)
    if not copied:
        return []
    return ["copied by FSDP2, not gathered and reduced in place:"] + [
        f"  {what} of {_some(units)}: {why}" for (what, why), units in copied.items()
    ]


def _some(names: Sequence[str]) -> str:
    shown, more = names[:_SHOWN], len(names) - _SHOWN
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
