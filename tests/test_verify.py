"""Programs broken by hand, one per rule: the message names the rule, the node and what."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from torch import fx

from fsdp_fx.passes import PassOptions, plan
from fsdp_fx.passes.verify import RULES, ProgramError, verify
from fsdp_fx.program import Program, compute, free, gather, reduce, wait
from fsdp_fx.trace import Trace
from traces import TWO_CHUNKS, trace


class Edit:
    """A program's graph, to be broken by node name."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = program.copy_graph()

    def __getitem__(self, name: str) -> fx.Node:
        return next(node for node in self.graph.nodes if node.name == name)

    def drop(self, *names: str) -> None:
        for name in names:
            self.graph.erase_node(self[name])

    def put(
        self,
        place: str,
        target: Callable[..., object],
        *args: str | int,
        name: str,
        **keywords: str | bool,
    ) -> fx.Node:
        """Insert a call behind the node ``place``; an argument ``%name`` is a node."""
        nodes = tuple(
            self[arg[1:]] if isinstance(arg, str) and arg[0] == "%" else arg for arg in args
        )
        with self.graph.inserting_after(self[place]):
            return self.graph.create_node("call_function", target, nodes, {**keywords}, name)

    def move(self, name: str, after: str) -> None:
        """Move a node behind the node ``after``."""
        self[after].append(self[name])

    def result(self) -> Program:
        return self.program.with_graph(self.graph)


# Gathers on demand; m is the parent of a and b. The nodes of the program, in order:
#   gather_m_F0 wait_m_F0 compute_m_F0
#   gather_m_a_F0 wait_m_a_F0 compute_m_a_F0 free_m_a_F0
#   gather_m_b_F0 wait_m_b_F0 compute_m_b_F0 free_m_b_F0 free_m_F0
#   gather_m_B0 wait_m_B0 compute_m_B0
#   gather_m_b_B0 wait_m_b_B0 compute_m_b_B0 free_m_b_B0 reduce_m_b_B0
#   gather_m_a_B0 wait_m_a_B0 compute_m_a_B0 free_m_a_B0 reduce_m_a_B0 free_m_B0 reduce_m_B0
WINDOW = "m F0: *(a b); m B0: *(b a)"
SOUND = trace(WINDOW)
ON_DEMAND = PassOptions(0, 0)


@dataclass(frozen=True)
class Case:
    """A way to break a program, and what the message must say."""

    rule: str
    node: str
    says: str
    breaks: Callable[[Edit], object]
    window: Trace = SOUND


def set_args(name: str, *args: str) -> Callable[[Edit], object]:
    """Give a node other arguments; ``%name`` is a node."""

    def breaks(edit: Edit) -> None:
        edit[name].args = tuple(edit[arg[1:]] if arg[0] == "%" else arg for arg in args)

    return breaks


def set_kwargs(name: str, **kwargs: str | bool) -> Callable[[Edit], object]:
    """Give a node other keywords."""

    def breaks(edit: Edit) -> None:
        edit[name].kwargs = {**kwargs}

    return breaks


def keep_through_gap(edit: Edit) -> None:
    """Drop the free of ``m.a`` in forward; it is gathered again in backward."""
    edit.drop("free_m_a_F0")
    edit.put("compute_m_a_B0", free, "%wait_m_a_F0", name="late", after="m.a F0")


def use_freed_value(edit: Edit) -> None:
    edit["compute_m_a_B0"].args = (edit["wait_m_a_F0"],)
    edit.drop("free_m_a_B0", "wait_m_a_B0", "gather_m_a_B0")


def swap_computes(edit: Edit) -> None:
    for name in ("gather_m_b_F0", "wait_m_b_F0", "compute_m_b_F0"):
        edit["gather_m_a_F0"].prepend(edit[name])


def gather_early_without_wait(edit: Edit) -> None:
    edit["compute_m_F0"].prepend(edit["gather_m_a_F0"])
    edit["compute_m_F0"].prepend(edit["wait_m_a_F0"])


def free_inner_use(edit: Edit) -> None:
    """The unit calls itself: free it when the inner use ends."""
    edit["free_m_a_F0"].kwargs = {"after": "m.a F1"}


def free_late(edit: Edit) -> None:
    edit.move("free_m_a_F0", after="compute_m_b_F0")


def free_behind_gather(edit: Edit) -> None:
    edit.move("free_m_a_F0", after="gather_m_b_F0")


def reduce_too_early(edit: Edit) -> None:
    edit.put("compute_m_B0", reduce, "m", name="early", after="m B0")


