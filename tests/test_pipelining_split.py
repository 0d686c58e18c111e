"""Backwards in two halves, as zero-bubble schedules run them: what is split, and what is not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining.schedules import BACKWARD_INPUT, BACKWARD_WEIGHT
from torch.torch_version import TorchVersion

import fsdp_fx
import split_models as models
from fsdp_fx.occupancy import outline_of
from pipeline_jobs import DIM, Block, Chunk, Job, Layout, Order, events_of, shard
from ranks import RankPools

# Two stages. On one rank, but for torch 2.11, which has it send to itself.
LOCAL = TorchVersion(torch.__version__) >= "2.13"
LAYOUT = Layout(pp=1 if LOCAL else 2)
RANKS = LAYOUT.pp * LAYOUT.shards
TOGETHER = "0F0,1F0,1I0,0F1,0I0,1F1,1I1,1W0,0W0,0I1,1W1,0F2,1F2,1I2,0I2,0W1,1W2,0W2"
OTHER = "0F0,1F0,1I0,0F1,0I0,1F1,1W0,1I1,0W0,0I1,0F2,1F2,1W1,1I2,0I2,0W1,1W2,0W2"
THREE_STAGES = "0F0,1F0,2F0,0F1,2I0,1I0,1F1,0I0,2F1,2W0,1W0,2I1,1I1,0W0,0I1,2W1,1W1,0W1"
WHOLE = "0F0,1F0,1B0,0F1,0B0,1F1,1B1,0B1,0F2,1F2,1B2,0B2"
SHORTER = "0F0,1F0,1I0,0F1,0I0,1F1,1I1,1W0,0W0,0I1,1W1,0W1"


def order(actions: str) -> Order:
    """An order of two stages, on as many ranks as there are."""
    if LOCAL:
        return Order((actions,))
    return Order(tuple(",".join(a for a in actions.split(",") if a[0] == stage) for stage in "01"))


def two_blocks(blocks: int) -> Chunk:
    return Chunk(2)


def job(actions: str = TOGETHER, **options: Any) -> Job:
    options.setdefault("make_chunk", two_blocks)
    return Job(order(actions), layout=LAYOUT, **options)


local = pytest.mark.skipif(not LOCAL, reason="needs both stages on one rank")


class Case(NamedTuple):
    """A kind of stage.

    Attributes:
        chunk: its class.
        whole: why its backward is not split; None if it is.
        options: of the job.
        actions: the order.
    """

    chunk: Callable[[int], nn.Module]
    whole: str | None = None
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed
    actions: str = TOGETHER


def _hook_submodules(context: fsdp_fx.FSDPContext, chunks: list[Any]) -> None:
    for chunk in chunks:
        context.hook_owner(chunk.blocks[0], [chunk.blocks[0].up, chunk.blocks[0].down])


def _compile_blocks(context: fsdp_fx.FSDPContext, chunks: list[Any]) -> None:
    for chunk in chunks:
        chunk.blocks[0].compile(backend="aot_eager")


CASES = {
    "plain": Case(models.Chunk),
    "frozen weights": Case(models.FrozenWeights),
    "frozen units": Case(models.FrozenBlocks),
    "LoRA": Case(models.LowRank),
    "outputs not used": Case(models.Unused, None, {"shard": models.shard_aside}),
    "two dtypes": Case(models.TwoDtypes),
    "several inputs and outputs": Case(models.TwoOfEach),
    "units in units": Case(models.Nested, None, {"shard": models.shard_linears}),
    "together": Case(
        models.Nested,
        None,
        {
            "shard": models.shard_linears,
            "adopt": lambda chunks: {"together": [b for c in chunks for b in c.blocks]},
        },
    ),
    "two modules in a unit": Case(models.Chunk, None, {"shard": models.shard_in_pairs}),
    "a Function with two outputs": Case(models.TwoResults),
    "a weight that a unit makes": Case(models.Made, None, {"shard": models.shard_aside}),
    "a reentrant checkpoint": Case(
        models.Reentrant,
        "a reentrant checkpoint has one backward for all gradients",
        {"infer_shapes": False},  # which torch does with autograd.grad()
    ),
    "a checkpoint": Case(
        models.Checkpointed, "a checkpoint would run again for the gradients of every weight"
    ),
    "a compiled block": Case(
        models.Chunk, "a compiled backward is one graph", {"prepare": _compile_blocks}
    ),
    "a module used twice": Case(models.Twice, "a weight is used in two places"),
    "tied weights": Case(models.Tied, "a weight is used in two places"),
    "submodules called one by one": Case(
        models.Submodules,
        "the submodules of c{chunk}.blocks.0 are called one by one",
        {"prepare": _hook_submodules},
    ),
    "an input passed on": Case(
        models.PassesOn,
        "an output is a view, which torch cannot cut off from its graph",
        {},
        THREE_STAGES,
    ),
    "a weight apart": Case(
        models.Apart,
        "the gradient of a weight does not come by way of an input",
        {},
        THREE_STAGES,
    ),
}


def _run_cases(names: list[str]) -> None:
    for name in names:
        try:
            _run_case(CASES[name])
        except Exception as error:
            error.add_note(f"case: {name}")
            raise


def _run_case(case: Case) -> None:
    tried = job(case.actions, make_chunk=lambda blocks: case.chunk(2), **case.options)
    tried.check_step(0)
    for step in (1, 2):
        tried.check_counts(tried.counted(step))
    if 1 not in tried.owned:
        assert tried.context.fallbacks == ()
        return
    chunk = tried.owned.index(1)
    fallbacks = [str(fallback) for fallback in tried.context.fallbacks]
    actions = [action for action in tried.actions if action.stage_index == 1]

    def kinds(trained: bool) -> set[Any]:
        split = case.whole is None and trained
        return {BACKWARD_INPUT, BACKWARD_WEIGHT} if split else {BACKWARD_INPUT}

    if case.whole is None:
        assert fallbacks == []
    else:
        why = case.whole.format(chunk=chunk)
        where = f"stage 1 (chunk c{chunk})"
        assert fallbacks == [f"{where}: the whole backward runs in its input half: {why}"]
        assert (
            f"runs in its input half: {why} ({3 * tried.microbatches} times)"
            in tried.context.explain()
        )
    for spec in (unit.spec for unit in tried.context.units):
        if spec.chunk != f"c{chunk}" or "blocks" not in spec.name:
            continue
        uses = events_of(tried, spec.name, "F").count(0)  # two where it has two modules
        expected = [
            a.microbatch_index for a in actions if a.computation_type in kinds(spec.trainable)
        ]
        assert events_of(tried, spec.name, "B") == [e for e in expected for _ in range(uses)]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([n for n, case in CASES.items() if case.whole is None], id="split"),
        pytest.param(
            [
                name
                for name, case in CASES.items()
                if case.whole is not None and (LOCAL or case.actions != THREE_STAGES)
            ],
            id="whole",
        ),
    ],
)
def test_every_kind_of_stage_equals_the_reference_and_says_why_it_is_not_split(
    ranks: RankPools, names: list[str]
) -> None:
    ranks(RANKS).run(_run_cases, names)


def of_units(job: Job, chunk: str) -> list[str]:
    return [unit.spec.name for unit in job.context.units if unit.spec.chunk == chunk]


def after(job: Job, action: str, look: Callable[[], None]) -> None:
    """Call ``look`` once after each time that the schedule has done ``action``."""
    kind, index = (
        {"I": "backward_one_chunk", "W": "backward_weight_one_chunk"}[action[1]],
        action[2:],
    )
    for stage in job.stages:
        if str(stage.stage_index) != action[0]:
            continue
        method = getattr(stage, kind)

        def wrapped(chunk: int, *args: Any, method: Any = method, **kwargs: Any) -> None:
            method(chunk, *args, **kwargs)
            if str(chunk) == index:
                look()

        setattr(stage, kind, wrapped)


def _free_between_the_halves() -> None:
    tried = job(memory_budget=0, forward_prefetch=0, backward_prefetch=0)
    resident: list[list[str]] = []

    def look() -> None:
        units = tried.context.units
        resident.append([u.spec.name for u in units if u.unsharded or u.in_flight])

    after(tried, "1I0", look)
    for step in range(3):
        tried.check_step(step)
    # Recorded, and replayed: nothing stays from one half to the other.
    assert resident == [[], [], []]
    chunk = f"c{tried.owned.index(1)}"
    program = tried.context.program
    assert program is not None
    program.verify()
    units = of_units(tried, chunk)
    halves = _halves(tried, units[0])
    assert [kind for kind, _ in halves] == ["I", "I", "W", "W", "I", "W"]
    outline = outline_of(program)
    for unit in units:
        at = [position for _, position in _halves(tried, unit)]
        for interval in outline.intervals:
            # Those of microbatches 0 and 1 have events of others in between.
            assert interval.unit != unit or not {at[0], at[2]} <= {*interval.uses}
            assert interval.unit != unit or not {at[1], at[3]} <= {*interval.uses}
    # Only what is used twice in a row is there for both of its uses.
    assert tried.context.stats.peak_resident_bytes <= 2 * max(
        unit.spec.bytes for unit in tried.context.units
    )
    text = program.print_readable(print_output=False)
    for microbatch in range(3):
        assert text.count(f"# chunk {chunk}, backward, microbatch {microbatch}\n") == 2


def _halves(job: Job, unit: str) -> list[tuple[str, int]]:
    """Which half each backward event of ``unit`` is, and where it is."""
    trace = job.context.trace
    assert trace is not None
    positions = [p for p, e in enumerate(trace) if e.unit == unit and e.phase == "B"]
    kinds = [a.computation_type for a in job.actions if a.stage_index == 1]
    halves = [{BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W"}.get(kind) for kind in kinds]
    return list(zip((h for h in halves if h is not None), positions, strict=True))


@local
def test_between_its_halves_a_backward_holds_no_unit_and_both_have_its_microbatch(
    ranks: RankPools,
) -> None:
    ranks(RANKS).run(_free_between_the_halves)


def _with_options() -> None:
    for options in (
        {"reduce_gradients": "per_window"},
        {"memory_budget": 1 << 20, "reduce_gradients": "planned"},
        {"forward_prefetch": 0, "backward_prefetch": 0},
        {"forward_prefetch": 1 << 20, "backward_prefetch": 1 << 20},
    ):
        tried = job(**options)
        units = len(tried.context.units)
        tried.check_step(0)
        for step in (1, 2):
            counted = tried.counted(step)
            tried.check_counts(counted)
            once = options.get("reduce_gradients") is not None
            assert counted["reductions"] == (1 if once else 3) * units


def test_split_backwards_are_right_with_every_option(ranks: RankPools) -> None:
    ranks(RANKS).run(_with_options)


def _replicate(actions: str) -> None:
    tried = Job(Order((actions,)), layout=Layout(pp=1, replicas=2), make_chunk=two_blocks)
    units = len(tried.context.units)
    tried.check_step(0)
    counted = tried.counted(1)
    tried.check_counts(counted)
    assert counted["reductions"] == 3 * units
    assert counted["all_reductions"] == units  # over the replicas once a window


@local
def test_halves_of_replicated_units_are_all_reduced_once(ranks: RankPools) -> None:
    ranks(4).run(_replicate, TOGETHER)


def _leave_the_program() -> None:
    tried = job()
    stats = tried.context.stats
    tried.check_step(0)
    tried.check_step(1)
    for position, (actions, divergences) in enumerate(
        [(OTHER, 1), (TOGETHER, 1), (OTHER, 1), (WHOLE, 2), (SHORTER, 3), (TOGETHER, 3), (WHOLE, 3)]
    ):
        tried.set_schedule(order(actions))
        tried.check_step(2 + position)
        if LOCAL:
            assert stats.divergences == divergences, actions
        assert stats.resident_bytes == 0
    assert stats.switches > 0


def test_a_window_may_leave_its_program_between_two_halves(ranks: RankPools) -> None:
    ranks(RANKS).run(_leave_the_program)


def _evaluate_between_the_halves() -> None:
    tried = job()
    x = torch.ones(2, DIM)
    outputs: list[torch.Tensor] = []

    def evaluate() -> None:
        window, chunk = tried.context.window, tried.chunks[-1]
        cursor = window.cursor
        with tried.context.evaluation():
            outputs.append(chunk(x))
        outputs.append(torch.no_grad()(chunk)(x))
        assert window.cursor == cursor

    after(tried, "1I1", evaluate)
    for step in range(3):
        reference = tried.reference[tried.owned[-1]]
        expected = torch.no_grad()(reference)(x)
        tried.check_step(step)
        for output in outputs:
            torch.testing.assert_close(output.detach(), expected)
        outputs.clear()
    assert tried.context.stats.replayed_windows == 2
    assert tried.context.stats.divergences == 0


def test_an_evaluation_between_two_halves_changes_nothing(ranks: RankPools) -> None:
    ranks(RANKS).run(_evaluate_between_the_halves)


class _Failing(torch.autograd.Function):
    """The product of its inputs; its backward fails where it is told to."""

    fails = ""
    """Which half fails next: "I", "W" or neither."""
    weight_half: Callable[[], bool] = staticmethod(lambda: False)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        if _Failing.fails == ("W" if _Failing.weight_half() else "I"):
            _Failing.fails = ""
            raise ArithmeticError("told to fail")
        return gradients[0] * weight, (gradients[0] * x).sum(0)


class FailingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Failing.apply(super().forward(x), self.scale)
        return result


class FailingChunk(Chunk):
    def __init__(self, blocks: int) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList((Block(), FailingBlock(), Block()))


def _fail(where: str) -> None:
    tried = job(make_chunk=FailingChunk, infer_shapes=False)
    _Failing.weight_half = lambda: tried.context.window.in_weight_half
    window = tried.context.window
    for step, replays in enumerate((False, True, True)):
        assert (tried.context.trace is not None) == replays
        if where in "IW":
            _Failing.fails = where
            failing = contextlib.nullcontext()
        else:
            failing = _failing_after(tried, where)
        with failing, pytest.raises(Exception, match=r"told to fail|Failed to run stage backward"):
            tried.run(step)
        if where in "IW":
            with pytest.raises(fsdp_fx.IncompleteWindowError, match="an exception crossed"):
                tried.context.finish_grad_sync()
        else:
            with pytest.raises(fsdp_fx.IncompleteWindowError, match="is missing"):
                tried.context.finish_grad_sync()
        tried.context.abort()
        assert not window.is_open
        assert not window.in_weight_half
        assert window.input_half_of is None
        assert all(p.grad is None for p in tried.parameters)
        assert tried.context.stats.resident_bytes == 0
        tried.set_schedule(order(TOGETHER))  # torch's own does not recover
        tried.check_step(step)
    assert tried.context.stats.aborts == 3


@contextlib.contextmanager
def _failing_after(job: Job, action: str) -> Iterator[None]:
    def fail() -> None:
        raise ArithmeticError("told to fail")

    after(job, action, fail)
    yield


@local
@pytest.mark.parametrize("where", ["I", "W", "1I0", "1W0"])
def test_after_an_exception_in_or_between_halves_the_retry_equals_the_reference(
    ranks: RankPools, where: str
) -> None:
    ranks(RANKS).run(_fail, where)


def _leave_a_half_out() -> None:
    tried = job(scale_grads=False)
    tried.check_step(0)
    for step in (1, 2):
        actions = tried.schedule.pipeline_order_with_comms[tried.pp]
        actions[:] = [action for action in actions if str(action) != "1W1"]
        loss = tried.run(step)
        match = r"the backward of the weights of c1 in chunk c1, microbatch 1 is missing"
        with pytest.raises(fsdp_fx.IncompleteWindowError, match=match) as error:
            tried.context.finish_grad_sync()
        assert "\n" not in str(error.value)
        (stage,) = [stage for stage in tried.stages if stage.stage_index == 1]
        stage.backward_weight_one_chunk(1)
        tried.context.finish_grad_sync()
        tried.compare(step, loss)
        assert tried.context.stats.divergences == 1  # the same order both times


@local
def test_a_weight_half_that_is_missing_is_named_and_can_still_be_run(ranks: RankPools) -> None:
    ranks(RANKS).run(_leave_a_half_out)


def _delay_by_themselves(builder: bool) -> None:
    """Weight gradients that a layer computes when it is told to."""

    def prepare(context: fsdp_fx.FSDPContext, chunks: list[Any]) -> None:
        for chunk in chunks:
            chunk.blocks[1].delayed = True
            context.hook_owner(chunk.blocks[1], delayed_weight_gradients=True)

    # Shapes are inferred with a backward, which such a layer takes for one of its own.
    tried = job(make_chunk=models.Delayed, prepare=prepare, scale_grads=False, infer_shapes=False)

    def compute(chunk: Any) -> None:
        with tried.context.weight_gradients(chunk.blocks[1]):
            chunk.blocks[1].backward_weight()

    for step in range(3):
        if builder:
            for stage, chunk in zip(tried.stages, tried.chunks, strict=True):
                stage.dw_builder = lambda chunk=chunk: lambda: compute(chunk)
        loss = tried.run(step)
        for chunk in () if builder else tried.chunks:
            for _ in range(tried.microbatches):
                compute(chunk)
        tried.context.finish_grad_sync()
        tried.compare(step, loss)
    assert tried.context.stats.replayed_windows == 2
    reason = "are delayed by themselves"
    assert (reason in tried.context.explain()) == (not builder and 1 in tried.owned)


def test_layers_that_delay_their_weight_gradients_run_whole_or_with_a_dw_builder(
    ranks: RankPools,
) -> None:
    for builder in (False, True):
        ranks(RANKS).run(_delay_by_themselves, builder)


def _mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def sharding(chunk: Any, mesh: Any) -> None:
        shard(chunk, mesh, mp_policy=policy)

    gradients = []
    for actions in (TOGETHER, WHOLE):
        tried = job(actions, shard=sharding)
        for step in range(2):
            tried.run(step)
            tried.context.finish_grad_sync()
        gradients.append([p.grad.full_tensor() for p in tried.parameters])
    for split, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(split, whole, rtol=1e-6, atol=1e-6)


def test_in_mixed_precision_split_backwards_have_the_gradients_of_whole_ones(
    ranks: RankPools,
) -> None:
    ranks(RANKS).run(_mixed_precision)
