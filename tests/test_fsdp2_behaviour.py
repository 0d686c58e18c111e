"""What PyTorch's FSDP2 does alone happens with a context too.

Each case trains a model under FSDP2 alone and under FSDP2 with a context, which are compared
bit for bit, and whole, which says that they are right (:mod:`parity`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from fsdp_fx import FSDPContext
from models import DIM, Block, Chunk
from parity import (
    Loss,
    MakeOptimizer,
    Trio,
    Units,
    assert_same,
    batch,
    blocks,
    built,
    mean_square,
    momentum,
    sharded,
)
from test_semantics import count, on_two_ranks, refused

EAGER: list[dict[str, Any]] = [{"mode": "recorded"}, {"mode": "registration"}]
COMPILED: dict[str, Any] = {"mode": "recorded", "compiled": True}


# Training


class Nested(nn.Module):
    """Units inside of a unit that has parameters of its own, before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.inner = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(torch.tanh(self.first(x))))


class Outer(nn.Module):
    """Two of those, in a root with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Nested(), Nested()])
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return self.norm(x)


class Tied(nn.Module):
    """The first and the last layer of the root's unit share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)
        self.last.weight = self.first.weight
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.first(x)))


class Unused(Chunk):
    """A chunk with a parameter and a unit that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.randn(DIM))
        self.skipped = Block()


class Discarded(Chunk):
    """A chunk with a unit whose output is not in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.side = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.side(y)
        return y


class Checkpointed(Chunk):
    """A chunk whose blocks are recomputed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x)


def two_forwards(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Two forwards before the backward."""
    loss: torch.Tensor = (model(x) - model(x.flip(0)).tanh()).square().mean()
    return loss


