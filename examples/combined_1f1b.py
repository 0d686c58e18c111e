"""Combined 1F1B of a mixture-of-experts transformer, node by node, on an fsdp_fx context.

    torchrun --nproc-per-node 4 examples/combined_1f1b.py            # CPU, gloo
    torchrun --nproc-per-node 4 examples/combined_1f1b.py --delay-weight-gradients
    torchrun --nproc-per-node 4 examples/combined_1f1b.py --device cuda

A layer is four nodes: attention, dispatch (router and all-to-all), experts, combine
(all-to-all back). The schedule calls them itself and alternates between the forward of
one microbatch and the backward of the one before, so that one's communication can run
beside the other's compute. No layer's forward is ever called.

Every rank has its own tokens. The dense parameters of a layer (attention, router) are
one unit, sharded over all four ranks. Experts are parallel over pairs of ranks, and the
two ranks that hold the same experts shard them between them:

    rank                0      1      2      3
    experts held       0 1    2 3    0 1    2 3
    tokens exchanged   0 and 1        2 and 3
    experts sharded    over 0 and 2, and over 1 and 3

A rank's gradient of an expert has come in over the tokens of both ranks of its pair. To
average over all four ranks, the sum over the two ranks that shard it is divided by four
where FSDP2 would divide by two. So is everything checked here, against the same model
whole: losses, and the gradient of every parameter. The lines that fsdp_fx adds are
marked (1) to (5).
"""

import argparse
import copy
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_fx

WIDTH, HEADS, HIDDEN, VOCABULARY = 32, 4, 48, 64
EXPERTS, CHOSEN = 4, 2  # experts of a layer, and of those for each token
ROWS, LENGTH = 2, 12  # of a microbatch of one rank
EXPERT_RANKS = 2


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    device: str = "cpu"
    layers: int = 3
    microbatches: int = 4
    steps: int = 3
    delay_weight_gradients: bool = False


# The model


