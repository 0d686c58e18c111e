"""The schedule of one window as an FX graph, and how it prints.

A :class:`Program` is a trace (:mod:`fsdp_fx.trace`) with the schedule in it. Its
graph holds nothing but calls of the five operations below, paired by data edges:

    handle = gather(unit)              start the all-gather of a unit
    full = wait(handle)                make the compute stream wait for it
    compute(full, event=...)           the event's compute begins
    free(full, after=...)              give the full parameters back
    reduce(unit, after=...)            start the reduction of the unit's gradients
    reduce(unit, after=..., all_reduce=False)
                                       the same, but only among the ranks that shard a
                                       replicated unit: its last reduction adds all up

One chain gather, wait, computes, free is one interval in which a unit is resident;
computes that share it share its one ``wait``. Around the compute of event ``i`` a
finished program reads

    [free, reduce after uses that ended with i - 1] [own gather] [wait]
    [gathers issued ahead] compute i

Events are named by their label, ``str(event)``. An ``after`` names the use, not the
place: it stands behind the compute at ``trace.ends`` of that event, because the use
of a parent ends after its children's.

Passes (:mod:`fsdp_fx.passes`) write programs; executors follow :attr:`Program.steps`.
The operations here compute nothing: they give the graph's Python code a meaning that
can be run and inspected without a process group.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, cast

from torch import fx

from fsdp_fx.planning.durations import Durations
from fsdp_fx.trace import Call, Event, Trace

__all__ = [
    "Full",
    "Handle",
    "Operation",
    "Program",
    "Step",
    "all_reduces",
    "compute",
    "compute_nodes",
    "free",
    "gather",
    "operation",
    "place_after",
    "reduce",
    "unit_of",
    "wait",
]

Operation = Literal["gather", "wait", "compute", "free", "reduce"]

_PHASES = {"F": "forward", "B": "backward"}
# Comments of longer lines start wherever the code ends.
_COMMENT_COLUMN = 72


@dataclass(frozen=True)
class Handle:
    """A gather in flight.

    Args:
        unit: name of the unit being gathered.
    """

    unit: str


@dataclass(frozen=True)
class Full:
    """The full parameters of a unit, ready to compute with.

    Args:
        unit: name of the unit.
    """

    unit: str


# Without has_side_effect, dead code elimination would drop what returns nothing.
@fx.has_side_effect
def gather(unit: str) -> Handle:
    """Start gathering ``unit``; returns the handle to wait for."""
    return Handle(unit)


@fx.has_side_effect
def wait(handle: Handle) -> Full:
    """Wait for the gather behind ``handle``; returns the unit's full parameters."""
    return Full(handle.unit)


@fx.has_side_effect
def compute(*full: Full, event: str) -> None:
    """Begin the compute of ``event`` (a label), which uses ``full``."""


@fx.has_side_effect
def free(full: Full, after: str) -> None:
    """Free ``full`` once the use of the event labelled ``after`` has ended."""


@fx.has_side_effect
def reduce(unit: str, after: str, all_reduce: bool = True) -> None:
    """Reduce the gradients of ``unit`` once the use of event ``after`` has ended.

    Without ``all_reduce`` the sums over the shards' ranks are kept back until a reduction
    with it adds them up and all-reduces them over the replicas.
    """


_OPERATIONS: dict[object, Operation] = {
    gather: "gather",
    wait: "wait",
    compute: "compute",
    free: "free",
    reduce: "reduce",
}


