"""Gathers into the full parameters and reductions out of the gradients: what is copied, and what not."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_fx
from fsdp_fx.units import Unit, attach
from models import DIM, Block, Chunk, cpu_mesh, linears
from parity import FP32, Trio, mean_square
from test_fsdp2_behaviour import CountedGather, CountedHook, CountedScatter
from test_semantics import on_ranks, on_two_ranks

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
ROWS = 3  # which do not divide by two ranks


def unit_of(module: Any, **options: Any) -> Unit:
    """The unit of one ``fully_shard`` call."""
    options.setdefault("mesh", cpu_mesh(dist.get_world_size()))
    fully_shard(module, **options)
    sharded, _ = attach(module, "c0", None)
    return sharded[0].units[0]


# Which unit is copied, and why


class Doubled(torch.Tensor):
    """A kind of tensor with a gather of its own."""

    def fsdp_pre_all_gather(self, mesh: Any, *others: Any) -> Any:
        return (self,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, **options: Any) -> Any:
        return outputs[0], outputs


def plain(module: Any) -> None:
    """Nothing about it is special."""


def uneven(module: Any) -> None:
    module.bias = nn.Parameter(torch.zeros(ROWS))


def mixed(module: Any) -> None:
    module.bias = nn.Parameter(module.bias.bfloat16(), requires_grad=False)


def complex_numbers(module: Any) -> None:
    module.bias = nn.Parameter(torch.zeros(DIM, dtype=torch.complex64), requires_grad=False)


def gather_of_ones_own(module: Any) -> None:
    module.set_custom_all_gather(CountedGather())


def scatter_of_ones_own(module: Any) -> None:
    module.set_custom_reduce_scatter(CountedScatter())


def hooked(module: Any) -> None:
    module.set_all_reduce_hook(CountedHook())


def extended(module: Any) -> None:
    local = module.weight._local_tensor
    for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
        setattr(local, name, getattr(Doubled, name).__get__(local))


BOTH = "both"
OBSTACLES: list[tuple[Any, Any, dict[str, Any], str, str | None]] = [
    (plain, plain, {}, BOTH, None),
    (plain, plain, {"mp_policy": BF16}, BOTH, None),
    (uneven, plain, {}, BOTH, "parameter 'bias' has 3 rows for 2 ranks"),
    (
        plain,
        plain,
        {"shard_placement_fn": lambda p: Shard(p.ndim - 1)},
        BOTH,
        "parameter 'weight' is sharded on dimension 1",
    ),
    (plain, plain, {"offload_policy": CPUOffloadPolicy(False)}, BOTH, "its shards are on the CPU"),
    # These are not reduced and gathered by process groups, but the view of them as real.
    (complex_numbers, plain, {}, BOTH, "parameter 'bias' is complex"),
    (mixed, plain, {}, "gather", "its parameters are gathered in float32 and bfloat16"),
    (plain, gather_of_ones_own, {}, "gather", "all-gathers go through CountedGather"),
    (plain, extended, {}, "gather", "parameter 'weight' is a tensor of its own kind"),
    (plain, scatter_of_ones_own, {}, "reduction", "reduce-scatters go through CountedScatter"),
    (plain, hooked, {}, "reduction", "it has an all-reduce hook"),
]


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(("before", "after", "options", "which", "why"), OBSTACLES)
def test_unit_is_copied_only_where_something_stands_in_the_way(
    before: Any, after: Any, options: dict[str, Any], which: str, why: str | None
) -> None:
    module: Any = nn.Linear(DIM, DIM)
    before(module)
    fully_shard(module, mesh=cpu_mesh(), **options)
    after(module)
    context = fsdp_fx.FSDPContext(mode="recorded")
    context.adopt(module)
    (unit,) = context.units
    assert unit.obstacles == (
        why if which in ("gather", BOTH) else None,
        why if which in ("reduction", BOTH) else None,
    )
    text = context.explain()
    what = {"gather": "gathers", "reduction": "reductions", BOTH: "gathers and reductions"}[which]
    assert (f"  {what} of c0: {why}\n" in text) == (why is not None)
    assert ("copied by FSDP2" in text) == (why is not None)


@pytest.mark.parametrize("fake_group", [1], indirect=True)
def test_one_rank_alone_gathers_as_fsdp2_does(fake_group: dist.ProcessGroup) -> None:
    module = nn.Linear(DIM, DIM)
    unit = unit_of(module)
    assert unit.obstacles == ("there is one rank to shard over",) * 2


@pytest.mark.parametrize("fake_group", [4], indirect=True)
def test_tensor_parallel_units_and_replicated_ones_are_not_copied(
    fake_group: dist.ProcessGroup,
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    block = Block()
    parallelize_module(block, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    unit = unit_of(block, mesh=mesh["outer"])
    assert isinstance(block.up.weight, DTensor)
    assert unit.obstacles == (None, None)
    block = Block()
    unit = unit_of(block, mesh=mesh)
    assert unit.spec.replicas == 2
    assert unit.obstacles == (None, None)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_collectives_that_are_replaced_later_are_used_from_then_on() -> None:
    module: Any = nn.Linear(DIM, DIM)
    unit = unit_of(module)
    gather = CountedGather()
    for own in (False, True, False):
        module.set_custom_all_gather(gather if own else type(unit.group._all_gather_comm)())
        if not own:
            unit.group._all_gather_comm = fsdp_fx.units.collectives.DefaultAllGather()
        assert (unit.obstacles[0] is None) == (not own)
        unit.gather()
        unit.wait()
        unit.free()
    assert gather.calls == 1


# No copies


class Copies(TorchDispatchMode):
    """Counts FSDP2's copies into and out of the buffers of its collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        if name.startswith("fsdp."):
            self.counts[name.split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def noted(name: str, of: int) -> Iterator[list[list[int]]]:
    """The addresses of the tensors in one argument of each call of a process group's method."""
    original = getattr(dist.ProcessGroup, name)
    addresses: list[list[int]] = []

    def call(group: Any, *arguments: Any) -> Any:
        addresses.append([tensor.data_ptr() for tensor in arguments[of]])
        return original(group, *arguments)

    with mock.patch.object(dist.ProcessGroup, name, call):
        yield addresses


@on_two_ranks(policy=[FP32, BF16])
def test_plain_units_are_gathered_and_reduced_where_they_are(policy: MixedPrecisionPolicy) -> None:
    model: Any = linears(2)
    model.append(nn.Linear(DIM, ROWS))
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=cpu_mesh(), mp_policy=policy)
    context = fsdp_fx.FSDPContext(mode="recorded")
    context.adopt(model)
    with Copies() as copies:
        for _ in range(2):
            model(torch.ones(2, DIM)).float().square().mean().backward()
            context.finish_grad_sync()
    # Those of the last unit, whose rows do not divide.
    gathers = context.units[2].collectives - 2
    assert gathers >= 2
    assert copies.counts == {
        "all_gather_copy_in": gathers,
        "split_with_sizes_copy": gathers,
        "chunk_cat": 2,
    }
    unit = context.units[0]
    parameters = [each._unsharded_param for each in unit.group.fsdp_params]
    with noted("allgather_into_tensor_coalesced", 0) as outputs:
        unit.gather()
        unit.wait()
    assert outputs == [[parameter.data_ptr() for parameter in parameters]]
    unit.free()
    gradients = [torch.full_like(p, 2.0, dtype=torch.float32) for p in parameters]
    for parameter, gradient in zip(unit.group.fsdp_params, gradients, strict=True):
        parameter.unsharded_accumulated_grad = gradient
    with noted("reduce_scatter_tensor_coalesced", 1) as inputs:
        unit.reduce()
    assert inputs == [[gradient.data_ptr() for gradient in gradients]]


