"""The compile backend: sharing, saved values, fallbacks, and what users see meanwhile."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import fsdp_fx
from fsdp_fx.compile.backend import fsdp_fx as backend
from ranks import RankPools
from training import (
    ORDERS,
    WIDTH,
    AcquireSpy,
    Block,
    Chunk,
    interleaved,
    loss_of,
    make_chunks,
    make_data,
    run_actions,
    set_up,
)

LONG = 240.0


class Middle(nn.Module):
    """A stage of layers only: several of them are alike."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _share_one_graph() -> None:
    torch.manual_seed(3)
    chunks: list[nn.Module] = [
        Chunk(1, first=True, last=False),
        *(Middle(2) for _ in range(3)),
        Chunk(1, first=False, last=True),
    ]
    setup = set_up(chunks, region_compiler="eager")
    context = setup.context
    for step in range(3):
        with AcquireSpy() as spy:
            setup.step(list(interleaved(5, 2)), make_data(step, 2), exact=True)
        used = {name for name, _ in spy.uses}
        assert used == {unit.spec.name for unit in context.units}
    for direction in ("forward", "backward"):
        numbers = {
            key.graph
            for key in context.compiled_graphs
            if key.chunk in ("c1", "c2", "c3") and key.direction == direction
        }
        assert len(numbers) == 1, f"{direction} graphs of three identical chunks: {numbers}"
    modules = {
        id(module)
        for key, module in context.compiled_graphs.items()
        if key.chunk in ("c1", "c2", "c3") and key.variant == "on demand"
    }
    assert len(modules) == 2, "one forward and one backward serve all three"


def test_three_identical_chunks_share_one_graph_and_gather_their_own_units(
    ranks: RankPools,
) -> None:
    ranks(2).run(_share_one_graph, timeout=LONG)


def _count_regions(layers: int) -> tuple[int, int]:
    compiled: list[fx.GraphModule] = []

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled.append(gm)
        return gm.forward

    chunk = make_chunks(1, layers)
    setup = set_up(chunk, region_compiler=compiler)
    setup.step(list(interleaved(1, 2)), make_data(0, 2), exact=True)
    return len(compiled), setup.context.report.region_uses


@pytest.mark.soak  # test_compile_cost.py has it for smaller layers
def test_compiled_regions_do_not_grow_with_the_number_of_layers(ranks: RankPools) -> None:
    few = ranks(2).run(_count_regions, 4, timeout=LONG)[0]
    many = ranks(2).run(_count_regions, 16, timeout=LONG)[0]
    assert many[0] == few[0] < few[1] < many[1]


def _saved_values(policy: str) -> None:
    setup = set_up(make_chunks(1, 3), policy, region_compiler="eager", fullgraph=True)
    context, chunk = setup.context, setup.callables[0]
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    shapes = {tuple(p.shape) for p in setup.chunks[0].parameters()}
    tokens, _ = make_data(0, 1)[0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = chunk(tokens[0])
    assert saved
    for tensor in saved:
        # Units' own parameters, freed until their backward, are handed past such hooks.
        assert tensor.untyped_storage().nbytes()
        assert tuple(tensor.shape) not in shapes, f"a saved copy of shape {tuple(tensor.shape)}?"
        assert tuple(tensor.shape[::-1]) not in shapes, "a saved transposed copy?"
    output.float().sum().backward()
    context.finish_grad_sync()


def _offloaded() -> None:
    setup = set_up(make_chunks(2, 2), region_compiler="eager")
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.clone())  # reads it
        return packed[-1]

    for step in range(3):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            setup.step(list(interleaved(2, 2)), make_data(step, 2), exact=True)
    assert packed
    assert setup.context.stats.recorded_windows == 1
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None, "left behind"


def test_hooks_that_move_activations_away_see_no_parameter_that_is_freed(
    ranks: RankPools,
) -> None:
    ranks(2).run(_offloaded, timeout=LONG)


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_no_saved_value_is_or_copies_a_full_parameter(ranks: RankPools, policy: str) -> None:
    ranks(2).run(_saved_values, policy, timeout=LONG)