def with_a_child(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A forward of the root, and one of a unit inside of it, called directly."""
    loss: torch.Tensor = mean_square(model, x)
    return loss + model.blocks[0](x).square().mean()


def nested_units(model: Outer) -> list[nn.Module]:
    return [*blocks(model), *model.parts]


@dataclass(frozen=True)
class Model:
    """What is trained, and how."""

    build: Callable[[], nn.Module] = Chunk
    units: Units = blocks
    loss: Loss = mean_square
    zeros: tuple[str, ...] = ()
    compiled: bool = False


CASES = {
    "nested units": Model(Outer, nested_units, compiled=True),
    "a shared parameter": Model(Tied),
    "what is never used": Model(Unused, zeros=("never",), compiled=True),
    "an output that is not in the loss": Model(Discarded),
    "recomputed blocks": Model(Checkpointed),
    "two forwards before a backward": Model(loss=two_forwards),
    "a unit called directly": Model(loss=with_a_child),
}


@on_two_ranks(
    case=[
        (name, options)
        for name, model in CASES.items()
        for options in (*EAGER, *[COMPILED] * model.compiled)
    ]
)
def test_training_is_that_of_fsdp2_alone(case: tuple[str, dict[str, Any]]) -> None:
    name, options = case
    model = CASES[name]
    trio = Trio(model.build, model.units, **options)
    trio.zeros.update(model.zeros)
    for _ in range(3):
        trio.step(model.loss)


def _optimizer(kind: Any, **options: Any) -> MakeOptimizer:
    return lambda parameters: kind(parameters, **options)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adam": _optimizer(torch.optim.Adam, lr=1e-2),
    "adam, one by one": _optimizer(torch.optim.Adam, lr=1e-2, foreach=False),
    "adamw, foreach": _optimizer(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw, fused": _optimizer(torch.optim.AdamW, lr=1e-2, fused=True),
    "adagrad": _optimizer(torch.optim.Adagrad, lr=1e-2),
}


@on_two_ranks(optimizer=OPTIMIZERS)
def test_any_optimizer_steps_as_under_fsdp2_alone(optimizer: str) -> None:
    # Adam divides by the root of squares: what is near zero is not near in a relative sense.
    trio = Trio(optimizer=OPTIMIZERS[optimizer], tolerance=1e-3)
    for _ in range(3):
        trio.step()
    for mine, theirs in zip(*(each.state.values() for each in trio.optimizers[:2]), strict=True):
        assert_same(mine, theirs)


def _lbfgs(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


def _step_with_closure(optimizer: torch.optim.Optimizer, model: Any, context: Any) -> list[float]:
    x = batch(1)[dist.get_rank()]
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mean_square(model, x)
        loss.backward()
        if context is not None:
            context.finish_grad_sync()
        losses.append(loss.item())
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return losses


@on_two_ranks(make=[momentum, _lbfgs])
def test_optimizer_with_a_closure_trains_as_under_fsdp2_alone(make: MakeOptimizer) -> None:
    trio = Trio(optimizer=make, tolerance=None)
    mine, theirs = trio.optimizers[:2]
    for _ in range(2):
        losses = _step_with_closure(mine, trio.ours, trio.context)
        assert losses == _step_with_closure(theirs, trio.plain, None)
        trio.compare(lambda parameter: parameter)
    assert len(losses) == trio.context.stats.windows / 2


# Gradient accumulation

ACCUMULATION: list[dict[str, Any]] = [
    # FSDP2 reduces after each backward, or with set_requires_gradient_sync() after the last.
    {"reduce_gradients": "per_backward"},
    {"reduce_gradients": "per_window"},
    {"reduce_gradients": "planned", "memory_budget": 0},
    {"reduce_gradients": "planned", "memory_budget": 2**30},
]


@on_two_ranks(
    case=[
        *((options, policy) for options in ACCUMULATION for policy in ("fp32", "bf16")),
        ({"reduce_gradients": "per_window", "compiled": True}, "bf16"),
    ]
)
def test_gradients_accumulate_as_under_fsdp2_alone(case: tuple[dict[str, Any], str]) -> None:
    options, policy = case
    trio = Trio(policy=POLICIES[policy], tolerance=TOLERANCES[policy], **options)
    for step in range(3):
        if options["reduce_gradients"] == "planned":
            # Everything is kept once there is a program, within a budget that has room.
            trio.keeps = bool(options["memory_budget"]) and step > 0
        trio.step(microbatches=3)
    program = trio.context.program
    assert program is not None
    assert count(program, "reduce") == (1 if trio.keeps else 3) * len(trio.context.units)


# Mixed precision


class Buffered(nn.Module):
    """Notes the dtypes that it sees; has buffers, and inputs of several kinds."""

    scale: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(DIM)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, DIM))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, *, more: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        dtype = self.norm.weight.dtype
        y = x.to(dtype)
        for block in self.blocks:
            y = block(y)
        y = self.norm(y.to(dtype) + more["float"].to(dtype)) * self.scale.to(dtype)
        self.seen.append((x.dtype, more["float"].dtype, more["int"].dtype, dtype, y.dtype))
        return y


def with_more(model: Any, x: torch.Tensor) -> torch.Tensor:
    output = model(x, more={"float": x.flip(1), "int": torch.arange(3)})
    module = getattr(model, "_orig_mod", model)
    module.seen.append((output.dtype, module.scale.dtype, module.scale.sum().item()))
    return mean_square(lambda value: value, output)


BF16, FP16 = torch.bfloat16, torch.float16
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    "bf16, reduced in bf16": MixedPrecisionPolicy(param_dtype=BF16),
    "fp16": MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=torch.float32),
    "reduced in bf16": MixedPrecisionPolicy(reduce_dtype=BF16),
    "output in fp32": MixedPrecisionPolicy(
        param_dtype=BF16, reduce_dtype=torch.float32, output_dtype=torch.float32
    ),
    "inputs as they are": MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False),
}
TOLERANCES = {name: 1e-5 if name == "fp32" else 5e-2 for name in POLICIES}


@on_two_ranks(
    case=[
        *((policy, options) for policy in POLICIES if policy != "fp32" for options in EAGER),
        ("output in fp32", COMPILED),
    ]
)
def test_mixed_precision_is_that_of_fsdp2_alone(case: tuple[str, dict[str, Any]]) -> None:
    policy, options = case
    trio = Trio(Buffered, policy=POLICIES[policy], tolerance=TOLERANCES[policy], **options)
    for _ in range(2):
        trio.step(with_more)
    assert trio.ours.seen[:2] == trio.plain.seen[:2]
    if not options.get("compiled"):
        assert trio.ours.seen == trio.plain.seen
    assert_same(dict(trio.ours.named_buffers()), dict(trio.plain.named_buffers()))
    assert trio.ours.scale.dtype == torch.float32
    assert trio.ours.calls == trio.plain.calls
    assert {parameter.dtype for parameter in trio.ours.parameters()} == {torch.float32}


# Clipping

CLIPPED: list[tuple[float, bool | None]] = [
    (1.0, None),
    (2.0, True),
    (2.0, False),
    (float("inf"), None),
    (float("inf"), False),
]


@on_two_ranks(norm=CLIPPED)
def test_clipped_gradients_are_those_of_fsdp2_alone(norm: tuple[float, bool | None]) -> None:
    order, foreach = norm
    trio = Trio()
    for limit in (1e-3, 1e3):  # scales them, leaves them
        trio.backwards(microbatches=2)
        before = [parameter.grad.full_tensor() for parameter in trio.ours.parameters()]
        totals: list[Any] = [
            nn.utils.clip_grad_norm_(model.parameters(), limit, order, foreach=foreach)
            for model in (trio.ours, trio.plain, trio.whole)
        ]
        assert_same(totals[0], totals[1])
        torch.testing.assert_close(totals[0].full_tensor(), totals[2])
        trio.compare(lambda parameter: parameter.grad)
        after = [parameter.grad.full_tensor() for parameter in trio.ours.parameters()]
        clipped = any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert clipped == (limit < 1)
        trio.update()


@on_two_ranks()
def test_clipping_in_two_steps_and_not_finite_norms_are_as_under_fsdp2_alone() -> None:
    trio = Trio()
    trio.backwards()
    totals = [
        nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        for model in (trio.ours, trio.plain, trio.whole)
    ]
    assert_same(totals[0], totals[1])
    for model, total in zip((trio.ours, trio.plain, trio.whole), totals, strict=True):
        nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, total)
    trio.update()
    scale = float("inf") if dist.get_rank() == 0 else 1.0  # one rank only
    trio.tolerance = None
    trio.backwards(scale=lambda loss: loss * scale)
    messages = []
    for model in trio.both():
        with pytest.raises(RuntimeError, match="non-finite") as error:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    trio.compare(lambda parameter: parameter.grad)


# Gradient scaling


class Scaled:
    """Scales the loss of each side in turn, and may let it overflow."""

    def __init__(self, scalers: list[Any], overflows: bool) -> None:
        self.scalers = iter(scalers)
        self.overflows = overflows

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = next(self.scalers).scale(loss)
        return scaled * float("inf") if self.overflows else scaled


@on_two_ranks(policy=["fp32", "fp16"])
def test_gradient_scaler_steps_and_skips_as_under_fsdp2_alone(policy: str) -> None:
    trio = Trio(policy=POLICIES[policy], tolerance=None)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2) for _ in range(2)]
    scales: list[float] = []
    for step in range(5):
        overflows = step == 2 and dist.get_rank() == 1  # on one rank only
        trio.backwards(scale=Scaled(scalers, overflows))
        before = [parameter.detach().clone() for parameter in trio.ours.parameters()]
        for scaler, optimizer, model in zip(scalers, trio.optimizers[:2], trio.both(), strict=True):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        trio.compare(lambda parameter: parameter)
        unchanged = all(
            torch.equal(old.to_local(), new.to_local())
            for old, new in zip(before, trio.ours.parameters(), strict=True)
        )
        # No rank steps where any has overflowed.
        assert unchanged == (step == 2)
        assert scalers[0].state_dict() == scalers[1].state_dict()
        scales.append(scalers[0].get_scale())
    assert scales == [64.0, 128.0, 64.0, 64.0, 128.0]


# Frozen parameters

FROZEN: dict[str, Callable[[Any], list[nn.Parameter]]] = {
    "a unit": lambda model: list(model.blocks[0].parameters()),
    "a part of each unit": lambda model: [block.up.weight for block in model.blocks],
    "the root": lambda model: list(model.norm.parameters()),
    "all but a bias": lambda model: [
        parameter for parameter in model.parameters() if parameter is not model.blocks[1].down.bias
    ],
}


@on_two_ranks(which=FROZEN, options=[{}, {"mode": "registration"}])
def test_frozen_parameters_train_as_under_fsdp2_alone(which: str, options: dict[str, Any]) -> None:
    """Frozen from the start, thawed after two steps, and frozen again."""

    def freeze(model: Any, trains: bool = False) -> None:
        for parameter in FROZEN[which](model):
            parameter.requires_grad_(trains)

    trio = Trio(prepare=freeze, **options)
    for step in range(5):
        if step in (2, 4):
            for model in (*trio.both(), trio.whole):
                freeze(model, trains=step == 2)
        trio.step()


# Ignored parameters


def _ignored(model: Any) -> dict[str, Any]:
    return {"ignored_params": {model.norm.weight, model.blocks[0].up.weight}}


@on_two_ranks(options=[*EAGER, COMPILED])
def test_ignored_parameters_are_left_alone_as_under_fsdp2_alone(options: dict[str, Any]) -> None:
    trio = Trio(sharding=_ignored, **options)
    names = {"norm.weight", "blocks.0.up.weight"}
    for _ in range(3):
        trio.local = names
        trio.backwards()
        for model in trio.both():  # as a user would
            for name in sorted(names):
                parameter = model.get_parameter(name)
                assert not isinstance(parameter, DTensor), name
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        trio.local = set()
        trio.compare(lambda parameter: parameter.grad)
        trio.update()


# FSDP2's methods that configure collectives


class CountedComm:
    """A custom collective that does what FSDP2's own does, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedGather(CountedComm):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        return dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class CountedScatter(CountedComm):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        return dist.reduce_scatter_tensor(
            output_tensor, input_tensor, group=group, op=op, async_op=async_op
        )


