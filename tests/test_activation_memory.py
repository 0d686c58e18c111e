"""How much memory activations take in compiled chunks, beside torch.compile without FSDP.

The CPU allocator's own events say what is allocated when, whatever runs the graphs. Which of it
is an activation (a saved value, a gradient of one, a temporary) the sizes say: every activation
has a dimension of eleven, and no parameter, gradient of one or buffer of a collective has.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from fsdp_fx import FSDPContext
from models import shard
from training import Block

BATCH = 11
WIDTH = 16
LAYERS = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(F.gelu(self.up(x)), 0.2, self.training)
        return x + F.dropout(self.down(y), 0.1, self.training)


class Chunk(nn.Module):
    def __init__(self, kind: type[nn.Module], layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Sharing(Chunk):
    """Every layer reads one activation, and its gradient is a sum over all of them."""

    def __init__(self) -> None:
        super().__init__(Layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.tanh(2 * x)
        for layer in self.layers:
            x = F.gelu(layer(x) * gate)
        return x


class Autocast(Chunk):
    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


MODELS: dict[str, Callable[[], Chunk]] = {
    "mlp": lambda: Chunk(Layer),
    "dropout": lambda: Chunk(Dropping),
    "shared": Sharing,
    "transformer": lambda: Chunk(Block, layers=6),
    "checkpointed": lambda: Chunk(Checkpointed),
    "autocast": Autocast,
}


@dataclass(frozen=True)
class Curve:
    """Bytes of activations that are live.

    Attributes:
        saved: between the forwards and the backwards, without what the caller has put in.
        peak: the most during the backwards.
        left: when they are over.
    """

    saved: int
    peak: int
    left: int


def measure(call: Callable[..., torch.Tensor], path: Path, length: int, in_flight: int) -> Curve:
    """One forward after another, then the backwards of all."""
    inputs = [torch.randn(BATCH, length, WIDTH, requires_grad=True) for _ in range(in_flight)]
    gradients = [torch.randn(BATCH, length, WIDTH) for _ in range(in_flight)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with record_function("forwards"):
            outputs = [call(x) for x in inputs]
        with record_function("backwards"):
            while outputs:
                outputs.pop().backward(gradients.pop())
        for x in inputs:
            x.grad = None
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    (begins, ends), *more = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("name") == "backwards" and event.get("cat") == "user_annotation"
    ]
    assert not more
    allocations = sorted(
        ((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"),
        key=lambda allocation: allocation[0],
    )
    live = saved = peak = 0
    for time, size in allocations:
        if not is_activation(abs(size)):
            continue
        live += size
        if time < begins:
            saved = live
        elif time <= ends:
            peak = max(peak, live)
    return Curve(saved, peak, live)


def is_activation(size: int) -> bool:
    return size % BATCH == 0


def curves(
    make: Callable[[], Chunk],
    region_compiler: Any,
    path: Path,
    length: int = 6,
    in_flight: int = 1,
) -> tuple[Curve, Curve]:
    """Of torch.compile on the chunk as it is, and of the chunk sharded and scheduled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    bare = make()
    sharded = shard(copy.deepcopy(bare), (*{type(layer) for layer in bare.layers}, type(bare)))
    context = FSDPContext("recorded")
    context.adopt(sharded)
    for unit in context.units:
        assert not is_activation(unit.spec.bytes), f"{unit} looks like an activation"
        assert not is_activation(unit.spec.gradient_bytes), f"{unit} looks like an activation"
    backend = "inductor" if region_compiler == "inductor" else "aot_eager"
    theirs = torch.compile(bare, backend=backend, fullgraph=True, dynamic=False)
    ours = torch.compile(
        sharded,
        backend="fsdp_fx",
        options={"region_compiler": region_compiler},
        fullgraph=True,
        dynamic=False,
    )
    measured = []
    for call, close in ((theirs, lambda: None), (ours, context.finish_grad_sync)):
        for _ in range(2):  # compiles and records, replays
            curve = measure(call, path, length, in_flight)
            close()
        measured.append(curve)
    assert context.stats.replayed_windows == 1
    assert context.report.region_uses > LAYERS
    return measured[0], measured[1]


def require_no_more(theirs: Curve, ours: Curve) -> None:
    assert theirs.left == ours.left == 0
    assert 0 < ours.saved <= theirs.saved, f"saved: {ours} beside {theirs}"
    assert ours.saved < ours.peak <= theirs.peak, f"in the backward: {ours} beside {theirs}"


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("model", MODELS)
def test_activations_take_no_more_than_in_torch_compile_without_fsdp(
    model: str, tmp_path: Path
) -> None:
    require_no_more(*curves(MODELS[model], "eager", tmp_path / "trace.json"))


@pytest.mark.usefixtures("fake_group")
def test_activations_of_several_microbatches_take_no_more_than_in_torch_compile(
    tmp_path: Path,
) -> None:
    one, _ = curves(MODELS["mlp"], "eager", tmp_path / "trace.json")
    theirs, ours = curves(MODELS["mlp"], "eager", tmp_path / "trace.json", in_flight=3)
    require_no_more(theirs, ours)
    assert ours.saved == 3 * one.saved


# Activations are larger than weights, as they should be: Inductor orders operators for the
# least memory in all.
@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    "model",
    [name if name == "mlp" else pytest.param(name, marks=pytest.mark.soak) for name in MODELS],
)
def test_activations_take_no_more_than_in_inductor_without_fsdp(model: str, tmp_path: Path) -> None:
    require_no_more(*curves(MODELS[model], "inductor", tmp_path / "trace.json", length=48))


def _keeps_its_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward  # which takes them one by one: whoever calls it holds them


@pytest.mark.usefixtures("fake_group")
def test_the_measurement_sees_activations_that_are_held_too_long(tmp_path: Path) -> None:
    theirs, ours = curves(MODELS["mlp"], _keeps_its_inputs, tmp_path / "trace.json")
    assert ours.saved == theirs.saved
    assert ours.peak > theirs.peak