def _activations_die() -> list[int]:
    storages: list[StorageWeakRef] = []
    alive: list[int] = []
    in_backward = False

    def count() -> int:
        return sum(not storage.expired() for storage in storages)

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(arguments: list[Any]) -> Any:
            values = tuple(arguments)
            arguments.clear()
            result = gm.forward(*values)
            del values
            if in_backward:
                alive.append(count())
            return result

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    layers = 6
    setup = set_up(make_chunks(1, layers), region_compiler=compiler)
    tokens, _ = make_data(0, 1)[0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().nbytes() and tensor.is_floating_point():
            storages.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    for _ in range(2):
        storages.clear()
        alive.clear()
        in_backward = False
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = setup.callables[0](tokens[0])
        loss = output.float().square().sum()
        del output
        assert count() == len(storages) > layers
        in_backward = True
        loss.backward()
        setup.context.finish_grad_sync()
    return alive


def test_a_saved_activation_dies_during_the_backward(ranks: RankPools) -> None:
    alive = ranks(2).run(_activations_die, timeout=LONG)[0]
    assert len(alive) >= 6, "one count per backward region"
    assert alive == sorted(alive, reverse=True)
    assert all(later < sooner for sooner, later in itertools.pairwise(alive)), alive


def _sharded_view() -> None:
    setup = set_up(make_chunks(), region_compiler="eager")
    modules = setup.chunks

    def check(when: str) -> None:
        for module in modules:
            for name, parameter in module.named_parameters():
                assert isinstance(parameter, DTensor), f"{name} {when}"
            for name, value in module.state_dict().items():
                assert isinstance(value, DTensor), f"state_dict {name} {when}"
        torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)

    for step in range(2):
        check("before the step")
        data = make_data(step, 2)
        inputs = [data[m][0][torch.distributed.get_rank()] for m in range(2)]
        outputs = [setup.callables[0](x) for x in inputs]
        check("between a forward and its backward")
        finals = [setup.callables[1](o.detach().requires_grad_()) for o in outputs]
        check("between the forwards and the backwards")
        for final in finals:
            final.sum().backward()
            check("between two backwards")
        for output in outputs:
            output.sum().backward()
        setup.context.finish_grad_sync()
        check("after the window")


def test_users_see_sharded_parameters_between_compiled_calls(ranks: RankPools) -> None:
    ranks(2).run(_sharded_view, timeout=LONG)


class Broken(nn.Module):
    """Layers with something that cannot be captured between, and in, them."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, WIDTH)
        self.layers = nn.ModuleList([Block(), Stubborn() if inside else Block(), Block()])
        self.head = nn.Linear(WIDTH, 24)
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embedding(x))
        if not self.inside:
            torch._dynamo.graph_break()
        x = self.layers[1](x)
        return self.head(self.layers[2](x))


class Stubborn(nn.Module):
    """A layer that breaks the graph in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x))
        torch._dynamo.graph_break()
        return x + self.down(y)


def _graph_break(inside: bool) -> tuple[str, list[str]]:
    logged: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logging.getLogger("fsdp_fx").addHandler(Handler())
    torch.manual_seed(11)
    setup = set_up([Broken(inside)], region_compiler="eager", fullgraph=False)
    for step in range(3):
        setup.step(list(interleaved(1, 3)), make_data(step, 3), exact=True)
    stats = setup.context.stats
    assert (stats.divergences, stats.recorded_windows) == (0, 1)
    return setup.context.explain(), logged


def test_a_graph_break_between_layers_keeps_the_step_right(ranks: RankPools) -> None:
    explanation, logged = ranks(2).run(_graph_break, False, timeout=LONG)[0]
    assert "compiled chunk c0: was captured in parts, what lies between ran eagerly" in explanation
    assert [line for line in logged if "in parts" in line and "graph_break()" in line] == logged


def test_a_layer_that_is_not_captured_runs_eagerly_and_explain_says_why(
    ranks: RankPools,
) -> None:
    explanation, logged = ranks(2).run(_graph_break, True, timeout=LONG)[0]
    assert "unit c0.layers.1 in compiled chunk c0: ran from its hooks" in explanation
    assert "graph_break" in explanation
    assert sum("c0.layers.1" in line for line in logged) == 1


