"""What a program is and how it prints."""

from __future__ import annotations

import pytest
from expecttest import TestCase

from fsdp_fx.passes import PassOptions, plan
from fsdp_fx.program import Full, Handle, Program, Step, gather, operation, wait
from fsdp_fx.trace import Event, Trace
from traces import TWO_CHUNKS, trace

SIZES = {"c0": 10, "c1": 10}


class PrintReadable(TestCase):
    def test_two_chunks_two_microbatches_with_parent_units(self) -> None:
        program = plan(trace(TWO_CHUNKS, SIZES, default=600))
        self.assertExpectedInline(
            str(program),
            """\
# program: 24 events, 6 units, 2 chunks; 19 gathers (18 ahead), 19 frees, 12 reductions; peak 2.4 KiB resident

# chunk c0, forward, microbatch 0
    gather_c0_F0 = gather("c0")                                           # c0, forward, microbatch 0, 20 B
    wait_c0_F0 = wait(gather_c0_F0)                                       # c0, forward, microbatch 0, 20 B
    gather_c0_a_F0 = gather("c0.a")                                       # c0.a, forward, microbatch 0, 1.2 KiB, ahead for c0.a F0
    compute(wait_c0_F0, event="c0 F0")                                    # c0, forward, microbatch 0, 20 B
    wait_c0_a_F0 = wait(gather_c0_a_F0)                                   # c0.a, forward, microbatch 0, 1.2 KiB
    gather_c0_b_F0 = gather("c0.b")                                       # c0.b, forward, microbatch 0, 1.2 KiB, ahead for c0.b F0
    compute(wait_c0_a_F0, event="c0.a F0")                                # c0.a, forward, microbatch 0, 1.2 KiB
    free(wait_c0_a_F0, after="c0.a F0")                                   # c0.a, forward, microbatch 0, 1.2 KiB
    wait_c0_b_F0 = wait(gather_c0_b_F0)                                   # c0.b, forward, microbatch 0, 1.2 KiB
    compute(wait_c0_b_F0, event="c0.b F0")                                # c0.b, forward, microbatch 0, 1.2 KiB
    free(wait_c0_b_F0, after="c0.b F0")                                   # c0.b, forward, microbatch 0, 1.2 KiB

# chunk c0, forward, microbatch 1
    gather_c0_a_F1 = gather("c0.a")                                       # c0.a, forward, microbatch 1, 1.2 KiB, ahead for c0.a F1
    compute(wait_c0_F0, event="c0 F1")                                    # c0, forward, microbatch 1, 20 B
    wait_c0_a_F1 = wait(gather_c0_a_F1)                                   # c0.a, forward, microbatch 1, 1.2 KiB
    gather_c0_b_F1 = gather("c0.b")                                       # c0.b, forward, microbatch 1, 1.2 KiB, ahead for c0.b F1
    compute(wait_c0_a_F1, event="c0.a F1")                                # c0.a, forward, microbatch 1, 1.2 KiB
    free(wait_c0_a_F1, after="c0.a F1")                                   # c0.a, forward, microbatch 1, 1.2 KiB
    wait_c0_b_F1 = wait(gather_c0_b_F1)                                   # c0.b, forward, microbatch 1, 1.2 KiB
    gather_c1_F0 = gather("c1")                                           # c1, forward, microbatch 0, 20 B, ahead for c1 F0
    compute(wait_c0_b_F1, event="c0.b F1")                                # c0.b, forward, microbatch 1, 1.2 KiB
    free(wait_c0_b_F1, after="c0.b F1")                                   # c0.b, forward, microbatch 1, 1.2 KiB
    free(wait_c0_F0, after="c0 F1")                                       # c0, forward, microbatch 1, 20 B

# chunk c1, forward, microbatch 0
    wait_c1_F0 = wait(gather_c1_F0)                                       # c1, forward, microbatch 0, 20 B
    gather_c1_a_F0 = gather("c1.a")                                       # c1.a, forward, microbatch 0, 1.2 KiB, ahead for c1.a F0
    compute(wait_c1_F0, event="c1 F0")                                    # c1, forward, microbatch 0, 20 B
    wait_c1_a_F0 = wait(gather_c1_a_F0)                                   # c1.a, forward, microbatch 0, 1.2 KiB
    gather_c1_b_F0 = gather("c1.b")                                       # c1.b, forward, microbatch 0, 1.2 KiB, ahead for c1.b F0
    compute(wait_c1_a_F0, event="c1.a F0")                                # c1.a, forward, microbatch 0, 1.2 KiB
    free(wait_c1_a_F0, after="c1.a F0")                                   # c1.a, forward, microbatch 0, 1.2 KiB
    wait_c1_b_F0 = wait(gather_c1_b_F0)                                   # c1.b, forward, microbatch 0, 1.2 KiB
    compute(wait_c1_b_F0, event="c1.b F0")                                # c1.b, forward, microbatch 0, 1.2 KiB
    free(wait_c1_b_F0, after="c1.b F0")                                   # c1.b, forward, microbatch 0, 1.2 KiB

# chunk c1, forward, microbatch 1
    gather_c1_a_F1 = gather("c1.a")                                       # c1.a, forward, microbatch 1, 1.2 KiB, ahead for c1.a F1
    compute(wait_c1_F0, event="c1 F1")                                    # c1, forward, microbatch 1, 20 B
    wait_c1_a_F1 = wait(gather_c1_a_F1)                                   # c1.a, forward, microbatch 1, 1.2 KiB
    gather_c1_b_F1 = gather("c1.b")                                       # c1.b, forward, microbatch 1, 1.2 KiB, ahead for c1.b F1
    compute(wait_c1_a_F1, event="c1.a F1")                                # c1.a, forward, microbatch 1, 1.2 KiB
    free(wait_c1_a_F1, after="c1.a F1")                                   # c1.a, forward, microbatch 1, 1.2 KiB
    wait_c1_b_F1 = wait(gather_c1_b_F1)                                   # c1.b, forward, microbatch 1, 1.2 KiB
    compute(wait_c1_b_F1, event="c1.b F1")                                # c1.b, forward, microbatch 1, 1.2 KiB
    free(wait_c1_b_F1, after="c1.b F1")                                   # c1.b, forward, microbatch 1, 1.2 KiB

# chunk c1, backward, microbatch 0
    gather_c1_b_B0 = gather("c1.b")                                       # c1.b, backward, microbatch 0, 1.2 KiB, ahead for c1.b B0
    compute(wait_c1_F0, event="c1 B0")                                    # c1, backward, microbatch 0, 20 B
    wait_c1_b_B0 = wait(gather_c1_b_B0)                                   # c1.b, backward, microbatch 0, 1.2 KiB
    gather_c1_a_B0 = gather("c1.a")                                       # c1.a, backward, microbatch 0, 1.2 KiB, ahead for c1.a B0
    compute(wait_c1_b_B0, event="c1.b B0")                                # c1.b, backward, microbatch 0, 1.2 KiB
    free(wait_c1_b_B0, after="c1.b B0")                                   # c1.b, backward, microbatch 0, 1.2 KiB
    reduce("c1.b", after="c1.b B0")                                       # c1.b, backward, microbatch 0, 2.3 KiB
    wait_c1_a_B0 = wait(gather_c1_a_B0)                                   # c1.a, backward, microbatch 0, 1.2 KiB
    compute(wait_c1_a_B0, event="c1.a B0")                                # c1.a, backward, microbatch 0, 1.2 KiB
    free(wait_c1_a_B0, after="c1.a B0")                                   # c1.a, backward, microbatch 0, 1.2 KiB
    reduce("c1.a", after="c1.a B0")                                       # c1.a, backward, microbatch 0, 2.3 KiB
    reduce("c1", after="c1 B0")                                           # c1, backward, microbatch 0, 40 B

# chunk c1, backward, microbatch 1
    gather_c1_b_B1 = gather("c1.b")                                       # c1.b, backward, microbatch 1, 1.2 KiB, ahead for c1.b B1
    compute(wait_c1_F0, event="c1 B1")                                    # c1, backward, microbatch 1, 20 B
    wait_c1_b_B1 = wait(gather_c1_b_B1)                                   # c1.b, backward, microbatch 1, 1.2 KiB
    gather_c1_a_B1 = gather("c1.a")                                       # c1.a, backward, microbatch 1, 1.2 KiB, ahead for c1.a B1
    compute(wait_c1_b_B1, event="c1.b B1")                                # c1.b, backward, microbatch 1, 1.2 KiB
    free(wait_c1_b_B1, after="c1.b B1")                                   # c1.b, backward, microbatch 1, 1.2 KiB
    reduce("c1.b", after="c1.b B1")                                       # c1.b, backward, microbatch 1, 2.3 KiB
    wait_c1_a_B1 = wait(gather_c1_a_B1)                                   # c1.a, backward, microbatch 1, 1.2 KiB
    gather_c0_B0 = gather("c0")                                           # c0, backward, microbatch 0, 20 B, ahead for c0 B0
    compute(wait_c1_a_B1, event="c1.a B1")                                # c1.a, backward, microbatch 1, 1.2 KiB
    free(wait_c1_a_B1, after="c1.a B1")                                   # c1.a, backward, microbatch 1, 1.2 KiB
    reduce("c1.a", after="c1.a B1")                                       # c1.a, backward, microbatch 1, 2.3 KiB
    free(wait_c1_F0, after="c1 B1")                                       # c1, backward, microbatch 1, 20 B
    reduce("c1", after="c1 B1")                                           # c1, backward, microbatch 1, 40 B

# chunk c0, backward, microbatch 0
    wait_c0_B0 = wait(gather_c0_B0)                                       # c0, backward, microbatch 0, 20 B
    gather_c0_b_B0 = gather("c0.b")                                       # c0.b, backward, microbatch 0, 1.2 KiB, ahead for c0.b B0
    compute(wait_c0_B0, event="c0 B0")                                    # c0, backward, microbatch 0, 20 B
    wait_c0_b_B0 = wait(gather_c0_b_B0)                                   # c0.b, backward, microbatch 0, 1.2 KiB
    gather_c0_a_B0 = gather("c0.a")                                       # c0.a, backward, microbatch 0, 1.2 KiB, ahead for c0.a B0
    compute(wait_c0_b_B0, event="c0.b B0")                                # c0.b, backward, microbatch 0, 1.2 KiB
    free(wait_c0_b_B0, after="c0.b B0")                                   # c0.b, backward, microbatch 0, 1.2 KiB
    reduce("c0.b", after="c0.b B0")                                       # c0.b, backward, microbatch 0, 2.3 KiB
    wait_c0_a_B0 = wait(gather_c0_a_B0)                                   # c0.a, backward, microbatch 0, 1.2 KiB
    compute(wait_c0_a_B0, event="c0.a B0")                                # c0.a, backward, microbatch 0, 1.2 KiB
    free(wait_c0_a_B0, after="c0.a B0")                                   # c0.a, backward, microbatch 0, 1.2 KiB
    reduce("c0.a", after="c0.a B0")                                       # c0.a, backward, microbatch 0, 2.3 KiB
    reduce("c0", after="c0 B0")                                           # c0, backward, microbatch 0, 40 B

# chunk c0, backward, microbatch 1
    gather_c0_b_B1 = gather("c0.b")                                       # c0.b, backward, microbatch 1, 1.2 KiB, ahead for c0.b B1
    compute(wait_c0_B0, event="c0 B1")                                    # c0, backward, microbatch 1, 20 B
    wait_c0_b_B1 = wait(gather_c0_b_B1)                                   # c0.b, backward, microbatch 1, 1.2 KiB
    gather_c0_a_B1 = gather("c0.a")                                       # c0.a, backward, microbatch 1, 1.2 KiB, ahead for c0.a B1
    compute(wait_c0_b_B1, event="c0.b B1")                                # c0.b, backward, microbatch 1, 1.2 KiB
    free(wait_c0_b_B1, after="c0.b B1")                                   # c0.b, backward, microbatch 1, 1.2 KiB
    reduce("c0.b", after="c0.b B1")                                       # c0.b, backward, microbatch 1, 2.3 KiB
    wait_c0_a_B1 = wait(gather_c0_a_B1)                                   # c0.a, backward, microbatch 1, 1.2 KiB
    compute(wait_c0_a_B1, event="c0.a B1")                                # c0.a, backward, microbatch 1, 1.2 KiB
    free(wait_c0_a_B1, after="c0.a B1")                                   # c0.a, backward, microbatch 1, 1.2 KiB
    reduce("c0.a", after="c0.a B1")                                       # c0.a, backward, microbatch 1, 2.3 KiB
    free(wait_c0_B0, after="c0 B1")                                       # c0, backward, microbatch 1, 20 B
    reduce("c0", after="c0 B1")                                           # c0, backward, microbatch 1, 40 B""",
        )

    def test_window_of_one_chunk_without_lookahead_and_one_reduction(self) -> None:
        window = trace("m F0: a b; m B0: b a; m F1: a b; m B1: b a", frozen={"m.b"})
        options = PassOptions(0, 0, reduce_gradients="per_window")
        self.assertExpectedInline(
            str(plan(window, options)),
            """\
# program: 8 events, 2 units, 1 chunk; 8 gathers (0 ahead), 8 frees, 1 reduction; peak 200 B resident, 400 B of gradients kept

# chunk m, forward, microbatch 0
    gather_m_a_F0 = gather("m.a")                                         # m.a, forward, microbatch 0, 200 B
    wait_m_a_F0 = wait(gather_m_a_F0)                                     # m.a, forward, microbatch 0, 200 B
    compute(wait_m_a_F0, event="m.a F0")                                  # m.a, forward, microbatch 0, 200 B
    free(wait_m_a_F0, after="m.a F0")                                     # m.a, forward, microbatch 0, 200 B
    gather_m_b_F0 = gather("m.b")                                         # m.b, forward, microbatch 0, 200 B
    wait_m_b_F0 = wait(gather_m_b_F0)                                     # m.b, forward, microbatch 0, 200 B
    compute(wait_m_b_F0, event="m.b F0")                                  # m.b, forward, microbatch 0, 200 B
    free(wait_m_b_F0, after="m.b F0")                                     # m.b, forward, microbatch 0, 200 B

# chunk m, backward, microbatch 0
    gather_m_b_B0 = gather("m.b")                                         # m.b, backward, microbatch 0, 200 B
    wait_m_b_B0 = wait(gather_m_b_B0)                                     # m.b, backward, microbatch 0, 200 B
    compute(wait_m_b_B0, event="m.b B0")                                  # m.b, backward, microbatch 0, 200 B
    free(wait_m_b_B0, after="m.b B0")                                     # m.b, backward, microbatch 0, 200 B
    gather_m_a_B0 = gather("m.a")                                         # m.a, backward, microbatch 0, 200 B
    wait_m_a_B0 = wait(gather_m_a_B0)                                     # m.a, backward, microbatch 0, 200 B
    compute(wait_m_a_B0, event="m.a B0")                                  # m.a, backward, microbatch 0, 200 B
    free(wait_m_a_B0, after="m.a B0")                                     # m.a, backward, microbatch 0, 200 B

# chunk m, forward, microbatch 1
    gather_m_a_F1 = gather("m.a")                                         # m.a, forward, microbatch 1, 200 B
    wait_m_a_F1 = wait(gather_m_a_F1)                                     # m.a, forward, microbatch 1, 200 B
    compute(wait_m_a_F1, event="m.a F1")                                  # m.a, forward, microbatch 1, 200 B
    free(wait_m_a_F1, after="m.a F1")                                     # m.a, forward, microbatch 1, 200 B
    gather_m_b_F1 = gather("m.b")                                         # m.b, forward, microbatch 1, 200 B
    wait_m_b_F1 = wait(gather_m_b_F1)                                     # m.b, forward, microbatch 1, 200 B
    compute(wait_m_b_F1, event="m.b F1")                                  # m.b, forward, microbatch 1, 200 B
    free(wait_m_b_F1, after="m.b F1")                                     # m.b, forward, microbatch 1, 200 B

# chunk m, backward, microbatch 1
    gather_m_b_B1 = gather("m.b")                                         # m.b, backward, microbatch 1, 200 B
    wait_m_b_B1 = wait(gather_m_b_B1)                                     # m.b, backward, microbatch 1, 200 B
    compute(wait_m_b_B1, event="m.b B1")                                  # m.b, backward, microbatch 1, 200 B
    free(wait_m_b_B1, after="m.b B1")                                     # m.b, backward, microbatch 1, 200 B
    gather_m_a_B1 = gather("m.a")                                         # m.a, backward, microbatch 1, 200 B
    wait_m_a_B1 = wait(gather_m_a_B1)                                     # m.a, backward, microbatch 1, 200 B
    compute(wait_m_a_B1, event="m.a B1")                                  # m.a, backward, microbatch 1, 200 B
    free(wait_m_a_B1, after="m.a B1")                                     # m.a, backward, microbatch 1, 200 B
    reduce("m.a", after="m.a B1")                                         # m.a, backward, microbatch 1, 400 B""",
        )

    def test_program_before_its_passes_shows_computes_only(self) -> None:
        self.assertExpectedInline(
            str(Program.from_trace(trace("m F0: a; m B0: a"))),
            """\
# program: 2 events, 1 unit, 1 chunk; 0 gathers (0 ahead), 0 frees, 0 reductions; peak 0 B resident

# chunk m, forward, microbatch 0
    compute(event="m.a F0")                                               # m.a, forward, microbatch 0, 200 B

# chunk m, backward, microbatch 0
    compute(event="m.a B0")                                               # m.a, backward, microbatch 0, 200 B""",
        )


