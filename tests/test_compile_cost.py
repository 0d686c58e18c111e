"""What compiling costs, in compilations, steps of this package and time, against the layers.

`pytest -s -m soak tests/test_compile_cost.py` prints the time to the first step beside that of
torch.compile on the same chunk without FSDP.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import fx, nn

import fsdp_fx
from fsdp_fx.compile.execution import ScheduledGraph
from fsdp_fx.compile.regions import region_key
from models import shard
from training import Block

WIDTH = 8
PACKAGE = str(Path(fsdp_fx.__file__).parent)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Chunk(nn.Module):
    def __init__(self, layers: int, kind: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Training:
    """Chunks in a row, compiled; a window is all forwards, then all backwards."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        region_compiler: Any = "eager",
        width: int = WIDTH,
        dynamic: bool | None = False,
    ) -> None:
        torch._dynamo.reset()
        kinds = tuple(
            {type(layer) for chunk in chunks for layer in chunk.layers} | {type(chunks[0])}
        )
        for chunk in chunks:
            shard(chunk, kinds)
        self.context = fsdp_fx.FSDPContext("recorded")
        self.context.adopt(*chunks)
        self.width = width
        self.chunks = [
            torch.compile(
                chunk,
                backend="fsdp_fx",
                options={"region_compiler": region_compiler},
                fullgraph=True,
                dynamic=dynamic,
            )
            for chunk in chunks
        ]

    def window(self, microbatches: int = 1, rows: int = 4) -> None:
        outputs = []
        for _ in range(microbatches):
            x = torch.ones(rows, self.width, requires_grad=True)
            for chunk in self.chunks:
                x = chunk(x)
            outputs.append(x)
        for output in outputs:
            output.sum().backward()
        self.context.finish_grad_sync()


@pytest.mark.usefixtures("fake_group")
def test_as_many_regions_are_compiled_for_48_layers_as_for_4() -> None:
    compiled: list[fx.GraphModule] = []

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled.append(gm)
        return gm.forward

    counts = {}
    for layers, chunks in ((4, 1), (16, 1), (48, 1), (4, 2)):
        compiled.clear()
        training = Training([Chunk(layers) for _ in range(chunks)], compiler)
        training.window()
        report = training.context.report
        assert report.distinct_regions == report.compiled_regions == len(compiled)
        assert report.region_uses >= 2 * layers
        counts[layers, chunks] = (len(compiled), report.captured_graphs)
    assert len(set(counts.values())) == 1, counts


