"""What dies with a model, with its context, and what cannot be copied.

Garbage collection is off: what is deleted must go at once, with no cycle to keep it. Only
``fully_shard`` itself leaves some behind, which is collected before anything is adopted.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim.swa_utils import AveragedModel

from fsdp_fx import FSDPContext
from fsdp_fx.compile.backend import fsdp_fx as backend
from fsdp_fx.pipelining import bind
from models import DIM, Block, Chunk, linears, shard

pytestmark = pytest.mark.usefixtures("fake_group")


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def adopted(module: nn.Module | None = None, **options: Any) -> tuple[Any, FSDPContext]:
    """A sharded model and its context."""
    module = Chunk() if module is None else module
    shard(
        module, (Block, Chunk, nn.Linear) if isinstance(module, nn.Sequential) else (Block, Chunk)
    )
    gc.collect()
    context = FSDPContext(**{"mode": "recorded", **options})
    context.adopt(module)
    return module, context


def step(module: Any, context: FSDPContext, microbatches: int = 1) -> None:
    for _ in range(microbatches):
        module(torch.randn(3, DIM)).square().mean().backward()
    context.finish_grad_sync()


def remains(module: nn.Module, context: FSDPContext | None = None) -> dict[str, Callable[[], Any]]:
    """What is to die, by name: each gives what is left of it, or None."""
    found: dict[str, Callable[[], Any]] = {}
    for name, parameter in module.named_parameters():
        found[name] = weakref.ref(parameter)
        found[f"shard of {name}"] = weakref.ref(parameter.to_local().untyped_storage())
    for name, child in module.named_modules():
        found[f"module {name or 'root'}"] = weakref.ref(child)
    if context is None:
        return found
    found["context"] = weakref.ref(context)
    found["window"] = weakref.ref(context.window)
    for unit in context.units:
        found[f"unit {unit.spec.name}"] = weakref.ref(unit)
        for index, parameter in enumerate(unit.group.fsdp_params):
            full = getattr(parameter, "_unsharded_param", None)
            if full is not None:
                found[f"full parameter {index} of {unit.spec.name}"] = weakref.ref(full)
    return found


def left(found: dict[str, Callable[[], Any]]) -> list[str]:
    return [name for name, reference in found.items() if reference() is not None]


# What a run may have gone through when its model is deleted


def never_run(module: Any, context: FSDPContext) -> None:
    pass


def recorded(module: Any, context: FSDPContext) -> None:
    step(module, context)


def replayed(module: Any, context: FSDPContext) -> None:
    for _ in range(3):
        step(module, context, 2)
    assert context.stats.replayed_windows == 2


def diverged(module: Any, context: FSDPContext) -> None:
    for microbatches in (1, 2, 1, 2):
        step(module, context, microbatches)
    assert context.stats.divergences == 1


def aborted(module: Any, context: FSDPContext) -> None:
    step(module, context)
    module(torch.randn(3, DIM))
    module(torch.randn(3, DIM)).sum().backward()
    context.abort()


def crashed(module: Any, context: FSDPContext) -> None:
    with pytest.raises(RuntimeError):
        module(torch.randn(3, DIM + 1))
    context.abort()


def evaluated(module: Any, context: FSDPContext) -> None:
    with torch.no_grad():
        module(torch.randn(3, DIM))
    with context.evaluation():
        module(torch.randn(3, DIM)).sum().backward()
    step(module, context)
    module.eval()
    module(torch.randn(3, DIM))


def in_an_open_window(module: Any, context: FSDPContext) -> None:
    step(module, context)
    module(torch.randn(3, DIM))


def stepped(module: Any, context: FSDPContext) -> None:
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(2):
        step(module, context)
        optimizer.step()
        optimizer.zero_grad()


def saved(module: Any, context: FSDPContext) -> None:
    step(module, context)
    module.load_state_dict(module.state_dict())
    step(module, context)


def compiled(module: Any, context: FSDPContext, compiler: str = "eager") -> None:
    call = torch.compile(module, backend=backend, options={"region_compiler": compiler})
    for _ in range(3):
        step(call, context, 2)
    with torch.no_grad():
        call(torch.randn(3, DIM))
    assert context.compiled_graphs
    assert not context.fallbacks


def compiled_by_inductor(module: Any, context: FSDPContext) -> None:
    compiled(module, context, "inductor")


def in_a_pipeline(module: Any, context: FSDPContext) -> None:
    group = dist.new_group([0])
    stage = PipelineStage(module, 0, 1, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda output, target: (output - target).mean())
    bind(schedule, context)
    for _ in range(3):
        schedule.step(torch.randn(4, DIM), target=torch.randn(4, DIM))
        context.finish_grad_sync()
    schedule.eval(torch.randn(4, DIM), target=torch.randn(4, DIM))


HISTORIES = (
    never_run,
    recorded,
    replayed,
    diverged,
    aborted,
    crashed,
    evaluated,
    in_an_open_window,
    stepped,
    saved,
    compiled,
    compiled_by_inductor,
    in_a_pipeline,
)


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.__name__)
def test_deleted_model_and_context_are_gone_at_once(history: Callable[..., None]) -> None:
    module, context = adopted()
    history(module, context)
    found = remains(module, context)
    del module, context
    assert left(found) == []


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.__name__)
def test_deleted_model_is_gone_while_its_context_lives(history: Callable[..., None]) -> None:
    module, context = adopted()
    history(module, context)
    found = remains(module)
    before = context.explain()
    del module
    assert left(found) == []
    assert context.explain() == before
    assert (context.program is None) == (history in (never_run, crashed))
    assert len(context.units) == 3
    assert not any(unit.is_alive for unit in context.units)
    assert context.stats.gathers >= context.stats.frees - len(context.units)


def test_model_of_torchs_own_classes_is_gone_at_once() -> None:
    module, context = adopted(linears())
    step(module, context)
    step(module, context)
    found = remains(module, context)
    del module, context
    assert left(found) == []


def test_registration_mode_leaves_nothing() -> None:
    module, context = adopted(mode="registration")
    for _ in range(2):
        module(torch.randn(3, DIM)).sum().backward()
    found = remains(module, context)
    del module, context
    assert left(found) == []


def test_modules_that_share_a_unit_are_gone_at_once() -> None:
    module: Any = Chunk(3)
    from torch.distributed.fsdp import fully_shard

    fully_shard([module.blocks[0], module.blocks[1]])
    fully_shard(module)
    gc.collect()
    context = FSDPContext(mode="recorded")
    context.adopt(module)
    step(module, context)
    found = remains(module, context)
    del module, context
    assert left(found) == []


def test_model_that_fsdp2_has_trained_before_is_gone_at_once() -> None:
    module: Any = shard(Chunk())
    module(torch.randn(3, DIM)).sum().backward()
    gc.collect()
    context = FSDPContext(mode="recorded")
    context.adopt(module)
    step(module, context)
    found = remains(module, context)
    del module, context
    assert left(found) == []


def test_adopted_model_still_saves_and_loads_after_a_collection() -> None:
    module, context = adopted()
    step(module, context)
    gc.collect()
    state = {name: value.full_tensor().clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    module.load_state_dict(module.state_dict())
    assert not any(value.full_tensor().any() for value in module.state_dict().values())
    step(module, context)
    assert context.stats.replayed_windows == 1
    assert state.keys() == dict(module.named_parameters()).keys()


def test_module_taken_out_of_the_tree_is_gone_and_the_rest_trains() -> None:
    module, context = adopted()
    step(module, context)
    norm = weakref.ref(module.norm)
    module.norm = nn.Identity()
    assert norm() is None
    step(module, context)
    assert context.stats.replayed_windows == 1


def test_forward_leaves_no_cycle_that_holds_its_output() -> None:
    module, context = adopted()
    step(module, context)
    output = module(torch.randn(3, DIM))
    reference = weakref.ref(output)
    output.sum().backward()
    del output
    assert reference() is None
    context.finish_grad_sync()


def test_output_that_is_kept_keeps_no_parameters_without_its_graph() -> None:
    module, context = adopted()
    output = module(torch.randn(3, DIM))
    output.sum().backward()
    context.finish_grad_sync()
    kept = output.detach()
    found = remains(module, context)
    del module, context, output
    assert left(found) == []
    assert kept.shape == (3, DIM)


def test_output_that_is_kept_with_its_graph_keeps_no_modules() -> None:
    module, context = adopted()
    output = module(torch.randn(3, DIM))
    found = remains(module)
    del module, context
    kept = left(found)
    assert not any(name.startswith(("module", "shard")) for name in kept), kept
    del output
    assert left(found) == []


def test_model_lives_on_without_its_context_and_says_so() -> None:
    module, context = adopted()
    step(module, context)
    reference = weakref.ref(context)
    del context
    assert reference() is None
    found = remains(module)
    again = FSDPContext(mode="recorded")
    again.adopt(module)
    step(module, again)
    step(module, again)
    assert again.stats.replayed_windows == 1
    del module, again
    assert left(found) == []


# Copies

COPIES: dict[str, Callable[[Any], object]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda module: torch.save(module, io.BytesIO()),
    "average": AveragedModel,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("which", ["model", "layer", "around", "unsharded root", "compiled"])
def test_copying_an_adopted_model_says_what_to_do(way: str, which: str) -> None:
    module, context = adopted(linears() if which == "unsharded root" else None)
    step(module, context)
    what = {
        "layer": lambda: module.blocks[0],
        "around": lambda: nn.Sequential(module),
        "compiled": lambda: torch.compile(module, backend=backend),
    }.get(which, lambda: module)()
    with pytest.raises(TypeError, match=r"before fully_shard\(\), or build another one") as error:
        COPIES[way](what)
    assert "\n" not in str(error.value)
    step(module, context)
    assert context.stats.replayed_windows == 1


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copying_a_context_is_refused(way: str) -> None:
    module, context = adopted()
    step(module, context)
    with pytest.raises(TypeError, match="an FSDPContext cannot be copied or pickled"):
        COPIES[way](context)
    with pytest.raises(TypeError, match="an FSDPContext cannot be copied or pickled"):
        copy.copy(context)


def test_state_and_outputs_are_saved_without_the_context() -> None:
    module, context = adopted()
    output = module(torch.randn(3, DIM))
    file = io.BytesIO()
    with pytest.warns(UserWarning, match="hooks"):
        torch.save(output, file)
    file.seek(0)
    assert torch.equal(torch.load(file), output)
    output.sum().backward()
    context.finish_grad_sync()
    copies = copy.deepcopy(dict(module.state_dict()))
    assert copies.keys() == module.state_dict().keys()


def test_slice_of_an_adopted_sequential_is_an_ordinary_one() -> None:
    module, _context = adopted(nn.Sequential(Block(), Block(), nn.Tanh()))
    part = module[1:]
    assert type(part) is nn.Sequential
    assert part[0] is module[1]
    assert isinstance(module, nn.Sequential)
    assert type(module).__name__ == "Sequential"
