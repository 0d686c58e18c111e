"""Units over FSDP2's parameter groups, and the private names of torch behind them."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

import fsdp_fx
from fsdp_fx import torch_internals
from fsdp_fx.units import (
    PRIVATE_NAMES,
    Unit,
    attach,
    find_sharded_modules,
    missing_private_names,
    storage_key,
    unit_of_tensor,
)
from models import DIM, Block, Chunk, cpu_mesh, linears, shard


def attached(module: nn.Module) -> list[Unit]:
    sharded, _ = attach(module, "c0", None)
    return [unit for each in sharded for unit in each.units]


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


# torch's private names, one test for each

NAMES = [
    pytest.param(
        owner, name, id=f"{owner.__name__}.{'|'.join([name] * (isinstance(name, str)) or name)}"
    )
    for owner, attributes in PRIVATE_NAMES.items()
    for name in attributes
]


@pytest.mark.parametrize(("owner", "name"), NAMES)
def test_torch_has_the_private_name(owner: type, name: str | tuple[str, str]) -> None:
    assert missing_private_names({owner: (name,)}) == []


@pytest.mark.parametrize(("owner", "name"), NAMES)
@pytest.mark.usefixtures("fake_group")
def test_instances_have_the_private_name(owner: type, name: str | tuple[str, str]) -> None:
    module = shard(Chunk(1), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    attached(module)
    state = _get_module_fsdp_state(module)
    assert state is not None
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    group = groups[0]
    instances: list[Any] = [state, group, group.fsdp_params[0], group.comm_ctx]
    instance = next(each for each in instances if isinstance(each, owner))
    choices = (name,) if isinstance(name, str) else name
    assert any(hasattr(instance, choice) for choice in choices)


def test_missing_private_names_are_named_with_their_class() -> None:
    class Torch:
        __slots__ = ("slot",)
        annotated: int

        def __init__(self) -> None:
            self.slot = 1

        def method(self) -> None: ...

    assert missing_private_names({Torch: ("slot", "annotated", "method")}) == []
    assert missing_private_names({Torch: ("slot", "gone", ("new", "old"), ("method", "gone"))}) == [
        "Torch.gone",
        "Torch.new or old",
    ]


def test_training_state_has_the_phases_that_units_ask_for() -> None:
    assert {"IDLE", "FORWARD", "PRE_BACKWARD"} <= {state.name for state in TrainingState}


# torch's private names outside of FSDP2


class Observed(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Any) -> torch.Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.function()
        return gradient, None


def observe(function: Any) -> None:
    """Call ``function`` in an autograd pass."""
    Observed.apply(torch.ones(1, requires_grad=True), function).sum().backward()


def test_graph_task_is_minus_one_outside_of_an_autograd_pass_and_differs_in_a_nested_one() -> None:
    tasks: list[int] = []

    def note() -> None:
        tasks.append(torch_internals.current_graph_task())

    def nest() -> None:
        note()
        with torch.enable_grad():
            observe(note)
        note()

    assert torch_internals.current_graph_task() == -1
    observe(nest)
    before, inner, after = tasks
    assert before == after != inner
    assert -1 not in tasks
    assert torch_internals.current_graph_task() == -1


def test_queued_callback_runs_at_the_end_of_its_own_pass_the_nested_one_first() -> None:
    happened: list[str] = []

    def nest() -> None:
        torch_internals.queue_callback(lambda: happened.append("outer ended"))
        with torch.enable_grad():
            observe(inner)
        happened.append("after nested")

    def inner() -> None:
        torch_internals.queue_callback(lambda: happened.append("nested ended"))
        happened.append("nested")

    observe(nest)
    assert happened == ["nested", "nested ended", "after nested", "outer ended"]


def test_compile_callback_leads_to_the_backend_and_is_none_outside() -> None:
    seen: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return graph.forward

    @torch._dynamo.disable
    def note(callback: Any) -> None:
        seen.append(callback and torch_internals.compile_backend(callback))

    def hook(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            note(torch_internals.active_compile_callback())

    torch_internals.skip_code(hook.__code__)
    module = Block()
    module.register_forward_pre_hook(hook)
    x = torch.ones(DIM)
    module(x)
    torch.compile(module, backend=backend)(x)
    module(x)
    assert seen == [None, backend, None]
    torch._dynamo.reset()


def test_skipped_code_is_not_captured_while_the_frames_that_it_calls_are() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x.cos())

    torch_internals.skip_code(outer.__code__)
    torch.compile(outer, backend=backend)(torch.ones(2))
    targets = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert not any("cos" in target for target in targets)
    torch._dynamo.reset()


def test_graph_break_reasons_are_one_line_each_the_latest_last() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def breaks(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x + 1

    assert torch_internals.graph_break_reasons() == {}
    torch.compile(breaks, backend="eager")(torch.ones(2))
    reasons = torch_internals.graph_break_reasons()
    assert reasons
    assert not any("\n" in reason for reason in reasons)
    torch._dynamo.reset()


def test_keyed_hooks_run_around_the_forward_the_latest_before_the_others() -> None:
    happened: list[str] = []
    module = nn.Linear(2, 2)

    def before(name: str) -> Any:
        return lambda module, args, kwargs: happened.append(name)

    module.register_forward_pre_hook(lambda *_: happened.append("user"))
    torch_internals.add_forward_pre_hook(module, "first", before("first"))
    torch_internals.add_forward_pre_hook(module, "second", before("second"))
    torch_internals.add_forward_hook(module, "after", lambda *_: happened.append("after"))
    module(torch.ones(2))
    assert happened == ["second", "first", "user", "after"]
    happened.clear()
    with pytest.raises(RuntimeError):
        module(torch.ones(3))
    assert happened == ["second", "first", "user", "after"]
    happened.clear()
    for key in ("first", "second", "after"):
        torch_internals.remove_forward_hooks(module, key)
    module(torch.ones(2))
    assert happened == ["user"]


def test_hook_under_a_key_that_is_taken_replaces_the_one_there() -> None:
    happened: list[str] = []
    module = nn.Linear(2, 2)
    for name in ("old", "new"):
        torch_internals.add_forward_pre_hook(
            module, "key", lambda *_, name=name: happened.append(f"before, {name}")
        )
        torch_internals.add_forward_hook(
            module, "key", lambda *_, name=name: happened.append(f"after, {name}")
        )
    module(torch.ones(2))
    assert happened == ["before, new", "after, new"]


# Units


@pytest.mark.usefixtures("fake_group")
def test_units_are_named_by_chunk_and_path_in_module_order() -> None:
    module = shard(Chunk(2))
    assert [path for path, _ in find_sharded_modules(module)] == ["", "blocks.0", "blocks.1"]
    assert [unit.spec.name for unit in attached(module)] == ["c0", "c0.blocks.0", "c0.blocks.1"]


@pytest.mark.usefixtures("fake_group")
def test_unit_holds_the_parameters_that_no_unit_below_it_has() -> None:
    own, block = attached(shard(Chunk(1)))
    assert own.spec.elements == 2 * DIM
    assert block.spec.elements == sum(p.numel() for p in Block().parameters())


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    ("policy", "size", "gradient"),
    [
        (MixedPrecisionPolicy(), 4, 4),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), 2, 2),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), 2, 4),
    ],
    ids=["fp32", "bf16", "bf16, reduced in fp32"],
)
def test_bytes_count_the_dtype_gathered_and_the_dtype_reduced(
    policy: MixedPrecisionPolicy, size: int, gradient: int
) -> None:
    (unit,) = attached(fully_shard(nn.Linear(3, 5), mesh=cpu_mesh(), mp_policy=policy))
    assert unit.spec.elements == 20
    assert unit.spec.bytes == 20 * size
    assert unit.spec.gradient_bytes == 20 * gradient


@pytest.mark.usefixtures("fake_group")
def test_unit_is_trainable_if_any_parameter_is() -> None:
    frozen, mixed = nn.Linear(3, 5).requires_grad_(False), nn.Linear(3, 5)
    mixed.weight.requires_grad_(False)
    units = attached(shard(nn.Sequential(frozen, mixed), nn.Linear))
    assert [unit.spec.trainable for unit in units] == [False, True]
    assert [unit.trainable for unit in units] == [False, True]
    assert [unit.spec.gradient_bytes for unit in units] == [0, 5 * 4]


@pytest.mark.usefixtures("fake_group")
def test_modules_given_to_one_fully_shard_call_are_one_unit() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard([module[0], module[2]], mesh=cpu_mesh())
    fully_shard(module, mesh=cpu_mesh())
    units = attached(module)
    assert [(unit.spec.name, unit.spec.elements) for unit in units] == [("c0", 6), ("c0.0", 12)]


@pytest.mark.usefixtures("fake_group")
def test_adopting_refuses_modules_of_one_unit_without_a_unit_around_them() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard([module[0], module[1]], mesh=cpu_mesh())
    assert re.search("'0' shares one fully_shard.*call fully_shard.. on", refusal(module))


@pytest.mark.usefixtures("fake_group")
def test_units_of_one_root_share_the_communication_that_they_are_given() -> None:
    _, first = attach(shard(Chunk()), "c0", None)
    sharded, second = attach(shard(Chunk()), "c1", first)
    assert second is first
    assert all(unit.communication is first for each in sharded for unit in each.units)


@pytest.mark.usefixtures("fake_group")
def test_gather_wait_and_free_say_where_the_unit_is() -> None:
    (unit,) = attached(fully_shard(nn.Linear(3, 5), mesh=cpu_mesh()))
    states = []
    for act in (lambda: None, unit.gather, unit.wait, unit.free, unit.free):
        act()
        states.append((unit.in_flight, unit.unsharded))
    assert states == [(False, False), (True, False), (False, True), (False, False), (False, False)]


@pytest.mark.usefixtures("fake_group")
def test_gather_in_flight_can_be_freed() -> None:
    (unit,) = attached(fully_shard(nn.Linear(3, 5), mesh=cpu_mesh()))
    unit.gather()
    unit.free()
    assert not unit.in_flight
    unit.gather()
    unit.wait()
    assert unit.unsharded


@pytest.mark.usefixtures("fake_group")
def test_module_shows_full_parameters_while_exposed_and_sharded_ones_otherwise() -> None:
    module = fully_shard(nn.Linear(3, 5), mesh=cpu_mesh())
    (unit,) = attached(module)
    sharded = module.weight
    unit.gather()
    unit.wait()
    assert module.weight is sharded
    unit.expose()
    unit.expose()
    full = module.weight
    assert full.shape == (5, 3)
    assert full is not sharded
    assert unit_of_tensor(full) is unit
    unit.conceal()
    assert module.weight is full
    unit.conceal()
    assert module.weight is sharded
    assert unit_of_tensor(torch.ones(2)) is None


@pytest.mark.usefixtures("fake_group")
def test_full_parameter_keeps_its_storage_from_gather_to_gather() -> None:
    module = fully_shard(nn.Linear(3, 5), mesh=cpu_mesh())
    (unit,) = attached(module)
    unit.expose()  # a graph may be captured before the first gather
    key = storage_key(module.weight)
    for _ in range(2):
        unit.gather()
        unit.wait()
        assert storage_key(module.weight) == key
        unit.free()
        assert module.weight.untyped_storage().nbytes() == 0
    unit.conceal()


@pytest.mark.usefixtures("fake_group")
def test_unit_of_a_deleted_module_says_so() -> None:
    module = fully_shard(nn.Linear(3, 5), mesh=cpu_mesh())
    (unit,) = attached(module)
    del module
    gc.collect()
    with pytest.raises(ReferenceError, match="the module of unit c0 has been deleted"):
        unit.gather()


# Options of FSDP2 that have no effect under a schedule


@pytest.fixture
def linear(fake_group: dist.ProcessGroup) -> nn.Linear:
    return nn.Linear(4, 4)


def refusal(module: nn.Module) -> str:
    with pytest.raises(ValueError) as error:
        fsdp_fx.FSDPContext(mode="recorded").adopt(module)
    return one_line(error)


def _prefetch_forward(module: Any) -> None:
    module.set_modules_to_forward_prefetch([module])


def _prefetch_backward(module: Any) -> None:
    module.set_modules_to_backward_prefetch([module])


def _stay_after_backward(module: Any) -> None:
    module.set_reshard_after_backward(False)


def _gather_asynchronously(module: Any) -> None:
    module._set_unshard_async_op(True)


def _wait_for_event(module: Any) -> None:
    module.set_post_optim_event(object())


@pytest.mark.parametrize(
    ("choose", "named"),
    [
        (_prefetch_forward, "set_modules_to_forward_prefetch"),
        (_prefetch_backward, "set_modules_to_backward_prefetch"),
        (_stay_after_backward, r"set_reshard_after_backward\(False\).*memory_budget"),
        (_gather_asynchronously, r"_set_unshard_async_op\(True\)"),
        (_wait_for_event, "set_post_optim_event"),
    ],
)
def test_adopting_refuses_what_the_program_decides(
    linear: nn.Linear, choose: Callable[[Any], None], named: str
) -> None:
    choose(fully_shard(linear, mesh=cpu_mesh()))
    assert re.search(f"'root': {named}.*", message := refusal(linear))
    assert "remove it" in message


@pytest.mark.usefixtures("fake_group")
def test_adopting_before_the_weights_exist_is_refused_and_works_after() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in (*module, module):
        fully_shard(layer, mesh=cpu_mesh())
    assert re.search(r"parameter 'weight' is on the meta.*to_empty\(\)", refusal(module))
    module.to_empty(device="cpu")
    fsdp_fx.FSDPContext().adopt(module)


@pytest.mark.parametrize("fake_group", [4], indirect=True)
def test_adopting_refuses_an_int_reshard_after_forward(fake_group: dist.ProcessGroup) -> None:
    module = nn.Linear(4, 4)
    fully_shard(module, mesh=cpu_mesh(4), reshard_after_forward=2)
    assert re.search("reshard_after_forward as an int.*leave it out", refusal(module))


@pytest.mark.parametrize("value", [True, False, None])
@pytest.mark.parametrize("fake_group", [4], indirect=True)
def test_adopting_takes_any_other_reshard_after_forward(
    fake_group: dist.ProcessGroup, value: bool | None
) -> None:
    module = nn.Linear(4, 4)
    fully_shard(module, mesh=cpu_mesh(4), reshard_after_forward=value)
    fsdp_fx.FSDPContext().adopt(module)


def test_adopting_refuses_gradient_sync_switched_off(linear: nn.Linear) -> None:
    fully_shard(linear, mesh=cpu_mesh()).set_requires_gradient_sync(False)
    message = refusal(linear)
    assert re.search(r"set_requires_gradient_sync\(False\).*remove it", message)
    assert 'reduce_gradients="per_window"' in message


def test_adopting_refuses_unshard_in_backward_switched_off(linear: nn.Linear) -> None:
    fully_shard(linear, mesh=cpu_mesh()).set_unshard_in_backward(False)
    assert re.search(r"set_unshard_in_backward\(False\).*remove it", refusal(linear))


@pytest.mark.usefixtures("fake_group")
def test_refusal_names_the_module_inside_the_chunk() -> None:
    module = shard(linears(2), nn.Linear)
    module[2].set_unshard_in_backward(False)
    assert refusal(module).startswith("module '2': ")


def test_gradient_sync_switched_off_after_adoption_is_refused_at_the_reduction(
    linear: nn.Linear,
) -> None:
    fully_shard(linear, mesh=cpu_mesh())
    context = fsdp_fx.FSDPContext(mode="recorded")
    context.adopt(linear)
    # Past what the adopted module says to it, as a module around it would.
    FSDPModule.set_requires_gradient_sync(linear, False)  # type: ignore[arg-type]
    loss = linear(torch.ones(2, 4)).sum()
    with pytest.raises(RuntimeError, match=r"set_requires_gradient_sync\(False\)") as error:
        loss.backward()
    one_line(error)
