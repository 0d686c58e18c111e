"""FSDP2's own methods on modules that a context schedules, and methods that are forwards."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_fx import FSDPContext
from models import DIM, Chunk, cpu_mesh, linears, shard
from test_semantics import Twin, at_rest, counting, on_two_ranks


@pytest.fixture
def model(fake_group: dist.ProcessGroup) -> Any:
    return shard(Chunk(), mesh=cpu_mesh())


def step(model: Any, context: FSDPContext) -> None:
    model(torch.ones(2, DIM)).sum().backward()
    context.finish_grad_sync()


# Flags: accepted where they say what the context does

PER_WINDOW: dict[str, Any] = {"mode": "recorded", "reduce_gradients": "per_window"}
RECORDED: dict[str, Any] = {"mode": "recorded"}
REGISTRATION: dict[str, Any] = {"mode": "registration"}


@pytest.mark.parametrize(
    ("method", "value", "options", "refused"),
    [
        ("set_requires_gradient_sync", True, RECORDED, None),
        ("set_requires_gradient_sync", False, PER_WINDOW, None),
        ("set_requires_gradient_sync", False, RECORDED, 'reduce_gradients="per_window"'),
        ("set_requires_gradient_sync", False, REGISTRATION, 'mode="recorded"'),
        ("set_requires_all_reduce", False, RECORDED, None),
        ("set_requires_all_reduce", False, REGISTRATION, 'mode="recorded"'),
        ("set_is_last_backward", False, RECORDED, None),
        ("set_is_last_backward", True, REGISTRATION, None),
        ("set_is_last_backward", False, REGISTRATION, 'mode="recorded"'),
        ("set_reshard_after_forward", True, RECORDED, None),
        ("set_reshard_after_forward", False, RECORDED, "before adopt"),
        ("set_reshard_after_backward", True, RECORDED, None),
        ("set_reshard_after_backward", False, RECORDED, "memory_budget"),
        ("set_unshard_in_backward", True, RECORDED, None),
        ("set_unshard_in_backward", False, RECORDED, "remove it"),
        ("set_reduce_scatter_unused_params", True, RECORDED, None),
        ("set_reduce_scatter_unused_params", False, RECORDED, "zeros"),
    ],
)
def test_a_flag_is_accepted_where_it_says_what_the_context_does(
    model: Any, method: str, value: bool, options: dict[str, Any], refused: str | None
) -> None:
    if not hasattr(FSDPModule, method):
        pytest.skip("this torch has no such method")
    context = FSDPContext(**options)
    context.adopt(model)
    for module, name in ((model, "c0"), (model.blocks[1], "c0.blocks.1")):
        if refused is None:
            getattr(module, method)(value)
            continue
        with pytest.raises(RuntimeError) as error:
            getattr(module, method)(value)
        message = str(error.value)
        assert message.startswith(f"{name}: {method}({value}) has no effect on a module that")
        assert refused in message
    step(model, context)  # nothing was changed
    assert context.stats.reductions == len(context.units)


def test_a_flag_is_found_however_it_is_given(model: Any) -> None:
    FSDPContext(mode="recorded").adopt(model)
    with pytest.raises(RuntimeError, match=r"sync\(False\) has no effect"):
        model.set_requires_gradient_sync(recurse=False, requires_gradient_sync=False)
    with pytest.raises(TypeError):
        model.set_requires_gradient_sync(True, False, False, nonsense=1)


@pytest.mark.parametrize(
    ("method", "arguments", "instead"),
    [
        ("unshard", (), "forward_prefetch"),
        ("set_modules_to_forward_prefetch", ([],), "forward_prefetch"),
        ("set_modules_to_backward_prefetch", ([],), "backward_prefetch"),
        ("set_post_optim_event", (None,), "remove it"),
        ("reset_iter_state", (), r"abort\(\)"),
        ("set_reduce_scatter_max_input_buffers", (2,), r"before adopt\(\)"),
        ("_set_unshard_async_op", (True,), "remove it"),
    ],
)
def test_what_the_program_decides_is_refused_by_name(
    model: Any, method: str, arguments: tuple[Any, ...], instead: str
) -> None:
    if not hasattr(FSDPModule, method):
        pytest.skip("this torch has no such method")
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    with pytest.raises(RuntimeError, match=rf"^c0: {method}\(\) has no effect.*{instead}"):
        getattr(model, method)(*arguments)
    step(model, context)


# Every method that FSDP2 has, and what becomes of it: a new one must be thought about.
LEFT_AS_THEY_ARE = {
    "set_all_reduce_hook",
    "set_allocate_memory_from_process_group_for_comm",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_force_sum_reduction_for_comms",
    "set_gradient_divide_factor",
    "set_reduce_scatter_divide_factor",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
}


def test_every_method_of_fsdp2_means_something_here(model: Any) -> None:
    FSDPContext(mode="recorded").adopt(model)
    methods = {name for name in vars(FSDPModule) if not name.startswith("__")}
    internal = {"_apply", "_get_fsdp_state", "_orig_cls_mro_index"}
    shadowed = {name for name in methods if name in model.__dict__}
    assert methods - shadowed - internal <= LEFT_AS_THEY_ARE


@on_two_ranks(sync=[True, False])
def test_an_accumulation_loop_of_fsdp2_goes_on_unchanged(sync: bool) -> None:
    twin = Twin(linears(), units=(nn.Linear, nn.Sequential), reduce_gradients="per_window")
    for _ in range(3):
        with counting(twin.context) as spent:
            for microbatch in range(3):
                if sync:
                    twin.chunks[0].set_requires_gradient_sync(microbatch == 2)
                    twin.chunks[0].set_is_last_backward(microbatch == 2)
                twin.run(f"F{microbatch} B{microbatch}")
            twin.context.finish_grad_sync()
        assert spent.reductions == len(twin.context.units)
        twin.check()


@pytest.mark.usefixtures("fake_group")
def test_the_most_reduction_inputs_that_any_chunk_asks_for_may_be_held() -> None:
    if not hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"):
        pytest.skip("this torch has no such method")
    chunks: list[Any] = [shard(Chunk(), mesh=cpu_mesh()) for _ in range(3)]
    chunks[1].set_reduce_scatter_max_input_buffers(3)
    context = FSDPContext(mode="recorded")
    context.adopt(*chunks)
    contexts = {id(unit.group.comm_ctx): unit.group.comm_ctx for unit in context.units}
    (shared,) = contexts.values()
    assert shared.reduce_scatter_max_input_buffers == 3


# reshard(), and what calls it


@on_two_ranks(keep=[True])
def test_reshard_between_windows_frees_what_stayed(keep: bool) -> None:
    chunk = linears()
    chunk[0].requires_grad_(False)
    twin = Twin(chunk, memory_budget=10_000, keep_frozen=keep)
    for _ in range(2):
        twin.run("F0 B0")
        twin.context.finish_grad_sync()
        twin.check()
    stays = twin.context.stats.resident_bytes
    assert stays > 0
    twin.chunks[0][2].reshard()  # another unit
    assert twin.context.stats.resident_bytes == stays
    twin.chunks[0][0].reshard()
    assert twin.context.stats.resident_bytes == 0
    twin.run("F0 B0")
    twin.context.finish_grad_sync()
    twin.check()


def test_reshard_and_moves_in_a_window_are_refused(model: Any) -> None:
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    loss = model(torch.ones(2, DIM)).sum()
    for call in (model.reshard, model.cpu, lambda: model.to("cpu")):
        with pytest.raises(RuntimeError, match=r"^c0.*: reshard\(\) in the middle of window 0"):
            call()
    loss.backward()
    context.finish_grad_sync()
    model.cpu()
    step(model, context)


def test_loading_in_a_window_is_refused(model: Any) -> None:
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    state = model.state_dict()
    loss = model(torch.ones(2, DIM)).sum()
    for module, name in ((model, "c0"), (model.blocks[0], "c0.blocks.0")):
        own = module.state_dict()
        with pytest.raises(RuntimeError, match=rf"load_state_dict\(\) of {name} in the middle"):
            module.load_state_dict(own)
    loss.backward()
    context.finish_grad_sync()
    model.load_state_dict(state)
    step(model, context)


def test_parameters_that_were_replaced_are_refused(model: Any) -> None:
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    fakes = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="'weight' of LayerNorm is not the parameter that was"):
        torch.func.functional_call(model, fakes, torch.ones(2, DIM))
    context.abort()
    step(model, context)
    at_rest(context)


# Methods that are forwards


class Encoder(nn.Module):
    """A model that is called by a method, with a block that is, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = Second()

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.second.apply_to(torch.tanh(self.first(x))) * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / DIM)

    def apply_to(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply_to(x)


@on_two_ranks(
    registered=["before", "after"],
    policy=[
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32),
    ],
)
def test_a_registered_method_is_a_forward(registered: str, policy: MixedPrecisionPolicy) -> None:
    torch.manual_seed(0)
    plain: Any = Encoder()
    scheduled: Any = copy.deepcopy(plain)
    context = FSDPContext(mode="recorded")
    for model in (plain, scheduled):
        for module in (model.first, model.second, model):
            fully_shard(module, mesh=cpu_mesh(), mp_policy=policy)
        if model is scheduled and registered == "after":
            context.adopt(scheduled)
        register_fsdp_forward_method(model, "encode")
        register_fsdp_forward_method(model.second, "apply_to")
    if registered == "before":
        context.adopt(scheduled)
    for seed in range(3):
        torch.manual_seed(10 * seed + dist.get_rank())
        inputs = torch.randn(2, 3, DIM)
        for model in (plain, scheduled):
            outputs = [model.encode(x, scale=0.5) for x in inputs]
            for output in outputs:
                assert output.dtype == torch.float32
                output.square().sum().backward()
        context.finish_grad_sync()
        for one, other in zip(plain.parameters(), scheduled.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=0)
            with torch.no_grad():
                one -= 0.1 * one.grad
                other -= 0.1 * other.grad
            one.grad = other.grad = None
    stats = context.stats
    # Two microbatches through two units: the chunk's own has no parameters.
    assert context.trace is not None
    assert len(context.trace) == 2 * 2 * len(context.units)
    assert (stats.windows, stats.replayed_windows, stats.on_demand_gathers) == (3, 2, 8 + 2)
    with torch.no_grad():
        torch.testing.assert_close(scheduled.encode(inputs[0]), plain.encode(inputs[0]))
    at_rest(context)