CASES = [
    Case(
        "known-operation",
        "extra",
        "add is not an operation",
        lambda edit: edit.put("wait_m_F0", operator.add, 1, 2, name="extra"),
    ),
    Case(
        "known-arguments",
        "free_m_a_F0",
        "free takes after keyword",
        set_kwargs("free_m_a_F0"),
    ),
    Case(
        "known-arguments",
        "reduce_m_a_B0",
        "reduce takes a str, got (free_m_a_B0,)",
        set_args("reduce_m_a_B0", "%free_m_a_B0"),
    ),
    Case(
        "known-arguments",
        "free_m_a_F0",
        "free takes one argument, got 2",
        set_args("free_m_a_F0", "%wait_m_a_F0", "%wait_m_F0"),
    ),
    Case(
        "known-name",
        "gather_m_a_F0",
        "unit m.c is not in the trace",
        set_args("gather_m_a_F0", "m.c"),
    ),
    Case(
        "known-name",
        "free_m_a_F0",
        "event m.a F7 is not in the trace",
        set_kwargs("free_m_a_F0", after="m.a F7"),
    ),
    Case(
        "defined-before-use",
        "wait_m_a_F0",
        "takes gather_m_a_F0, which comes later",
        lambda edit: edit.move("gather_m_a_F0", after="compute_m_a_F0"),
    ),
    Case(
        "wait-takes-gather",
        "wait_m_a_F0",
        "waits for wait_m_F0, which is not a gather",
        set_args("wait_m_a_F0", "%wait_m_F0"),
    ),
    Case(
        "full-from-wait",
        "compute_m_a_F0",
        "takes gather_m_a_F0, which nothing has waited for",
        set_args("compute_m_a_F0", "%gather_m_a_F0"),
    ),
    Case(
        "full-from-wait",
        "free_m_a_F0",
        "takes gather_m_a_F0, which nothing has waited for",
        set_args("free_m_a_F0", "%gather_m_a_F0"),
    ),
    Case(
        "one-compute-per-event",
        "again",
        "m.a F0 computes a second time",
        lambda edit: edit.put(
            "compute_m_a_F0", compute, "%wait_m_a_F0", name="again", event="m.a F0"
        ),
    ),
    Case(
        "one-compute-per-event",
        "output",
        "m.a F0 (event 1) has no compute",
        lambda edit: edit.drop("compute_m_a_F0"),
    ),
    Case("trace-order", "compute_m_b_F0", "m.b F0 stands where m.a F0 is due", swap_computes),
    Case(
        "own-unit",
        "compute_m_a_F0",
        "m.a F0 needs m.a, takes m",
        set_args("compute_m_a_F0", "%wait_m_F0"),
    ),
    Case(
        "own-unit",
        "compute_m_a_F0",
        "m.a F0 needs m.a, takes nothing",
        set_args("compute_m_a_F0"),
    ),
    Case(
        "one-wait-per-gather",
        "again",
        "waits a second time for gather_m_a_F0 of m.a",
        lambda edit: edit.put("wait_m_a_F0", wait, "%gather_m_a_F0", name="again"),
    ),
    Case(
        "no-dropped-gather",
        "dropped",
        "m.a is gathered and nothing waits for it",
        lambda edit: edit.put("compute_m_b_F0", gather, "m.a", name="dropped"),
    ),
    Case(
        "no-dropped-gather",
        "dropped",
        "m.b is gathered and nothing computes with it",
        lambda edit: (
            edit.put("compute_m_F0", gather, "m.b", name="dropped"),
            edit.put("dropped", wait, "%dropped", name="waited"),
        ),
    ),
    Case(
        "wait-at-use",
        "wait_m_a_F0",
        "waits for m.a at m F0, but the first use is m.a F0",
        gather_early_without_wait,
    ),
    Case(
        "no-double-free",
        "again",
        "m.a from wait_m_a_F0 is freed a second time",
        lambda edit: edit.put("free_m_a_F0", free, "%wait_m_a_F0", name="again", after="m.a F0"),
    ),
    Case(
        "freed-at-end",
        "wait_m_a_F0",
        "m.a is never freed",
        lambda edit: edit.drop("free_m_a_F0"),
    ),
    Case(
        "no-second-gather",
        "gather_m_a_B0",
        "m.a is still there from gather_m_a_F0",
        keep_through_gap,
    ),
    Case(
        "no-second-gather",
        "gather_m_a_B0",
        "m.a is still there from gather_m_a_F0",
        # In flight at once: the second is issued before the first is waited for.
        lambda edit: edit.move("gather_m_a_B0", after="gather_m_a_F0"),
    ),
    Case(
        "no-use-after-free",
        "compute_m_a_B0",
        "m.a B0 uses m.a after free_m_a_F0",
        use_freed_value,
    ),
    Case(
        "after-has-ended",
        "free_m_a_F0",
        "m.b F0 has not begun",
        set_kwargs("free_m_a_F0", after="m.b F0"),
    ),
    Case(
        "after-has-ended",
        "free_m_a_F0",
        "m F0 runs until after m.b F0",
        set_kwargs("free_m_a_F0", after="m F0"),
    ),
    Case("after-has-ended", "early", "m B0 runs until after m.a B0", reduce_too_early),
    Case(
        "after-in-place", "free_m_a_F0", "ended after m.a F0; too late for free of m.a", free_late
    ),
    Case(
        "after-in-place",
        "free_m_a_F0",
        "ended after m.a F0; too late for free of m.a",
        free_behind_gather,
    ),
    Case(
        "after-in-place",
        "free_m_b_F0",
        "stands behind free_m_F0, which must come later",
        lambda edit: edit.move("free_m_F0", after="compute_m_b_F0"),
    ),
    Case(
        "after-in-place",
        "free_m_b_B0",
        "stands behind reduce_m_b_B0, which must come later",
        lambda edit: edit.move("reduce_m_b_B0", after="compute_m_b_B0"),
    ),
    Case(
        "free-after-own-use",
        "free_m_F0",
        "m.b F0 does not use this value of m",
        set_kwargs("free_m_F0", after="m.b F0"),
    ),
    Case(
        "no-free-in-use",
        "free_m_a_F0",
        "m.a is freed after m.a F1, but m.a F0 uses it until after m.a F1",
        free_inner_use,
        window=trace("m F0: a(b a)"),
    ),
    Case(
        "reduce-trainable",
        "frozen",
        "m.a is frozen",
        lambda edit: edit.put("free_m_a_B0", reduce, "m.a", name="frozen", after="m.a B0"),
        window=trace(WINDOW, frozen={"m.a"}),
    ),
    Case(
        "reduce-after-contribution",
        "early",
        "m.a F0 gives m.b no gradient",
        lambda edit: edit.put("free_m_a_F0", reduce, "m.b", name="early", after="m.a F0"),
    ),
    Case(
        "reduce-after-contribution",
        "early",
        "contributions of m.a are still missing after m.a B0",
        lambda edit: edit.put("free_m_a_B0", reduce, "m.a", name="early", after="m.a B0"),
        window=trace("m B0: a- b; m B1: a"),
    ),
    Case(
        "no-second-reduction",
        "again",
        "m.a has no contribution since reduce_m_a_B0",
        lambda edit: edit.put("reduce_m_a_B0", reduce, "m.a", name="again", after="m.a B0"),
    ),
    Case(
        "no-lost-contribution",
        "compute_m_a_B0",
        "m.a is never reduced after m.a B0",
        lambda edit: edit.drop("reduce_m_a_B0"),
    ),
    Case(
        "no-lost-contribution",
        "compute_m_a_B1",
        "m.a is last reduced after m.a B0, before the contribution of m.a B1",
        lambda edit: edit.drop("reduce_m_a_B1"),
        window=trace("m B0: a; m B1: a"),
    ),
    Case(
        "known-arguments",
        "reduce_m_a_B0",
        "reduce takes after keyword",
        set_kwargs("reduce_m_a_B0", after="m.a B0", all_reduce="False"),
    ),
    Case(
        "partial-if-replicated",
        "reduce_m_a_B0",
        "m.a has no replicas to all-reduce over later",
        set_kwargs("reduce_m_a_B0", after="m.a B0", all_reduce=False),
        window=trace("m B0: a b; m B1: a b", replicas={"m.b": 2}),
    ),
    Case(
        "all-reduced-at-last",
        "reduce_m_b_B1",
        "partial sums of m.b are never all-reduced",
        set_kwargs("reduce_m_b_B1", after="m.b B1", all_reduce=False),
        window=trace("m B0: a b; m B1: a b", replicas={"m.b": 2}),
    ),
    Case(
        "all-reduced-at-last",
        "reduce_m_b_B0",
        "m.b is all-reduced before its last reduction, reduce_m_b_B1",
        set_kwargs("reduce_m_b_B0", after="m.b B0"),
        window=trace("m B0: a b; m B1: a b", replicas={"m.b": 2}),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.node}")
def test_broken_program_is_refused_by_rule_and_node(case: Case) -> None:
    edit = Edit(plan(case.window, ON_DEMAND))
    case.breaks(edit)
    with pytest.raises(ProgramError) as caught:
        edit.result().verify()
    message = str(caught.value)
    assert (caught.value.rule, caught.value.node) == (case.rule, case.node), message
    assert message.startswith(f"rule {case.rule}, node {case.node}: ")
    assert case.says in message
    assert "\n" not in message


def test_capacity_refuses_parameters_beyond_it() -> None:
    # One event ahead: beside the unit in use there is one gather in flight.
    program = plan(trace("m F0: a b; m B0: b a", {"m.a": 2048, "m.b": 1024}))
    replace(program, capacity=(6144, 2048, 6144, 4096)).verify()
    with pytest.raises(ProgramError, match=r"at m\.b B0 \(event 2\) 6.0 KiB of para") as caught:
        replace(program, capacity=(6144, 2048, 6143, 4096)).verify()
    assert caught.value.rule == "within-capacity"


def test_capacity_refuses_waiting_gradients_beyond_it() -> None:
    program = plan(
        trace("m F0: a; m B0: a; m F1: a; m B1: a"),
        PassOptions(0, 0, reduce_gradients="per_window"),
    )
    # 200 bytes of parameters; 400 of gradients from the first backward to the second's end.
    replace(program, capacity=(200, 200, 600, 600)).verify()
    for capacity in ((200, 200, 599, 600), (200, 200, 600, 599)):
        with pytest.raises(ProgramError, match="400 B of gradients wait") as caught:
            replace(program, capacity=capacity).verify()
        assert caught.value.rule == "within-capacity"


def test_capacity_has_a_value_per_event() -> None:
    program = plan(trace("m F0: a; m B0: a"))
    with pytest.raises(ProgramError, match="capacity at 1 of 2 events"):
        replace(program, capacity=(1000,)).verify()


CARRIED = "m F0: a b; m B0: b a"


def test_carried_frozen_refuses_a_unit_that_the_optimizer_changes() -> None:
    program = plan(
        trace(CARRIED, frozen={"m.a"}), PassOptions(memory_budget=10**6, keep_frozen=True)
    )
    assert program.carried == {"m.a"}
    program.verify()
    with pytest.raises(ProgramError, match=r"m\.b would stay over an optimizer step") as caught:
        replace(program, carried=frozenset({"m.a", "m.b"})).verify()
    assert caught.value.rule == "carried-frozen"


def test_carried_at_end_refuses_a_unit_that_is_freed() -> None:
    program = plan(trace(CARRIED, frozen={"m.a"}))
    with pytest.raises(ProgramError, match=r"m\.a is to stay .* freed in the end") as caught:
        replace(program, carried=frozenset({"m.a"})).verify()
    assert (caught.value.rule, caught.value.node) == ("carried-at-end", "free_m_a_B0")


def test_freed_at_end_holds_for_all_but_the_carried_units() -> None:
    program = plan(
        trace(CARRIED, frozen={"m.a"}), PassOptions(memory_budget=10**6, keep_frozen=True)
    )
    with pytest.raises(ProgramError, match=r"m\.a is never freed"):
        replace(program, carried=frozenset()).verify()


def test_every_rule_has_a_broken_program() -> None:
    apart = {"within-capacity", "carried-frozen", "carried-at-end"}
    assert {case.rule for case in CASES} | apart == set(RULES)


def test_every_rule_is_documented_in_order() -> None:
    text = verify.__globals__["__doc__"]
    places = [text.index(f"``{rule}``") for rule in RULES]
    assert places == sorted(places)


def test_program_without_output_is_refused() -> None:
    edit = Edit(plan(trace("m F0: a")))
    edit.drop("output")
    with pytest.raises(ProgramError, match="does not end with its output"):
        edit.result().verify()


def test_program_without_its_passes_is_refused() -> None:
    with pytest.raises(ProgramError, match="rule own-unit, node compute_c0_F0"):
        Program.from_trace(trace(TWO_CHUNKS)).verify()


def test_sound_program_is_returned_unchanged() -> None:
    program = plan(trace(TWO_CHUNKS))
    before = str(program)
    assert verify(program) is program
    assert str(program) == before


def test_program_error_is_a_value_error_with_rule_and_node() -> None:
    error = ProgramError("some-rule", "some_node", "what is wrong")
    assert isinstance(error, ValueError)
    assert (error.rule, error.node) == ("some-rule", "some_node")
    assert str(error) == "rule some-rule, node some_node: what is wrong"