class LineCounter:
    """Counts the lines of this package that run: what its loops cost, on any machine."""

    def __enter__(self) -> LineCounter:
        self.lines = 0
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._count if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _count(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.lines += event == "line"
        return self._count


@pytest.mark.usefixtures("fake_group")
def test_steps_of_this_package_per_layer_do_not_grow_with_the_layers() -> None:
    """Compiling, recording, planning and binding; then a replay."""
    per_layer: dict[int, list[float]] = {}
    for layers in (4, 16, 48):
        training = Training([Chunk(layers)])
        per_layer[layers] = []
        for _ in range(3):  # records; looks its slices up; has them
            with LineCounter() as counter:
                training.window(microbatches=3)
            per_layer[layers].append(counter.lines / layers)
        assert training.context.stats.replayed_windows == 2
    for few, some, many in zip(*per_layer.values(), strict=True):
        assert many <= some <= few, per_layer


def cached(context: fsdp_fx.FSDPContext) -> dict[str, int]:
    """How much of what grows with new slices there is."""
    latest = context.window.library.latest
    assert latest is not None
    graphs = [graph for graph in latest.slices if isinstance(graph, ScheduledGraph)]
    host_graphs = set(context.compiled_graphs.values())
    return {
        "programs": len(context.programs),
        "graphs": len(graphs),
        "slices": sum(len(slices) for slices in latest.slices.values()),
        "variants": sum(len(graph._variants) for graph in graphs),
        "transformed graphs": len(context.compiled_graphs),
        "calls": sum(len(graph.bindings) for graph in host_graphs),
        "regions": context.report.region_uses,
    }


@pytest.mark.usefixtures("fake_group")
def test_host_time_and_caches_do_not_grow_with_the_number_of_windows() -> None:
    training = Training([Chunk(3), Chunk(3)])
    training.window(microbatches=2)
    training.window(microbatches=2)
    known = cached(training.context)
    plain = Chunk(24)  # beside each window, for how fast the machine is just then
    ratios: list[float] = []
    lines: list[int] = []
    gc.collect()
    objects = len(gc.get_objects())
    for index in range(200):
        if index in (1, 199):
            with LineCounter() as counter:
                training.window(microbatches=2)
            lines.append(counter.lines)
            continue
        began = time.process_time()
        training.window(microbatches=2)
        between = time.process_time()
        for _ in range(2):
            plain(torch.ones(4, WIDTH, requires_grad=True)).sum().backward()
        ratios.append((between - began) / (time.process_time() - between))
    gc.collect()
    assert lines[0] == lines[1]
    assert cached(training.context) == known
    assert len(gc.get_objects()) - objects < 200, "something is kept of every window"
    first, last = statistics.median(ratios[:40]), statistics.median(ratios[-40:])
    assert last <= 1.5 * first, f"{first:.2f} times as long as a plain model, at last {last:.2f}"


class OtherLayer(nn.Module):
    """The same computation under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.projection(hidden).relu()


class OtherChunk(nn.Module):
    """The same layers in another class, in a container of another name, and more of them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(OtherLayer() for _ in range(layers + 2)))

    # The same argument: torch names the symbol of a dynamic size after where it comes from.
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train_in_a_process(dynamic: bool, other: bool, path: str) -> None:
    """Trains with fixed or with varying shapes; writes what was compiled, and the keys."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2)
    kind = OtherChunk if other else Chunk
    training = Training([kind(3)], "inductor", dynamic=dynamic)
    for rows in (4, 6) if dynamic else (4,):
        training.window(rows=rows)
    report = training.context.report
    found: dict[str, Any] = {
        "graphs": report.captured_graphs,
        "distinct": report.distinct_regions,
        "cached": report.cached_regions,
        "compiled": report.compiled_regions,
        "explanation": training.context.explain(),
    }
    keys: list[str] = []

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        keys.append(region_key(gm))
        return gm.forward

    Training([kind(3)], compiler).window()
    found["keys"] = keys
    Path(path).write_text(json.dumps(found))


def _trained(dynamic: bool, other: bool, path: Path, cache: Path, seed: str) -> dict[str, Any]:
    code = f"import test_compile_cost as t; t.train_in_a_process({dynamic}, {other}, {str(path)!r})"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": str(Path(__file__).parent),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "dynamic", [pytest.param(True, marks=pytest.mark.soak), False], ids=["dynamic", "static"]
)
def test_another_process_and_another_model_of_the_same_layers_compile_nothing_again(
    tmp_path: Path, dynamic: bool
) -> None:
    one = _trained(dynamic, False, tmp_path / "first.json", tmp_path / "cache", "1")
    other = _trained(dynamic, True, tmp_path / "second.json", tmp_path / "cache", "2")
    assert one["graphs"] == other["graphs"] == 1
    assert one["compiled"] == one["distinct"] == other["distinct"] > 2
    assert one["cached"] == other["compiled"] == 0, "compiled again"
    assert other["cached"] == other["distinct"]
    number = other["distinct"]
    made = f"{number} distinct, 0 of these taken from the cache, {number} compiled"
    assert made in one["explanation"]
    assert f"{number} of these taken from the cache, 0 compiled" in other["explanation"]
    assert "first step in" in other["explanation"]
    assert one["keys"] == other["keys"], "the same in every process"


# --- the time to the first step --------------------------------------------------------


def processor_seconds() -> float:
    """Of this process and of the C++ compilers that it has run: a busy machine adds little."""
    return sum(os.times()[:4])


def first_step(kind: str, layers: int) -> float:
    """Processor seconds of a forward and a backward that compile everything."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    chunk = Chunk(layers, Block)
    x = torch.ones(2, 6, 16, requires_grad=True)
    if kind in WITHOUT_FSDP:
        call: Callable[..., torch.Tensor] = torch.compile(
            chunk, backend=WITHOUT_FSDP[kind], fullgraph=True, dynamic=False
        )
    else:
        training = Training([chunk], kind.removeprefix("fsdp_fx, "))
        (call,) = training.chunks
    gc.collect()
    began = processor_seconds()
    call(x).sum().backward()
    return processor_seconds() - began


WITHOUT_FSDP = {
    "tracing": "aot_eager",
    "tracing for inductor": "aot_eager_decomp_partition",  # into the operators that it wants
    "inductor, whole chunk": "inductor",
}
KINDS = (
    "tracing",
    "fsdp_fx, eager",
    "tracing for inductor",
    "fsdp_fx, inductor",
    "inductor, whole chunk",
)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("fake_group")
def test_time_to_the_first_step_grows_by_no_more_than_tracing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    numbers = (4, 16, 48)
    for kind in KINDS:
        first_step(kind, 1)  # imports
    seconds = {
        kind: [
            # The better of two, but for what takes longest.
            min(first_step(kind, layers) for _ in range(1 if "whole" in kind else 2))
            for layers in numbers
        ]
        for kind in KINDS
    }
    with capsys.disabled():
        print("\nprocessor seconds of the first forward and backward")
        print(f"{'layers':<24}" + "".join(f"{layers:>8}" for layers in numbers))
        for kind in KINDS:
            print(f"{kind:<24}" + "".join(f"{each:8.1f}" for each in seconds[kind]))
    growth = {kind: seconds[kind][-1] - seconds[kind][0] for kind in KINDS}
    assert growth["fsdp_fx, eager"] <= 1.5 * growth["tracing"]
    assert growth["fsdp_fx, inductor"] <= 1.5 * growth["tracing for inductor"]