def test_print_readable_prints_what_it_returns(capsys: pytest.CaptureFixture[str]) -> None:
    program = plan(trace("m F0: a; m B0: a"))
    text = program.print_readable()
    assert capsys.readouterr().out == text + "\n"
    assert program.print_readable(print_output=False) == str(program) == text
    assert capsys.readouterr().out == ""


def test_every_node_has_one_line() -> None:
    program = plan(trace(TWO_CHUNKS))
    lines = [line for line in str(program).splitlines() if line.startswith("    ")]
    nodes = [node for node in program.graph_module.graph.nodes if operation(node)]
    assert len(lines) == len(nodes)
    for line, node in zip(lines, nodes, strict=True):
        assert f"{operation(node)}(" in line


def test_printed_operations_are_valid_python() -> None:
    compile("if True:\n" + str(plan(trace(TWO_CHUNKS))), "program", "exec")


def test_from_trace_has_one_compute_per_event_in_order() -> None:
    window = trace(TWO_CHUNKS)
    program = Program.from_trace(window)
    labels = [node.kwargs["event"] for node in program.graph_module.graph.nodes if node.kwargs]
    assert labels == [str(event) for event in window]
    assert program.provides == {"computes"}


def test_from_trace_refuses_two_events_with_one_label() -> None:
    window = trace("m F0: a")
    twice = Trace(window.units, window.events * 2, (0, 1), frozenset())
    with pytest.raises(ValueError, match=r"event 1 \(m.a F0\) appears twice"):
        Program.from_trace(twice)


