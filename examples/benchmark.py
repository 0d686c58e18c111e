"""Step time against peak memory: no sharding, FSDP2 in several ways, fsdp_fx with several budgets.

    torchrun --nproc-per-node 2 examples/benchmark.py
    torchrun --nproc-per-node 8 examples/benchmark.py --order accumulation --chunks 1 --microbatches 8
    python examples/benchmark.py --emulated-ranks 2     # one GPU stands for one rank of two

Every variant trains the same Llama-shaped layers in the same order, one variant after the other in
one run, so that ratios can be trusted. A step is forwards, backwards and the gradients' reduction;
there is no optimizer. Inputs and the gradients of outputs are given, as to a stage in the middle of
a pipeline. `--json` keeps every number, `--picture` draws step time against peak memory.

    step     median over the measured steps of the slowest rank, and their spread (10th to 90th percentile)
    peak     most memory allocated in the measured steps, on any rank
    reserved most memory that the allocator held for it, what it keeps for other streams included
    host     until the last call of a step returns; the host waits for the GPU where its queue is full
    first    the first step, with what is compiled in it
    alone    time in a step in which the GPU did nothing but communicate
    check    difference of the reduced gradients' norm from that of the first sharded variant
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler_util import DeviceType  # type: ignore[attr-defined]  # no stub
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import fsdp_fx

# What is trained


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int


class Layer(nn.Module):
    """A Llama layer: grouped-query attention with rotary embeddings, and a gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.width = shape.hidden // shape.heads
        narrow = shape.kv_heads * self.width
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.key = nn.Linear(shape.hidden, narrow, bias=False)
        self.value = nn.Linear(shape.hidden, narrow, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        y = self.attention_norm(x)
        query, key, value = (
            projection(y).view(batch, tokens, heads, self.width).transpose(1, 2)
            for projection, heads in (
                (self.query, self.heads),
                (self.key, self.kv_heads),
                (self.value, self.kv_heads),
            )
        )
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, -1))
        y = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class Chunk(nn.Module):
    """Consecutive layers."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, shape: Shape, layers: int, tokens: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape) for _ in range(layers))
        width = shape.hidden // shape.heads
        frequencies = 500000.0 ** -(torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(tokens).float(), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cosine, sine = self.cosine.to(x.dtype), self.sine.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return x


@dataclass(frozen=True)
class Action:
    """The forward (F) or backward (B) of one microbatch through one chunk."""

    kind: str
    chunk: int
    microbatch: int


def actions_of(order: str, chunks: int, microbatches: int) -> list[Action]:
    """A step: `chunks` takes every microbatch through a chunk before the next one,
    `interleaved` is one rank of an interleaved 1F1B, `accumulation` is F B F B."""
    if order == "accumulation":
        return [
            Action(kind, chunk, microbatch)
            for microbatch in range(microbatches)
            for kind, places in (("F", range(chunks)), ("B", reversed(range(chunks))))
            for chunk in places
        ]
    group = microbatches if order == "chunks" else min(chunks, microbatches)
    begins = range(0, microbatches, group)

    def pass_over(kind: str, places: Sequence[int]) -> list[Action]:
        return [
            Action(kind, chunk, microbatch)
            for begin in begins
            for chunk in places
            for microbatch in range(begin, min(begin + group, microbatches))
        ]

    forwards = pass_over("F", range(chunks))
    backwards = pass_over("B", range(chunks)[::-1])
    ahead = min(len(forwards), chunks * group)
    steady = zip(forwards[ahead:], backwards, strict=False)
    mixed = [action for pair in steady for action in pair]
    return [*forwards[:ahead], *mixed, *backwards[len(forwards) - ahead :]]


@dataclass(frozen=True)
class Workload:
    """What every variant trains.

    Attributes:
        shape: of a layer.
        layers: in all chunks together.
        chunks: how many.
        microbatches: of a step.
        tokens: of a microbatch.
        order: see :func:`actions_of`.
        parameters: the dtype of the stored parameters; they compute in bfloat16.
    """

    shape: Shape
    layers: int
    chunks: int
    microbatches: int
    tokens: int
    order: str
    parameters: torch.dtype

    def build(self) -> Iterator[Chunk]:
        """The chunks one after the other, with the same weights each time."""
        torch.manual_seed(0)
        for _ in range(self.chunks):
            with torch.device("cuda"):
                chunk = Chunk(self.shape, self.layers // self.chunks, self.tokens)
            for parameter in chunk.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)
            yield chunk.to(self.parameters)

    def batch(self) -> list[torch.Tensor]:
        """The input of each microbatch on this rank."""
        generator = torch.Generator("cuda").manual_seed(1 + dist.get_rank())
        size = (1, self.tokens, self.shape.hidden)
        return [
            torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator)
            for _ in range(self.microbatches)
        ]


def run_step(
    actions: Sequence[Action],
    chunks: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    batch: Sequence[torch.Tensor],
    upstream: torch.Tensor,
    before: Callable[[Action], None] = lambda action: None,
) -> None:
    """Forwards and backwards in order; what a backward has read is dropped.

    Args:
        actions: the order.
        chunks: the chunks' forwards.
        batch: the input of each microbatch.
        upstream: the gradient of every output of the last chunk.
        before: called before each action.
    """
    saved: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    gradients: dict[int, torch.Tensor] = {}
    carried = dict(enumerate(batch))
    for action in actions:
        before(action)
        place = action.chunk, action.microbatch
        if action.kind == "F":
            entered = carried.pop(action.microbatch).detach().requires_grad_()
            left = chunks[action.chunk](entered)
            saved[place] = entered, left
            carried[action.microbatch] = left
            del entered, left
        else:
            carried.pop(action.microbatch, None)
            entered, left = saved.pop(place)
            # Its memory is for the backward: an output that is kept would be held twice.
            torch.autograd.backward(left, gradients.pop(action.microbatch, upstream))
            assert entered.grad is not None
            gradients[action.microbatch] = entered.grad
            del entered, left


# Who trains it


@dataclass
class Trainer:
    """A variant at work.

    Attributes:
        chunks: the chunks' forwards.
        parameters: what has gradients at the end of a step.
        before: called before each action of a step.
        after: called at the end of a step.
        context: of fsdp_fx, if it schedules.
    """

    chunks: Sequence[Callable[[torch.Tensor], torch.Tensor]]
    parameters: list[nn.Parameter]
    before: Callable[[Action], None] = lambda action: None
    after: Callable[[], None] = lambda: None
    context: fsdp_fx.FSDPContext | None = None


@dataclass(frozen=True)
class Variant:
    """One row of the table.

    Attributes:
        name: what it is called.
        family: who shards: nobody, FSDP2, or fsdp_fx.
        build: makes it.
    """

    name: str
    family: str
    build: Callable[[Workload], Trainer]


def compile_layers(chunk: Chunk) -> None:
    for name, layer in chunk.layers.named_children():
        chunk.layers.register_module(name, torch.compile(layer, fullgraph=True))  # type: ignore[arg-type]


def shard(chunk: Chunk, **options: Any) -> Chunk:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in chunk.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, **options)
    fully_shard(chunk, mesh=mesh, mp_policy=policy, **options)
    return chunk


def parameters_of(chunks: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [parameter for chunk in chunks for parameter in chunk.parameters()]


def compute_only(workload: Workload, compiled: bool) -> Trainer:
    chunks = [chunk.to(torch.bfloat16) for chunk in workload.build()]
    if compiled:
        for chunk in chunks:
            compile_layers(chunk)
    return Trainer(chunks, parameters_of(chunks))


def fsdp2(workload: Workload, compiled: bool, prefetch: int = 0) -> Trainer:
    """FSDP2 alone.

    Args:
        workload: what is trained.
        compiled: whether each layer is compiled.
        prefetch: how many layers ahead gathers are started by hand; 0: as FSDP2 does by itself.
    """
    chunks = []
    for chunk in workload.build():
        if compiled:
            compile_layers(chunk)
        chunks.append(shard(chunk))
        layers: list[FSDPModule] = list(chunk.layers)  # type: ignore[arg-type]
        for index, layer in enumerate(layers):
            if prefetch:
                layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + prefetch])
                earlier = layers[max(0, index - prefetch) : index]
                layer.set_modules_to_backward_prefetch(earlier[::-1])
    return Trainer(chunks, parameters_of(chunks))


def fsdp2_kept(workload: Workload, compiled: bool) -> Trainer:
    """FSDP2 as pipelining uses it: a chunk is gathered once, and reduced at its last backward."""
    chunks: list[Any] = []
    for chunk in workload.build():
        if compiled:
            compile_layers(chunk)
        chunks.append(shard(chunk, reshard_after_forward=False))

    def before(action: Action) -> None:
        if action.kind == "B":
            chunk, last = chunks[action.chunk], action.microbatch == workload.microbatches - 1
            chunk.set_requires_gradient_sync(last)
            chunk.set_is_last_backward(last)
            chunk.set_reshard_after_backward(last)

    return Trainer(chunks, parameters_of(chunks), before)


def ours(workload: Workload, compiled: bool, **options: Any) -> Trainer:
    chunks = [shard(chunk) for chunk in workload.build()]
    context = fsdp_fx.FSDPContext(mode="recorded", **options)
    context.adopt(*chunks)
    runs: list[Any] = list(chunks)
    if compiled:
        runs = [torch.compile(chunk, backend="fsdp_fx", fullgraph=True) for chunk in chunks]
    return Trainer(
        runs, parameters_of(chunks), after=context.finish_grad_sync, context=context
    )  # fmt: skip


EVERYTHING = 1 << 50


def variants_of(budgets: Sequence[str]) -> list[Variant]:
    """Every variant that can be measured, in the order of the table."""
    found = []
    for compiled in (False, True):
        how = " compiled" if compiled else ""
        builders: dict[str, tuple[str, Callable[[Workload], Trainer]]] = {
            f"compute{how}": ("compute", partial(compute_only, compiled=compiled)),
            f"fsdp2{how}": ("fsdp2", partial(fsdp2, compiled=compiled)),
            f"fsdp2{how} prefetch": ("fsdp2", partial(fsdp2, compiled=compiled, prefetch=1)),
            f"fsdp2{how} kept": ("fsdp2", partial(fsdp2_kept, compiled=compiled)),
        }
        for budget in budgets:
            name = f"ours {'compiled' if compiled else 'eager'} {budget}"
            builders[name] = "ours", partial(ours, compiled=compiled, **options_of(budget))
        found += [Variant(name, family, build) for name, (family, build) in builders.items()]
    return found


def options_of(budget: str) -> dict[str, Any]:
    """The options of a context: `0`, `2GiB`, `auto`, `auto+2GiB` or `all`.

    With `/bf16` behind it full gradients are kept in bfloat16, not in the reduction's dtype.
    """
    if budget == "0":
        return {}
    budget, _, kept = budget.partition("/")
    size: int | str
    if budget == "all":
        size = EVERYTHING
    elif budget.startswith("auto"):
        size = budget
    else:
        match = re.fullmatch(r"([\d.]+)GiB", budget)
        if match is None:
            raise SystemExit(
                f"--budgets: {budget!r} is none of 0, auto, all, or like 2GiB or auto+2GiB"
            )
        size = int(float(match[1]) * 2**30)
    if kept not in ("", "bf16"):
        raise SystemExit(f"--budgets: gradients may be kept in bf16, not in {kept!r}")
    options: dict[str, Any] = {"memory_budget": size, "reduce_gradients": "planned"}
    if kept:
        options["kept_gradient_dtype"] = torch.bfloat16
    return options


# How it is measured


@dataclass
class Result:
    """What was measured of one variant; times in milliseconds, memory in GiB.

    Attributes:
        name: of the variant.
        family: of the variant.
        step: median step time.
        spread: 10th and 90th percentile of the step time.
        peak: most memory allocated.
        reserved: most memory that the allocator held.
        host: median time until the last call returned.
        first: time of the first step.
        gathers: all-gathers of units per step, and of them those on demand (fsdp_fx alone tells).
        on_demand: see above.
        reductions: reduce-scatters per step.
        moved: bytes per step that the collectives produced or took, in GiB.
        communication: time in which any collective ran.
        alone: time in which nothing else ran.
        kernels: time by kind of kernel, summed over streams.
        norm: of the reduced gradients of this rank.
        check: relative difference of the norm from the first sharded variant's.
        steps: every measured step.
    """

    name: str
    family: str
    step: float
    spread: tuple[float, float]
    peak: float
    reserved: float
    host: float
    first: float
    gathers: int
    on_demand: int | None
    reductions: int
    moved: float
    communication: float
    alone: float
    kernels: dict[str, float]
    norm: float
    check: float
    steps: list[float]


KINDS = {  # of kernels, by their names; the first that fits
    "gather": r"AllGather|all_gather",
    "reduce-scatter": r"ReduceScatter|reduce_scatter",
    "other collectives": r"nccl|emulated",
    "attention": r"flash|fmha|sdpa|cudnn",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|splitK",
    "copies": r"split_with_sizes|chunk_cat|Memcpy|CatArray|multi_tensor_apply|copy",
    "memset": r"Memset|fill",
    "other": r"",
}
COMMUNICATION = ("gather", "reduce-scatter", "other collectives")


def kind_of(kernel: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.I))


def length(intervals: Sequence[tuple[float, float]]) -> float:
    """Of the union of intervals."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