@dataclass(frozen=True)
class Step:
    """What an executor does around one event.

    Args:
        event: the event.
        gathers: units whose gathers are issued before the wait, in order.
        wait: whether to wait for the event's unit; false if an earlier event of the
            same interval has waited.
        prefetches: units whose gathers are issued after the wait and before the
            compute, in order.
        frees: units freed when the event's use ends, in order.
        reduces: units reduced when the event's use ends, after the frees.
        partial: those of ``reduces`` that are not all-reduced over their replicas yet.
    """

    event: Event
    gathers: tuple[str, ...]
    wait: bool
    prefetches: tuple[str, ...]
    frees: tuple[str, ...]
    reduces: tuple[str, ...]
    partial: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Program:
    """A trace with its schedule: an immutable value, rewritten only by passes.

    Args:
        graph: the schedule. Treat it as read-only: passes edit the copy that
            :meth:`copy_graph` gives them.
        trace: the window that the program schedules.
        provides: properties that passes have established so far.
        capacity: bytes of full parameters, and of full gradients that wait for their
            reduction, that may be resident at each event; ``None`` for no limit.
        carried: frozen units that stay resident from one window to the next. The first
            gather of one finds it there, in every window but the first.
        unproven: bytes that another choice of what stays resident might save more, at most;
            0 where the choice is proven to be the best.
    """

    graph: fx.Graph
    trace: Trace
    provides: frozenset[str] = frozenset()
    capacity: tuple[int, ...] | None = None
    carried: frozenset[str] = frozenset()
    unproven: int = 0

    @classmethod
    def from_trace(cls, trace: Trace) -> Program:
        """The program that computes every event of ``trace`` and does nothing else.

        Raises:
            ValueError: two events of the trace have the same label.
        """
        graph = fx.Graph()
        labels: set[str] = set()
        for position, event in enumerate(trace):
            label = str(event)
            if label in labels:
                raise ValueError(f"event {position} ({label}) appears twice in the trace")
            labels.add(label)
            # FX turns the dots and the space of a label into underscores.
            graph.create_node("call_function", compute, (), {"event": label}, f"compute_{label}")
        graph.output(())
        return cls(graph, trace, frozenset({"computes"}))

    @cached_property
    def graph_module(self) -> fx.GraphModule:
        """The graph as runnable Python. Treat it as read-only."""
        # Only if asked for: to write and compile the code takes longer than most passes.
        return fx.GraphModule({}, self.graph, class_name="Program")

    def copy_graph(self) -> fx.Graph:
        """A copy of the graph, for a pass to edit."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        return graph

    def with_graph(self, graph: fx.Graph) -> Program:
        """This program with another graph."""
        return replace(self, graph=graph)

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Positions in the trace by event label."""
        return {str(event): position for position, event in enumerate(self.trace)}

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """One step per event, in trace order: what both executors follow.

        Meaningful for a program that verifies; nothing is checked here.
        """
        frees: dict[str, list[str]] = {}
        reduces: dict[str, list[str]] = {}
        partial: dict[str, set[str]] = {}
        heads: list[tuple[str, tuple[str, ...], bool, tuple[str, ...]]] = []
        issued: list[str] = []
        before_wait: tuple[str, ...] | None = None
        for node in self.graph.nodes:
            match operation(node):
                case "gather":
                    issued.append(unit_of(node))
                case "wait":
                    before_wait, issued = tuple(issued), []
                case "compute":
                    waited = before_wait is not None
                    heads.append((_label(node), before_wait or (), waited, tuple(issued)))
                    before_wait, issued = None, []
                case "free":
                    frees.setdefault(_label(node), []).append(unit_of(node))
                case "reduce":
                    reduces.setdefault(_label(node), []).append(unit_of(node))
                    if not all_reduces(node):
                        partial.setdefault(_label(node), set()).add(unit_of(node))
        return tuple(
            Step(
                self.trace[self.positions[label]],
                gathers,
                waited,
                prefetches,
                tuple(frees.get(label, ())),
                tuple(reduces.get(label, ())),
                frozenset(partial.get(label, ())),
            )
            for label, gathers, waited, prefetches in heads
        )

    def verify(self) -> None:
        """Prove the program safe to run; see :mod:`fsdp_fx.passes.verify`.

        Raises:
            ProgramError: the program breaks a rule; names the rule and the node.
        """
        from fsdp_fx.passes.verify import verify

        verify(self)

    def save_timeline(
        self,
        path: str | os.PathLike[str],
        *,
        caption: str | None = None,
        durations: Durations | None = None,
    ) -> None:
        """Draw the program; see :func:`fsdp_fx.timeline.save_timeline`.

        Args:
            path: a file ending in ``.png``, ``.svg`` or ``.json`` (Perfetto).
            caption: added to the title, for example the rank.
            durations: how long things take; without them time is counted in events.

        Raises:
            ValueError: the file ends in something else, or the durations are not those of
                the program's trace.
            ImportError: a picture is wanted and matplotlib is not installed.
        """
        from fsdp_fx.timeline import save_timeline

        save_timeline(self, path, caption=caption, durations=durations)

    def print_readable(self, print_output: bool = True) -> str:
        """The program as commented Python, one line per node, by call.

        Args:
            print_output: also print the text.

        Returns:
            The text.
        """
        text = "\n".join(_lines(self))
        if print_output:
            print(text)
        return text

    def diff(self, before: Program) -> str:
        """What this program has that another has not, and the other way round.

        Args:
            before: the other, usually what a pass was given (:func:`fsdp_fx.passes.pass_results`).

        Returns:
            A unified diff of the two as :meth:`print_readable` shows them; empty if they print
            alike.
        """
        lines = difflib.unified_diff(
            list(_lines(before)), list(_lines(self)), "before", "after", lineterm="", n=2
        )
        return "\n".join(lines)

    def __repr__(self) -> str:
        trace = self.trace
        return f"<Program of {len(trace)} events in {len(trace.calls)} calls>"

    def __str__(self) -> str:
        return self.print_readable(print_output=False)