class AllToAll(torch.autograd.Function):
    """Sends rows to the ranks of a group; the backward sends gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return AllToAll.apply(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


class GroupedLinear(torch.autograd.Function):
    """Rows, sorted by expert, times the weight of their expert.

    With a queue, the backward leaves there what the weight gradient takes.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, sizes: list[int], queue: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.sizes, ctx.queue = sizes, queue
        return torch.cat([r @ w for r, w in zip(rows.split(sizes), weight, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        parts = zip(gradients[0].split(ctx.sizes), weight, strict=True)
        to_rows = torch.cat([g @ w.T for g, w in parts])
        to_weight = None
        if ctx.queue is None:
            to_weight = weight_gradient(rows, gradients[0], ctx.sizes)
        else:
            ctx.queue.append((rows, gradients[0], ctx.sizes))
        return to_rows, to_weight, None, None


def weight_gradient(rows: torch.Tensor, gradient: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    parts = zip(rows.split(sizes), gradient.split(sizes), strict=True)
    return torch.stack([r.T @ g for r, g in parts])


@dataclass
class Routing:
    """Where the tokens of a microbatch go."""

    order: torch.Tensor  # sorts the copies of tokens by expert
    sent: list[int]  # copies per rank of the pair
    received: list[int]
    by_expert: list[list[int]]  # copies received, per rank that sent them and expert held here


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind()
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Dispatch(nn.Module):
    """Chooses experts, and sends each token to the ranks that hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.group: dist.ProcessGroup | None = None  # without one, all experts are here

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Routing]:
        tokens = self.norm(x).flatten(0, 1)
        gates, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        rows = tokens.repeat_interleave(CHOSEN, 0)[order]
        if self.group is None:
            routing = Routing(order, [len(order)], [len(order)], [counts.tolist()])
            return rows, gates, routing
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        by_expert = arriving.view(self.group.size(), -1).tolist()
        sent = counts.view(self.group.size(), -1).sum(1).tolist()
        routing = Routing(order, sent, [sum(each) for each in by_expert], by_expert)
        rows = AllToAll.apply(rows, routing.sent, routing.received, self.group)
        return rows, gates, routing


class Experts(nn.Module):
    """The experts that this rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)
        # What the weight gradients of each parameter take, a microbatch an entry.
        self.delayed: dict[str, deque[Any]] = {}

    def forward(self, rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        by_expert = torch.tensor(routing.by_expert)
        # Rows come sorted by rank, then expert; compute wants them by expert.
        expert = torch.arange(by_expert.shape[1]).repeat(len(by_expert))
        expert = expert.repeat_interleave(by_expert.flatten())
        order = expert.argsort(stable=True).to(rows.device)
        sizes = by_expert.sum(0).tolist()
        rows = F.gelu(GroupedLinear.apply(rows[order], self.up, sizes, self.delayed.get("up")))
        rows = GroupedLinear.apply(rows, self.down, sizes, self.delayed.get("down"))
        return rows[order.argsort()]

    def compute_weight_gradients(self) -> None:
        """The weight gradients of the oldest microbatch whose backward has run without."""
        for name, queue in self.delayed.items():
            gradient = weight_gradient(*queue.popleft())
            parameter = getattr(self, name)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class Combine(nn.Module):
    """Brings the experts' results back to their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.group: dist.ProcessGroup | None = None

    def forward(
        self, x: torch.Tensor, rows: torch.Tensor, gates: torch.Tensor, routing: Routing
    ) -> torch.Tensor:
        if self.group is not None:
            rows = AllToAll.apply(rows, routing.received, routing.sent, self.group)
        rows = rows[routing.order.argsort()].unflatten(0, (-1, CHOSEN))
        return x + (rows * gates.unsqueeze(-1)).sum(1).view_as(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.dispatch = Dispatch()
        self.experts = Experts()
        self.combine = Combine()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        rows, gates, routing = self.dispatch(x)
        result: torch.Tensor = self.combine(x, self.experts(rows, routing), gates, routing)
        return result


class Head(nn.Linear):
    """The last linear, and the loss."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x).flatten(0, 1), targets.flatten())


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = Head(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = self.head(x, tokens[:, 1:])
        return loss


# The schedule


@dataclass
class Node:
    """A node that has run: the tensors that it read, what they were detached to, and made."""

    module: nn.Module
    read: list[torch.Tensor]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


class Microbatch:
    """One microbatch on its way through the nodes, each a graph of its own.

    Args:
        model: the model.
        tokens: its tokens, the target of each behind it.
        share: the weight of its loss in the step's.
    """

    def __init__(self, model: Model, tokens: torch.Tensor, share: float) -> None:
        self.model = model
        self.tokens = tokens
        self.share = share
        self.loss = torch.tensor(0.0)
        self._nodes: list[Node] = []
        self._gradients: dict[int, torch.Tensor] = {}  # of tensors in nodes, by identity

    def forward(self) -> Iterator[None]:
        """Runs one node between two steps."""
        (x,) = self._run(self.model.embedding, self.tokens[:, :-1])
        yield
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            (x,) = self._run(layer.attention, x)
            yield
            rows, gates, routing = self._run(layer.dispatch, x)
            yield
            (rows,) = self._run(layer.experts, rows, routing)
            yield
            (x,) = self._run(layer.combine, x, rows, gates, routing)
            yield
        (self.loss,) = self._run(self.model.head, x, self.tokens[:, 1:])
        yield

    def _run(self, module: nn.Module, *arguments: Any) -> tuple[Any, ...]:
        read = [each for each in arguments if differentiable(each)]
        inputs = [tensor.detach().requires_grad_() for tensor in read]
        left = iter(inputs)
        made = module(*(next(left) if differentiable(each) else each for each in arguments))
        outputs = made if isinstance(made, tuple) else (made,)
        self._nodes.append(Node(module, read, inputs, list(filter(differentiable, outputs))))
        return outputs

    def backward(self) -> Iterator[nn.Module]:
        """Differentiates one node between two steps; yields the module of each."""
        self._gradients[id(self.loss)] = torch.full_like(self.loss, self.share)
        while self._nodes:
            node = self._nodes.pop()
            gradients = [self._gradients.pop(id(output)) for output in node.outputs]
            torch.autograd.backward(node.outputs, gradients)
            for source, tensor in zip(node.read, node.inputs, strict=True):
                assert tensor.grad is not None
                before = self._gradients.get(id(source))
                self._gradients[id(source)] = (
                    tensor.grad if before is None else before + tensor.grad
                )
            yield node.module


def differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def combined_1f1b(
    ctx: fsdp_fx.FSDPContext, microbatches: Sequence[Microbatch], delayed: bool
) -> None:
    """Forward of each microbatch beside the backward of the one before, node by node."""
    forwards = chain((each.forward() for each in microbatches), [iter(())])
    backwards = chain([iter(())], (each.backward() for each in microbatches))
    waiting: Experts | None = None
    for forward, backward in zip(forwards, backwards, strict=True):
        for _, module in zip_longest(forward, backward):
            if waiting is not None:
                with ctx.weight_gradients(waiting):  # (5) one node after the experts' backward
                    waiting.compute_weight_gradients()
                waiting = None
            if delayed and isinstance(module, Experts):
                waiting = module


# Sharding


def make_models(options: Options, device: torch.device) -> tuple[Model, Model, DeviceMesh]:
    """The model sharded, the same whole, and the mesh."""
    torch.manual_seed(0)
    whole = Model(options.layers).to(device)
    model = copy.deepcopy(whole)
    world = init_device_mesh(options.device, (dist.get_world_size(),))
    mesh = init_device_mesh(
        options.device,
        (dist.get_world_size() // EXPERT_RANKS, EXPERT_RANKS),
        mesh_dim_names=("shard", "expert"),
    )
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.dispatch.group = layer.combine.group = mesh["expert"].get_group()
        experts = layer.experts
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(held(parameter.detach(), mesh).clone()))
            if options.delay_weight_gradients:
                experts.delayed[name] = deque()
        sharded = fully_shard(experts, mesh=mesh["shard"])
        sharded.set_gradient_divide_factor(dist.get_world_size())
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other way to divide
        fully_shard(layer, mesh=world)
    for module in (model.embedding, model.head):
        fully_shard(module, mesh=world)
    return model, whole, mesh


def held(experts: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Of all experts, those of this rank."""
    return experts.chunk(EXPERT_RANKS)[mesh["expert"].get_local_rank()]


# Training and the comparison


@dataclass
class Row:
    """What one step did on this rank, and its errors over all ranks."""

    loss: float
    loss_error: float
    gradient_error: float
    events: int
    gathers: int
    on_demand: int
    reductions: int


def train(options: Options) -> list[Row]:
    """Trains sharded and whole side by side; one row a step. Needs a process group."""
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    model, whole, mesh = make_models(options, device)

    ctx = fsdp_fx.FSDPContext(mode="recorded")  # (1) one context
    ctx.adopt(model)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        # (2) The layer's own hooks never fire: those on its nodes act for it. The experts
        # are a unit of their own, with their own hooks.
        ctx.hook_owner(
            layer,
            [layer.attention, layer.dispatch, layer.combine],
            release_after=layer.dispatch,
        )
        if options.delay_weight_gradients:
            ctx.hook_owner(layer.experts, delayed_weight_gradients=True)  # (3)

    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, whole)]
    rows = []
    for step in range(options.steps):
        tokens = make_tokens(options, step).to(device)
        mine = tokens[dist.get_rank()]
        stats = ctx.stats
        before = (stats.gathers, stats.on_demand_gathers, stats.reductions)
        microbatches = [Microbatch(model, each, 1 / len(mine)) for each in mine]
        combined_1f1b(ctx, microbatches, options.delay_weight_gradients)
        ctx.finish_grad_sync()  # (4) the window ends here

        wanted = whole_step(whole, tokens.flatten(0, 1))
        loss = torch.stack([each.loss.detach() for each in microbatches]).mean()
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
        errors = torch.stack([(loss - wanted).abs(), gradient_error(model, whole, mesh)])
        dist.all_reduce(errors, dist.ReduceOp.MAX)
        loss_error, worst = errors.tolist()
        assert ctx.trace is not None
        after = (stats.gathers, stats.on_demand_gathers, stats.reductions)
        gathers, on_demand, reductions = (b - a for a, b in zip(before, after, strict=True))
        events = len(ctx.trace)
        rows.append(Row(loss.item(), loss_error, worst, events, gathers, on_demand, reductions))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return rows


def make_tokens(options: Options, step: int) -> torch.Tensor:
    """Tokens of every rank and microbatch."""
    generator = torch.Generator().manual_seed(step)
    size = (dist.get_world_size(), options.microbatches, ROWS, LENGTH + 1)
    return torch.randint(VOCABULARY, size, generator=generator)


def whole_step(whole: Model, microbatches: torch.Tensor) -> torch.Tensor:
    """Gradients of the whole model on the microbatches of all ranks; their mean loss."""
    total = torch.zeros((), device=microbatches.device)
    for tokens in microbatches:
        loss = whole(tokens) / len(microbatches)
        loss.backward()
        total += loss.detach()
    return total


def gradient_error(model: Model, whole: Model, mesh: DeviceMesh) -> torch.Tensor:
    """The largest error of a parameter's gradient on this rank, relative by norm."""
    errors = []
    pairs = zip(model.named_parameters(), whole.parameters(), strict=True)
    for (name, parameter), expected in pairs:
        assert expected.grad is not None
        wanted = held(expected.grad, mesh) if ".experts." in name else expected.grad
        gradient: Any = parameter.grad
        if gradient is None:
            raise RuntimeError(f"{name} has no gradient")
        errors.append((gradient.full_tensor() - wanted).norm() / (wanted.norm() + 1e-6))
    return torch.stack(errors).max()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--delay-weight-gradients", action="store_true")
    options = Options(**vars(parser.parse_args()))
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rows = train(options)
    # A value that is no number is not below anything.
    equal = all(row.loss_error < 1e-4 and row.gradient_error < 1e-4 for row in rows)
    if dist.get_rank() == 0:
        heads = ("step", "loss", "events", "gathers", "on demand", "reductions", "gradient error")
        print("  ".join(f"{head:>10}" for head in heads))
        for step, row in enumerate(rows):
            counts = (row.events, row.gathers, row.on_demand, row.reductions)
            cells = (step, f"{row.loss:.6f}", *counts, f"{row.gradient_error:.1e}")
            print("  ".join(f"{cell:>10}" for cell in cells))
        print("equal to the model whole" if equal else "NOT equal to the model whole")
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