@on_two_ranks(inner=[True])
def test_a_registered_method_of_a_block_taken_together_is_no_event_of_its_own(inner: bool) -> None:
    model: Any = Encoder()
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=cpu_mesh())
    context = FSDPContext(mode="recorded")
    context.adopt(model, together=[model])
    register_fsdp_forward_method(model.second, "apply_to")
    step(model, context)
    assert context.trace is not None
    assert len(context.trace) == 2 * len(context.units)


def test_an_exception_in_a_registered_method_is_named_at_the_close(model: Any) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("odd")

    model.fails = fails
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    register_fsdp_forward_method(model, "fails")
    with pytest.raises(ValueError, match="odd"):
        model.fails(torch.ones(2, DIM))
    with pytest.raises(RuntimeError, match=r"crossed a method of c0 in chunk c0, microbatch 0"):
        context.finish_grad_sync()
    with pytest.raises(RuntimeError, match=re.escape("Discard it with abort()")):
        model(torch.ones(2, DIM))
    context.abort()
    step(model, context)
    at_rest(context)


def test_a_registered_method_that_fails_in_an_evaluation_leaves_nothing_behind(model: Any) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        model.blocks[0](x)
        raise ValueError("odd")

    model.fails = fails
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    register_fsdp_forward_method(model, "fails")
    with torch.no_grad():
        with pytest.raises(ValueError, match="odd"):
            model.fails(torch.ones(2, DIM))
        assert all(isinstance(value, DTensor) for value in model.state_dict().values())
        at_rest(context)
        with pytest.raises(ValueError, match="odd"):
            model.fails(torch.ones(2, DIM))
        model(torch.ones(2, DIM))
    at_rest(context)
    step(model, context)
    at_rest(context)


