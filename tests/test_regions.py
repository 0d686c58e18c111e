"""Regions: where a graph is cut, what is compiled, and that the result is the eager one."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fsdp_fx.compile.regions import (
    CompiledRegion,
    ParameterOutputError,
    Region,
    RegionCompiler,
    region_key,
    split,
)
from region_executor import RegionBackend, slots_by_child

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(F.gelu(self.linear(self.norm(x))), self.dropout, self.training)


class Attention(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Layers(nn.Module):
    """Children in a row; the slot of a parameter is the number of its child."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Twice(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class TiedLanguageModel(Layers):
    """An embedding whose weight is read again at the end, past the layers, through a view."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(16, 8), Block(), Attention(), Block())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) @ self.layers[0].weight.t()


class Views(Layers):
    """Views that are made long before they are used."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.layers[2].weight.t()[:, 2:]
        late = self.layers[0].weight.view(2, 4, 8)
        x = self.layers[1](self.layers[0](x))
        return (x @ early) @ late.flatten(0, 1)[:6]


class Autocast(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class BufferUpdates(Layers):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def rows() -> torch.Tensor:
    return torch.randn(4, 8)


def sequences() -> torch.Tensor:
    return torch.randn(2, 5, 8)


def tokens() -> torch.Tensor:
    return torch.randint(16, (2, 5))


CASES: dict[str, tuple[Callable[[], Layers], Callable[[], torch.Tensor]]] = {
    "mlp": (lambda: Layers(*(Block() for _ in range(4))), rows),
    "attention": (lambda: Layers(Attention(), Block(), Attention()), sequences),
    "tied": (TiedLanguageModel, tokens),
    "twice": (lambda: Twice(Block(), Block()), rows),
    "views": (Views, rows),
    "autocast": (lambda: Autocast(Block(), Attention(), nn.Linear(8, 8)), sequences),
    "dropout": (lambda: Layers(*(Block(dropout=0.5) for _ in range(3))), rows),
    "buffers": (BufferUpdates, rows),
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def backend_for(model: Layers, region_compiler: Any = "eager", **options: Any) -> RegionBackend:
    slots = slots_by_child(model, list(model.layers))
    return RegionBackend(slots, region_compiler, **options)


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point())


def step(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    inputs = leaf(x)
    output = call(inputs)
    output.float().square().sum().backward()
    return [output.detach(), *([inputs.grad] if inputs.grad is not None else [])]


def compare(
    model: Layers, x: torch.Tensor, region_compiler: Any = "eager", steps: int = 2, **options: Any
) -> RegionBackend:
    """Trains through the regions and eagerly, on the same numbers."""
    reference = copy.deepcopy(model)
    backend = backend_for(model, region_compiler, **options)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    exact = region_compiler == "eager"
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-4}
    for _ in range(steps):
        actual, expected = step(compiled, x), step(reference, x)
        torch.testing.assert_close(actual, expected, **tolerance)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **tolerance, msg=lambda m, n=name: f"{n}: {m}")
    for p, q in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(p, q, **tolerance)
    return backend


# --- results --------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_bitwise_equal_to_eager_with_parameters_there_only_when_needed(case: str) -> None:
    make, inputs = CASES[case]
    backend = compare(make(), inputs(), poison=True)
    for parameter in backend.slots:
        assert parameter.isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tied", "autocast"])
def test_inductor(case: str) -> None:
    make, inputs = CASES[case]
    if case == "tied":
        compare(make(), inputs(), "inductor", steps=1, poison=True)
    else:
        # bf16: only that nothing is read when it is not there.
        model = make()
        compiled = torch.compile(model, backend=backend_for(model, "inductor", poison=True))
        assert all(value.isfinite().all() for value in step(compiled, inputs()))
        assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("fallback_random", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_inductor_dropout(fallback_random: bool) -> None:
    model = Layers(*(Block(dropout=0.5) for _ in range(5)))
    if fallback_random:
        backend = compare(model, rows(), "inductor", steps=1)
    else:
        backend = backend_for(model, "inductor", fallback_random=False, poison=True)
        output, gradient = step(torch.compile(model, backend=backend), rows())
        assert output.isfinite().all()
        assert gradient.isfinite().all()
    # Seeds are numbered over the whole graph; the layers share their code all the same.
    forward = backend.only("forward").split
    inner = {region_key(r.graph_module) for r in forward.regions if r.begins in [(2,), (3,)]}
    assert len(inner) == 1


def test_inference() -> None:
    model = TiedLanguageModel()
    x = tokens()
    expected = model(x)
    backend = backend_for(model, poison=True)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=backend)(x), expected)
    assert [graph.kind for graph in backend.graphs] == ["inference"]