@on_two_ranks()
def test_gradients_are_cast_or_made_contiguous_before_they_are_reduced() -> None:
    module = nn.Linear(DIM, DIM)
    unit = unit_of(module, mp_policy=BF16)
    unit.gather()
    unit.wait()
    weight, bias = unit.trained_parameters
    values = torch.arange(DIM * DIM, dtype=torch.float32).view(DIM, DIM) + dist.get_rank()
    weight.grad = values.to(torch.bfloat16).t()
    bias.grad = torch.full((DIM,), 1.0 + dist.get_rank(), dtype=torch.bfloat16)
    unit.reduce()
    unit.free()
    found = [parameter.grad.full_tensor() for parameter in unit.sharded_parameters]  # type: ignore[union-attr]
    assert [each.dtype for each in found] == [torch.float32] * 2
    ranks = [values.t() - dist.get_rank() + rank for rank in range(2)]
    expected = sum(each.to(torch.bfloat16).float() for each in ranks) / 2
    assert torch.equal(found[0], torch.as_tensor(expected))
    assert torch.equal(found[1], torch.full((DIM,), 1.5))


# The same numbers as FSDP2's, bit for bit


def divided(model: Any) -> None:
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(8.0)
        module.set_force_sum_reduction_for_comms(True)


def unconfigured(model: Any) -> None:
    """As it is."""