@pytest.mark.usefixtures("fake_group")
def test_slices_of_a_program_die_with_the_graphs_they_were_made_for() -> None:
    setup = set_up(make_chunks(1, 1), region_compiler="eager")
    tokens = make_data(0, 1)[0][0][0]
    for _ in range(2):
        setup.callables[0](tokens).sum().backward()
        setup.context.finish_grad_sync()
    latest = setup.context.window.library.latest
    assert latest is not None
    assert len(latest.slices) == 2, "of the forward and of the backward graph"
    torch._dynamo.reset()
    gc.collect()
    assert len(latest.slices) == 0


class Uncaptured(nn.Module):
    """A chunk without units below it that torch.compile leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, WIDTH)
        self.head = nn.Linear(WIDTH, 24)

    @torch._dynamo.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


def _captured_nothing() -> str:
    setup = set_up([Uncaptured()], region_compiler="eager", fullgraph=False, shard=lambda chunk: [])
    for step in range(2):
        setup.step(list(interleaved(1, 2)), make_data(step, 2), exact=True)
    return setup.context.explain()


def test_a_chunk_of_which_nothing_is_captured_is_reported(ranks: RankPools) -> None:
    explanation = ranks(2).run(_captured_nothing, timeout=LONG)[0]
    assert "compiled chunk c0: ran eagerly" in explanation
    assert "fallbacks: none" not in explanation


class Branch(nn.Module):
    """fc1, fc2 if the flag is up, fc3."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 24)
        self.flag = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.layers[0](self.embedding(x)))
        if self.flag:
            x = torch.relu(self.layers[1](x))
        return self.head(torch.relu(self.layers[2](x)))


def _diverge() -> None:
    torch.manual_seed(5)
    module = Branch()
    setup = set_up([module], region_compiler="eager")
    context = setup.context
    actions = list(interleaved(1, 2))
    for step, flag in enumerate([True, True, False, False, True, False]):
        module.flag = setup.reference.chunks[0].flag = setup.truth.chunks[0].flag = flag
        setup.step(actions, make_data(step, 2), exact=True)
        assert context.stats.windows == step + 1
    assert context.stats.divergences == 1
    assert context.stats.switches == 2
    assert context.stats.recorded_windows == 2
    assert len(context.programs) == 2


def test_a_branch_in_a_compiled_chunk_diverges_once_and_is_known_after(
    ranks: RankPools,
) -> None:
    ranks(2).run(_diverge, timeout=LONG)


def _evaluate_between() -> None:
    setup = set_up(make_chunks(), region_compiler="eager")
    context = setup.context
    actions = list(interleaved(2, 2))

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        for chunk in setup.callables:
            tokens = chunk(tokens)
        return tokens

    for step in range(4):
        data = make_data(step, 2)
        setup.step(actions, data, exact=True)
        before = context.stats.windows, context.trace
        with torch.no_grad():
            quiet = forward(data[0][0][0])
        with context.evaluation():
            forward(data[0][0][0])
        expected = data[0][0][0]
        for chunk in setup.reference.chunks:
            expected = chunk(expected)
        torch.testing.assert_close(quiet, expected.detach(), rtol=0, atol=0)
        assert not context.window.is_open
        assert (context.stats.windows, context.trace) == before
    assert (context.stats.recorded_windows, context.stats.divergences) == (1, 0)


def test_evaluations_of_compiled_chunks_leave_the_window_alone(ranks: RankPools) -> None:
    ranks(2).run(_evaluate_between, timeout=LONG)


def _per_layer() -> None:
    chunks = make_chunks()
    setup = set_up(chunks)
    for chunk in chunks:
        for layer in chunk.layers:
            layer.compile(backend=backend, options={"region_compiler": "eager"}, fullgraph=True)
    for step in range(3):
        setup.step(list(interleaved(2, 2)), make_data(step, 2), exact=True)
    assert setup.context.stats.on_demand_gathers == len(setup.context.trace or ()) + 2


def test_layers_compiled_one_by_one_are_scheduled_by_their_hooks(ranks: RankPools) -> None:
    ranks(2).run(_per_layer, timeout=LONG)


