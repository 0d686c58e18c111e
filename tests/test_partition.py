"""What passes from a forward to its backward."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils.parametrizations import weight_norm

from fsdp_fx.compile import partition
from fsdp_fx.compile.partition import parameter_chains, reduce_grad, saved_parameter_copies
from region_executor import Graph, RegionBackend, slots_by_child


class Embedding(nn.Module):
    """Units that a backward graph does not read: an embedding only, a bias only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.shift = nn.ParameterList([nn.Parameter(torch.randn(8))])
        self.linear = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.linear(self.table(tokens) + self.shift[0])


class Derived(nn.Module):
    """Copies and views of weights that an untagged partition saves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.normed = weight_norm(nn.Linear(8, 8))
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("mask", torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.normed(torch.tanh(self.first(x)))
        x = x @ self.weight.t().contiguous()
        x = x @ (self.weight * self.mask).tanh()
        return x * self.weight.abs().amax() + x @ self.weight.view(4, 2, 8).flatten(0, 1)


class Autocast(nn.Module):
    """A weight at both ends: autocast casts it once, so its copy would span the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # AOTAutograd traces without the cache, so that is the reference.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            for layer in self.layers:
                x = torch.tanh(layer(x))
        return x


class DroppedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ F.dropout(self.linear.weight, 0.5)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def train(model: nn.Module, x: torch.Tensor, region_compiler: str = "eager") -> RegionBackend:
    """One step through the regions, compared with the eager model."""
    reference = copy.deepcopy(model)
    backend = RegionBackend(
        slots_by_child(model, list(model.children())),
        region_compiler=region_compiler,
        poison=region_compiler == "eager",
    )
    torch.manual_seed(1)
    expected = reference(x)
    expected.float().square().sum().backward()
    torch.manual_seed(1)
    actual = torch.compile(model, backend=backend, fullgraph=True)(x)
    actual.float().square().sum().backward()
    tolerance = (
        {"rtol": 0, "atol": 0} if region_compiler == "eager" else {"rtol": 1e-4, "atol": 1e-4}
    )
    torch.testing.assert_close(actual, expected, **tolerance)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **tolerance)
    return backend


def copies(graph: Graph, num_outputs: int = 1) -> list[str]:
    return [
        str(c) for c in saved_parameter_copies(graph.gm, num_outputs, graph.slots, graph.neutral)
    ]


@pytest.mark.parametrize("model", [Embedding, Derived, Autocast])
def test_nothing_made_from_parameters_is_saved(model: type[nn.Module]) -> None:
    x = torch.randint(10, (2, 3)) if model is Embedding else torch.randn(2, 8)
    backend = train(model(), x)
    forward, backward = backend.only("forward"), backend.only("backward")
    assert copies(forward) == []
    # And by storage size: nothing saved but parameters is as large as one.
    for node in backward.gm.graph.find_nodes(op="placeholder"):
        if node.name not in backward.slots and node.name not in backward.neutral:
            assert node.meta["val"].numel() < 64, node


@pytest.mark.parametrize("model", [Derived, Autocast])
def test_an_untagged_partition_is_refused(
    model: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "_recompute_chains", lambda *_: None)
    module = model()
    backend = RegionBackend(slots_by_child(module, list(module.children())))
    with pytest.raises(Exception, match=r"views or copies of parameters: \w+ \(made from primals_"):
        torch.compile(module, backend=backend)(torch.randn(2, 8))


@pytest.mark.parametrize("model", [Embedding, Derived, Autocast])
def test_every_slot_is_in_the_backward(model: type[nn.Module]) -> None:
    x = torch.randint(10, (2, 3)) if model is Embedding else torch.randn(2, 8)
    module = model()
    backend = train(module, x)
    pieces = backend.only("backward").split
    assert sorted(pieces.gradients) == sorted(set(backend.slots.values()))
    pairs = [pair for pairs in pieces.gradients.values() for pair in pairs]
    assert len(pairs) == len(list(module.parameters()))
    assert sorted(pieces.last_gradient_region) == sorted(pieces.gradients)
    if model is Embedding:
        assert set(pieces.last_region) == {2}, "the backward reads the linear weight alone"


def test_one_gradient_of_two_parameters() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.ParameterList([nn.Parameter(torch.randn(2, 8))])
            self.b = nn.ParameterList([nn.Parameter(torch.randn(2, 8))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x + self.a[0] + self.b[0])

    pieces = train(Sum(), torch.randn(2, 8)).only("backward").split
    (first,), (second,) = pieces.gradients.values()
    assert first[0] != second[0]
    assert first[1] == second[1]
    assert pieces.outputs == (None,) * len(pieces.outputs)


def test_dropout_on_a_weight_is_right_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, partition.__name__):
        backend = train(DroppedWeight(), torch.randn(2, 8))
    assert any("cannot be computed again" in record.message for record in caplog.records)
    assert len(copies(backend.only("forward"))) > 0


def test_frozen_parameters_have_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    x = torch.randn(2, 8)
    backend = RegionBackend(slots_by_child(model, list(model)), poison=True)
    torch.compile(model, backend=backend)(x).sum().backward()
    assert set(backend.only("backward").split.gradients) == {1}


def test_the_mark_is_never_run() -> None:
    with pytest.raises(RuntimeError, match="only marks a gradient"):
        reduce_grad(torch.ones(1), torch.ones(1))


def test_parameter_chains() -> None:
    graph = fx.Graph()
    w, x, buffer = (graph.placeholder(name) for name in ("w", "x", "buffer"))
    aten = torch.ops.aten
    view = graph.call_function(aten.t.default, (w,))
    ones = graph.call_function(aten.ones.default, ([2, 2],))
    scaled = graph.call_function(aten.mul.Tensor, (view, ones))
    masked = graph.call_function(aten.mul.Tensor, (scaled, buffer))
    dropped = graph.call_function(aten.native_dropout.default, (masked, 0.5, True))
    product = graph.call_function(aten.mm.default, (x, masked))
    graph.output((product,))
    names = lambda **kw: [n.name for n in parameter_chains(graph, [w], [buffer], **kw)]  # noqa: E731
    assert names() == [view.name, scaled.name, masked.name]
    assert names(repeatable_only=False) == [view.name, scaled.name, masked.name, dropped.name]
    assert list(parameter_chains(graph, [w])) == [view, scaled]

    # A buffer that the graph writes to cannot be read later instead.
    with graph.inserting_before(graph.output_node()):
        graph.call_function(aten.copy_.default, (buffer, masked))
    assert names() == [view.name, scaled.name]


def test_saved_copies_with_inductor() -> None:
    backend = train(Derived(), torch.randn(2, 8), "inductor")
    assert copies(backend.only("forward")) == []
