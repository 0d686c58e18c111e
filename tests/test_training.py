"""Training through a context equals an unsharded, unpipelined reference.

Each test runs real ranks. Eager hooks and the "eager" region compiler run the very
kernels of the reference, so gradients and weights are compared bit for bit; Inductor's
within a tolerance.
"""

from __future__ import annotations

import pytest

from ranks import RankPools
from training import ORDERS, AcquireSpy, make_chunks, make_data, set_up

MICROBATCHES = 3


def _train(order: str, policy: str, region_compiler: str | None, steps: int) -> None:
    setup = set_up(make_chunks(), policy, region_compiler)
    context = setup.context
    actions = list(ORDERS[order](2, MICROBATCHES))
    exact = region_compiler in (None, "eager")
    tolerance = 1e-5 if policy == "fp32" else 1e-2
    for step in range(steps):
        before = context.stats.gathers, context.stats.on_demand_gathers, context.stats.reductions
        with AcquireSpy() as spy:
            setup.step(actions, make_data(step, MICROBATCHES), exact, tolerance)
        stats = context.stats
        gathers, on_demand, reductions = (
            now - then
            for now, then in zip(
                (stats.gathers, stats.on_demand_gathers, stats.reductions), before, strict=True
            )
        )
        program = context.program
        assert program is not None
        assert context.trace is not None
        assert len(spy.uses) == len(context.trace), "one use per event"
        assert [name for name, _ in spy.uses] == [event.unit for event in context.trace]
        if step == 0:
            assert on_demand == gathers > 0
            continue
        nodes = [
            str(node.target.__name__)
            for node in program.graph_module.graph.nodes
            if node.op == "call_function"
        ]
        assert gathers == nodes.count("gather")
        assert reductions == nodes.count("reduce")
        assert on_demand == 1
        late = [(place, name) for place, (name, there) in enumerate(spy.uses) if not there]
        assert late == [(0, context.trace[0].unit)], f"not there before their event: {late}"
    assert context.stats.recorded_windows == 1
    assert context.stats.replayed_windows == steps - 1
    assert context.stats.divergences == 0
    assert not context.fallbacks


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("order", list(ORDERS))
def test_eager_recorded_training_equals_the_reference_exactly(
    ranks: RankPools, order: str, policy: str
) -> None:
    ranks(2).run(_train, order, policy, None, 3)


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("order", list(ORDERS))
def test_compiled_training_without_inductor_equals_the_reference_exactly(
    ranks: RankPools, order: str, policy: str
) -> None:
    ranks(2).run(_train, order, policy, "eager", 3, timeout=240)


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_training_through_inductor_equals_the_reference_within_tolerance(
    ranks: RankPools, policy: str
) -> None:
    ranks(2).run(_train, "interleaved", policy, "inductor", 3, timeout=300)


def _same_program() -> tuple[str, str]:
    fingerprints = []
    for region_compiler in (None, "eager"):
        setup = set_up(make_chunks(), "fp32", region_compiler)
        setup.step(list(ORDERS["interleaved"](2, 2)), make_data(0, 2), exact=True)
        assert setup.context.trace is not None
        fingerprints.append(setup.context.trace.fingerprint)
    return fingerprints[0], fingerprints[1]


def test_eager_and_compiled_windows_record_the_same_trace(ranks: RankPools) -> None:
    for eager, compiled in ranks(2).run(_same_program, timeout=240):
        assert eager == compiled