def _nothing(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward


def _refuse(attempt: str) -> str:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    chunk = make_chunks(1, 1)[0]
    fully_shard(chunk.layers[0], mesh=mesh)
    fully_shard(chunk, mesh=mesh)
    context = fsdp_fx.FSDPContext(mode="recorded")
    context.adopt(chunk)
    options: dict[str, Any] = {}
    mode = None
    use: Any = backend
    if attempt == "other backend":
        use = _nothing
    elif attempt == "mode":
        mode = "max-autotune"
    elif attempt == "option":
        options = {"regions": 3}
    elif attempt == "region compiler":
        options = {"region_compiler": "tvm"}
    elif attempt == "inductor options":
        options = {"region_compiler": "eager", "inductor": {"max_autotune": True}}
    elif attempt == "unknown inductor option":
        options = {"inductor": {"max_autotun": True}}
    elif attempt == "no dict":
        options = {"inductor": 3}
    elif attempt == "no bool":
        options = {"fallback_random": "no"}
    elif attempt == "random numbers":
        options = {"region_compiler": "eager", "fallback_random": True}
    elif attempt == "cuda graphs":
        options = {"inductor": {"triton.cudagraphs": True}}
    compiled = torch.compile(chunk, backend=use, mode=mode, options=options or None)
    try:
        compiled(torch.zeros(1, 4, dtype=torch.long))
    except Exception as error:
        context.abort()
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("attempt", "advice"),
    [
        ("other backend", 'use torch.compile(backend="fsdp_fx")'),
        ("mode", "cannot use CUDA graphs: pass other settings of Inductor"),
        ("option", "use region_compiler, fallback_random, accumulate_in_products, inductor"),
        ("region compiler", 'use "inductor", "eager", or a callable'),
        ("inductor options", "remove it"),
        ("unknown inductor option", "has no 'max_autotun'"),
        ("no dict", "is a dict of Inductor's configuration, not 3"),
        ("no bool", "is True or False, not 'no'"),
        ("random numbers", "'fallback_random' has no effect"),
        ("cuda graphs", "remove the triton.cudagraphs option"),
    ],
)
def test_what_the_backend_cannot_do_is_an_error_that_says_what_to_do(
    ranks: RankPools, attempt: str, advice: str
) -> None:
    for message in ranks(2).run(_refuse, attempt, timeout=LONG):
        assert advice in message


def test_the_backend_is_registered_under_its_name() -> None:
    assert "fsdp_fx" in torch._dynamo.list_backends(())


@pytest.mark.parametrize("order", list(ORDERS))
def test_every_order_visits_each_chunk_and_microbatch_once(order: str) -> None:
    actions = list(ORDERS[order](3, 4))
    assert len(actions) == len(set(actions)) == 2 * 3 * 4
    for kind, chunk, microbatch in actions:
        if kind == "B":
            forward = actions.index(("F", chunk, microbatch))
            assert forward < actions.index((kind, chunk, microbatch))


def _sequential_chunks(compile_in_place: bool) -> None:
    torch.manual_seed(2)

    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    chunks: list[nn.Module] = [
        nn.Sequential(nn.Embedding(24, WIDTH), layer(), layer()),
        nn.Sequential(layer(), layer(), nn.Linear(WIDTH, 24)),
    ]
    setup = set_up(
        chunks,
        region_compiler=None if compile_in_place else "eager",
        shard=lambda chunk: [child for child in chunk if isinstance(child, nn.Sequential)],
    )
    if compile_in_place:
        for chunk in chunks:
            chunk.compile(backend=backend, options={"region_compiler": "eager"}, fullgraph=True)
    for step in range(3):
        setup.step(list(interleaved(2, 2)), make_data(step, 2), exact=True)
    assert setup.context.stats.on_demand_gathers == len(setup.context.trace or ()) + 2
    assert {key.chunk for key in setup.context.compiled_graphs} == {"c0", "c1"}
    assert not setup.context.fallbacks


@pytest.mark.parametrize("compile_in_place", [False, True])
def test_chunks_of_torch_nn_classes_are_captured_whole(
    ranks: RankPools, compile_in_place: bool
) -> None:
    ranks(2).run(_sequential_chunks, compile_in_place, timeout=LONG)