@dataclass
class Counts:
    """Collectives of one step."""

    gathers: int = 0
    reductions: int = 0
    moved: int = 0


# Methods of a process group, by the names that they have had: which counter, and where the whole
# tensor stands among the arguments, the group included.
COLLECTIVES = {
    "_allgather_base": ("gathers", 1),
    "all_gather_single": ("gathers", 1),
    "allgather_into_tensor_coalesced": ("gathers", 1),
    "all_gather_single_coalesced": ("gathers", 1),
    "_reduce_scatter_base": ("reductions", 2),
    "reduce_scatter_single": ("reductions", 2),
    "reduce_scatter_tensor_coalesced": ("reductions", 2),
    "reduce_scatter_single_coalesced": ("reductions", 2),
}


@contextlib.contextmanager
def counting(counts: Counts) -> Iterator[None]:
    """Counts the collectives that are issued through process groups."""
    group_class = type(dist.group.WORLD)

    def wrap(function: Any, kind: str, place: int) -> Any:
        def counted(*args: Any) -> Any:
            tensors = args[place] if isinstance(args[place], list | tuple) else [args[place]]
            setattr(counts, kind, getattr(counts, kind) + 1)
            counts.moved += sum(each.numel() * each.element_size() for each in tensors)
            return function(*args)

        return counted

    # Looked up without binding, so that they can be put back as they were.
    before = {name: vars(group_class)[name] for name in COLLECTIVES if name in vars(group_class)}
    for name in before:
        setattr(group_class, name, wrap(getattr(group_class, name), *COLLECTIVES[name]))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(group_class, name, method)


