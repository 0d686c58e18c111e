"""Pipeline × FSDP training whose whole step is one recorded program.

    torchrun --nproc-per-node 4 examples/pipelined.py            # CPU, gloo
    torchrun --nproc-per-node 4 examples/pipelined.py --compile
    torchrun --nproc-per-node 8 examples/pipelined.py --compile --device cuda

Two pipeline ranks, two virtual stages on each, the other ranks shard. The model is an
ordinary one (fsdp_fx/demo/model.py); the lines that fsdp_fx adds are marked (1) to (4).
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import fsdp_fx
import fsdp_fx.pipelining
from fsdp_fx.demo.model import ModelShape, Stage, next_byte_loss
from fsdp_fx.demo.text import Text

STAGES, MICROBATCHES, ROWS = 4, 8, 4  # rows: sequences in a microbatch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    device = torch.device(arguments.device, int(os.environ["LOCAL_RANK"]))
    if arguments.device == "cuda":
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    mesh = init_device_mesh(
        arguments.device, (2, int(os.environ["WORLD_SIZE"]) // 2), mesh_dim_names=("pp", "dp")
    )
    pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()

    # Each rank holds stages pp and pp + 2. FSDP2 as always: every layer, then the stage.
    shape = ModelShape(layers=8)
    indices = [pp, pp + 2]
    chunks = [Stage(shape, index, STAGES).to(device) for index in indices]
    for chunk in chunks:
        for layer in chunk.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(chunk, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()], 3e-3)

    # (1) One context for all chunks of this rank. Adopt before compiling.
    ctx = fsdp_fx.FSDPContext(mode="recorded")
    ctx.adopt(*chunks)
    if arguments.compile:
        # (2) Gathers, frees and reductions move into the compiled graphs.
        chunks = [torch.compile(chunk, backend="fsdp_fx") for chunk in chunks]
    schedule = ScheduleInterleaved1F1B(
        [
            PipelineStage(chunk, index, STAGES, device, group=mesh["pp"].get_group())
            for chunk, index in zip(chunks, indices, strict=True)
        ],
        MICROBATCHES,
        loss_fn=next_byte_loss,
    )
    # (3) The schedule leaves FSDP to the context.
    fsdp_fx.pipelining.bind(schedule, ctx)

    text = Text()
    for step in range(arguments.steps):
        inputs, targets = text.batch(ROWS * MICROBATCHES, shape.context, step, dp, device)
        losses: list[torch.Tensor] = []
        if pp == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        ctx.finish_grad_sync()  # (4) The window ends here: gradients are complete.
        optimizer.step()
        optimizer.zero_grad()
        if losses and dp == 0:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}", flush=True)

    if dist.get_rank() == 0:
        print(ctx.program)  # what this rank does in a step, gather by gather
        print(ctx.explain())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
