"""Schedules written by hand in the style of Megatron's, on an fsdp_fx context or FSDP2 alone.

    torchrun --nproc-per-node 4 examples/megatron_style.py            # CPU, gloo
    torchrun --nproc-per-node 4 examples/megatron_style.py --order grouped --compile
    torchrun --nproc-per-node 8 examples/megatron_style.py --device cuda --pp 4 --vp 3
    torchrun --nproc-per-node 4 examples/megatron_style.py --plain    # FSDP2 alone

Each of `pp` pipeline ranks holds `vp` model chunks: chunk v of rank r is stage v * pp + r.
The other ranks shard. What a schedule is made of is a forward step and a backward step of
one chunk for one microbatch; two schedules are made of these, interleaved 1F1B and one
that takes every microbatch through a chunk before the next chunk. As in Megatron, the
trainer gives them `no_sync` and a hook that finishes the gradients of each chunk.

An FSDP2 script becomes one of fsdp_fx by what differs under `arguments.plain`. Gradients
and weights of every step are compared with the same model whole, without a pipeline.
"""

import argparse
import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_fx
from fsdp_fx.demo.model import ModelShape, Stage, next_byte_loss
from fsdp_fx.demo.observe import Observer
from fsdp_fx.demo.text import Text

ROWS = 2  # sequences in a microbatch of one rank
EPSILON = 1e-4  # AdamW's: the sign of a gradient that is all rounding decides nothing

Batch = list[tuple[torch.Tensor, torch.Tensor]]  # inputs and targets of each microbatch


# The pipeline


