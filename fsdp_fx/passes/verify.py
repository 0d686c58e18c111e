"""The proof that a program is safe to run.

:func:`verify` walks a program and checks every rule below, in this order; a later rule
may rely on the earlier ones. It knows nothing of the passes that wrote the program, and
never repairs anything. That collectives stand in the same order on every rank is not a
property of one program: ranks compare fingerprints of their traces for that.

The graph is well formed:

- ``known-operation``: every node calls one of the five operations; the output is last.
- ``known-arguments``: every node has the arguments of its operation.
- ``known-name``: the units and events that nodes name are the trace's.
- ``defined-before-use``: a value stands before the nodes that take it.
- ``wait-takes-gather``: a wait waits for a gather.
- ``full-from-wait``: a compute or free takes full parameters from a wait.

Every event computes, with what it needs:

- ``one-compute-per-event``: every event of the trace has exactly one compute.
- ``trace-order``: computes stand in trace order.
- ``own-unit``: a compute takes exactly the full parameters of its own unit.
- ``one-wait-per-gather``: no gather is waited for twice.
- ``no-dropped-gather``: every gather is waited for, and computed with.
- ``wait-at-use``: a wait stands between the compute before its first use and that use.

Nothing is gathered twice, freed too early or left over:

- ``no-double-free``: nothing is freed twice.
- ``carried-frozen``: only frozen units stay past the end: the optimizer changes the others.
- ``carried-at-end``: a unit that is said to stay past the end is gathered, and not freed
  after its last gather.
- ``freed-at-end``: every other gather is freed.
- ``no-second-gather``: no unit is gathered while it is resident or in flight.
- ``no-use-after-free``: no compute takes what has been freed.
- ``after-has-ended``: the event that ``after`` names has begun and its use has ended.
- ``after-in-place``: a free or reduction stands where the use that it names ends, in the
  order in which uses end there (inner ones before enclosing ones, if the trace does not
  say otherwise), the free before the reduction.
- ``free-after-own-use``: a free comes after an event that uses the value.
- ``no-free-in-use``: nothing is freed while another use of it is still running.
- ``within-capacity``: the full parameters and the waiting full gradients at each event stay
  within the program's capacity.

Gradients are reduced when, and only when, they are there:

- ``reduce-trainable``: only trainable units are reduced.
- ``reduce-after-contribution``: a reduction comes after an event of its unit at which
  all contributions are in.
- ``no-second-reduction``: every reduction has a contribution since the one before it.
- ``no-lost-contribution``: every contribution is followed by a reduction.
- ``partial-if-replicated``: only reductions of replicated units leave out the all-reduce.
- ``all-reduced-at-last``: the last reduction of a replicated unit all-reduces, and no
  earlier one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from torch import fx

from fsdp_fx.occupancy import resident_bytes
from fsdp_fx.planning.memory import format_bytes, kept_gradient_bytes
from fsdp_fx.program import Operation, Program, all_reduces, operation, unit_of
from fsdp_fx.trace import Event, Trace

__all__ = ["RULES", "ProgramError", "verify"]


class ProgramError(ValueError):
    """A program breaks a rule.

    Args:
        rule: name of the rule, as listed in :mod:`fsdp_fx.passes.verify`.
        node: name of the node that breaks it; of the output node if one is missing.
        problem: what is wrong, with the unit or event.
    """

    def __init__(self, rule: str, node: str, problem: str) -> None:
        super().__init__(f"rule {rule}, node {node}: {problem}")
        self.rule = rule
        self.node = node


def verify(program: Program) -> Program:
    """Prove that ``program`` is safe to run.

    Args:
        program: any program; it is only read.

    Returns:
        The program.

    Raises:
        ProgramError: a rule is broken; the first one found.
    """
    view = _View(program)
    for rule in _RULES:
        for node, problem in rule(view):
            raise ProgramError(_name(rule), node.name, problem)
    return program


@dataclass(frozen=True)
class _Op:
    """A node of a well-formed graph, read once.

    Args:
        node: the node.
        kind: the operation that it calls.
        unit: the unit that it is about; for a compute, the event's.
        event: position of the event that it names; -1 for a gather or wait.
        place: the number of computes before it.
    """

    node: fx.Node
    kind: Operation
    unit: str
    event: int
    place: int


class _View:
    """What the rules read. ``ops`` and what follows need a well-formed graph."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.trace: Trace = program.trace
        self.nodes: list[fx.Node] = list(program.graph.nodes)

    def event(self, op: _Op) -> Event:
        return self.trace[op.event]

    @cached_property
    def ops(self) -> list[_Op]:
        ops: list[_Op] = []
        place = 0
        for node in self.nodes:
            kind = operation(node)
            if kind is None:
                continue
            label = node.kwargs.get("event", node.kwargs.get("after"))
            event = self.program.positions[cast(str, label)] if label is not None else -1
            unit = self.trace[event].unit if kind == "compute" else unit_of(node)
            ops.append(_Op(node, kind, unit, event, place))
            place += kind == "compute"
        return ops

    def of(self, *kinds: Operation) -> list[_Op]:
        """The operations of some kinds, in program order."""
        return [op for op in self.ops if op.kind in kinds]

    @cached_property
    def users(self) -> dict[tuple[fx.Node, Operation], list[_Op]]:
        """The operations of one kind that take a node's value, in program order."""
        users: dict[tuple[fx.Node, Operation], list[_Op]] = {}
        for op in self.ops:
            for source in op.node.all_input_nodes:
                users.setdefault((source, op.kind), []).append(op)
        return users

    def uses(self, full: fx.Node) -> list[_Op]:
        """The computes that take the value of a wait."""
        return self.users.get((full, "compute"), [])

    @cached_property
    def output(self) -> fx.Node:
        return self.nodes[-1]