def profile(
    step: Callable[[], None], trace: Path | None, steps: int = 2
) -> tuple[dict[str, float], float, float]:
    """Milliseconds per step by kind of kernel, of communication, and of nothing else.

    Args:
        step: runs a step.
        trace: where to keep what Perfetto shows.
        steps: how many.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    kernels: dict[str, list[tuple[float, float]]] = {}
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            interval = (event.time_range.start, event.time_range.end)
            kernels.setdefault(kind_of(event.name), []).append(interval)
    communication = [i for kind in COMMUNICATION for i in kernels.get(kind, ())]
    everything = [interval for intervals in kernels.values() for interval in intervals]
    others = [i for kind, each in kernels.items() if kind not in COMMUNICATION for i in each]
    sums = {
        kind: sum(end - begin for begin, end in kernels[kind]) / steps / 1e3
        for kind in KINDS
        if kind in kernels
    }
    sums["idle"] = (
        max(end for _, end in everything)
        - min(begin for begin, _ in everything)
        - length(everything)
    ) / (steps * 1e3)
    alone = length(everything) - length(others)
    return sums, length(communication) / steps / 1e3, alone / steps / 1e3


def over_ranks(value: float, op: Any = dist.ReduceOp.MAX) -> float:
    tensor = torch.tensor(value, dtype=torch.float64, device="cuda")
    dist.all_reduce(tensor, op)
    return tensor.item()


def gradient_norm(parameters: Sequence[nn.Parameter]) -> float:
    """Of what is on this rank."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    return math.sqrt(sum(each.double().square().sum().item() for each in local))


