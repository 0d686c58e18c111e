"""``ctx.release()``: modules go back to plain FSDP2, and training goes on."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

import fsdp_fx
from fsdp_fx import FSDPContext
from models import DIM, Block, Chunk, cpu_mesh, linears, shard
from test_semantics import on_two_ranks

MICROBATCHES = 2
SEVERAL_GROUPS = TorchVersion(torch.__version__) >= "2.13"


class Tied(nn.Module):
    """An embedding whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.block = Block()
        self.last = nn.Linear(DIM, DIM, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.first(x)))


class Frozen(nn.Sequential):
    """A frozen linear before one that trains."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
        self[0].requires_grad_(False)


def nested(mesh: Any) -> nn.Module:
    return shard(Chunk(), mesh=mesh)


def only_inside(mesh: Any) -> nn.Module:
    """The root itself is no unit."""
    return shard(linears(), nn.Linear, mesh=mesh)


def grouped(mesh: Any) -> nn.Module:
    model = linears(3)
    fully_shard([model[0], model[2]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tied(mesh: Any) -> nn.Module:
    return shard(Tied(), (Block, Tied), mesh=mesh)


def frozen(mesh: Any) -> nn.Module:
    return shard(Frozen(), (nn.Linear, Frozen), mesh=mesh)


def cast(mesh: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    return shard(linears(), (nn.Linear, nn.Sequential), mesh=mesh, mp_policy=policy)


def stays(mesh: Any) -> nn.Module:
    return shard(Chunk(), mesh=mesh, reshard_after_forward=False)


MODELS = (nested, only_inside, grouped, tied, frozen, cast, stays)


def window(model: Any, seed: int) -> list[torch.Tensor]:
    """Two microbatches, reduced after each backward; the losses."""
    losses = []
    for microbatch in range(MICROBATCHES):
        generator = torch.Generator().manual_seed(10 * seed + microbatch)
        x = torch.randn(dist.get_world_size(), 3, DIM, generator=generator)[dist.get_rank()]
        loss = model(x).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses


def surface(model: nn.Module) -> dict[str, Any]:
    """What a user or torch can see of the hooks and methods of each module."""
    return {
        path: (
            type(module),
            sorted(set(module.__dict__) - {"_fsdp_use_orig_params"}),
            getattr(module, "_is_fsdp_managed_module", None),
            [len(getattr(module, hooks)) for hooks in HOOKS],
        )
        for path, module in model.named_modules()
    }


HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_state_dict_pre_hooks",
)


@on_two_ranks(case=[*((make, "recorded") for make in MODELS), (nested, "registration")])
def test_training_goes_on_as_if_no_context_had_been_there(
    case: tuple[Callable[[Any], nn.Module], Any],
) -> None:
    make, mode = case
    mesh = cpu_mesh()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make(mesh))
    adopted, plain = models
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in models]

    def step(seed: int, finish: Callable[[], None] = lambda: None) -> None:
        losses = [window(model, seed) for model in models]
        finish()
        torch.testing.assert_close(*losses, rtol=0, atol=0)
        for one, other in zip(*(each.parameters() for each in models), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(*(each.parameters() for each in models), strict=True):
            torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=0)

    step(0)
    before = surface(plain)
    context = FSDPContext(mode=mode)
    context.adopt(adopted)
    for seed in (1, 2):
        step(seed, context.finish_grad_sync)
    assert context.stats.windows > 1
    gathers = context.stats.gathers
    context.release()
    step(3)
    assert surface(adopted) == before
    assert context.stats.gathers == gathers
    assert "windows" in context.explain()
    # And again with a context, a new one.
    again = FSDPContext(mode=mode)
    again.adopt(adopted)
    step(4, again.finish_grad_sync)
    again.release()
    step(5)
    assert adopted.state_dict().keys() == plain.state_dict().keys()


@on_two_ranks(release=[True])
def test_submodules_and_blocks_taken_together_are_given_back(release: bool) -> None:
    mesh = cpu_mesh()
    torch.manual_seed(0)
    model: Any = nested(mesh)
    before = surface(model)
    context = FSDPContext(mode="recorded")
    context.adopt(model, together=[model.blocks[0]])
    context.hook_owner(model.blocks[1], [model.blocks[1].up, model.blocks[1].down])
    context.release()
    # FSDP2 registers its state-dict hooks when it is initialised, at the first forward.
    window(model, 0)
    fresh = nested(mesh)
    window(fresh, 0)
    assert surface(model) == surface(fresh)
    assert before.keys() == surface(model).keys()


@on_two_ranks(adopted=[False, True])
def test_a_root_that_was_given_back_is_resharded_after_its_forward_as_a_part(adopted: bool) -> None:
    model: Any = nested(cpu_mesh())
    if adopted:
        context = FSDPContext(mode="recorded")
        context.adopt(model)
        window(model, 0)
        context.finish_grad_sync()
        context.release()
    around = nn.Sequential(model, nn.Linear(DIM, DIM))
    fully_shard(around, mesh=cpu_mesh())
    loss = around(torch.ones(2, DIM)).sum()
    # As a root it would show the full parameters until its backward.
    assert isinstance(model.norm.weight, DTensor)
    assert not isinstance(around[1].weight, DTensor)
    loss.backward()


@on_two_ranks(keep=[True])
def test_frozen_units_that_stay_are_freed(keep: bool) -> None:
    model = frozen(cpu_mesh())
    context = FSDPContext(mode="recorded", memory_budget=10_000, keep_frozen=keep)
    context.adopt(model)
    for seed in range(3):
        window(model, seed)
        context.finish_grad_sync()
        for parameter in model.parameters():
            parameter.grad = None
    assert context.stats.resident_bytes > 0
    context.release()
    assert context.stats.resident_bytes == 0
    window(model, 3)


@pytest.fixture
def model(fake_group: dist.ProcessGroup) -> Any:
    return nested(cpu_mesh())


def test_an_open_window_is_not_released(model: Any) -> None:
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    loss = model(torch.ones(2, DIM)).sum()
    with pytest.raises(RuntimeError, match=r"release\(\) in the middle of window 0: close it"):
        context.release()
    loss.backward()
    context.finish_grad_sync()
    context.release()
    context.release()  # nothing is left to do


def test_a_forward_or_backward_that_is_running_is_not_released(model: Any) -> None:
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    refused = []

    def release(*_: Any) -> None:
        with pytest.raises(RuntimeError, match=r"release\(\) inside of a forward or backward"):
            context.release()
        refused.append(True)

    hook = model.blocks[1].up.register_forward_hook(release)
    with torch.no_grad():
        model(torch.ones(2, DIM))
    hook.remove()
    with context.evaluation():
        output = model(torch.ones(2, DIM))
        squares = output.square()
    output.grad_fn.register_hook(release)
    squares.sum().backward()
    assert refused == [True, True]
    context.release()
    window(model, 0)


def test_what_was_evaluated_before_is_not_differentiated_after(model: Any) -> None:
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    with context.evaluation():
        loss = model(torch.ones(2, DIM)).sum()
    context.release()
    with pytest.raises(RuntimeError, match=r"an evaluation, a forward from before release\(\)"):
        loss.backward()
    window(model, 0)


def test_an_evaluation_of_submodules_that_was_left_is_given_back(model: Any) -> None:
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    block = model.blocks[1]
    context.hook_owner(block, [block.up, block.down])
    with torch.no_grad():
        block.up(torch.ones(2, DIM))
    assert context.stats.resident_bytes > 0
    context.release()
    assert context.stats.resident_bytes == 0
    window(model, 0)


def test_a_released_context_takes_no_other_modules(model: Any) -> None:
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    context.release()
    with pytest.raises(RuntimeError, match="build another FSDPContext"):
        context.adopt(model)


def test_optimizers_step_at_any_time_again(model: Any) -> None:
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    context.release()
    model(torch.ones(2, DIM)).sum().backward()
    optimizer.step()


def test_fsdp2_methods_are_fsdp2s_again(model: Any) -> None:
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    with pytest.raises(RuntimeError, match="has no effect"):
        model.unshard()
    context.release()
    model.unshard()
    model.reshard()
    model.set_requires_gradient_sync(False)
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(model)


def test_a_released_model_and_its_context_do_not_keep_each_other(model: Any) -> None:
    context = FSDPContext(mode="recorded")
    module = nested(cpu_mesh())
    context.adopt(module)
    context.release()
    gone = weakref.ref(context)
    del context
    gc.collect()
    assert gone() is None
    assert isinstance(module, FSDPModule)


class Mixed(nn.Linear):
    """Trains parameters of two dtypes, which FSDP2 refuses in one group."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.bias = nn.Parameter(torch.randn(DIM, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.bias