_Violations = Iterator[tuple[fx.Node, str]]
_Rule = Callable[[_View], _Violations]


def _known_operation(view: _View) -> _Violations:
    for node in view.nodes[:-1]:
        if operation(node) is None:
            target = getattr(node.target, "__name__", node.target)
            yield node, f"{node.op} of {target} is not an operation of a program"
    if view.output.op != "output":
        yield view.output, "the program does not end with its output"


def _known_arguments(view: _View) -> _Violations:
    for node in view.nodes[:-1]:
        kind = operation(node)
        keys = {"compute": {"event"}, "free": {"after"}, "reduce": {"after"}}.get(str(kind), set())
        labels = dict(node.kwargs)
        if kind == "reduce" and isinstance(labels.get("all_reduce"), bool):
            del labels["all_reduce"]
        if set(labels) != keys or not all(isinstance(v, str) for v in labels.values()):
            wanted = ", ".join(sorted(keys)) or "no"
            yield node, f"{kind} takes {wanted} keyword, got {dict(node.kwargs)}"
        wanted_type = str if kind in ("gather", "reduce") else fx.Node
        if not all(isinstance(arg, wanted_type) for arg in node.args):
            yield node, f"{kind} takes a {wanted_type.__name__}, got {node.args}"
        if kind != "compute" and len(node.args) != 1:
            yield node, f"{kind} takes one argument, got {len(node.args)}"


def _known_name(view: _View) -> _Violations:
    units = {unit.name for unit in view.trace.units}
    for node in view.nodes[:-1]:
        for arg in node.args:
            if isinstance(arg, str) and arg not in units:
                yield node, f"unit {arg} is not in the trace"
        for key, label in node.kwargs.items():
            if key != "all_reduce" and label not in view.program.positions:
                yield node, f"event {label} is not in the trace"


def _defined_before_use(view: _View) -> _Violations:
    defined: set[fx.Node] = set()
    for node in view.nodes:
        for source in node.all_input_nodes:
            if source not in defined:
                yield node, f"takes {source.name}, which comes later"
        defined.add(node)


def _wait_takes_gather(view: _View) -> _Violations:
    for node in view.nodes[:-1]:
        if operation(node) == "wait":
            for source in node.all_input_nodes:
                if operation(source) != "gather":
                    yield node, f"waits for {source.name}, which is not a gather"


def _full_from_wait(view: _View) -> _Violations:
    for node in view.nodes[:-1]:
        if operation(node) in ("compute", "free"):
            for source in node.all_input_nodes:
                if operation(source) != "wait":
                    yield node, f"takes {source.name}, which nothing has waited for"


def _one_compute_per_event(view: _View) -> _Violations:
    seen: set[int] = set()
    for op in view.of("compute"):
        if op.event in seen:
            yield op.node, f"{view.event(op)} computes a second time"
        seen.add(op.event)
    for position, event in enumerate(view.trace):
        if position not in seen:
            yield view.output, f"{event} (event {position}) has no compute"


def _trace_order(view: _View) -> _Violations:
    for op in view.of("compute"):
        if op.event != op.place:
            yield op.node, f"{view.event(op)} stands where {view.trace[op.place]} is due"