def measure(
    variant: Variant, workload: Workload, warm_up: int, steps: int, traces: Path | None
) -> Result:
    """Train one variant and let go of it."""
    actions = actions_of(workload.order, workload.chunks, workload.microbatches)
    trainer = variant.build(workload)
    batch = workload.batch()
    upstream = torch.full_like(batch[0], 1e-3)
    gc.collect()
    torch.cuda.empty_cache()
    issued = [0.0]

    def step() -> None:
        for parameter in trainer.parameters:
            parameter.grad = None
        began = time.perf_counter()
        run_step(actions, trainer.chunks, batch, upstream, trainer.before)
        trainer.after()
        issued[0] = 1e3 * (time.perf_counter() - began)

    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = 1e3 * (time.perf_counter() - began)
    for _ in range(warm_up - 1):
        step()
    counts = Counts()
    with counting(counts):
        step()
    on_demand = None
    if trainer.context is not None:
        before = trainer.context.stats.on_demand_gathers
        step()
        on_demand = trainer.context.stats.on_demand_gathers - before
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times, hosts = [], []
    for _ in range(steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(over_ranks(begin.elapsed_time(end)))
        hosts.append(issued[0])
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    norm = gradient_norm(trainer.parameters)
    trace = None
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"\W+", "_", variant.name)
        trace = traces / f"{name}_rank{dist.get_rank()}.json.gz"
    kernels, communication, alone = profile(step, trace)
    ordered = sorted(times)
    return Result(
        name=variant.name,
        family=variant.family,
        step=statistics.median(times),
        spread=(ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]),
        peak=over_ranks(peak) / 2**30,
        reserved=over_ranks(reserved) / 2**30,
        host=statistics.median(hosts),
        first=first,
        gathers=counts.gathers,
        on_demand=on_demand,
        reductions=counts.reductions,
        moved=counts.moved / 2**30,
        communication=communication,
        alone=alone,
        kernels=kernels,
        norm=norm,
        check=math.nan,
        steps=times,
    )