class Edge:
    """One direction between two neighbours of a pipeline.

    Tensors arrive in the order in which they were sent. Each edge has a process group of
    its own: on one NCCL communicator a send that crosses another one waits for it.
    """

    def __init__(self, source: int, destination: int) -> None:
        self.source, self.destination = source, destination
        self.group = dist.new_group([source, destination])
        self.sent: list[tuple[Any, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor) -> None:
        tensor = tensor.contiguous()
        self.sent.append((dist.isend(tensor, self.destination, self.group), tensor))

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.recv(tensor, self.source, self.group)
        return tensor

    def finish(self) -> None:
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


def make_edges(mesh: DeviceMesh) -> tuple[dict[str, Edge], dict[str, Edge]]:
    """What this rank receives from and sends to: activations forward, gradients backward."""
    receives, sends = {}, {}
    for ranks in mesh.mesh.T.tolist():  # one pipeline after the other, on all ranks
        for rank, following in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
            for name, source, destination in (
                ("forward", rank, following),
                ("backward", following, rank),
            ):
                edge = Edge(source, destination)
                if dist.get_rank() == source:
                    sends[name] = edge
                if dist.get_rank() == destination:
                    receives[name] = edge
    return receives, sends


@dataclass
class Pipeline:
    """What the schedules work with on one rank.

    Attributes:
        chunks: the chunks of this rank, in their order in the model.
        rank: which pipeline rank.
        ranks: how many.
        edges: what this rank receives from, and sends to.
        activations: makes an empty tensor for what goes from stage to stage.
        no_sync: a context that a backward of the chunk runs in if it is not its last.
        finish_grad_sync: called for each chunk at the end.
    """

    chunks: list[Any]
    rank: int
    ranks: int
    edges: tuple[dict[str, Edge], dict[str, Edge]]
    activations: Callable[[], torch.Tensor]
    no_sync: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    finish_grad_sync: Callable[[], None] = lambda: None

    def begin(self, batch: Batch) -> None:
        self.batch = batch
        self.losses: list[torch.Tensor] = []
        # Of each chunk, inputs and outputs of what is still to go backward.
        self.saved: list[deque[Any]] = [deque() for _ in self.chunks]
        self.backwards_left = [len(batch) for _ in self.chunks]

    def is_first(self, chunk: int) -> bool:
        return self.rank == 0 and chunk == 0

    def is_last(self, chunk: int) -> bool:
        return self.rank == self.ranks - 1 and chunk == len(self.chunks) - 1

    def finalize_model_grads(self) -> None:
        """What a trainer does after the last backward; Megatron calls it for each chunk."""
        for edge in self.edges[1].values():
            edge.finish()
        for _ in self.chunks:
            self.finish_grad_sync()


def forward_step(pipeline: Pipeline, chunk: int, microbatch: int) -> None:
    receives, sends = pipeline.edges
    inputs, targets = pipeline.batch[microbatch]
    if not pipeline.is_first(chunk):
        inputs = receives["forward"].receive(pipeline.activations()).requires_grad_()
    output = pipeline.chunks[chunk](inputs)
    if pipeline.is_last(chunk):
        output = next_byte_loss(output, targets) / len(pipeline.batch)
        pipeline.losses.append(output.detach())
    else:
        sends["forward"].send(output.detach())
    pipeline.saved[chunk].append((inputs, output))


def backward_step(pipeline: Pipeline, chunk: int) -> None:
    """The backward of the oldest microbatch of the chunk that has had none."""
    receives, sends = pipeline.edges
    inputs, output = pipeline.saved[chunk].popleft()
    gradient = None
    if not pipeline.is_last(chunk):
        gradient = receives["backward"].receive(pipeline.activations())
    pipeline.backwards_left[chunk] -= 1
    last = pipeline.backwards_left[chunk] == 0
    with contextlib.nullcontext() if last else pipeline.no_sync(pipeline.chunks[chunk]):
        output.backward(gradient)
    if not pipeline.is_first(chunk):
        sends["backward"].send(inputs.grad)


# The schedules


def interleaved(pipeline: Pipeline) -> None:
    """1F1B over virtual stages; the number of microbatches is a multiple of the ranks."""
    ranks, virtual = pipeline.ranks, len(pipeline.chunks)
    total = len(pipeline.batch) * virtual
    warm_up = min((ranks - pipeline.rank - 1) * 2 + (virtual - 1) * ranks, total)

    def forward(k: int) -> None:
        microbatch = k // (ranks * virtual) * ranks + k % ranks
        forward_step(pipeline, k // ranks % virtual, microbatch)

    def backward(k: int) -> None:
        backward_step(pipeline, virtual - 1 - k // ranks % virtual)

    for k in range(warm_up):
        forward(k)
    for k in range(total - warm_up):
        forward(warm_up + k)
        backward(k)
    for k in range(total - warm_up, total):
        backward(k)


def grouped(pipeline: Pipeline) -> None:
    """Every microbatch through a chunk before the next chunk."""
    for chunk in range(len(pipeline.chunks)):
        for microbatch in range(len(pipeline.batch)):
            forward_step(pipeline, chunk, microbatch)
    for chunk in reversed(range(len(pipeline.chunks))):
        for _ in pipeline.batch:
            backward_step(pipeline, chunk)


SCHEDULES = {"interleaved": interleaved, "grouped": grouped}


# Training


@contextlib.contextmanager
def without_gradient_sync(chunk: Any) -> Iterator[None]:
    """FSDP2's `no_sync`: this backward reduces nothing, and is not the chunk's last."""
    chunk.set_requires_gradient_sync(False)
    chunk.set_is_last_backward(False)
    yield
    chunk.set_requires_gradient_sync(True)
    chunk.set_is_last_backward(True)


def train(arguments: argparse.Namespace, device: torch.device) -> bool:
    """Trains; whether every step was the whole model's."""
    mesh = init_device_mesh(
        device.type,
        (arguments.pp, dist.get_world_size() // arguments.pp),
        mesh_dim_names=("pp", "dp"),
    )
    pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    stages = arguments.pp * arguments.vp
    shape = ModelShape(layers=2 * stages, width=32, context=32)
    indices = range(pp, stages, arguments.pp)
    chunks: list[Any] = [Stage(shape, index, stages).to(device) for index in indices]
    for chunk in chunks:
        for layer in chunk.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(chunk, mesh=mesh["dp"])
    pipeline = Pipeline(
        chunks,
        pp,
        arguments.pp,
        make_edges(mesh),
        activations=lambda: torch.empty(ROWS, shape.context, shape.width, device=device),
    )
    if arguments.plain:
        pipeline.no_sync = without_gradient_sync
    else:
        ctx = fsdp_fx.FSDPContext(
            mode="recorded",
            memory_budget=arguments.memory_budget,
            reduce_gradients=arguments.reduce_gradients,
        )
        ctx.adopt(*chunks)
        # The context knows which backward is a unit's last, and decides what is reduced.
        pipeline.no_sync = contextlib.nullcontext
        # Called once per chunk: the first call ends the window, the others do nothing.
        pipeline.finish_grad_sync = ctx.finish_grad_sync
    if arguments.compile:
        for chunk in chunks:
            chunk.compile(backend="fsdp_fx", options={"region_compiler": arguments.compile})
    optimizer = torch.optim.AdamW(
        [p for chunk in chunks for p in chunk.parameters()], lr=1e-3, eps=EPSILON
    )

    whole = nn.Sequential(*(Stage(shape, index, stages) for index in range(stages))).to(device)
    whole_optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3, eps=EPSILON)
    text = Text()

    def batch(step: int, rank: int) -> Batch:
        rows = ROWS * arguments.microbatches
        inputs, targets = text.batch(rows, shape.context, step, rank, device)
        return list(zip(inputs.split(ROWS), targets.split(ROWS), strict=True))

    equal = True
    counts = (0, 0, 0)
    with Observer() if arguments.plain else contextlib.nullcontext() as observer:
        for step in range(arguments.steps):
            pipeline.begin(batch(step, dp))
            SCHEDULES[arguments.order](pipeline)
            pipeline.finalize_model_grads()

            everything = [each for rank in range(mesh["dp"].size()) for each in batch(step, rank)]
            for inputs, targets in everything:
                (next_byte_loss(whole(inputs), targets) / len(everything)).backward()
            sharded = [p for chunk in chunks for p in chunk.parameters()]
            expected = [p for index in indices for p in whole[index].parameters()]
            errors = [largest_error((p.grad for p in sharded), (p.grad for p in expected))]
            for each in (optimizer, whole_optimizer):
                each.step()
                each.zero_grad()
            worst = torch.stack([*errors, largest_error(sharded, expected)])
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            loss = sum(pipeline.losses, torch.zeros((), device=device))
            dist.all_reduce(loss)
            equal &= bool((worst < 1e-3).all())  # a value that is no number is not

            stats = observer.stats if observer else ctx.stats
            before, counts = counts, (stats.gathers, stats.on_demand_gathers, stats.reductions)
            gathers, on_demand, reductions = (b - a for a, b in zip(before, counts, strict=True))
            if dist.get_rank() == 0:
                print(
                    f"step {step}: loss {loss.item() / mesh['dp'].size():.4f}, {gathers} gathers, "
                    f"{on_demand} on demand, {reductions} reductions, error of gradients "
                    f"{worst[0].item():.1e}, of weights {worst[1].item():.1e}"
                )
    if dist.get_rank() == 0:
        full = sum(p.numel() * p.element_size() for p in sharded)
        print(f"most parameters resident: {stats.peak_resident_bytes} of {full} bytes")
    return equal


def largest_error(
    sharded: Iterable[torch.Tensor | None], whole: Iterable[torch.Tensor | None]
) -> torch.Tensor:
    """The largest error of a tensor, relative by norm."""
    errors = []
    for shards, expected in zip(sharded, whole, strict=True):
        found: Any = shards
        assert found is not None
        assert expected is not None
        errors.append((found.full_tensor() - expected).norm() / (expected.norm() + 1e-6))
    return torch.stack(errors).max().detach()


def memory_budget(text: str) -> int | str:
    return text if text == "auto" else int(text)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pp", type=int, default=2, help="pipeline ranks, at least 2")
    parser.add_argument("--vp", type=int, default=2, help="chunks on each")
    parser.add_argument("--order", choices=SCHEDULES, default="interleaved")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="FSDP2 without fsdp_fx")
    parser.add_argument(
        "--compile", nargs="?", const="inductor", help='what compiles the regions: "eager" does not'
    )
    parser.add_argument("--memory-budget", type=memory_budget, help='bytes, or "auto" on GPUs')
    parser.add_argument(
        "--reduce-gradients",
        choices=("per_backward", "per_window", "planned"),
        default="per_window",
    )
    arguments = parser.parse_args()
    if arguments.plain and arguments.compile:
        parser.error("--compile is the backend of fsdp_fx: leave out --plain")
    if arguments.pp < 2 or int(os.environ["WORLD_SIZE"]) % arguments.pp:
        parser.error("--pp is at least 2 and divides the number of processes")
    if arguments.microbatches % arguments.pp:
        parser.error("--microbatches is a multiple of --pp")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    equal = train(arguments, device)
    if dist.get_rank() == 0:
        print("equal to the model whole" if equal else "NOT equal to the model whole")
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
