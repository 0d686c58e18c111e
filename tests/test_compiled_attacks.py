"""Models and calls on which the compile backend has failed, each with the rule that it broke.

Both ranks have the same data, so that the averages are the gradients of the same model whole.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from fsdp_fx import FSDPContext
from models import DIM, shard
from test_semantics import at_rest, on_two_ranks


class Layers(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def rows() -> torch.Tensor:
    return torch.randn(4, DIM)


class Pair:
    """A compiled chunk on a context, and the same module whole."""

    def __init__(self, whole: nn.Module, region_compiler: Any = "eager", units: Any = nn.Linear):
        self.whole = whole
        self.chunk = shard(copy.deepcopy(whole), units)
        self.context = FSDPContext(mode="recorded")
        self.context.adopt(self.chunk)
        options = {"region_compiler": region_compiler}
        self.compiled = torch.compile(self.chunk, backend="fsdp_fx", options=options)

    def window(self) -> None:
        """Two microbatches, with gradients like those of the whole module."""
        self.chunk.zero_grad()
        self.whole.zero_grad()
        for x in (rows(), rows()):
            self.compiled(x).square().sum().backward()
            self.whole(x).square().sum().backward()
        self.context.finish_grad_sync()
        self.compare()
        assert at_rest(self.context)

    def compare(self) -> None:
        for (name, mine), wanted in zip(
            self.chunk.named_parameters(), self.whole.parameters(), strict=True
        ):
            found = mine.grad
            assert (found is None) == (wanted.grad is None), name
            if found is not None:
                torch.testing.assert_close(found.full_tensor(), wanted.grad)  # type: ignore[attr-defined]


class Renormalised(nn.Module):
    """An embedding that rescales rows of its weight where it reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, DIM, max_norm=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens)


class Shrinking(Layers):
    """Scales a weight in place, without gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.fc1.weight.mul_(0.5)
        return super().forward(x)


@on_two_ranks()
def test_a_forward_that_writes_to_a_parameter_is_refused() -> None:
    """The write would come when the graph is over, to memory that is freed by then."""
    for model, x in ((Renormalised(), torch.arange(4)), (Shrinking(), rows())):
        for gradients in (True, False):
            pair = Pair(model, units=(nn.Linear, nn.Embedding))
            shape = re.escape(str(tuple(next(model.parameters()).shape)))
            refusal = f"writes to the managed parameters .* of shape {shape}.*would be lost"
            with torch.set_grad_enabled(gradients), pytest.raises(Exception, match=refusal):
                pair.compiled(x)
            pair.context.abort()
            assert at_rest(pair.context)


@on_two_ranks()
def test_an_evaluation_that_fails_inside_a_region_leaves_residency_as_it_was() -> None:
    armed: list[bool] = []

    def compiler(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            if armed:
                armed.clear()
                raise ArithmeticError("by intention")
            return gm(*values)

        return run

    pair = Pair(Layers(), compiler)
    pair.window()
    units = pair.context.units
    for in_window in (False, True):
        if in_window:
            pair.compiled(rows()).sum().backward()
        with torch.no_grad():
            pair.compiled(rows())
            before = [(unit.holds, unit.unsharded or unit.in_flight) for unit in units]
            armed.append(True)
            with pytest.raises(ArithmeticError):
                pair.compiled(rows())
        after = [(unit.holds, unit.unsharded or unit.in_flight) for unit in units]
        assert after == before
        pair.context.finish_grad_sync()
        pair.window()


@on_two_ranks()
def test_a_parameter_frozen_between_forward_and_backward_gets_no_gradient() -> None:
    pair = Pair(Layers())
    pair.window()
    pair.chunk.zero_grad()
    pair.whole.zero_grad()
    x = rows()
    for run, module in ((pair.compiled, pair.chunk), (pair.whole, pair.whole)):
        output = run(x)
        module.fc1.requires_grad_(False)
        output.sum().backward()
    pair.context.finish_grad_sync()
    for name, parameter in pair.chunk.named_parameters():
        wanted = pair.whole.get_parameter(name).grad
        found = parameter.grad
        # The reduction is planned: it runs, on nothing.
        total = torch.zeros(()) if found is None else found.full_tensor()  # type: ignore[attr-defined]
        torch.testing.assert_close(total, torch.zeros_like(total) if wanted is None else wanted)
    pair.window()


@on_two_ranks()
def test_a_generated_module_is_a_chunk_like_any_other() -> None:
    """The forward of an fx.GraphModule belongs to no Python module."""
    pair = Pair(fx.symbolic_trace(Layers()))
    for _ in range(2):
        pair.window()
    assert not pair.context.fallbacks
    assert {key.direction for key in pair.context.compiled_graphs} == {"forward", "backward"}


class Selecting(Layers):
    """Computes on as many rows as the data says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x)[x[:, 0] > 0])


@on_two_ranks()
def test_sizes_that_the_data_decides_pass_from_region_to_region() -> None:
    """Inductor takes for its own a symbol that an input of its graph is said to define."""
    pair = Pair(Selecting(), "inductor")
    x = rows()
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(pair.compiled(x), pair.whole(x))
    assert not pair.context.fallbacks
    assert pair.context.report.captured_graphs == 1
