"""Low-rank adapters on a frozen base model, whose weights stay gathered from step to step.

    torchrun --nproc-per-node 2 examples/lora.py            # CPU, gloo
    torchrun --nproc-per-node 2 examples/lora.py --device cuda --memory-budget 500000
    torchrun --nproc-per-node 2 examples/lora.py --plain    # FSDP2 alone

The adapters of all layers are one unit, from one `fully_shard` call: they are small, and train
with one gather and one reduction a step. What is left of a layer is its own unit, all frozen.
A frozen unit is never reduced, and with `keep_frozen` it stays as long as the budget has room
for it, from step to step. Frozen parameters in one unit with trained ones could not: the
optimizer changes these, and the unit is gathered again. The example trains without and with
`keep_frozen`, under the same budget.

An FSDP2 script becomes one of fsdp_fx by what differs under `arguments.plain`. The
gradients of every step and the weights after it are compared with the same model whole,
which sees the microbatches of all ranks.
"""

import argparse
import contextlib
import copy
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_fx
from fsdp_fx.demo.model import ModelShape, Stage, next_byte_loss
from fsdp_fx.demo.observe import Observer
from fsdp_fx.demo.text import Text

SHAPE = ModelShape(layers=4)
RANK = 4  # of the adapters
MICROBATCHES, ROWS = 4, 4  # rows: sequences in a microbatch of one rank
EPSILON = 1e-4  # AdamW's: the sign of a gradient that is all rounding decides nothing


class Adapter(nn.Module):
    """What training adds to a linear layer; nothing at first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.down.T @ self.up.T


class Adapted(nn.Module):
    """A linear layer with an adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.adapter = Adapter(base.in_features, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base(x) + self.adapter(x)
        return adapted


def make_model() -> Any:
    """The model frozen, with an adapter at each linear layer but the last."""
    torch.manual_seed(0)
    model: Any = Stage(SHAPE, 0, 1).requires_grad_(False)
    for layer in model.layers:
        layer.attention.qkv = Adapted(layer.attention.qkv)
        layer.attention.out = Adapted(layer.attention.out)
        layer.mlp[0] = Adapted(layer.mlp[0])
        layer.mlp[2] = Adapted(layer.mlp[2])
    return model


def train(arguments: argparse.Namespace, device: torch.device, keep: bool) -> tuple[bool, int]:
    """Trains; whether every step was the whole model's, and the gathers of the last one."""
    model = make_model().to(device)
    whole = copy.deepcopy(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    fully_shard([m for m in model.modules() if isinstance(m, Adapter)], mesh=mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)  # what is left of it: all frozen
    fully_shard(model, mesh=mesh)
    if not arguments.plain:
        ctx = fsdp_fx.FSDPContext(
            mode="recorded",
            memory_budget=arguments.memory_budget,
            reduce_gradients="per_window",
            keep_frozen=keep,
        )
        ctx.adopt(model)
    optimizer, whole_optimizer = (
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2, eps=EPSILON)
        for each in (model, whole)
    )

    text = Text()
    equal = True
    counts = (0, 0)
    with Observer() if arguments.plain else contextlib.nullcontext() as observer:
        for step in range(arguments.steps):
            total = torch.zeros((), device=device)
            for index, (inputs, targets) in enumerate(batch(text, step, dist.get_rank(), device)):
                if arguments.plain:
                    model.set_requires_gradient_sync(index == MICROBATCHES - 1)
                loss = next_byte_loss(model(inputs), targets) / MICROBATCHES
                loss.backward()
                total += loss.detach()
            if not arguments.plain:
                ctx.finish_grad_sync()  # the window ends here: gradients are complete

            for rank in range(mesh.size()):
                for inputs, targets in batch(text, step, rank, device):
                    loss = next_byte_loss(whole(inputs), targets) / MICROBATCHES
                    (loss / mesh.size()).backward()
            errors = [
                largest_error(
                    [p.grad for p in model.parameters() if p.requires_grad],
                    [p.grad for p in whole.parameters() if p.requires_grad],
                )
            ]
            for each in (optimizer, whole_optimizer):
                each.step()
                each.zero_grad()
            errors.append(largest_error(model.parameters(), whole.parameters()))
            worst = torch.stack(errors)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            dist.all_reduce(total)
            equal &= bool((worst < 1e-3).all())  # a value that is no number is not

            stats = observer.stats if observer else ctx.stats
            before, counts = counts, (stats.gathers, stats.reductions)
            gathers, reductions = (b - a for a, b in zip(before, counts, strict=True))
            if dist.get_rank() == 0:
                print(
                    f"step {step}: loss {total.item() / mesh.size():.4f}, {gathers} gathers, "
                    f"{reductions} reductions, error of gradients {worst[0].item():.1e}, "
                    f"of weights {worst[1].item():.1e}"
                )
    if dist.get_rank() == 0:
        print(f"most parameters resident: {stats.peak_resident_bytes} bytes")
    return equal, gathers


def batch(
    text: Text, step: int, rank: int, device: torch.device
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of each microbatch of a rank."""
    inputs, targets = text.batch(ROWS * MICROBATCHES, SHAPE.context, step, rank, device)
    return zip(inputs.split(ROWS), targets.split(ROWS), strict=True)


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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--plain", action="store_true", help="FSDP2 without fsdp_fx")
    parser.add_argument("--memory-budget", type=int, default=2**20, help="in bytes")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    results = []
    for keep in (False,) if arguments.plain else (False, True):
        if dist.get_rank() == 0:
            print("FSDP2 alone" if arguments.plain else f"keep_frozen={keep}")
        results.append(train(arguments, device, keep))
    equal = all(each for each, _ in results)
    if dist.get_rank() == 0:
        last = " and ".join(str(gathers) for _, gathers in results)
        print(f"gathers in the last step: {last}")
        print("equal to the model whole" if equal else "NOT equal to the model whole")
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