def test_nodes_are_named_after_operation_and_event() -> None:
    program = plan(trace("m F0: layers.0; m B0: layers.0"))
    names = [node.name for node in program.graph_module.graph.nodes]
    assert names == [
        "gather_m_layers_0_F0",
        "wait_m_layers_0_F0",
        "compute_m_layers_0_F0",
        "compute_m_layers_0_B0",
        "free_m_layers_0_B0",
        "reduce_m_layers_0_B0",
        "output",
    ]


def test_units_whose_names_differ_only_in_punctuation_keep_apart() -> None:
    program = plan(trace("m F0: a.b a_b; m B0: a_b a.b"))
    names = [node.name for node in program.graph_module.graph.nodes]
    assert len(set(names)) == len(names)
    assert [step.event.unit for step in program.steps] == ["m.a.b", "m.a_b", "m.a_b", "m.a.b"]


def test_graph_is_runnable_python() -> None:
    assert plan(trace(TWO_CHUNKS)).graph_module() == ()
    assert wait(gather("c0")) == Full("c0")
    assert gather("c0") == Handle("c0")


def test_dead_code_elimination_keeps_every_operation() -> None:
    program = plan(trace(TWO_CHUNKS))
    graph = program.copy_graph()
    graph.eliminate_dead_code()
    assert len(graph.nodes) == len(program.graph_module.graph.nodes)


