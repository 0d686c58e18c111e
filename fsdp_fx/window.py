"""The window and its one cursor.

Every compute event of the step, from an eager hook or from a compiled graph, comes
through :class:`Window` in the order in which it happens. While recording, it gathers
on demand and writes the events down. While replaying, it matches the event to the
program, does what the program puts there, and moves on. It notices when the two
differ, and it decides whether the window is whole when it is closed.

This module registers no hooks (:mod:`fsdp_fx.eager`, :mod:`fsdp_fx.compile` do) and
plans nothing (:mod:`fsdp_fx.passes`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .library import BoundProgram, Key, ProgramLibrary
from .recording import Recording
from .residency import Residency
from .trace import Phase, Trace
from .units import Communication, Unit

__all__ = ["ClosedWindow", "ForwardCall", "IncompleteWindowError", "Use", "Window"]

ReduceGradients = Literal["per_backward", "per_window"]


class IncompleteWindowError(RuntimeError):
    """A window was closed before it was whole. The message says what is missing."""


class ClosedWindow(NamedTuple):
    """What a closed window leaves.

    Attributes:
        trace: its trace if it is new: it was recorded, or it left its program.
        divergence: how it left its program, for a message; None if it did not.
    """

    trace: Trace | None
    divergence: str | None


@dataclass(eq=False, slots=True)
class ForwardCall:
    """One entry into a chunk's forward, and the backward that belongs to it.

    Attributes:
        chunk: name of the chunk.
        window: number of the window that it belongs to.
        microbatch: index among the chunk's training forwards of the window; -1 for
            an evaluation.
        training: whether its events are recorded.
        compiled: whether it was entered under torch.compile.
        captured: whether a captured graph ran in it.
        finished: whether the forward returned.
        needs_backward: whether some output can be differentiated.
        has_backward: whether a backward through it has begun.
        outstanding: per unit, forward uses whose backward is still to come.
    """

    chunk: str
    window: int
    microbatch: int
    training: bool
    compiled: bool = False
    captured: bool = False
    finished: bool = False
    needs_backward: bool = False
    has_backward: bool = False
    outstanding: dict[Unit, int] = field(default_factory=dict)

    def __str__(self) -> str:
        kind = f"microbatch {self.microbatch}" if self.training else "an evaluation"
        return f"chunk {self.chunk}, {kind}"


@dataclass(eq=False, slots=True)
class Use:
    """A stretch of compute during which a unit's full parameters are needed.

    Attributes:
        unit: the unit.
        phase: ``"F"`` or ``"B"``.
        call: the forward call it belongs to.
        position: position of its event in the window, or None where there is no
            event: in an evaluation and in a recomputation.
        contributes: whether its end completes a forward use that is outstanding.
        recomputes: whether it is a forward inside a backward.
        gathered: whether it brought the unit in, and so frees it where no program says.
        open: whether it is still under way.
    """

    unit: Unit
    phase: Phase
    call: ForwardCall
    position: int | None
    contributes: bool = False
    recomputes: bool = False
    gathered: bool = True
    open: bool = True


class Window:
    """The window under way, its cursor, and the program that it follows.

    Args:
        residency: gathers and frees the units.
        library: the programs known.
        reduce_gradients: when gradients are reduced while no program says so.

    Attributes:
        number: windows closed or aborted before this one.
        cursor: position of the next event.
        current: the chunk's forward that is running, innermost last.
        backward_call: the forward call whose backward is running.
        on_open: called before the first event of each window.
        closes_itself: whether windows are closed at the end of an autograd pass; for
            messages.
    """

    def __init__(
        self,
        residency: Residency,
        library: ProgramLibrary,
        reduce_gradients: ReduceGradients,
    ) -> None:
        self.residency = residency
        self.library = library
        self.reduce_gradients = reduce_gradients
        self.units: list[Unit] = []
        self.communication: Communication | None = None
        self.number = 0
        self._evaluating = 0
        self.on_open: Callable[[], None] | None = None
        self.closes_itself = False
        self._begin()

    def _begin(self) -> None:
        self.cursor = 0
        self.following: BoundProgram | None = None
        self.current: list[ForwardCall] = []
        self.backward_call: ForwardCall | None = None
        self.failure: str | None = None
        self.divergence: str | None = None
        self._opened = False
        self._calls: list[ForwardCall] = []
        self._microbatches: dict[str, int] = {}
        self._backward_uses: list[Use] = []
        self._recomputed: set[Unit] = set()
        self._passes: list[int] = []
        self._trains = False  # whether the outermost pass reached a training forward
        self._recording = Recording()
        self._with_gradients: set[Unit] = set()

    @property
    def is_open(self) -> bool:
        """Whether anything of this window has happened."""
        return self._opened

    @property
    def recording(self) -> bool:
        """Whether events are being written down: no program is followed."""
        return self._opened and self.following is None

    # Calls

    def open_call(self, chunk: str, training: bool, compiled: bool) -> ForwardCall:
        """A chunk's forward begins.

        Args:
            chunk: name of the chunk.
            training: False for an evaluation.
            compiled: whether it runs under torch.compile.
        """
        training = training and not self._evaluating
        microbatch = -1
        if training:
            if self._passes:
                self.fail(f"an autograd pass did not end before a forward of {chunk} began")
            self._open()
            microbatch = self._microbatches.get(chunk, 0)
            self._microbatches[chunk] = microbatch + 1
        call = ForwardCall(chunk, self.number, microbatch, training, compiled=compiled)
        if training:
            self._calls.append(call)
        elif self.communication is not None:
            # Between windows the optimizer may still be writing what is gathered here.
            self.communication.wait_for_compute()
        self.current.append(call)
        return call

    def close_call(self, call: ForwardCall, needs_backward: bool) -> None:
        """A chunk's forward returned.

        Args:
            call: what :meth:`open_call` returned.
            needs_backward: whether some output can be differentiated.
        """
        call.finished = True
        call.needs_backward = needs_backward
        if call in self.current:
            self.current.remove(call)

    def fail(self, what: str) -> None:
        """An exception crossed the window: it will not be accepted as whole."""
        if self.failure is None:
            self.failure = what

    def _open(self) -> None:
        if self._opened:
            return
        if self.on_open is not None:
            self.on_open()
        self._opened = True
        self.following = self.library.latest
        self._with_gradients = {unit for unit in self.units if unit.has_reduced_gradients}
        if self.communication is not None:
            self.communication.wait_for_compute()

    @property
    def evaluating(self) -> bool:
        """Whether forwards that begin now are evaluations."""
        return self._evaluating > 0

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Forwards that begin inside are evaluations."""
        self._evaluating += 1
        try:
            yield
        finally:
            self._evaluating -= 1

    # Events

    def begin(self, unit: Unit, phase: Phase, call: ForwardCall) -> Use:
        """Compute needs ``unit`` from here until :meth:`end`.

        Raises:
            RuntimeError: it is a backward through a forward of an earlier window.
        """
        if phase == "B":
            self.enter_backward(call)
        if not call.training:
            # A lookahead may have brought the unit in, for the window under way.
            absent = self.residency.acquire(unit)
            return Use(unit, phase, call, None, gathered=absent)
        position = self.cursor
        following = self.following
        if following is not None:
            if position < len(following.keys) and following.keys[position] == (unit, phase):
                step = following.steps[position]
            elif self._leave(((unit, phase),)):
                assert self.following is not None
                step = self.following.steps[position]
            else:
                return self._record(unit, phase, call)
            self.cursor = position + 1
            residency = self.residency
            for other in step.gathers:
                if other is not unit:
                    residency.prefetch(other)
            residency.acquire(unit)
            for other in step.prefetches:
                residency.prefetch(other)
            return Use(unit, phase, call, position)
        return self._record(unit, phase, call)

    def _record(self, unit: Unit, phase: Phase, call: ForwardCall) -> Use:
        position = self.cursor
        self.cursor = position + 1
        self._recording.add(unit, phase, call.microbatch, end=position)
        self.residency.acquire(unit)
        return Use(unit, phase, call, position)

    def begin_recomputation(self, unit: Unit) -> Use:
        """A forward inside a backward needs ``unit``: gathered if absent, not an event."""
        call = self.backward_call or ForwardCall("", self.number, -1, False)
        self.residency.acquire(unit)
        self._recomputed.add(unit)
        return Use(unit, "F", call, None, recomputes=True)

    def end(self, use: Use) -> None:
        """Compute no longer needs the unit of ``use``."""
        unit, call = use.unit, use.call
        residency = self.residency
        use.open = False
        if call.window != self.number and call.training:
            return  # abort() has reset the unit's holds already
        residency.release(unit)
        if use.recomputes:
            return
        if use.phase == "B":
            if use in self._backward_uses:
                self._backward_uses.remove(use)
            self._end_backward(use)
            return
        if use.position is None or self.following is None:
            if use.position is not None:
                self._recording.end(use.position, last=self.cursor - 1)
            if use.gathered:
                residency.free(unit)
        else:
            for other in self.following.steps[use.position].frees:
                residency.free(other)

    def _end_backward(self, use: Use) -> None:
        unit, residency = use.unit, self.residency
        complete = self.contribute(unit, use.call, use.contributes)
        if use.position is None or self.following is None:
            if use.gathered:
                residency.free(unit)
            if use.position is not None:
                self._recording.end(use.position, last=self.cursor - 1)
                if complete:
                    self._recording.contributions_complete([use.position])
            if complete:
                self._reduce_unplanned(unit, use.call)
            return
        step = self.following.steps[use.position]
        for other in step.frees:
            residency.free(other)
        for other in step.reduces:
            if other is not unit or complete:
                residency.reduce(other)
        if complete and unit not in step.reduces:
            residency.keep_gradients(unit)

    def contribute(self, unit: Unit, call: ForwardCall, counted: bool = True) -> bool:
        """A backward of ``unit`` has computed its part of the gradient.

        Args:
            unit: the unit.
            call: the forward call it belongs to.
            counted: whether the forward use was counted as outstanding.

        Returns:
            Whether every contribution of the microbatch is in.
        """
        outstanding = call.outstanding
        if counted:
            outstanding[unit] = outstanding.get(unit, 0) - 1
        return unit.spec.trainable and outstanding.get(unit, 0) <= 0

    def _reduce_unplanned(self, unit: Unit, call: ForwardCall) -> None:
        if self.reduce_gradients == "per_backward" or not call.training:
            self.residency.reduce(unit)
        else:
            self.residency.keep_gradients(unit)

    # Compiled calls

    def begin_slice(
        self, units: Sequence[Unit], phase: Phase, ends: Sequence[int], call: ForwardCall
    ) -> int | None:
        """A compiled graph is about to run all of its events.

        Args:
            units: the unit of each of its events, in order.
            phase: ``"F"`` or ``"B"``.
            ends: for each event, the index among ``units`` of the last event that
                has begun when the graph no longer needs the unit.
            call: the forward call it belongs to.

        Returns:
            The position of the first event in :attr:`following`, or None if the graph
            is to gather on demand: in an evaluation, while recording, and after a
            divergence.
        """
        if not call.training:
            return None
        position, count = self.cursor, len(units)
        following = self.following
        if following is not None:
            stop = position + count
            wanted = tuple((unit, phase) for unit in units)
            if following.keys[position:stop] == wanted or self._leave(wanted):
                self.cursor = stop
                return position
        for index, unit in enumerate(units):
            self._recording.add(unit, phase, call.microbatch, end=position + ends[index])
        self.cursor = position + count
        return None

    def note_reductions(self, start: int, indices: Sequence[int]) -> None:
        """Write down after which events of a recorded slice the gradients were complete."""
        self._recording.contributions_complete(start + index for index in indices)

    # Leaving a program

    def _leave(self, found: Sequence[Key]) -> bool:
        """The events found are not the expected ones: go on with another known program.

        Returns:
            Whether one is known that has these events here. If not, the rest of the
            window runs on demand and is written down.
        """
        left = self.following
        assert left is not None
        position = self.cursor
        prefix = left.keys[:position]
        other = self.library.going_on(prefix, found)
        if other is not None:
            self.following = other
            self.residency.stats.switches += 1
            wanted = other.resident_before(position) | {found[0][0]}
            self.residency.free_idle([unit for unit in self.units if unit not in wanted])
            return True
        here = position
        while here < len(left.keys) and left.keys[here] == found[here - position]:
            here += 1
        unit, phase = found[here - position]
        self._diverge(left, position, here, f"{unit.spec.name} {phase}")
        self.residency.free_idle([unit for unit in self.units if unit is not found[0][0]])
        return False

    def _diverge(self, left: BoundProgram, position: int, here: int, found: str) -> None:
        """From ``position`` on no program is followed: event ``here`` was another."""
        events = left.program.trace.events
        expected = str(events[here]) if here < len(events) else "the window's end"
        self.divergence = f"at event {here}: expected {expected}, found {found}"
        self.residency.stats.divergences += 1
        self.following = None
        self._recording = Recording.beginning_of(left, position)

    # Autograd passes

    def enter_backward(self, call: ForwardCall) -> None:
        """A backward through ``call`` reaches one of its units or outputs.

        Raises:
            RuntimeError: ``call`` belongs to a window that is closed or aborted.
        """
        if call.training and call.window != self.number:
            remedy = (
                "a window ends with the first backward in registration mode, "
                'FSDPContext(mode="recorded") takes several'
                if self.closes_itself
                else "run every backward before finish_grad_sync()"
            )
            raise RuntimeError(
                f"backward through {call}, a forward of window {call.window}, but that window "
                f"is closed or aborted: {remedy}; run the forward again after abort()"
            )
        call.has_backward = True
        self._trains = self._trains or call.training
        self.backward_call = call

    def enter_pass(self, graph_task: int) -> bool:
        """Note the autograd pass under way; True if it is new, and its end wants a callback."""
        if graph_task in self._passes:
            return False
        self._passes.append(graph_task)
        return True

    def leave_pass(self, graph_task: int) -> bool:
        """An autograd pass ended.

        The outermost one's end frees and resets the units that it touched and whose
        own end never came: their inputs needed no gradient, or their output was not
        in the loss. The window stays open.

        Returns:
            Whether it was the outermost one, and went through a training forward.
        """
        if graph_task in self._passes:
            self._passes.remove(graph_task)
        if self._passes:
            return False
        for use in list(self._backward_uses):
            self.end(use)
        if self._recomputed:
            following = self.following
            wanted = following.resident_before(self.cursor) if following is not None else set()
            self.residency.free_idle([u for u in self._recomputed if u not in wanted])
            self._recomputed.clear()
        self.backward_call = None
        trained, self._trains = self._trains, False
        return trained

    def track_backward(self, use: Use) -> None:
        """Have :meth:`leave_pass` end ``use`` if nothing else does."""
        self._backward_uses.append(use)

    # The close

    def close(self, every_forward: bool = True) -> ClosedWindow:
        """End the window: wait for reductions, free every unit, cursor to 0.

        Does nothing in a window in which nothing has happened.

        Args:
            every_forward: whether a forward that can be differentiated must have had
                its backward.

        Raises:
            IncompleteWindowError: the window is not whole. It stays open.
        """
        if not self._opened:
            self._finish_reductions()
            return ClosedWindow(None, None)
        self._require_whole(every_forward)
        left = self.following
        if left is not None and self.cursor < len(left.keys):
            self._end_early(left)
        self.flush_gradients()
        self.residency.free_idle(self.units)
        stats = self.residency.stats
        stats.windows += 1
        trace = None
        if self.following is not None:
            stats.replayed_windows += 1
            self.library.touch(self.following)
        else:
            stats.recorded_windows += 1
            trace = self._recording.trace(self.units)
        closed = ClosedWindow(trace, self.divergence)
        self.number += 1
        self._begin()
        return closed

    def _end_early(self, left: BoundProgram) -> None:
        # Whole, but with fewer events than the program: a batch with fewer
        # microbatches. The close is then the event that differs.
        shorter = self.library.exactly(left.keys[: self.cursor])
        if shorter is not None:
            self.following = shorter
            self.residency.stats.switches += 1
            return
        self._diverge(left, self.cursor, self.cursor, "the window's end")

    def flush_gradients(self, chunk: str | None = None) -> None:
        """Reduce what is not reduced yet and make the current stream wait for all of it.

        Args:
            chunk: only the units of this chunk; None for all.
        """
        for unit in self.units:
            if (chunk is None or unit.spec.chunk == chunk) and unit.has_gradients:
                self.residency.reduce(unit)
                if self.recording:
                    self._recording.complete_at_close(unit)
        self._finish_reductions()

    def _require_whole(self, every_forward: bool) -> None:
        problem = self.failure
        if problem is None and self._passes:
            problem = "an autograd pass has not ended: an exception crossed it"
        if problem is None:
            for call in self._calls:
                if not call.finished:
                    problem = f"the forward of {call} did not return"
                elif every_forward and call.needs_backward and not call.has_backward:
                    problem = f"the backward of {call} is missing"
                if problem is not None:
                    break
        if problem is None:
            held = next((unit for unit in self.units if unit.holds), None)
            if held is not None:
                problem = f"unit {held.spec.name} is still in use"
        if problem is None and self.cursor == 0:
            problem = "it has no compute event"
        if problem is None:
            return
        expected = ""
        if self.following is not None and self.cursor < len(self.following.keys):
            event = self.following.program.trace.events[self.cursor]
            expected = f"; the next event expected is {event} (event {self.cursor})"
        raise IncompleteWindowError(
            f"window {self.number} is not whole: {problem}{expected}. Run what is missing "
            "before finish_grad_sync(), or discard the window with abort(). A forward that was "
            "an evaluation belongs under evaluation() or torch.no_grad()"
        )

    def _finish_reductions(self) -> None:
        if self.communication is not None:
            self.communication.wait_for_reductions(self.units)

    def abort(self) -> list[Unit]:
        """Discard the window: free and reset every unit, forget what it recorded.

        Gradients that were reduced in the window are cleared.

        Returns:
            Units that had gradients before the window began: theirs now hold a part
            of it and are left alone.
        """
        self._finish_reductions()
        self.residency.reset(self.units)
        tainted = []
        if self._opened:
            for unit in self.units:
                if unit in self._with_gradients:
                    tainted.append(unit)
                else:
                    unit.clear_reduced_gradients()
            self.number += 1
            self.residency.stats.aborts += 1
        self._begin()
        return tainted