def test_a_registered_method_may_abort_and_go_on(model: Any) -> None:
    context = FSDPContext(mode="recorded")

    def aborts(x: torch.Tensor) -> torch.Tensor:
        model.blocks[0](x)
        context.abort()
        return x

    model.aborts = aborts
    context.adopt(model)
    register_fsdp_forward_method(model, "aborts")
    model.aborts(torch.ones(2, DIM))
    step(model, context)
    at_rest(context)


class Checkpointed(Encoder):
    """Its block's method runs again in the backward, and stops early."""

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        x = self.first(x)
        if x.requires_grad:
            x.register_hook(self.reached)
        return checkpoint(self.second.apply_to, torch.tanh(x), use_reentrant=False) * scale

    def reached(self, gradient: torch.Tensor) -> None:
        """The backward of the block is over."""


@on_two_ranks(options=[{}, {"memory_budget": 10_000}, {"backward_prefetch": 0}])
def test_a_registered_method_may_be_checkpointed(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain: Any = Checkpointed()
    scheduled: Any = copy.deepcopy(plain)
    context = FSDPContext(mode="recorded", **options)
    for model in (plain, scheduled):
        for module in (model.first, model.second, model):
            fully_shard(module, mesh=cpu_mesh())
        register_fsdp_forward_method(model.second, "apply_to")
    context.adopt(scheduled)
    sizes = {unit.spec.name: unit.spec.bytes for unit in context.units}
    resident: list[int] = []
    scheduled.reached = lambda gradient: resident.append(context.stats.resident_bytes)
    for seed in range(3):
        torch.manual_seed(10 * seed + dist.get_rank())
        for x in torch.randn(2, 3, DIM):
            for model in (plain, scheduled):
                model(x).square().sum().backward()
        context.finish_grad_sync()
        at_rest(context)
        for one, other in zip(plain.parameters(), scheduled.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=0)
            one.grad = other.grad = None
    if "backward_prefetch" in options:  # the block is freed after its own backward
        assert set(resident) <= {0, sizes["c0.first"]}