@on_two_ranks(
    policy=[FP32, BF16, MixedPrecisionPolicy(torch.bfloat16), MixedPrecisionPolicy(torch.float16)],
    configure=[unconfigured, divided],
    compiled=[False, True],
)
def test_training_is_that_of_fsdp2_alone(
    policy: MixedPrecisionPolicy, configure: Callable[[Any], None], compiled: bool
) -> None:
    seen: dict[str, list[tuple[str, torch.Tensor]]] = {"ours": [], "plain": []}
    trio = Trio(policy=policy, configure=configure, compiled=compiled, tolerance=None)
    for side in seen:
        for name, parameter in getattr(trio, side).named_parameters():

            def hook(sharded: Any, side: str = side, name: str = name) -> None:
                seen[side].append((name, sharded.grad.to_local().clone()))

            parameter.register_post_accumulate_grad_hook(hook)
    assert all(unit.obstacles == (None, None) for unit in trio.context.units)
    for microbatches in (1, 3, 2):
        trio.step(mean_square, microbatches)
    assert len(seen["ours"]) == len(seen["plain"]) > 0
    # Units may be reduced in another order; each of them as often, and with the same.
    for found, wanted in zip(
        *(sorted(each, key=lambda entry: entry[0]) for each in seen.values()), strict=True
    ):
        assert found[0] == wanted[0]
        assert torch.equal(found[1], wanted[1])


def odd(model: Any) -> None:
    # Its part is seven elements: what comes behind it in a buffer is put at a multiple of 16.
    model.odd = nn.Parameter(torch.ones(14, 1))
    model.register_forward_hook(lambda module, args, output: output * module.odd.mean())


