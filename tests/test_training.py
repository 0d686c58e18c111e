"""Training through a context equals an unsharded, unpipelined reference.

Each test runs real ranks. Eager hooks and the "eager" region compiler run the very
kernels of the reference, so gradients and weights are compared bit for bit; Inductor's
within a tolerance.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from ranks import RankPools
from training import ORDERS, POLICIES, AcquireSpy, loss_of, make_chunks, make_data, set_up

MICROBATCHES = 3


RARE = {("one_by_one", "bf16"), ("chunk_by_chunk", "bf16")}
CASES = [
    # bf16 in one order in every run, in all of them with `-m soak`.
    pytest.param(order, policy, marks=pytest.mark.soak if (order, policy) in RARE else ())
    for order in ORDERS
    for policy in POLICIES
]


def _train(order: str, policy: str, region_compiler: str | None, steps: int) -> None:
    setup = set_up(make_chunks(), policy, region_compiler)
    context = setup.context
    actions = list(ORDERS[order](2, MICROBATCHES))
    exact = region_compiler in (None, "eager")
    tolerance = 1e-5 if policy == "fp32" else None
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


@pytest.mark.parametrize(("order", "policy"), CASES)
def test_eager_recorded_training_equals_the_reference_exactly(
    ranks: RankPools, order: str, policy: str
) -> None:
    ranks(2).run(_train, order, policy, None, 3)


@pytest.mark.parametrize(("order", "policy"), CASES)
def test_compiled_training_without_inductor_equals_the_reference_exactly(
    ranks: RankPools, order: str, policy: str
) -> None:
    ranks(2).run(_train, order, policy, "eager", 3, timeout=240)


@pytest.mark.parametrize("policy", [pytest.param("fp32", marks=pytest.mark.soak), "bf16"])
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


def _with_options(region_compiler: str | None, policy: str, options: dict[str, Any]) -> None:
    setup = set_up(make_chunks(), policy, region_compiler, **options)
    context = setup.context
    recorded = context.mode == "recorded"
    microbatches = MICROBATCHES if recorded else 1
    # Kept gradients are added up before the ranks are averaged, not after.
    exact = options.get("reduce_gradients") != "per_window"
    actions = list(ORDERS["interleaved" if recorded else "one_by_one"](2, microbatches))
    for step in range(3):
        before = context.stats.gathers, context.stats.on_demand_gathers, context.stats.reductions
        setup.step(actions, make_data(step, microbatches), exact, tolerance=1e-4)
        stats = context.stats
        if recorded and not step:
            continue
        program = context.program
        assert program is not None
        calls = [n for n in program.graph_module.graph.nodes if n.op == "call_function"]
        planned = [str(n.target.__name__) for n in calls]
        assert stats.gathers - before[0] == planned.count("gather")
        assert stats.reductions - before[2] == planned.count("reduce")
        if "forward_prefetch" not in options:
            assert stats.on_demand_gathers - before[1] == 1
    assert context.stats.divergences == 0


@pytest.mark.parametrize("region_compiler", [None, "eager"])
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("fp32", {"reduce_gradients": "per_window"}),
        ("bf16", {"reduce_gradients": "per_window"}),
        ("fp32", {"forward_prefetch": 0, "backward_prefetch": 0}),
        ("fp32", {"forward_prefetch": 5000, "backward_prefetch": 10**9}),
    ],
    ids=["per_window", "per_window-bf16", "no_prefetch", "long_prefetch"],
)
def test_each_option_keeps_the_step_right_and_the_counts_as_planned(
    ranks: RankPools, region_compiler: str | None, policy: str, options: dict[str, Any]
) -> None:
    ranks(2).run(_with_options, region_compiler, policy, options, timeout=240)


def _register(region_compiler: str | None) -> None:
    """One autograd pass through both chunks, as in ordinary training."""
    setup = set_up(make_chunks(), "fp32", region_compiler, mode="registration")
    context = setup.context
    for step in range(3):
        data = make_data(step, 1)
        tokens, targets = data[0]
        value = tokens[dist.get_rank()]
        for chunk in setup.callables:
            value = chunk(value)
        assert context.program is not None, "known before the backward"
        loss_of(value, targets[dist.get_rank()]).backward()
        assert context.stats.windows == step + 1, "closed by the end of the backward"
        assert context.stats.on_demand_gathers == step + 1
        setup.reference.accumulate(data)
        setup.compare("gradient", lambda p: p.grad, exact=True, tolerance=0)
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        setup.reference_optimizer.step()
        setup.reference_optimizer.zero_grad()
    assert context.stats.recorded_windows == context.stats.divergences == 0


@pytest.mark.parametrize("region_compiler", [None, "eager"])
def test_registration_mode_replays_from_the_first_step_on(
    ranks: RankPools, region_compiler: str | None
) -> None:
    ranks(2).run(_register, region_compiler, timeout=240)
