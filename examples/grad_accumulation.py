"""Gradient accumulation with FSDP2, on an fsdp_fx context or alone.

    torchrun --nproc-per-node 2 examples/grad_accumulation.py            # CPU, gloo
    torchrun --nproc-per-node 2 examples/grad_accumulation.py --compile --memory-budget 1000000
    torchrun --nproc-per-node 2 examples/grad_accumulation.py --device cuda \
        --dtype bfloat16 --memory-budget auto --reduce-gradients planned
    torchrun --nproc-per-node 2 examples/grad_accumulation.py --plain    # FSDP2 alone

An FSDP2 script becomes one of fsdp_fx by what differs under `arguments.plain`: two lines
come and one goes, besides the import and the context. Gradients and weights of every step
are compared with the same model whole, which sees the microbatches of all ranks.
"""

import argparse
import copy
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp_fx
from fsdp_fx.demo.model import ModelShape, Stage, next_byte_loss
from fsdp_fx.demo.text import Text

SHAPE = ModelShape(layers=4)
MICROBATCHES, ROWS = 4, 4  # rows: sequences in a microbatch of one rank
EPSILON = 1e-4  # AdamW's: the sign of a gradient that is all rounding decides nothing


def train(arguments: argparse.Namespace, device: torch.device) -> bool:
    """Trains; whether every step was the whole model's."""
    dtype = getattr(torch, arguments.dtype)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model: Any = Stage(SHAPE, 0, 1).to(device)  # all layers: an ordinary transformer
    whole = copy.deepcopy(model)
    mesh = init_device_mesh(device.type, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if not arguments.plain:
        ctx = fsdp_fx.FSDPContext(
            mode="recorded",
            memory_budget=arguments.memory_budget,
            reduce_gradients=arguments.reduce_gradients,
        )
        ctx.adopt(model)
    if arguments.compile:
        model.compile(backend="fsdp_fx", options={"region_compiler": arguments.compile})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPSILON)
    whole_optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3, eps=EPSILON)

    text = Text()
    equal = True
    for step in range(arguments.steps):
        total = torch.zeros((), device=device)
        for index, (inputs, targets) in enumerate(microbatches(text, step, rank, device)):
            if arguments.plain:
                model.set_requires_gradient_sync(index == MICROBATCHES - 1)
            loss = next_byte_loss(model(inputs), targets) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        if not arguments.plain:
            ctx.finish_grad_sync()  # the window ends here: gradients are complete
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        expected = whole_gradients(whole, text, step, dtype, device)
        norms = [norm.full_tensor(), nn.utils.clip_grad_norm_(whole.parameters(), 1.0)]
        gradient_error = largest_error(gradients(model), gradients(whole))
        optimizer.step()
        optimizer.zero_grad()
        whole_optimizer.step()
        whole_optimizer.zero_grad()
        weight_error = largest_error(model.parameters(), whole.parameters())
        with torch.no_grad():  # roundings do not add up: each step is compared by itself
            for parameter, sharded in zip(whole.parameters(), model.parameters(), strict=True):
                parameter.copy_(sharded.full_tensor())

        dist.all_reduce(total)
        errors = [(total / ranks - expected).abs(), (norms[0] - norms[1]).abs() / norms[1]]
        worst = torch.stack([*errors, gradient_error, weight_error])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        # Inductor rounds to bfloat16 elsewhere. A value that is no number is not below anything.
        tolerance = 0.1 if arguments.compile and dtype == torch.bfloat16 else 1e-3
        equal &= bool((worst < tolerance).all())
        if rank == 0:
            print(
                f"step {step}: loss {total.item() / ranks:.4f}, gradient norm {norms[0].item():.3f}, "
                f"error of gradients {worst[2].item():.1e}, of weights {worst[3].item():.1e}"
            )
    if not arguments.plain and rank == 0:
        print(ctx.explain())
    return equal


def microbatches(
    text: Text, step: int, rank: int, device: torch.device
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    inputs, targets = text.batch(ROWS * MICROBATCHES, SHAPE.context, step, rank, device)
    return zip(inputs.split(ROWS), targets.split(ROWS), strict=True)


def whole_gradients(
    whole: nn.Module, text: Text, step: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Gradients of the whole model on the microbatches of all ranks; their mean loss.

    Computed in `dtype` and added up in the parameters' own, as FSDP2's policy says.
    """
    total = torch.zeros((), device=device)
    for rank in range(dist.get_world_size()):
        for inputs, targets in microbatches(text, step, rank, device):
            cast = copy.deepcopy(whole).to(dtype)
            loss = next_byte_loss(cast(inputs), targets) / MICROBATCHES
            loss.backward()
            total += loss.detach().float() / dist.get_world_size()
            for parameter, low in zip(whole.parameters(), cast.parameters(), strict=True):
                assert low.grad is not None
                gradient = low.grad.to(parameter.dtype) / dist.get_world_size()
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    return total


def gradients(model: nn.Module) -> Iterable[torch.Tensor | None]:
    return (parameter.grad for parameter in model.parameters())


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
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--plain", action="store_true", help="FSDP2 without fsdp_fx")
    parser.add_argument(
        "--compile", nargs="?", const="inductor", help='what compiles the regions: "eager" does not'
    )
    parser.add_argument("--memory-budget", type=memory_budget, help='bytes, or "auto" on GPUs')
    parser.add_argument(
        "--reduce-gradients",
        choices=("per_backward", "per_window", "planned"),
        default="per_window",
        help="per_window is what the loop of --plain does",
    )
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