def test_copy_graph_keeps_names_and_leaves_the_program_alone() -> None:
    program = plan(trace("m F0: a; m B0: a"))
    before = str(program)
    graph = program.copy_graph()
    nodes = zip(graph.nodes, program.graph_module.graph.nodes, strict=True)
    assert all(copy.name == node.name and copy is not node for copy, node in nodes)
    graph.erase_node(next(iter(reversed(graph.find_nodes(op="output")))))
    assert str(program) == before
    program.verify()


def event(unit: str, phase: str, occurrence: int = 0) -> Event:
    assert phase in ("F", "B")
    return Event(unit, "F" if phase == "F" else "B", occurrence)


def test_steps_name_what_happens_around_each_event() -> None:
    program = plan(trace("m F0: *(a b); m B0: *(b a)"))
    assert program.steps == (
        Step(event("m", "F"), ("m",), True, ("m.a",), (), ()),
        Step(event("m.a", "F"), (), True, ("m.b",), ("m.a",), ()),
        Step(event("m.b", "F"), (), True, (), ("m.b",), ()),
        Step(event("m", "B"), (), False, ("m.b",), ("m",), ("m",)),
        Step(event("m.b", "B"), (), True, ("m.a",), ("m.b",), ("m.b",)),
        Step(event("m.a", "B"), (), True, (), ("m.a",), ("m.a",)),
    )


def test_steps_without_lookahead_gather_on_demand() -> None:
    program = plan(trace("m F0: a; m B0: a"), PassOptions(0, 0))
    assert program.steps == (
        Step(event("m.a", "F"), ("m.a",), True, (), ("m.a",), ()),
        Step(event("m.a", "B"), ("m.a",), True, (), ("m.a",), ("m.a",)),
    )


def test_steps_free_at_the_use_that_ends_last_not_the_one_that_begins_last() -> None:
    # The unit calls itself: the inner use shares the value and must not free it.
    program = plan(trace("m F0: a(b a)"))
    frees = {str(step.event): step.frees for step in program.steps}
    assert frees == {"m.a F0": ("m.a",), "m.b F0": ("m.b",), "m.a F1": ()}