def operation(node: fx.Node) -> Operation | None:
    """Which of the five operations ``node`` calls; ``None`` for any other node."""
    return _OPERATIONS.get(node.target) if node.op == "call_function" else None


def unit_of(node: fx.Node) -> str:
    """The unit that a gather, wait, free or reduce node is about."""
    while isinstance(source := node.args[0], fx.Node):
        node = source
    return cast(str, source)


def all_reduces(node: fx.Node) -> bool:
    """Whether a reduce node also all-reduces, if its unit is replicated."""
    return bool(node.kwargs.get("all_reduce", True))


def compute_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The compute nodes of ``graph``, in order: in a sound program, one per event."""
    return graph.find_nodes(op="call_function", target=compute)


def place_after(
    program: Program,
    computes: Sequence[fx.Node],
    position: int,
    kind: Literal["free", "reduce"],
) -> fx.Node:
    """Where in a graph a free or reduction after one event belongs.

    Args:
        program: the program that the graph is a copy of.
        computes: the compute nodes of the graph that is being edited.
        position: position of the event whose use must have ended.
        kind: which of the two. After the same use the free comes first, so that the
            reduction's buffers find its memory.

    Returns:
        The node to insert behind: the compute at which the use ends, or the last free
        or reduction there that comes before this one.
    """
    ranks = program.trace.end_ranks
    here = ranks[position], kind == "reduce"
    node = computes[program.trace.ends[position]]
    while (other := operation(node.next)) in ("free", "reduce"):
        if (ranks[program.positions[_label(node.next)]], other == "reduce") > here:
            break
        node = node.next
    return node


def _label(node: fx.Node) -> str:
    """The event that a compute, free or reduce node names."""
    return cast(str, node.kwargs["event" if operation(node) == "compute" else "after"])


def _lines(program: Program) -> Iterator[str]:
    """The lines of :meth:`Program.print_readable`."""
    yield _header(program)
    starts = {call.start: call for call in program.trace.calls}
    place = -1  # of the last compute seen
    heading = -1  # of the last event whose call has its heading
    for node in program.graph.nodes:
        kind = operation(node)
        if kind is None:
            continue
        # Frees and reductions close the event before them; the rest opens the next.
        opens = place if kind in ("free", "reduce") else place + 1
        if opens > heading:
            heading = opens
            if opens in starts:
                yield ""
                yield _heading(starts[opens])
        if kind == "compute":
            place += 1
        code = f"    {_code(node, kind)}"
        yield f"{code:<{_COMMENT_COLUMN}}  # {_comment(program, node, kind, opens)}"


def _header(program: Program) -> str:
    from fsdp_fx.occupancy import peak_resident_bytes
    from fsdp_fx.planning.memory import format_bytes, kept_gradient_bytes

    trace = program.trace
    counts = {kind: 0 for kind in _OPERATIONS.values()}
    for node in program.graph.nodes:
        if (kind := operation(node)) is not None:
            counts[kind] += 1
    counts["gather"] -= len(program.carried)  # there from the window before
    ahead = sum(len(step.prefetches) for step in program.steps)
    reductions = _count(counts["reduce"], "reduction")
    if replicated := {unit.name for unit in trace.units if unit.replicas > 1}:
        nodes = program.graph.find_nodes(op="call_function", target=reduce)
        over = sum(unit_of(node) in replicated and all_reduces(node) for node in nodes)
        reductions += f" ({over} over replicas)"
    chunks = len({unit.chunk for unit in trace.units})
    size = format_bytes(peak_resident_bytes(program))
    reduced = [position for position, step in enumerate(program.steps) if step.reduces]
    kept = max(kept_gradient_bytes(trace, reduced), default=0)
    gradients = f", {format_bytes(kept)} of gradients kept" if kept else ""
    stay = f"; {_count(len(program.carried), 'unit')} kept from window to window"
    return (
        f"# program: {_count(len(trace), 'event')}, {_count(len(trace.units), 'unit')}, "
        f"{_count(chunks, 'chunk')}; {_count(counts['gather'], 'gather')} ({ahead} ahead), "
        f"{_count(counts['free'], 'free')}, {reductions}; "
        f"peak {size} resident{gradients}{stay if program.carried else ''}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _heading(call: Call) -> str:
    return f"# chunk {call.chunk}, {_PHASES[call.phase]}, microbatch {call.microbatch}"


def _code(node: fx.Node, kind: Operation) -> str:
    arguments = [arg.name if isinstance(arg, fx.Node) else f'"{arg}"' for arg in node.args]
    arguments += [
        f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}"
        for key, value in node.kwargs.items()
    ]
    call = f"{kind}({', '.join(arguments)})"
    return f"{node.name} = {call}" if kind in ("gather", "wait") else call


def _comment(program: Program, node: fx.Node, kind: Operation, place: int) -> str:
    """Unit, phase, microbatch and bytes of a node, and what a gather ahead is for."""
    from fsdp_fx.planning.memory import format_bytes

    trace = program.trace
    position = _serves(program, node, kind, place)
    event = trace[position]
    name = event.unit if kind == "compute" else unit_of(node)
    unit = trace.unit(name)
    size = format_bytes(unit.gradient_bytes if kind == "reduce" else unit.bytes)
    text = f"{name}, {_PHASES[event.phase]}, microbatch {event.microbatch}, {size}"
    if kind == "gather" and position != place:
        text += f", ahead for {event}"
    if kind == "gather" and _is_carried(program, node):
        text += ", in the first window only"
    if kind == "reduce" and unit.replicas > 1:
        text += f", over {unit.replicas} replicas" if all_reduces(node) else ", partial sums"
    return text


def _is_carried(program: Program, node: fx.Node) -> bool:
    """Whether a gather finds its unit there, from the window before."""
    if unit_of(node) not in program.carried:
        return False
    gathers = program.graph.find_nodes(op="call_function", target=gather)
    return node is next(other for other in gathers if unit_of(other) == unit_of(node))


def _serves(program: Program, node: fx.Node, kind: Operation, place: int) -> int:
    """Position of the event that a node belongs to; for a gather, its first use."""
    if kind in ("compute", "free", "reduce"):
        return program.positions[_label(node)]
    uses = [
        program.positions[_label(user)]
        for waiter in (node.users if kind == "gather" else (node,))
        for user in waiter.users
        if operation(user) == "compute"
    ]
    # An unfinished program may hold a gather that nothing uses yet.
    return min(uses, default=min(place, len(program.trace) - 1))