def _own_unit(view: _View) -> _Violations:
    for op in view.of("compute"):
        taken = [unit_of(cast(fx.Node, full)) for full in op.node.args]
        if taken != [op.unit]:
            yield (
                op.node,
                f"{view.event(op)} needs {op.unit}, takes {', '.join(taken) or 'nothing'}",
            )


def _one_wait_per_gather(view: _View) -> _Violations:
    for op in view.of("gather"):
        for second in view.users.get((op.node, "wait"), [])[1:]:
            yield second.node, f"waits a second time for {op.node.name} of {op.unit}"


def _no_dropped_gather(view: _View) -> _Violations:
    for op in view.of("gather"):
        waits = view.users.get((op.node, "wait"), [])
        if not waits:
            yield op.node, f"{op.unit} is gathered and nothing waits for it"
        for wait in waits:
            if not view.uses(wait.node):
                yield op.node, f"{op.unit} is gathered and nothing computes with it"


def _wait_at_use(view: _View) -> _Violations:
    for op in view.of("wait"):
        first = view.uses(op.node)[0]
        if op.place != first.place:
            yield (
                op.node,
                f"waits for {op.unit} at {view.trace[op.place]}, "
                f"but the first use is {view.event(first)}",
            )


def _no_double_free(view: _View) -> _Violations:
    for op in view.of("wait"):
        for second in view.users.get((op.node, "free"), [])[1:]:
            yield second.node, f"{op.unit} from {op.node.name} is freed a second time"


def _carried_frozen(view: _View) -> _Violations:
    for unit in view.trace.units:
        if unit.name in view.program.carried and unit.trainable:
            yield (
                view.output,
                f"{unit.name} would stay over an optimizer step, and is trainable: stale then",
            )


def _carried_at_end(view: _View) -> _Violations:
    last = {op.unit: op for op in view.of("wait")}
    for name in sorted(view.program.carried):
        if name not in last:
            yield view.output, f"{name} is to stay for the next window and is never gathered"
        elif (last[name].node, "free") in view.users:
            yield (
                view.users[last[name].node, "free"][0].node,
                f"{name} is to stay for the next window and is freed in the end",
            )


def _freed_at_end(view: _View) -> _Violations:
    last = {op.unit: op for op in view.of("wait")}
    for op in view.of("wait"):
        stays = op.unit in view.program.carried and op is last[op.unit]
        if (op.node, "free") not in view.users and not stays:
            yield op.node, f"{op.unit} is never freed"


def _no_second_gather(view: _View) -> _Violations:
    resident: dict[str, fx.Node] = {}
    for op in view.of("gather", "free"):
        if op.kind == "free":
            resident.pop(op.unit, None)
        elif op.unit in resident:
            yield op.node, f"{op.unit} is still there from {resident[op.unit].name}"
        else:
            resident[op.unit] = op.node


def _no_use_after_free(view: _View) -> _Violations:
    freed: dict[fx.Node, fx.Node] = {}
    for op in view.of("compute", "free"):
        (full,) = op.node.all_input_nodes
        if op.kind == "free":
            freed[full] = op.node
        elif full in freed:
            yield op.node, f"{view.event(op)} uses {op.unit} after {freed[full].name}"


def _after_has_ended(view: _View) -> _Violations:
    for op in view.of("free", "reduce"):
        end = view.trace.ends[op.event]
        if op.event >= op.place:
            yield op.node, f"{view.event(op)} has not begun"
        elif end >= op.place:
            yield op.node, f"{view.event(op)} runs until after {view.trace[end]}"


def _after_in_place(view: _View) -> _Violations:
    before: _Op | None = None
    for op in view.ops:
        if op.kind in ("free", "reduce"):
            end = view.trace.ends[op.event]
            if end != op.place - 1 or (before and before.kind in ("gather", "wait")):
                yield (
                    op.node,
                    f"{view.event(op)} ended after {view.trace[end]}; "
                    f"too late for {op.kind} of {op.unit}",
                )
            if (
                before
                and before.kind != "compute"
                and _tail_order(view, before) > _tail_order(view, op)
            ):
                yield op.node, f"stands behind {before.node.name}, which must come later"
        before = op


def _tail_order(view: _View, op: _Op) -> tuple[int, bool]:
    """Sorts the frees and reductions at one place; see :meth:`Trace.end_order`."""
    return view.trace.end_ranks[op.event], op.kind == "reduce"


def _free_after_own_use(view: _View) -> _Violations:
    for op in view.of("free"):
        uses = view.uses(op.node.all_input_nodes[0])
        if op.event not in [use.event for use in uses]:
            yield op.node, f"{view.event(op)} does not use this value of {op.unit}"