def measure_all(
    variants: Sequence[Variant], workload: Workload, warm_up: int, steps: int, traces: Path | None
) -> Iterator[Result]:
    expected: float | None = None
    for variant in variants:
        result = measure(variant, workload, warm_up, steps, traces)
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        if variant.family != "compute":
            expected = result.norm if expected is None else expected
            result.check = result.norm / expected - 1
        yield result


# How it is shown

COLUMNS = {
    "variant": lambda r: r.name,
    "step ms": lambda r: f"{r.step:.1f}",
    "spread": lambda r: f"{r.spread[0]:.0f}-{r.spread[1]:.0f}",
    "peak GiB": lambda r: f"{r.peak:.2f}",
    "reserved": lambda r: f"{r.reserved:.2f}",
    "gathers": lambda r: str(r.gathers),
    "on demand": lambda r: "" if r.on_demand is None else str(r.on_demand),
    "reductions": lambda r: str(r.reductions),
    "moved GiB": lambda r: f"{r.moved:.1f}",
    "host ms": lambda r: f"{r.host:.0f}",
    "alone ms": lambda r: f"{r.alone:.1f}",
    "idle ms": lambda r: f"{r.kernels['idle']:.1f}",
    "first s": lambda r: f"{r.first / 1e3:.1f}",
    "check": lambda r: "" if math.isnan(r.check) else f"{r.check:.0e}",
}


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def show(results: Sequence[Result]) -> str:
    main = [list(COLUMNS), *([show(each) for show in COLUMNS.values()] for each in results)]
    kinds = [kind for kind in KINDS if any(kind in each.kernels for each in results)]
    kernels = [
        ["kernels, ms", *kinds],
        *([each.name, *(f"{each.kernels.get(k, 0):.1f}" for k in kinds)] for each in results),
    ]
    return f"{table(main)}\n\n{table(kernels)}"