def _evaluate_within() -> None:
    setup = set_up(make_chunks(), region_compiler="eager")
    context, (first, second) = setup.context, setup.callables
    rank = torch.distributed.get_rank()
    for step in range(3):
        ((tokens, _),) = data = make_data(step, 1)
        before = context.stats.on_demand_gathers
        hidden = first(tokens[rank])
        resident = [unit for unit in context.units if unit.unsharded or unit.in_flight]
        gathers = context.stats.on_demand_gathers
        with torch.no_grad():
            second(first(tokens[rank]))
        during = context.stats.on_demand_gathers - gathers
        assert resident == [u for u in context.units if u.unsharded or u.in_flight]
        inner = hidden.detach().requires_grad_()
        loss_of(second(inner), data[0][1][rank]).backward()
        hidden.backward(inner.grad)
        context.finish_grad_sync()
        setup.reference.accumulate(data)
        setup.compare("gradient", lambda p: p.grad, exact=True, tolerance=0)
        setup.optimizer.zero_grad()
        setup.reference_optimizer.zero_grad()
        if step:
            assert resident, "the next chunk's unit is on its way"
            assert context.stats.on_demand_gathers - before == 1 + during
    assert context.stats.replayed_windows == 2


def test_an_evaluation_within_a_compiled_window_leaves_residency_as_it_was(
    ranks: RankPools,
) -> None:
    ranks(2).run(_evaluate_within, timeout=LONG)


def _lengths() -> None:
    setup = set_up(make_chunks(), region_compiler="eager")
    for chunk in setup.chunks:
        chunk.compile(backend=backend, options={"region_compiler": "eager"})
    setup.callables = list(setup.chunks)
    for step, length in enumerate([6, 5, 4, 6, 3]):
        data = [(x[..., :length], y[..., :length]) for x, y in make_data(step, 2)]
        setup.step(list(interleaved(2, 2)), data, exact=False, tolerance=1e-5)
    assert setup.context.stats.recorded_windows == 1
    assert setup.context.stats.divergences == 0


@pytest.mark.soak  # case 21 is like it
def test_other_sequence_lengths_follow_the_same_program(ranks: RankPools) -> None:
    ranks(2).run(_lengths, timeout=LONG)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", ["aot_eager", "eager"])
def test_torchs_own_backends_compile_regions(name: str) -> None:
    backend_of_torch = torch._dynamo.lookup_backend(name)
    setup = set_up(make_chunks(1, 2), region_compiler=backend_of_torch)
    for step in range(2):
        run_actions(setup.callables, list(interleaved(1, 2)), make_data(step, 2), rank=0)
        setup.context.finish_grad_sync()
    assert setup.context.report.distinct_regions > 3
    assert not setup.context.fallbacks


@pytest.mark.usefixtures("fake_group")
def test_a_region_compiler_that_returns_nothing_is_named() -> None:
    setup = set_up(make_chunks(1, 1), region_compiler=lambda gm, inputs: None)
    with pytest.raises(Exception, match=r"region_compiler=.*lambda> returned NoneType"):
        setup.callables[0](make_data(0, 1)[0][0][0])
    setup.context.abort()


@pytest.mark.usefixtures("fake_group")
@torch._dynamo.config.patch(recompile_limit=2)
def test_a_chunk_that_is_compiled_too_often_goes_on_eagerly_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = set_up(make_chunks(1, 2), region_compiler="eager", fullgraph=False)
    with caplog.at_level(logging.WARNING, logger="fsdp_fx"):
        for step, length in enumerate([6, 5, 4, 3, 2]):
            data = [(x[..., :length], y[..., :length]) for x, y in make_data(step, 2)]
            run_actions(setup.callables, list(interleaved(1, 2)), data, rank=0)
            setup.context.finish_grad_sync()
    lines = [r.getMessage() for r in caplog.records if r.name == "fsdp_fx"]
    assert len(lines) == 1
    assert lines[0].startswith("fell back: compiled chunk c0: ran eagerly: ")
    assert "recompile limit" in lines[0]
    assert (setup.context.stats.recorded_windows, setup.context.stats.divergences) == (1, 0)
