"""Misuse that would train wrongly is an error or a warning that says what to do."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_fx
from fsdp_fx.units import Communication


def _adopted() -> tuple[nn.Module, fsdp_fx.FSDPContext, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    context = fsdp_fx.FSDPContext(mode="recorded")
    context.adopt(model)
    return model, context, torch.optim.AdamW(model.parameters())


@pytest.mark.usefixtures("fake_group")
def test_a_step_in_the_middle_of_a_window_is_an_error_that_says_what_to_do() -> None:
    model, context, optimizer = _adopted()
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"AdamW.step\(\).*call finish_grad_sync\(\)") as caught:
        optimizer.step()
    assert "\n" not in str(caught.value)
    context.finish_grad_sync()
    optimizer.step()


@pytest.mark.usefixtures("fake_group")
def test_an_optimizer_of_other_parameters_may_step_at_any_time() -> None:
    model, context, _ = _adopted()
    other = nn.Linear(2, 2)
    model(torch.ones(2, 4)).sum().backward()
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    context.abort()


@pytest.mark.usefixtures("fake_group")
def test_a_step_is_free_again_when_the_context_is_gone() -> None:
    model, context, optimizer = _adopted()
    model(torch.ones(2, 4)).sum().backward()
    del context
    optimizer.step()


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).t()


@pytest.mark.usefixtures("fake_group")
def test_a_unit_that_returns_a_view_warns_once_of_changes_in_place() -> None:
    model = Transposed()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    context = fsdp_fx.FSDPContext(mode="recorded")
    context.adopt(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 4))
    warned = [str(each.message) for each in caught if "returned a view" in str(each.message)]
    assert len(warned) == 1
    assert "unit c0" in warned[0]
    context.abort()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.usefixtures("fake_group")
def test_training_a_chunk_in_eval_mode_is_said_once(compiled: bool) -> None:
    model, context, optimizer = _adopted()
    if compiled:
        model.compile(backend="fsdp_fx", options={"region_compiler": "eager"})
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 4))
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)  # of inputs alone: no gradient of a parameter
    assert not context.fallbacks
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        context.finish_grad_sync()
        optimizer.step()
    (fallback,) = context.fallbacks
    assert fallback.where == "chunk c0"
    assert "call train() on the chunk" in fallback.why
    assert context.stats.windows == 0
    model.train()
    model(torch.ones(2, 4)).sum().backward()
    context.finish_grad_sync()
    assert context.stats.windows == 1
    assert len(context.fallbacks) == 1


@pytest.mark.usefixtures("fake_group")
def test_a_step_before_a_backward_names_the_forward() -> None:
    model, context, optimizer = _adopted()
    model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="the backward of chunk c0, microbatch 0 is missing"):
        optimizer.step()
    context.abort()


@pytest.mark.usefixtures("fake_group")
def test_explain_says_that_no_window_was_ever_closed() -> None:
    model, context, _ = _adopted()
    assert "no window was closed" not in context.explain()
    model(torch.ones(2, 4)).sum().backward()
    assert "no window was closed: nothing has trained in train mode" in context.explain()
    assert "no chunk is adopted" in fsdp_fx.FSDPContext().explain()


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_capture_into_a_cuda_graph_is_refused_before_anything_is_gathered(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, context, optimizer = _adopted()
    loss = model(torch.ones(2, 4)).sum() if when == "backward" else None
    gathers = context.stats.gathers
    # There is nothing to capture on a CPU; tests/gpu does it for real.
    with monkeypatch.context() as captured:
        captured.setattr(Communication, "captured", True)
        with pytest.raises(RuntimeError, match=rf"the {when} of .*run the step without torch.cuda"):
            model(torch.ones(2, 4)) if loss is None else loss.backward()
    assert context.stats.gathers == gathers
    context.abort()
    model(torch.ones(2, 4)).sum().backward()
    context.finish_grad_sync()
    optimizer.step()