def draw(results: Sequence[Result], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    colours = {"compute": "#5b6770", "fsdp2": "#b4532a", "ours": "#1f6f8b"}
    curves: dict[str, list[Result]] = {}
    for result in results:
        axes.scatter(result.peak, result.step, color=colours[result.family], zorder=3)
        axes.annotate(
            result.name, (result.peak, result.step), (5, 4), textcoords="offset points", fontsize=7
        )
        if result.family == "ours":
            curves.setdefault(" ".join(result.name.split()[:2]), []).append(result)
    for curve in curves.values():
        points = sorted((each.peak, each.step) for each in curve)
        axes.plot(*zip(*points, strict=True), color=colours["ours"], linewidth=1)
    axes.set_xlabel("peak of allocated memory, GiB")
    axes.set_ylabel("step, ms")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="of a microbatch")
    parser.add_argument(
        "--order", choices=("chunks", "interleaved", "accumulation"), default="chunks"
    )
    parser.add_argument("--parameters", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--budgets",
        default="0,auto,auto+1GiB,auto+2GiB,auto+4GiB,all,auto/bf16,all/bf16",
        help="of fsdp_fx; /bf16: gradients are kept in bfloat16",
    )
    parser.add_argument("--only", help="variants whose name matches this regular expression")
    parser.add_argument("--list", action="store_true", help="print the variants and end")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the measured ones")
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--traces", type=Path, help="folder for two steps of each, for Perfetto")
    parser.add_argument("--emulated-ranks", type=int, help="one GPU stands for one rank of so many")
    parser.add_argument(
        "--bandwidth", type=float, default=300e9, help="bytes/s of an emulated rank, each way"
    )
    arguments = parser.parse_args()
    variants = [
        variant
        for variant in variants_of(arguments.budgets.split(","))
        if arguments.only is None or re.search(arguments.only, variant.name)
    ]
    if arguments.list:
        print("\n".join(variant.name for variant in variants))
        return
    if arguments.layers % arguments.chunks:
        parser.error("--layers must be a multiple of --chunks")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if arguments.emulated_ranks:
        import emulated_ranks

        emulated_ranks.start(arguments.emulated_ranks, arguments.bandwidth)
    else:
        dist.init_process_group("nccl")
    workload = Workload(
        shape=Shape(arguments.hidden, arguments.intermediate, arguments.heads, arguments.kv_heads),
        layers=arguments.layers,
        chunks=arguments.chunks,
        microbatches=arguments.microbatches,
        tokens=arguments.tokens,
        order=arguments.order,
        parameters=getattr(torch, arguments.parameters),
    )
    ranks = f"{dist.get_world_size()} {'emulated ' if arguments.emulated_ranks else ''}ranks"
    title = (
        f"{torch.cuda.get_device_name()}, {ranks}, torch {torch.__version__}: {workload.layers} "
        f"layers of {arguments.hidden}/{arguments.intermediate}, {workload.chunks} chunks, "
        f"{workload.microbatches} microbatches of {workload.tokens} tokens, {workload.order}"
    )
    speaks = dist.get_rank() == 0
    if speaks:
        print(title, flush=True)
    results = []
    settings = (workload, arguments.warm_up, arguments.steps, arguments.traces)
    for result in measure_all(variants, *settings):
        results.append(result)
        if speaks:
            print(f"  {result.name}: {result.step:.1f} ms, {result.peak:.2f} GiB", flush=True)
    if speaks:
        print(f"\n{show(results)}")
        if arguments.json:
            record = {
                "title": title,
                "command": sys.argv,
                "results": [dataclasses.asdict(each) for each in results],
            }
            arguments.json.write_text(json.dumps(record, indent=1))
        if arguments.picture:
            draw(results, arguments.picture, title)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