class CountedHook:
    """An all-reduce hook that makes what is reduced three times as large."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor) -> None:
        self.calls += 1
        output *= 3


@dataclass(frozen=True)
class Method:
    """A method of FSDP2, what it is called with, and what it does to gradients."""

    argument: Callable[[], Any]
    factor: float = 1.0
    counts: str | None = None  # which counter of the context its argument agrees with


METHODS = {
    "set_gradient_divide_factor": Method(lambda: 0.5, factor=4.0),
    "set_reduce_scatter_divide_factor": Method(lambda: 4.0, factor=0.5),
    "set_custom_all_gather": Method(CountedGather, counts="gathers"),
    "set_custom_reduce_scatter": Method(CountedScatter, counts="reductions"),
    "set_all_reduce_hook": Method(CountedHook, factor=3.0, counts="reductions"),
    "set_force_sum_reduction_for_comms": Method(lambda: True),
    "set_allocate_memory_from_process_group_for_comm": Method(lambda: True),
}


@on_two_ranks(
    method=METHODS,
    adopted=[False, True],
    options=[{}, {"reduce_gradients": "per_window"}],
)
def test_method_that_configures_collectives_does_what_it_does_under_fsdp2_alone(
    method: str, adopted: bool, options: dict[str, Any]
) -> None:
    case, counted = METHODS[method], []

    def configure(model: Any) -> None:
        argument = case.argument()
        counted.append(argument)
        for module in (*model.blocks, model):
            getattr(module, method)(argument)
            if isinstance(argument, float):  # gloo cannot multiply while it sums
                module.set_force_sum_reduction_for_comms(True)

    trio = Trio(configure=configure if not adopted else lambda model: None, **options)
    if adopted:  # called before or after
        for model in (trio.plain, trio.ours):
            configure(model)
    trio.factor = case.factor
    for _ in range(2):
        trio.step(microbatches=2)
    theirs, mine = counted
    if case.counts is not None:
        assert mine.calls == getattr(trio.context.stats, case.counts) > 0
    if case.counts == "reductions":
        assert mine.calls == theirs.calls


# Meta device


def _initialise(model: Any) -> None:
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return Chunk()


@on_two_ranks(options=EAGER)
def test_model_built_on_the_meta_device_trains_as_under_fsdp2_alone(
    options: dict[str, Any],
) -> None:
    trio = Trio(_on_meta, configure=_initialise, tolerance=None, **options)
    for _ in range(2):
        trio.step()


@on_two_ranks()
def test_weights_loaded_in_the_place_of_the_meta_device_are_trained() -> None:
    """``load_state_dict(assign=True)`` brings the parameters themselves."""
    states = [sharded(built(Chunk)).state_dict() for _ in range(2)]
    trio = Trio(
        _on_meta,
        configure=lambda model: model.load_state_dict(states.pop(), assign=True),
        tolerance=None,
    )
    trio.step()
    state = sharded(built(Chunk, seed=8)).state_dict()
    for model in trio.both():
        model.load_state_dict(
            {name: value.detach().clone() for name, value in state.items()}, assign=True
        )
    trio.optimizers = [momentum(list(model.parameters())) for model in trio.both()]
    trio.compare(lambda parameter: parameter)
    for _ in range(2):
        trio.step()


@on_two_ranks()
def test_adopting_before_the_weights_are_there_says_what_to_do_and_can_be_repeated() -> None:
    model = sharded(_on_meta())
    context = FSDPContext(mode="recorded")
    with refused(ValueError, r"'up'|'weight'.*meta device; call to_empty\(\)"):
        context.adopt(model)
    _initialise(model)
    context.adopt(model)
    for _ in range(2):
        mean_square(model, batch(0)[dist.get_rank()]).backward()
        context.finish_grad_sync()


# Extensions of the all-gather


class Rounded(torch.Tensor):
    """A weight that is gathered in bf16, and computes with what was gathered.

    As float8 weights do: the full parameter is such a tensor too, around what was gathered.
    """

    _shapes = (
        torch.ops.aten.as_strided.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.copy_.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_zeros.default,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.split.Tensor,
        torch.ops.aten.view.default,
        torch.ops.aten.zeros_like.default,
    )
    gathers = 0

    @staticmethod
    def __new__(cls: Any, held: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=torch.float32,
            device=held.device,
            requires_grad=held.requires_grad,
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: None, size: Any, stride: Any) -> Any:
        return cls(inner["held"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        shapes = function in cls._shapes

        def unwrap(tensor: Rounded) -> torch.Tensor:
            return tensor.held if shapes else tensor.held.float()

        args, kwargs = tree_map_only(Rounded, unwrap, (args, kwargs or {}))
        output = function(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, output) if shapes else output

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        Rounded.gathers += 1
        return (self.held.bfloat16(),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (gathered,) = outputs
        if out is not None:
            assert isinstance(out, Rounded)
            assert out.held.untyped_storage().data_ptr() == gathered.untyped_storage().data_ptr()
            return None
        return Rounded(gathered), (gathered,)


class Upcast(Rounded):
    """A weight that is gathered in bf16; the full parameter is an ordinary one in fp32."""

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (gathered,) = outputs
        if out is not None:
            # As autograd counts it, nothing has changed: it is what was there.
            preserved: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
            with torch.no_grad(), preserved(out):
                out.copy_(gathered)
            return None
        full = gathered.to(dtype)
        return full, (gathered, full)


def _extended(kind: type[Rounded]) -> Callable[[Any], None]:
    def extend(model: Any) -> None:
        for block in model.blocks:
            for linear in (block.up, block.down):
                linear.weight = nn.Parameter(kind(linear.weight.detach()))

    return extend


@on_two_ranks(
    case=[(kind, options) for kind in (Rounded, Upcast) for options in EAGER] + [(Upcast, COMPILED)]
)
def test_extended_all_gathers_train_as_under_fsdp2_alone(
    case: tuple[type[Rounded], dict[str, Any]],
) -> None:
    kind, options = case
    trio = Trio(prepare=_extended(kind), tolerance=None, **options)
    for _ in range(3):
        before = Rounded.gathers
        trio.step()
        assert Rounded.gathers > before


@on_two_ranks()
def test_compiling_an_all_gather_that_makes_a_tensor_subclass_is_refused_by_name() -> None:
    trio = Trio(prepare=_extended(Rounded), **COMPILED)
    with pytest.raises(Exception, match=r"unit c0.blocks.0 is a Rounded, made by its fsdp_post"):
        trio.call(batch(0)[dist.get_rank()])
