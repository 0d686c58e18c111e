"""Pipeline × FSDP training whose whole step is one recorded program.

    torchrun --nproc-per-node 4 examples/pipelined.py            # CPU, gloo
    torchrun --nproc-per-node 4 examples/pipelined.py --compile
    torchrun --nproc-per-node 4 examples/pipelined.py --schedule InterleavedZeroBubble
    torchrun --nproc-per-node 8 examples/pipelined.py --compile --device cuda
    torchrun --nproc-per-node 4 examples/pipelined.py --plain    # torch alone

Two pipeline ranks, one or two stages on each, the other ranks shard. The model is an
ordinary one (fsdp_fx/demo/model.py); the lines that fsdp_fx adds are marked (1) to (4),
three besides the context, and one changes to compile. Gradients and weights of every step
are compared with the same model whole, without a pipeline.

`--plain` leaves those lines out: torch shards and schedules alone. With a schedule that
splits the backward (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV) torch then trains
wrongly without a word, and the comparison says so. (The last two, where a rank has two
stages in a row, torch 2.11 cannot run over gloo.)
"""

import argparse
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

import fsdp_fx
import fsdp_fx.pipelining
from fsdp_fx.demo.model import ModelShape, Stage, next_byte_loss
from fsdp_fx.demo.text import Text

SHAPE = ModelShape(layers=8)
MICROBATCHES, ROWS = 8, 4  # rows: sequences in a microbatch
EPSILON = 1e-4  # AdamW's: the sign of a gradient that is all rounding decides nothing
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the first rank has the first and the last stage


def train(arguments: argparse.Namespace, device: torch.device) -> bool:
    """Trains; whether every step was the whole model's."""
    mesh = init_device_mesh(
        arguments.device, (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp")
    )
    pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    make_schedule: Any = get_schedule_class(arguments.schedule)
    if issubclass(make_schedule, PipelineScheduleSingle):
        stages, indices = 2, [pp]
    else:
        stages, indices = 4, [pp, 3 - pp if arguments.schedule in V_SHAPED else pp + 2]

    # FSDP2 as always: every layer, then the stage.
    chunks: list[Any] = [Stage(SHAPE, index, stages).to(device) for index in indices]
    for chunk in chunks:
        for layer in chunk.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(chunk, mesh=mesh["dp"])
    sharded = [parameter for chunk in chunks for parameter in chunk.parameters()]
    optimizer = torch.optim.AdamW(sharded, lr=1e-3, eps=EPSILON)
    whole = nn.Sequential(*(Stage(SHAPE, index, stages) for index in range(stages))).to(device)
    expected = [parameter for index in indices for parameter in whole[index].parameters()]
    whole_optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3, eps=EPSILON)

    # (1) One context for all chunks of this rank. Adopt before compiling.
    if not arguments.plain:
        ctx = fsdp_fx.FSDPContext(mode="recorded", reduce_gradients="per_window")
        ctx.adopt(*chunks)
    if arguments.compile:
        # (2) Gathers, frees and reductions move into the compiled graphs. In place: some
        # schedules refuse what torch.compile(chunk) returns.
        for chunk in chunks:
            chunk.compile(backend="fsdp_fx", options={"region_compiler": arguments.compile})
    group = mesh["pp"].get_group()
    pipeline_stages = [
        PipelineStage(chunk, index, stages, device, group=group)
        for chunk, index in zip(chunks, indices, strict=True)
    ]
    schedule = make_schedule(
        pipeline_stages[0] if stages == 2 else pipeline_stages,
        MICROBATCHES,
        loss_fn=next_byte_loss,
    )
    if not arguments.plain:
        # (3) The schedule leaves FSDP to the context.
        fsdp_fx.pipelining.bind(schedule, ctx)

    text = Text()
    equal = True
    for step in range(arguments.steps):
        batches = [
            text.batch(ROWS * MICROBATCHES, SHAPE.context, step, rank, device)
            for rank in range(mesh["dp"].size())
        ]
        inputs, targets = batches[dp]
        losses: list[torch.Tensor] = []
        schedule.step(
            *([inputs] if 0 in indices else []),
            **({"target": targets, "losses": losses} if stages - 1 in indices else {}),
        )
        if not arguments.plain:
            ctx.finish_grad_sync()  # (4) The window ends here: gradients are complete.

        for inputs, targets in batches:
            for each in zip(inputs.split(ROWS), targets.split(ROWS), strict=True):
                loss = next_byte_loss(whole(each[0]), each[1])
                (loss / MICROBATCHES / len(batches)).backward()
        errors = [largest_error((p.grad for p in sharded), (p.grad for p in expected))]
        for both in (optimizer, whole_optimizer):
            both.step()
            both.zero_grad()
        worst = torch.stack([*errors, largest_error(sharded, expected)])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        total = sum((loss.detach() for loss in losses), torch.zeros((), device=device))
        dist.all_reduce(total)
        equal &= bool((worst < 1e-3).all())  # a value that is no number is not
        if dist.get_rank() == 0:
            print(
                f"step {step}: loss {total.item() / MICROBATCHES / len(batches):.4f}, "
                f"error of gradients {worst[0].item():.1e}, of weights {worst[1].item():.1e}",
                flush=True,
            )

    if not arguments.plain and dist.get_rank() == 0:
        print(ctx.program)  # what this rank does in a step, gather by gather
        print(ctx.explain())
    return equal


def largest_error(
    sharded: Iterable[torch.Tensor | None], whole: Iterable[torch.Tensor | None]
) -> torch.Tensor:
    """The largest error of a tensor, relative by norm; infinite if one is missing."""
    errors = []
    for shards, expected in zip(sharded, whole, strict=True):
        found: Any = shards
        assert expected is not None
        if found is None:
            errors.append(torch.full_like(expected.norm(), torch.inf))
        else:
            errors.append((found.full_tensor() - expected).norm() / (expected.norm() + 1e-6))
    return torch.stack(errors).max().detach()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="Interleaved1F1B", help="a name that torch knows")
    parser.add_argument("--plain", action="store_true", help="FSDP2 without fsdp_fx")
    parser.add_argument(
        "--compile", nargs="?", const="inductor", help='what compiles the regions: "eager" does not'
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    if arguments.plain and arguments.compile:
        parser.error("--compile is the backend of fsdp_fx: leave out --plain")
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