def test_dynamic_shapes() -> None:
    model = TiedLanguageModel()
    reference = copy.deepcopy(model)
    backend = backend_for(model, poison=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for length in (5, 7):
        x = torch.randint(16, (3, length))
        assert torch.equal(step(compiled, x)[0], step(reference, x)[0])
    assert len(backend.graphs) == 2
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    for graph in backend.graphs:
        for region in graph.split.regions:
            values = [n.meta["val"] for n in region.graph_module.graph.nodes if "val" in n.meta]
            inputs = [n.meta["val"] for n in region.graph_module.graph.find_nodes(op="placeholder")]
            used = {str(s) for v in values if isinstance(v, torch.Tensor) for s in _symbols(v)}
            assert used <= {str(v) for v in inputs if isinstance(v, torch.SymInt)}


def _symbols(value: torch.Tensor) -> set[Any]:
    sizes = [size for size in value.shape if isinstance(size, torch.SymInt)]
    return {symbol for size in sizes for symbol in size.node.expr.free_symbols}


class OverwritingCompiler(RegionCompiler):
    """Regions that leave rubbish in the inputs that they may overwrite."""

    overwritten = 0

    def __call__(self, region: Region) -> CompiledRegion:
        run = super().__call__(region)

        def overwriting(inputs: list[Any]) -> Sequence[Any]:
            donated = [inputs[position] for position in region.donated]
            results = run(inputs)
            for value in donated:
                value.fill_(float("nan") if value.is_floating_point() else 77)
                self.overwritten += 1
            return results

        return overwriting


class Reused(Layers):
    """Gradients that several layers' regions read, as they are and as views."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.layers
        y = first(x)
        total = y
        for layer in others:
            total = total + layer(y.t()).t() * y
        return torch.tanh(total + y.sin())


@pytest.mark.parametrize("case", [*CASES, "reused"])
def test_what_a_region_may_overwrite_nobody_reads_again(case: str) -> None:
    make, inputs = CASES.get(case, (lambda: Reused(*(nn.Linear(8, 8) for _ in range(4))), None))
    x = inputs() if inputs is not None else torch.randn(8, 8)
    model = make()
    reference = copy.deepcopy(model)
    backend = backend_for(model)
    backend.compiler = compiler = OverwritingCompiler("eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for call in (compiled, reference):
        torch.manual_seed(1)
        loss = call(leaf(x)).float().square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert compiler.overwritten or len(model.layers) < 3
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            p.grad, q.grad, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.slow
def test_dynamic_shapes_with_inductor() -> None:
    model = Layers(*(Block() for _ in range(4)))
    reference = copy.deepcopy(model)
    backend = backend_for(model, "inductor")
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for length in (3, 6):
        x = torch.randn(length, 8)
        torch.testing.assert_close(step(compiled, x), step(reference, x), rtol=1e-4, atol=1e-4)
    assert backend.compiler.distinct_regions < backend.compiler.region_uses


def test_checkpointed_layers() -> None:
    class Checkpointed(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return x

    backend = compare(Checkpointed(*(Block(dropout=0.5) for _ in range(3))), rows(), poison=True)
    pieces = backend.only("backward").split
    assert [slot for region in pieces.regions for slot in region.begins] == [2, 1, 0]


# --- identity -------------------------------------------------------------------------


def kinds(backend: RegionBackend) -> dict[str, int]:
    return {
        kind: len({region_key(r.graph_module) for r in backend.only(kind).split.regions})
        for kind in ("forward", "backward")
    }


@pytest.mark.parametrize(
    "region_compiler", ["eager", pytest.param("inductor", marks=pytest.mark.soak)]
)
def test_the_number_of_distinct_regions_does_not_grow_with_depth(region_compiler: str) -> None:
    found = []
    for depth in (4, 16):
        torch._dynamo.reset()
        model = Layers(*(Block() for _ in range(depth)))
        backend = compare(model, rows(), region_compiler, steps=1)
        found.append((kinds(backend), backend.compiler.distinct_regions))
        assert backend.compiler.region_uses > 2 * depth
        print(f"{region_compiler}, {depth} layers: {found[-1]}")
    assert found[0] == found[1]


def test_one_compiler_shares_code_between_models() -> None:
    compiler = RegionCompiler("eager")
    counts = []
    for _ in range(2):
        torch._dynamo.reset()
        model = Layers(*(Block() for _ in range(4)))
        backend = backend_for(model)
        backend.compiler = compiler
        step(torch.compile(model, backend=backend), rows())
        counts.append(compiler.distinct_regions)
    assert counts[0] == counts[1]


def test_region_key_tells_regions_apart() -> None:
    def region(scale: Any, dtype: torch.dtype = torch.float32, transpose: bool = False) -> str:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(4, 4, dtype=dtype, device="meta")
        if transpose:
            x.meta["val"] = x.meta["val"].t()
        y = graph.call_function(aten.mul.Tensor, (x, scale))
        y.meta["val"] = x.meta["val"]
        graph.output((y,))
        return region_key(fx.GraphModule({}, graph))

    keys = [
        region(1),
        region(1.0),
        region(True),
        region(1, torch.float64),
        region(1, transpose=True),
    ]
    assert len(set(keys)) == len(keys)
    assert region(2) == region(2)


def test_any_callable_compiles_regions() -> None:
    seen: list[int] = []

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(len(inputs))
        return gm.forward

    backend = compare(Layers(Block(), Block()), rows(), compiler)
    assert len(seen) == backend.compiler.distinct_regions


def test_an_unknown_region_compiler_is_refused() -> None:
    with pytest.raises(ValueError, match=r'"inductor", "eager" or a callable, not \'nvfuser\''):
        RegionCompiler("nvfuser")  # type: ignore[arg-type]


# --- intervals ------------------------------------------------------------------------


def test_the_last_region_covers_views_and_later_uses() -> None:
    backend = compare(Views(), rows())
    forward = backend.only("forward").split
    assert [r.begins for r in forward.regions] == [(0,), (1,), (2,)]
    assert forward.last_region == {0: 2, 1: 1, 2: 2}


def test_a_saved_activation_dies_during_the_backward() -> None:
    model = Layers(*(Block(64) for _ in range(4)))
    saved: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def watch(kind: str, index: int, values: dict[str, Any]) -> None:
        pieces = backend.only(kind).split
        if kind == "forward" and index == len(pieces.regions) - 1:
            names = {v for v in pieces.outputs[1:] if isinstance(v, str)} - {*pieces.placeholders}
            saved.extend(weakref.ref(values[name].untyped_storage()) for name in names)
        if kind == "backward":
            alive.append(sum(reference() is not None for reference in saved))

    backend = backend_for(model, after_region=watch)
    compiled = torch.compile(model, backend=backend)
    compiled(torch.randn(16, 64)).sum().backward()
    assert len(saved) >= 12
    assert sorted(alive, reverse=True) == alive
    assert alive[0] > alive[len(alive) // 2] > alive[-1] == 0


def test_gradients_are_peeled_off_the_outputs() -> None:
    model = Layers(Block(), Block())
    backend = backend_for(model, return_gradients=False)
    inputs = leaf(rows())
    torch.compile(model, backend=backend)(inputs).sum().backward()
    assert inputs.grad is not None
    assert all(p.grad is None for p in model.parameters())
    pieces = backend.only("backward").split
    assert pieces.last_gradient_region == pieces.last_region == {1: 1, 0: 2}


# --- split on hand-built graphs -------------------------------------------------------


def tensor(node: fx.Node, *size: int) -> fx.Node:
    node.meta["val"] = torch.empty(*size, device="meta")
    return node


def hand_built(build: Callable[[fx.Graph, fx.Node, fx.Node, fx.Node], Any]) -> fx.GraphModule:
    graph = fx.Graph()
    x, w0, w1 = (tensor(graph.placeholder(name), 4, 4) for name in ("x", "w0", "w1"))
    graph.output(build(graph, x, w0, w1))
    return fx.GraphModule({}, graph)


def test_values_before_the_first_use() -> None:
    def view_first(graph: fx.Graph, x: fx.Node, w0: fx.Node, w1: fx.Node) -> Any:
        view = tensor(graph.call_function(aten.t.default, (x,), name="view"), 4, 4)
        y = tensor(graph.call_function(aten.mm.default, (view, w0), name="y"), 4, 4)
        return (tensor(graph.call_function(aten.mm.default, (y, w1), name="z"), 4, 4), w0, None, 3)

    pieces = split(hand_built(view_first), {"w0": 7, "w1": 2})
    assert [r.begins for r in pieces.regions] == [(7,), (2,)]
    assert [r.inputs for r in pieces.regions] == [("x", "w0"), ("y", "w1")]
    assert [r.outputs for r in pieces.regions] == [("y",), ("z",)]
    assert pieces.outputs == ("z", "w0", None, 3)
    assert pieces.last_region == {7: 0, 2: 1}
    assert pieces.last_use == {"x": 0, "w0": 0, "y": 1, "w1": 1, "z": 1}

    def compute_first(graph: fx.Graph, x: fx.Node, w0: fx.Node, w1: fx.Node) -> Any:
        y = tensor(graph.call_function(aten.sin.default, (x,), name="y"), 4, 4)
        return (tensor(graph.call_function(aten.addmm.default, (y, w0, w1), name="z"), 4, 4),)

    pieces = split(hand_built(compute_first), {"w0": 0, "w1": 1})
    assert [r.begins for r in pieces.regions] == [(), (0, 1)]


def test_what_is_made_from_parameters_is_made_again_in_each_region() -> None:
    def build(graph: fx.Graph, x: fx.Node, w0: fx.Node, w1: fx.Node) -> Any:
        cast = tensor(graph.call_function(aten.mul.Tensor, (w0, 2.0), name="cast"), 4, 4)
        a = tensor(graph.call_function(aten.mm.default, (x, cast), name="a"), 4, 4)
        b = tensor(graph.call_function(aten.mm.default, (a, w1), name="b"), 4, 4)
        return (tensor(graph.call_function(aten.mm.default, (b, cast), name="c"), 4, 4),)

    pieces = split(hand_built(build), {"w0": 0, "w1": 1})
    assert [r.inputs for r in pieces.regions] == [("x", "w0"), ("a", "w1", "w0")]
    assert pieces.last_region == {0: 1, 1: 1}


def test_parameters_that_only_pass_through_need_no_region() -> None:
    pieces = split(hand_built(lambda graph, x, w0, w1: (w0, x)), {"w0": 0, "w1": 1})
    assert pieces.regions == ()
    assert pieces.outputs == ("w0", "x")
    assert pieces.last_region == {}


def test_a_returned_view_of_a_parameter_is_refused() -> None:
    gm = hand_built(lambda graph, x, w0, w1: (graph.call_function(aten.t.default, (w0,)),))
    with pytest.raises(ParameterOutputError, match="returns t_default, a view of a managed"):
        split(gm, {"w0": 0})


@pytest.mark.parametrize("gradients", [False, True])
def test_a_model_that_returns_a_view_of_a_parameter_is_refused(gradients: bool) -> None:
    class Leaky(Layers):
        def forward(self, x: torch.Tensor) -> Any:
            return self.layers[0](x), self.layers[0].weight.t()

    model = Leaky(nn.Linear(8, 8))
    compiled = torch.compile(model, backend=backend_for(model))
    with torch.set_grad_enabled(gradients), pytest.raises(Exception, match="a view of"):
        compiled(rows())


def test_a_write_to_a_parameter_is_refused() -> None:
    gm = hand_built(lambda graph, x, w0, w1: (graph.call_function(aten.copy_.default, (w0, x)),))
    with pytest.raises(ParameterOutputError, match="writes to the managed parameters w0"):
        split(gm, {"w0": 0})


def test_an_unknown_placeholder_is_named() -> None:
    gm = hand_built(lambda graph, x, w0, w1: (x,))
    with pytest.raises(ValueError, match="no placeholder is named w9; the graph has x, w0, w1"):
        split(gm, {"w9": 0})
