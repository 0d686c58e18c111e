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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, ParamSpec

from .agreement import Agreements, RanksDisagreeError
from .calls import Backward, DelayedUses, ForwardCall, MethodCall, MethodForward, Use
from .library import BoundProgram, Key, ProgramLibrary
from .metering import Meter, Metered
from .recording import Recording
from .residency import Residency
from .torch_internals import current_graph_task
from .trace import Event, Phase, Trace
from .units import Communication, Unit

__all__ = ["ClosedWindow", "IncompleteWindowError", "ReduceGradients", "Window"]

ReduceGradients = Literal["per_backward", "per_window", "planned"]
Arguments = ParamSpec("Arguments")
_END = "the window's end"


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


class Window:
    """The window under way, its cursor, and the program that it follows.

    Args:
        residency: gathers and frees the units.
        library: the programs known.
        reduce_gradients: when gradients are reduced while no program says so.

    Attributes:
        number: windows closed or aborted before this one.
        cursor: position of the next event.
        agreements: compares events with those of the other ranks.
        options: what programs are planned with, one text each.
        meters_memory: whether a window that is written down notes allocated memory.
        respecified: to be set where the units of this window are not what they were.
        current: the chunk's forward that is running, innermost last.
        backward_call: the forward call whose backward is running.
        on_open: called before the first event of each window.
        on_pass_end: called when an outermost autograd pass has ended, and later where a close
            was put off by then.
        on_unscheduled: called when the backward of an evaluation adds to gradients.
        closes_itself: whether windows are closed at the end of an autograd pass; for
            messages.
        released: whether the modules are plain FSDP2's again.
        method: the call of a method that the forward which begins now is of, if any.
        by_method: the forwards by a method that are running, innermost last.
        input_half_of: the backwards that have begun in an input half that is running;
            None outside of one.
        in_weight_half: whether the gradients that are computed are those of weights alone.
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
        self.options: tuple[str, ...] = ()
        self.meters_memory = False
        self.respecified = False
        self._aborted = False
        self._evaluating = 0
        self.agreements = Agreements()
        self.on_open: Callable[[], None] | None = None
        self.on_pass_end: Callable[[], None] | None = None
        self.on_unscheduled: Callable[[ForwardCall], None] | None = None
        self.closes_itself = False
        self.released = False
        self._begin()

    def _begin(self) -> None:
        self.cursor = 0
        self.following: BoundProgram | None = None
        self.current: list[ForwardCall] = []
        self.method: MethodCall | None = None
        self.by_method: list[MethodForward] = []
        self.backward_call: ForwardCall | None = None
        self.failure: str | None = None
        self._overdue = False
        self.divergence: str | None = None
        self._opened = False
        self._calls: list[ForwardCall] = []
        self._microbatches: dict[tuple[str, str | None], int] = {}
        self._backwards: dict[Backward, None] = {}
        self._delayed: list[DelayedUses] = []
        self._recomputed: dict[Unit, None] = {}
        self._repeated: list[tuple[object, ForwardCall]] = []
        self._passes: list[int] = []
        self._accumulating: set[int] = set()
        self.input_half_of: dict[Any, None] | None = None
        self.in_weight_half = False
        self._trains = False  # whether the outermost pass reached a training forward
        self._recording = Recording()
        self._left: BoundProgram | None = None  # the program that this window began with
        self.residency.meter = None
        self._followed: list[int] = []  # the microbatch of each event that followed a program
        self._with_gradients: set[Unit] = set()

    def put_off_close(self) -> None:
        """Close with what comes next: a pass ended inside of another that has had no event.

        That one may still have events, and its end is heard of from its first event on.
        """
        self._overdue = True
        self._finish_reductions()

    def close_if_overdue(self) -> None:
        """Close the window if that was put off and no autograd pass is running."""
        if self._overdue and self.on_pass_end is not None and current_graph_task() == -1:
            self._overdue = False
            self.on_pass_end()

    @property
    def is_open(self) -> bool:
        """Whether anything of this window has happened."""
        return self._opened

    @property
    def is_running(self) -> bool:
        """Whether a forward or an autograd pass is under way, an evaluation's too."""
        self.abandon_methods()
        return bool(self.current or self._passes)

    @property
    def recording(self) -> bool:
        """Whether events are being written down: no program is followed."""
        return self._opened and self.following is None

    # Calls

    def open_call(
        self, chunk: str, training: bool, compiled: bool, module: str | None = None
    ) -> ForwardCall:
        """The forward of a chunk begins, or that of a module which is entered without it.

        Args:
            chunk: name of the chunk.
            training: False for an evaluation.
            compiled: whether it runs under torch.compile.
            module: the unit whose module is entered, if it is not the chunk.

        Raises:
            RuntimeError: a CUDA graph is being captured.
            IncompleteWindowError: an exception has crossed the window.
        """
        self.close_if_overdue()
        self.abandon_methods()
        self._refuse_capture(f"the forward of chunk {chunk}")
        training = training and not self._evaluating
        microbatch = -1
        if training:
            if self._passes:
                self.fail(self._pass_not_ended())
            if self.failure is not None:
                raise IncompleteWindowError(self._not_whole(self.failure))
            self._open()
            counter = (chunk, module)
            microbatch = self._microbatches.get(counter, 0)
            self._microbatches[counter] = microbatch + 1
        call = ForwardCall(
            chunk, self.number, microbatch, training, compiled=compiled, module=module
        )
        if training:
            self._calls.append(call)
        else:
            if not self._opened:
                self._free_stale(self.units)
            if self.communication is not None:
                # Between windows the optimizer may still be writing what is gathered here.
                self.communication.wait_for_compute()
        self.current.append(call)
        return call

    def abandon_methods(self) -> None:
        """End the forwards by methods that an exception has ended, without any hook's notice."""
        for forward in reversed(self.by_method):
            if forward.method is not None and forward.method.is_over:
                forward.abandon()

    def _refuse_capture(self, what: str) -> None:
        # Replayed, a CUDA graph would repeat kernels, but no cursor, no count of uses, and
        # no allocation: its addresses would be those of parameters that are freed by then.
        if self.communication is not None and self.communication.captured:
            raise RuntimeError(
                f"{what} of window {self.number} is being captured into a CUDA graph, which cannot "
                "gather and free parameters when it is replayed: run the step without "
                "torch.cuda.graph(), or capture parts that no context schedules"
            )

    def close_call(self, call: ForwardCall, needs_backward: bool) -> None:
        """A chunk's forward returned.

        Args:
            call: what :meth:`open_call` returned.
            needs_backward: whether some output can be differentiated.
        """
        call.finished = True
        call.needs_backward = needs_backward
        self.suspend_call(call)

    def suspend_call(self, call: ForwardCall) -> None:
        """A call that has not returned lets others run: its modules are called one by one."""
        if call in self.current:
            self.current.remove(call)

    def resume_call(self, call: ForwardCall) -> None:
        """Undo :meth:`suspend_call`: a module of the call runs."""
        self.current.append(call)

    def fail(self, what: str) -> None:
        """An exception crossed the window: it will not be accepted as whole."""
        if self.failure is None:
            self.failure = what

    def collective_failed(self, what: str, unit: Unit, error: Exception) -> None:
        """A collective raised ``error``: say where, and whether ranks that differ are why.

        Args:
            what: ``"gather"`` or ``"reduction"``.
            unit: the unit.
            error: gets a note.

        Raises:
            RanksDisagreeError: another rank has found out that the ranks differ.
        """
        self.fail(f"the {what} of unit {unit.spec.name} failed")
        after = self._last_event() or " before any event"
        error.add_note(
            f"fsdp_fx: the {what} of unit {unit.spec.name} failed in window {self.number}{after}; "
            "call abort() on every rank before the step is repeated"
        )
        if isinstance(error, RanksDisagreeError):
            return
        try:
            # Another rank that has aborted may have run into the same error.
            self._agree(self.agreements.check, aborts=False)
        except RanksDisagreeError as disagreement:
            raise disagreement from error
        except RuntimeError as unreachable:
            error.add_note(f"fsdp_fx: whether the ranks differ is not known: {unreachable}")

    def _forget_deleted(self) -> None:
        """A model may be deleted while its context, with other chunks, goes on."""
        for unit in self.units:
            if not unit.is_alive:
                self.residency.forget(unit)
        self.units[:] = [unit for unit in self.units if unit.is_alive]

    def _agree(
        self, compare: Callable[Arguments, None], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> None:
        """Compare with the other ranks; a window in which they differ is not whole."""
        try:
            compare(*args, **kwargs)
        except RanksDisagreeError as error:
            self.fail(str(error))
            raise

    def _open(self) -> None:
        if self._opened:
            return
        self._forget_deleted()
        self.agreements.begin()
        if self._aborted:
            issued = {unit.spec.name: unit.collectives for unit in self.units}
            self._agree(self.agreements.resume, issued)
            self._aborted = False
        if self.on_open is not None:
            self.on_open()
        self._opened = True
        self.following = self.library.latest
        if self.following is not None and self.following.provisional:
            self.following = None
        if self.following is None or self.respecified:
            self.respecified = False
            units = tuple(unit.spec for unit in self.units)
            self._agree(self.agreements.open, units, self.options)
        stay = self.following.carried if self.following is not None else frozenset()
        self.residency.free_idle([unit for unit in self.units if unit not in stay])
        self._free_stale(stay)
        if self.following is None:
            self._begin_metering()
        for unit in self.units:
            unit.reduced = False
        self._with_gradients = {unit for unit in self.units if unit.has_reduced_gradients}
        if self.communication is not None:
            self.communication.wait_for_compute()

    def _free_stale(self, carried: Iterable[Unit]) -> None:
        """Free those that have stayed from the window before and have changed since."""
        if self.residency.stats.resident_bytes:
            stale = [u for u in carried if u.is_alive and u.unsharded and u.is_stale]
            self.residency.free_idle(stale)

    def _begin_metering(self) -> None:
        if self.communication is not None:
            self.residency.meter = Meter(self.communication, self.meters_memory)

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
            self._followed.append(call.microbatch)
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
        event = self._recording.add(unit, phase, call.microbatch, end=position)
        self._agree(self.agreements.record, event)
        residency = self.residency
        if residency.meter is not None:
            residency.meter.expect(unit, position)
        residency.acquire(unit)
        return Use(unit, phase, call, position)

    def begin_recomputation(self, unit: Unit) -> Use:
        """A forward inside a backward needs ``unit``: gathered if absent, not an event."""
        call = self.backward_call or ForwardCall("", self.number, -1, False)
        self.residency.acquire(unit)
        self._recomputed[unit] = None
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
        accumulates = use.accumulates or current_graph_task() in self._accumulating
        complete = self.contribute(unit, use.call, use.contributes, accumulates)
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
        # Also where a forward use is outstanding: its output was not in the loss when the
        # program was recorded, and the close would reduce what the program reduces here.
        for other in step.reduces:
            residency.reduce(other, other not in step.partial)
        # Contributions that are still missing here did not come when it was recorded.
        complete = complete or (step.contributed and unit.contributed)
        if complete and unit not in step.reduces:
            residency.keep_gradients(unit)

    def contribute(
        self, unit: Unit, call: ForwardCall, counted: bool = True, accumulates: bool = True
    ) -> bool:
        """A backward of ``unit`` has computed its part of the gradient.

        Which parameters have one on this rank plays no part: every rank gets the same
        answer.

        Args:
            unit: the unit.
            call: the forward call it belongs to.
            counted: whether the forward use was counted as outstanding.
            accumulates: whether the autograd pass adds gradients to parameters at all.

        Returns:
            Whether every contribution of the microbatch is in.
        """
        if not accumulates:
            return False
        call.accumulated = True
        if not call.training and self.on_unscheduled is not None:
            self.on_unscheduled(call)
        outstanding = call.outstanding
        if counted:
            outstanding[unit] = outstanding.get(unit, 0) - 1
        planned = unit.spec.trainable
        # Unfrozen in the middle of the window: reduced at its close.
        unit.contributed = unit.contributed or planned or unit.trainable
        return planned and outstanding.get(unit, 0) <= 0

    def _reduce_unplanned(self, unit: Unit, call: ForwardCall) -> None:
        if self.reduce_gradients != "per_window" or not call.training:
            self.residency.reduce(unit, not self.keeps_partial_sums(unit, call))
        else:
            self.residency.keep_gradients(unit)

    def keeps_partial_sums(self, unit: Unit, call: ForwardCall) -> bool:
        """Whether a reduction that no program has planned leaves the all-reduce to the close.

        Nobody knows which reduction of the window will be the unit's last.
        """
        return call.training and unit.spec.replicas > 1

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
                self._followed.extend([call.microbatch] * count)
                return position
        for index, unit in enumerate(units):
            event = self._recording.add(unit, phase, call.microbatch, end=position + ends[index])
            self._agree(self.agreements.record, event, ends[index] - index)
            if self.residency.meter is not None:
                self.residency.meter.expect(unit, position + index)
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
        here = position
        while here < len(left.keys) and left.keys[here] == found[here - position]:
            here += 1
        unit, phase = found[here - position]
        before = left.program.trace.events[:here]
        # Not gathered before every rank has come here: it is not what they expect.
        event = Event(unit.spec.name, phase, left.keys[:here].count((unit, phase)))
        units, expected = left.program.trace.units, self._expected(left, here)
        self._agree(self.agreements.depart, units, before, event, expected)
        other = self.library.going_on(prefix, found)
        if other is not None:
            self.following = other
            self.residency.stats.switches += 1
            wanted = other.resident_before(position) | {found[0][0]}
            self.residency.free_idle([unit for unit in self.units if unit not in wanted])
            self._reduce_beyond(other.kept_before(position))
            return True
        self._diverge(left, here, f"{unit.spec.name} {phase}")
        self.residency.free_idle([unit for unit in self.units if unit is not found[0][0]])
        return False

    def _reduce_beyond(self, kept: Collection[Unit]) -> None:
        """Reduce the gradients that the program before kept, but for those of ``kept``."""
        for unit in self.units:
            if self.residency.keeps_gradients(unit) and unit not in kept:
                # Which reduction is the unit's last is not known: the close all-reduces.
                self.residency.reduce(unit, all_reduce=unit.spec.replicas == 1)

    def _diverge(self, left: BoundProgram, here: int, found: str) -> None:
        """From here on no program is followed: event ``here`` was another."""
        self.divergence = f"at event {here}: expected {self._expected(left, here)}, found {found}"
        self.residency.stats.divergences += 1
        self.following = None
        self._recording = Recording.beginning_of(left, self._followed)
        self._left = left
        self._begin_metering()

    @staticmethod
    def _expected(left: BoundProgram, here: int) -> str:
        events = left.program.trace.events
        return str(events[here]) if here < len(events) else _END

    # Autograd passes

    def enter_backward(self, call: ForwardCall) -> None:
        """A backward through ``call`` reaches one of its units or outputs.

        Raises:
            RuntimeError: ``call`` belongs to a window that is closed or aborted, or to modules
                that were released, or a CUDA graph is being captured.
        """
        if self.released:
            raise RuntimeError(
                f"backward through {call}, a forward from before release(): plain FSDP2 knows "
                "nothing of it; run every backward before release(), or the forward again"
            )
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
        self._refuse_capture(f"the backward of {call}")
        call.has_backward = True
        self._trains = self._trains or call.training
        self.backward_call = call

    def begin_repetition(self, calls: Sequence[tuple[object, ForwardCall]]) -> None:
        """A reentrant checkpoint is about to run whole forward calls again.

        Args:
            calls: what was entered, and the call that this began, in order.

        Raises:
            RuntimeError: one belongs to a window that is closed or aborted.
        """
        for _, call in calls:
            self.enter_backward(call)
        self._repeated = list(calls)

    def repeat_call(self, entered: object) -> ForwardCall | None:
        """The call that began when ``entered`` was entered and that is now run again, if any."""
        for index, (other, call) in enumerate(self._repeated):
            if other is entered:
                del self._repeated[index]
                self.enter_backward(call)
                return call
        return None

    def enter_pass(self, graph_task: int) -> bool:
        """Note the autograd pass under way; True if it is new, and its end wants a callback."""
        if graph_task in self._passes:
            return False
        self._passes.append(graph_task)
        return True

    def note_accumulation(self) -> None:
        """The autograd pass that is running adds gradients to parameters.

        A module that takes no differentiable input and uses none of its parameters on
        this rank cannot tell; those around and inside it can.
        """
        self._accumulating.add(current_graph_task())

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
        for backward in list(self._backwards):
            backward.end()
        self._backwards.clear()
        self._accumulating.clear()
        if self._recomputed:
            following = self.following
            wanted = following.resident_before(self.cursor) if following is not None else set()
            self.residency.free_idle([u for u in self._recomputed if u not in wanted])
            self._recomputed.clear()
        self._repeated = []
        self.backward_call = None
        trained, self._trains = self._trains, False
        return trained

    def track_backward(self, backward: Backward) -> None:
        """Have :meth:`leave_pass` end ``backward`` unless :meth:`untrack_backward` is called."""
        self._backwards[backward] = None

    def untrack_backward(self, backward: Backward) -> None:
        """``backward`` has ended by itself."""
        self._backwards.pop(backward, None)

    # Backwards in two halves

    @contextlib.contextmanager
    def input_half(self, begun: dict[Any, None]) -> Iterator[None]:
        """The gradients of a chunk's inputs are computed inside, not those of its weights.

        Args:
            begun: gets the backwards that begin inside, in order.
        """
        self.input_half_of = begun
        try:
            yield
        finally:
            self.input_half_of = None

    @contextlib.contextmanager
    def weight_half(self) -> Iterator[None]:
        """The gradients of weights are computed inside, by passes that only ask for them."""
        self.in_weight_half = True
        number = self.number
        try:
            yield
        except BaseException:
            if number == self.number:
                self.fail(f"an exception crossed a weight half{self._last_event()}")
            raise
        finally:
            self.in_weight_half = False

    # Delayed weight gradients

    def delay(self, units: tuple[Unit, ...], call: ForwardCall, uses: Sequence[Use]) -> None:
        """A backward has run but for the gradients of weights: its uses go on.

        Args:
            units: the units; :meth:`weight_gradients` of the same ones ends the uses.
            call: the forward call it belongs to.
            uses: its uses.
        """
        if uses:
            self._delayed.append(DelayedUses(units, call, tuple(uses)))

    @contextlib.contextmanager
    def weight_gradients(self, units: tuple[Unit, ...], name: str) -> Iterator[None]:
        """The oldest delayed weight gradients of ``units`` are computed inside.

        Args:
            units: what :meth:`delay` was given.
            name: what messages call them.

        Raises:
            RuntimeError: none are delayed.
        """
        delayed = next((each for each in self._delayed if each.units == units), None)
        if delayed is None:
            raise RuntimeError(
                f"no weight gradients of {name} are delayed: run its backward to the end before "
                "weight_gradients(), and enter that once per backward"
            )
        self._delayed.remove(delayed)
        number = self.number
        for unit in units:
            unit.expose()
        set_aside = [unit.set_gradients_aside() for unit in units]
        try:
            yield
        except BaseException:
            if number == self.number:
                self.fail(f"an exception crossed the weight gradients of {delayed.call}")
            raise
        finally:
            if number == self.number:
                for unit, gradients in zip(units, set_aside, strict=True):
                    unit.take_gradients_back(gradients)
                    unit.conceal()
        if number != self.number:
            return  # aborted inside
        for use in delayed.uses:
            # Autograd does not see what adds to the gradients here.
            use.accumulates = True
            self.end(use)

    # The close

    def close(
        self,
        every_forward: bool = True,
        commit: Callable[[Trace, Metered | None, BoundProgram | None], None] | None = None,
    ) -> ClosedWindow:
        """End the window: wait for reductions, free every unit, cursor to 0.

        Does nothing in a window in which nothing has happened.

        Args:
            every_forward: whether a forward that can be differentiated must have had
                its backward.
            commit: called before a window that was written down is closed, with its trace,
                what was metered, and the program that it had begun with.

        Raises:
            IncompleteWindowError: the window is not whole. It stays open.
            RanksDisagreeError: another rank's window was another. It stays open, to be
                discarded with :meth:`abort`.
        """
        self.abandon_methods()
        if not self._opened:
            self._forget_deleted()
            self._finish_reductions()
            return ClosedWindow(None, None)
        self._require_whole(every_forward)
        if self.cursor == 0:  # it closes itself, and no unit was used
            self._finish_reductions()
            self.number += 1
            self._begin()
            return ClosedWindow(None, None)
        left = self.following
        if left is not None and self.cursor < len(left.keys):
            self._end_early(left)
        meter = self.residency.meter
        if meter is not None:
            meter.close()
        self.flush_gradients()
        stay = self.following.carried if self.following is not None else frozenset()
        # What is still on its way is a prefetch of a longer program that was left at the close.
        self.residency.free_idle([u for u in self.units if u not in stay or u.in_flight])
        stats = self.residency.stats
        trace = None
        if self.following is not None:
            self._agree(self.agreements.look)
            self.library.touch(self.following)
            stats.replayed_windows += 1
        else:
            trace = self._recording.trace(self.units)
            if commit is not None:
                metered = meter.evaluate(self._new_shards()) if meter is not None else None
                self._agree(commit, trace, metered, self._left)
            stats.recorded_windows += 1
        stats.windows += 1
        closed = ClosedWindow(trace, self.divergence)
        self.number += 1
        self._begin()
        return closed

    def _new_shards(self) -> dict[str, int]:
        """Bytes of the reduced gradients that have come in this window, by unit."""
        return {
            unit.spec.name: unit.reduced_gradient_bytes
            for unit in self.units
            if unit not in self._with_gradients
        }

    def awaits_backward(self) -> ForwardCall | None:
        """A call of this window that a backward is still to come of, if any.

        Where none has come at all: the first call, whether or not it can be differentiated.
        """
        waiting = (call for call in self._calls if call.needs_backward and not call.has_backward)
        alone = self._calls if not any(call.has_backward for call in self._calls) else ()
        return next(iter((*waiting, *alone)), None)

    def inputs_only(self) -> ForwardCall | None:
        """A call of this window whose inputs alone were differentiated so far, if any."""
        for call in self._calls:
            if (
                call.needs_backward
                and call.has_backward
                and not call.accumulated
                and any(unit.spec.trainable for unit in call.outstanding)
            ):
                return call
        return None

    def _end_early(self, left: BoundProgram) -> None:
        # Whole, but with fewer events than the program: a batch with fewer
        # microbatches. The close is then the event that differs.
        trace = left.program.trace
        before, expected = trace.events[: self.cursor], self._expected(left, self.cursor)
        self._agree(self.agreements.depart, trace.units, before, _END, expected)
        shorter = self.library.exactly(left.keys[: self.cursor])
        if shorter is not None:
            self.following = shorter
            self.residency.stats.switches += 1
            return
        self._diverge(left, self.cursor, _END)

    def flush_gradients(self, chunk: str | None = None) -> None:
        """Reduce what is not reduced yet and make the current stream wait for all of it.

        Args:
            chunk: only the units of this chunk; None for all.
        """
        for unit in self.units:
            if chunk is not None and unit.spec.chunk != chunk:
                continue
            if unit.contributed or unit.has_gradients:
                self.residency.reduce(unit)
                if self.recording:
                    self._recording.complete_at_close(unit)
            elif unit.has_partial_sums:
                self.residency.reduce(unit)
        self._finish_reductions()

    def _last_event(self) -> str:
        """After which event the window stands, for a message; empty before any."""
        if self.following is not None:
            events: Sequence[Event] = self.following.program.trace.events[: self.cursor]
        else:
            events = self._recording.events
        return f" after {events[-1]} (event {len(events) - 1})" if events else ""

    def _pass_not_ended(self) -> str:
        return f"an autograd pass has not ended: an exception crossed it{self._last_event()}"

    def _require_whole(self, every_forward: bool) -> None:
        problem = self.failure
        if problem is None and self._passes:
            problem = (
                "finish_grad_sync() was called inside of an autograd pass"
                if current_graph_task() != -1
                else self._pass_not_ended()
            )
        if problem is None:
            for call in self._calls:
                if not call.finished:
                    ended = "return" if call.last is None else f"reach {call.last}"
                    problem = f"the forward of {call} did not {ended}"
                elif every_forward and call.needs_backward and not call.has_backward:
                    problem = f"the backward of {call} is missing"
                elif every_forward and call.awaited:
                    problem = f"the backward of {call.awaited[0]} in {call} is missing"
                if problem is not None:
                    break
        if problem is None and self._delayed:
            delayed = self._delayed[0]
            problem = (
                f"the delayed weight gradients of unit {delayed.units[0].spec.name}, "
                f"microbatch {delayed.call.microbatch} are missing: compute them in "
                "`with ctx.weight_gradients(owner):`"
            )
        if problem is None:
            held = next((unit for unit in self.units if unit.holds), None)
            if held is not None:
                problem = f"unit {held.spec.name} is still in use"
        if problem is None and self.cursor == 0 and every_forward:
            problem = "it has no compute event"
        if problem is not None:
            raise IncompleteWindowError(self._not_whole(problem))

    def _not_whole(self, problem: str) -> str:
        text = f"window {self.number} is not whole: {problem}"
        if self.failure is not None or (self._passes and current_graph_task() == -1):
            return f"{text}. Discard it with abort(), on every rank, and repeat the step"
        if self.following is not None and self.cursor < len(self.following.keys):
            event = self.following.program.trace.events[self.cursor]
            text += f"; the next event expected is {event} (event {self.cursor})"
        return (
            f"{text}. Run what is missing before finish_grad_sync(), or discard the window with "
            "abort(). A forward that was an evaluation belongs under evaluation() or "
            "torch.no_grad()"
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
        self._forget_deleted()
        self._finish_reductions()
        self.residency.reset(self.units)
        tainted = []
        if self._opened:
            for unit in self.units:
                if unit in self._with_gradients:
                    if unit.reduced:
                        tainted.append(unit)
                else:
                    unit.clear_reduced_gradients()
            self.residency.stats.aborts += 1
            self.agreements.abort()
        # Also if nothing had happened on this rank yet: on another it may have.
        self._aborted = True
        self.number += 1
        self._begin()
        return tainted