@on_two_ranks(around=[False, True])
def test_units_of_several_dtypes_train_on_where_fsdp2_takes_several_groups(around: bool) -> None:
    if not SEVERAL_GROUPS:
        return  # the next test
    torch.manual_seed(0)
    whole: Any = nn.Sequential(Mixed(), nn.Linear(DIM, DIM, dtype=torch.float64))
    model: Any = shard(copy.deepcopy(whole), (nn.Linear, nn.Sequential) if around else nn.Linear)
    context = FSDPContext(mode="recorded")
    context.adopt(model)
    for seed in range(4):
        window(model, seed)
        context.finish_grad_sync()
        if seed == 1:
            context.release()
        for microbatch in range(MICROBATCHES):
            generator = torch.Generator().manual_seed(10 * seed + microbatch)
            for x in torch.randn(2, 3, DIM, generator=generator):
                (whole(x).float().square().mean() / 2).backward()
        for one, expected in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), expected.grad)
            one.grad = expected.grad = None
    assert context.stats.windows == 2


@pytest.mark.usefixtures("fake_group")
@pytest.mark.skipif(SEVERAL_GROUPS, reason="this FSDP2 takes several groups itself")
def test_units_that_plain_fsdp2_refuses_stay_with_their_context() -> None:
    module = Mixed()
    fully_shard(module, mesh=cpu_mesh())
    context = fsdp_fx.FSDPContext(mode="recorded")
    context.adopt(module)
    with pytest.raises(RuntimeError, match=r"several dtypes.*stays with its context"):
        context.release()