def _no_free_in_use(view: _View) -> _Violations:
    trace = view.trace
    for op in view.of("free"):
        for use in view.uses(op.node.all_input_nodes[0]):
            if trace.end_order(use.event) > trace.end_order(op.event):
                yield (
                    op.node,
                    f"{op.unit} is freed after {view.event(op)}, but {view.event(use)} "
                    f"uses it until after {trace[trace.ends[use.event]]}",
                )


def _within_capacity(view: _View) -> _Violations:
    capacity = view.program.capacity
    if capacity is None:
        return
    if len(capacity) != len(view.trace):
        yield view.output, f"capacity at {len(capacity)} of {len(view.trace)} events"
        return
    resident = resident_bytes(view.program)
    kept = kept_gradient_bytes(view.trace, [op.event for op in view.of("reduce")])
    for op, parameters, gradients, limit in zip(
        view.of("compute"), resident, kept, capacity, strict=True
    ):
        if parameters + gradients > limit:
            yield (
                op.node,
                f"at {view.event(op)} (event {op.event}) {format_bytes(parameters)} of parameters "
                f"are resident and {format_bytes(gradients)} of gradients wait, and there is room "
                f"for {format_bytes(limit)}",
            )


def _reduce_trainable(view: _View) -> _Violations:
    for op in view.of("reduce"):
        if not view.trace.unit(op.unit).trainable:
            yield op.node, f"{op.unit} is frozen"


def _reduce_after_contribution(view: _View) -> _Violations:
    for op in view.of("reduce"):
        event = view.event(op)
        if event.unit != op.unit:
            yield op.node, f"{event} gives {op.unit} no gradient"
        elif op.event not in view.trace.reduces:
            yield op.node, f"contributions of {op.unit} are still missing after {event}"


def _no_second_reduction(view: _View) -> _Violations:
    last: dict[str, _Op] = {}
    for op in view.of("reduce"):
        before = last.get(op.unit)
        if before is not None and op.event == before.event:
            yield op.node, f"{op.unit} has no contribution since {before.node.name}"
        last[op.unit] = op


def _no_lost_contribution(view: _View) -> _Violations:
    trace = view.trace
    last = {op.unit: op for op in view.of("reduce")}
    for op in view.of("compute"):
        if op.event not in trace.reduces or not trace.unit(op.unit).trainable:
            continue
        reduction = last.get(op.unit)
        if reduction is None:
            yield op.node, f"{op.unit} is never reduced after {view.event(op)}"
        elif trace.end_order(reduction.event) < trace.end_order(op.event):
            yield (
                op.node,
                f"{op.unit} is last reduced after {view.event(reduction)}, "
                f"before the contribution of {view.event(op)}",
            )


def _partial_if_replicated(view: _View) -> _Violations:
    for op in view.of("reduce"):
        if not all_reduces(op.node) and view.trace.unit(op.unit).replicas == 1:
            yield op.node, f"{op.unit} has no replicas to all-reduce over later"


def _all_reduced_at_last(view: _View) -> _Violations:
    last = {op.unit: op for op in view.of("reduce")}
    for op in view.of("reduce"):
        if view.trace.unit(op.unit).replicas == 1:
            continue
        if op is last[op.unit] and not all_reduces(op.node):
            yield op.node, f"partial sums of {op.unit} are never all-reduced"
        elif op is not last[op.unit] and all_reduces(op.node):
            yield (
                op.node,
                f"{op.unit} is all-reduced before its last reduction, {last[op.unit].node.name}",
            )


_RULES: tuple[_Rule, ...] = (
    _known_operation,
    _known_arguments,
    _known_name,
    _defined_before_use,
    _wait_takes_gather,
    _full_from_wait,
    _one_compute_per_event,
    _trace_order,
    _own_unit,
    _one_wait_per_gather,
    _no_dropped_gather,
    _wait_at_use,
    _no_double_free,
    _carried_frozen,
    _carried_at_end,
    _freed_at_end,
    _no_second_gather,
    _no_use_after_free,
    _after_has_ended,
    _after_in_place,
    _free_after_own_use,
    _no_free_in_use,
    _within_capacity,
    _reduce_trainable,
    _reduce_after_contribution,
    _no_second_reduction,
    _no_lost_contribution,
    _partial_if_replicated,
    _all_reduced_at_last,
)


def _name(rule: _Rule) -> str:
    return rule.__name__.strip("_").replace("_", "-")


RULES: tuple[str, ...] = tuple(_name(rule) for rule in _RULES)