@on_ranks(4, policy=[FP32, BF16], keep=[False, True])
def test_replicated_units_train_as_those_of_fsdp2_alone(
    policy: MixedPrecisionPolicy, keep: bool
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    trio = Trio(
        Chunk,
        policy=policy,
        prepare=odd,
        tolerance=None,
        sharding=lambda model: {"mesh": mesh},
        **({"reduce_gradients": "per_window"} if keep else {}),
    )
    assert all(unit.obstacles == (None, None) for unit in trio.context.units)
    for _ in range(2):
        trio.step(mean_square, 3 if keep else 1)


@on_ranks(4, policy=[FP32, BF16])
def test_partial_sums_of_a_replicated_unit_are_all_reduced_with_the_last(
    policy: MixedPrecisionPolicy,
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    module: Any = nn.Linear(DIM, DIM)
    odd(module)
    unit = unit_of(module, mesh=mesh, mp_policy=policy)
    for window in range(2):
        for index, last in enumerate((False, False, True)):
            unit.gather()
            unit.wait()
            for parameter in unit.trained_parameters:
                parameter.grad = torch.full_like(parameter, 4.0 * index + dist.get_rank())
            unit.reduce(all_reduce=last)
            unit.free()
            if index == 1:
                # Chosen in the middle of a window: from the next one on.
                module.set_custom_reduce_scatter(CountedScatter())
                assert unit.obstacles[1] is not None
        unit.communication.wait_for_reductions([unit])
        for parameter in unit.sharded_parameters:
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            assert torch.equal(
                gradient.full_tensor(), torch.full(gradient.shape, (window + 1) * (3 * 1.5 + 12.0))
            )


# Shards that change between gathers


@on_two_ranks(policy=[FP32, BF16], assign=[False, True])
def test_shards_that_are_replaced_are_gathered_from_then_on(
    policy: MixedPrecisionPolicy, assign: bool
) -> None:
    trio = Trio(policy=policy, tolerance=None)
    trio.step()
    torch.manual_seed(9)
    for model in trio.both():
        torch.manual_seed(9)
        state = {name: torch.randn_like(each) for name, each in model.state_dict().items()}
        model.load_state_dict(state, assign=assign)
    trio.optimizers[:2] = [torch.optim.SGD(m.parameters(), 0.1) for m in trio.both()]
    trio.step()
    assert all(unit.obstacles == (None, None) for unit in trio.context.units)


# Memory and what autograd sees


def storages(unit: Unit) -> list[int]:
    return [p.all_gather_outputs[0].untyped_storage().nbytes() for p in unit.group.fsdp_params]


def whole(unit: Unit) -> list[torch.Tensor]:
    return [p._unsharded_param.detach().clone() for p in unit.group.fsdp_params]


@on_two_ranks()
def test_gather_takes_memory_when_it_starts_and_a_free_gives_all_of_it_back() -> None:
    module = nn.Linear(DIM, DIM)
    unit = unit_of(module)
    full = [4 * DIM * DIM, 4 * DIM]
    for act, expected in [
        (unit.gather, full),
        (unit.wait, full),
        (unit.free, [0, 0]),
        (unit.gather, full),
        (unit.free, [0, 0]),
        (unit.free, [0, 0]),
    ]:
        act()
        assert storages(unit) == expected, act


@on_two_ranks()
def test_gather_does_not_look_like_a_change_to_what_autograd_has_saved() -> None:
    module = nn.Linear(DIM, DIM)
    unit = unit_of(module)
    unit.gather()
    unit.wait()
    unit.expose()
    x = torch.ones(2, DIM, requires_grad=True)
    loss = module(x).sum()
    versions = [p._unsharded_param._version for p in unit.group.fsdp_params]
    with torch.inference_mode():
        unit.free()
        unit.gather()
        # Before the wait, too: a compiled backward looks at everything that it has saved first.
        time.sleep(0.2)
        assert [p._unsharded_param._version for p in unit.group.fsdp_params] == versions
        unit.wait()
    loss.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, module.weight.detach().sum(0).expand(2, -1))
    unit.conceal()
    unit.free()


@on_two_ranks()
def test_gather_that_was_given_up_before_the_other_rank_came_writes_nothing_later() -> None:
    torch.manual_seed(0)
    reference = nn.Linear(DIM, DIM)
    torch.manual_seed(0)
    module = nn.Linear(DIM, DIM)
    unit = unit_of(module)
    expected = [parameter.detach() for parameter in reference.parameters()]
    for late, waits in itertools.product((0, 1), (0.0, 0.1, 10.0)):
        if dist.get_rank() == late:
            time.sleep(0.3)
        unit.gather()
        unit.reset(time.monotonic() + waits)
        assert (unit.in_flight, unit.unsharded) == (False, False)
        unit.gather()
        unit.wait()
        for found, wanted in zip(whole(unit), expected, strict=True):
            assert torch.equal(found, wanted)
        unit.free()
        assert storages(unit) == [0, 0]
        # With nothing given up any more, it is gathered in place again.
        with noted("allgather_into_tensor_coalesced", 0) as outputs:
            unit.gather()
            unit.wait()
        assert len(outputs) == 1
        unit.free()


@on_two_ranks()
def test_gather_that_failed_leaves_no_memory_behind() -> None:
    module = nn.Linear(DIM, DIM)
    unit = unit_of(module)

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("by intention")

    with (
        mock.patch.object(dist.ProcessGroup, "allgather_into_tensor_coalesced", fail),
        pytest.raises(RuntimeError, match="by intention"),
    ):
        unit.gather()
    assert not unit.in_flight
    unit.reset()
    assert storages(unit) == [0, 0]
    unit.gather()
    unit.wait()
    assert unit.unsharded
    unit.free()


def gradients(unit: Unit) -> Sequence[Any]:
    return [parameter.grad for parameter in unit.sharded_parameters]


@on_two_ranks()
def test_reduction_adds_to_the_gradients_that_are_there() -> None:
    module = nn.Linear(DIM, DIM)
    unit = unit_of(module)
    unit.gather()
    unit.wait()
    for times in (1, 2, 3):
        for parameter in unit.trained_parameters:
            parameter.grad = torch.full_like(parameter, 1.0 + dist.get_rank())
        before = gradients(unit)
        unit.reduce()
        unit.communication.wait_for_reductions([unit])
        for old, new in zip(before, gradients(unit), strict=True):
            assert old is None or new is old
            assert torch.equal(new.full_tensor(), torch.full(new.shape, 1.5 * times))
        assert not unit.has_gradients
    unit.free()
