"""Small models of many kinds, one row of :data:`ROWS` each, for the compile backend.

A row says how a chunk is built, which of its modules are units, what it is called with, and
how much of it torch.compile captures. :mod:`test_compiled_models` trains each row compiled,
in several orders and under several budgets, and compares every window with the same model
whole. For another model, write its class and add its row: nothing else is needed.

What a model returns may be nested in any way. Its tensors that need a gradient have a
multiple of :data:`WIDTH` elements each, since the other chunk goes on with those.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

__all__ = ["BATCH", "LENGTH", "ROWS", "VOCABULARY", "WIDTH", "Arguments", "Row"]

WIDTH = 8
VOCABULARY = 16
BATCH = 2
LENGTH = 4
HEADS = 2

FP32 = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a chunk is called with."""


@dataclass(frozen=True)
class Row:
    """A model of the table.

    Attributes:
        name: of the row.
        build: makes the chunk, whole; called under a fixed seed.
        inputs: draws the arguments of one microbatch.
        units: which modules below the chunk ``fully_shard`` is called on, by path; a ``*``
            stands for any one part of a path. The chunk itself comes last.
        policy: of every unit.
        policies: of single units, by path, where it is another one; the chunk's own is "".
        placed: whether the other chunk, a simple one, comes after the model or before it.
        fullgraph: whether the chunk is captured whole.
        eager: the units that run from their hooks since the capture breaks inside of them.
        tolerance: how far gradients, weights and outputs may be off, relative by norm; 0 for
            bitwise equality.
        reason: why ``tolerance`` is not 0.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Arguments]
    units: tuple[str, ...] = ("layers.*",)
    policy: MixedPrecisionPolicy = FP32
    policies: Mapping[str, MixedPrecisionPolicy] = dataclasses.field(default_factory=dict)
    placed: Literal["first", "last"] = "first"
    fullgraph: bool = True
    eager: tuple[str, ...] = ()
    tolerance: float = 0.0
    reason: str = ""

    def __post_init__(self) -> None:
        if bool(self.tolerance) != bool(self.reason):
            raise ValueError(f"{self.name}: a tolerance and the reason for it belong together")
        if self.eager and self.fullgraph:
            raise ValueError(f"{self.name}: what is captured whole runs nothing eagerly")


def _features(generator: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randn(*(size or (BATCH, LENGTH, WIDTH)), generator=generator)


def features(generator: torch.Generator) -> Arguments:
    """One tensor of features."""
    return (_features(generator),), {}


def tokens(generator: torch.Generator) -> Arguments:
    """One tensor of token numbers."""
    return (torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator),), {}


def images(generator: torch.Generator) -> Arguments:
    """A batch of small images with two channels."""
    return (_features(generator, BATCH, 2, 4, 4),), {}


# Parts


class MLP(nn.Module):
    """Two linears and a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Layers one after the other, and a norm that belongs to the chunk's own unit."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def stack(layer: Callable[..., nn.Module], count: int = 2, *args: Any) -> Callable[[], nn.Module]:
    """Builds a :class:`Stack` of ``count`` layers."""
    return lambda: Stack(*(layer(*args) for _ in range(count)))


class Embedded(nn.Module):
    """A stack between an embedding and a head, both in the chunk's own unit."""

    def __init__(self, *layers: nn.Module, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# Architectures


class LlamaBlock(nn.Module):
    """RMSNorm, rotary positions, grouped queries, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.size = 4, WIDTH // 4
        self.attention_norm, self.norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, 2 * self.size, bias=False)
        self.value = nn.Linear(WIDTH, 2 * self.size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        angles = torch.outer(torch.arange(LENGTH).float(), torch.ones(self.size // 2))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, dim=-1)
        turned = torch.cat((-other, one), dim=-1)
        return x * self.cos.to(x.dtype) + turned * self.sin.to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        query, key, value = (
            project(normed).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        query, key = self.rotate(query), self.rotate(key)
        key, value = (t.repeat_interleave(self.heads // 2, dim=1) for t in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Conv1D(nn.Module):
    """GPT-2's linear, with the weight the other way round."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = (*x.shape[:-1], self.bias.numel())
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(size)


class GPT2Block(nn.Module):
    """LayerNorm, explicit causal attention, dropout, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = Conv1D(WIDTH, 3 * WIDTH), Conv1D(WIDTH, WIDTH)
        self.up, self.down = Conv1D(WIDTH, 4 * WIDTH), Conv1D(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attention(self.ln_1(x)).split(WIDTH, dim=2)
        query, key, value = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in parts)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(~self.mask, float("-inf"))
        attended = self.dropout(scores.softmax(-1)) @ value
        x = x + self.dropout(self.projection(attended.transpose(1, 2).flatten(2)))
        hidden = F.gelu(self.up(self.ln_2(x)), approximate="tanh")
        return x + self.dropout(self.down(hidden))


class GPT2(nn.Module):
    """Token and position embeddings, blocks, a head tied to the tokens' embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(GPT2Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class DenseMoE(nn.Module):
    """Every expert computes every token; the router's best two are weighted in."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(MLP() for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        weights = torch.zeros(*x.shape[:-1], len(self.experts), dtype=x.dtype, device=x.device)
        weights = weights.scatter(-1, chosen, scores / scores.sum(-1, keepdim=True))
        return x + sum(
            weights[..., index : index + 1] * expert(x) for index, expert in enumerate(self.experts)
        )


class CapacityMoE(nn.Module):
    """Each expert takes the tokens that want it most, a fixed number, and adds them back."""

    def __init__(self, experts: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(0.3 * torch.randn(experts, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(0.3 * torch.randn(experts, 2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        scores, places = self.router(flat).softmax(-1).t().topk(3, dim=-1)
        taken = flat[places]
        hidden = F.silu(torch.bmm(taken, self.up))
        result = torch.bmm(hidden, self.down) * scores.unsqueeze(-1)
        combined = torch.zeros_like(flat).index_add(0, places.flatten(), result.flatten(0, 1))
        return x + combined.view_as(x)


class DispatchMoE(nn.Module):
    """Each expert computes the tokens routed to it, however many: that breaks the graph."""

    def __init__(self, experts: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(MLP() for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        scores, chosen = self.router(flat).softmax(-1).topk(1, dim=-1)
        result = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            (places,) = torch.where(chosen[:, 0] == index)
            if places.numel():
                result = result.index_add(0, places, expert(flat[places]) * scores[places])
        return x + result.view_as(x)


class LoRALinear(nn.Module):
    """A frozen linear and a trained addition of low rank."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, inputs))
        self.b = nn.Parameter(0.1 * torch.randn(outputs, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def lora() -> nn.Module:
    """Layers with adapters between frozen ones, with a frozen embedding, norm and head."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = LoRALinear(WIDTH, 2 * WIDTH), LoRALinear(2 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.gelu(self.up(x)))

    model = Embedded(MLP().requires_grad_(False), Layer(), MLP().requires_grad_(False), Layer())
    for module in (model.embedding, model.norm, model.head):
        module.requires_grad_(False)
    return model


class ConvBlock(nn.Module):
    """A convolution, BatchNorm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """Convolutions with BatchNorm in units, and GroupNorm in the chunk's own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 2, 1)
        self.layers = nn.ModuleList(ConvBlock() for _ in range(2))
        self.norm = nn.GroupNorm(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class CrossAttention(nn.Module):
    """A decoder layer: self-attention, attention to what was encoded, MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.cross = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = MLP()

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x = x + self.own(x, x, x, need_weights=False)[0]
        x = x + self.cross(x, memory, memory, need_weights=False)[0]
        return self.mlp(x)


class EncoderDecoder(nn.Module):
    """Encodes one sequence, decodes another with it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 16, 0.0, batch_first=True) for _ in range(1)
        )
        self.decoder = nn.ModuleList(CrossAttention() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.encoder:
            source = layer(source)
        memory = self.norm(source)
        for layer in self.decoder:
            target = layer(target, memory)
        return self.norm(target)


def two_sequences(generator: torch.Generator) -> Arguments:
    """Two tensors of features, of different lengths."""
    return (_features(generator, BATCH, 3, WIDTH), _features(generator)), {}


class EinsumAttention(nn.Module):
    """Attention with weights of three dimensions, all by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(0.4 * torch.randn(3, WIDTH, HEADS, WIDTH // HEADS))
        self.out = nn.Parameter(0.4 * torch.randn(HEADS, WIDTH // HEADS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = torch.einsum("btd,cdhe->cbhte", x, self.qkv)
        weights = torch.einsum("bhte,bhse->bhts", query, key).softmax(-1)
        attended = torch.einsum("bhts,bhse->bhte", weights, value)
        return x + torch.einsum("bhte,hed->btd", attended, self.out)


class GRUCell(nn.Module):
    """A cell that is run over the length: its parameters are used at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0])
        states = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state)
        return torch.stack(states, dim=1)


class Bags(nn.Module):
    """Bags of tokens, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean"), MLP()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bags, mlp = self.layers
        return mlp(bags(x))


# Units without a saved parameter, tied and shared parameters


class Bias(nn.Module):
    """Nothing but a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class OneElement(nn.Module):
    """A scale and a shift of one element each."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.scale + self.shift)


class EmbeddingUnits(nn.Module):
    """Embeddings that are a unit each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(VOCABULARY, WIDTH) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.layers
        return self.norm(one(x) + other(x.flip(1)))


class TiedPair(nn.Module):
    """Two linears with one weight, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.one(x)))


class AroundLayers(nn.Module):
    """A parameter of the chunk's own unit that is used before, between and after the layers."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(MLP() for _ in range(2))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        x = first(self.mix(x * self.scale))
        if self.breaks:
            torch._dynamo.graph_break()
        x = second(x * self.scale)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.mix(x * self.scale)


class Twice(nn.Module):
    """Units that are called twice in one forward: at once, and with others in between."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(3))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        x = second(first(first(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        return first(third(second(x)))


class TiedAcrossABreak(nn.Module):
    """An embedding and a head with one weight, and breaks of the graph between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MLP() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embedding(x))
        torch._dynamo.graph_break()
        x = self.layers[1](x)
        torch._dynamo.graph_break()
        return self.head(x)


class Views(nn.Module):
    """Computes with views of its parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(0.4 * torch.randn(WIDTH, WIDTH))
        self.tall = nn.Parameter(0.4 * torch.randn(3 * WIDTH, WIDTH))
        self.flat = nn.Parameter(0.4 * torch.randn(WIDTH * WIDTH))
        self.cube = nn.Parameter(0.4 * torch.randn(2, WIDTH, WIDTH // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ self.square.t())
        x = x @ self.tall[:WIDTH] + x @ self.tall.narrow(0, 2 * WIDTH, WIDTH).t()
        x = torch.tanh(x @ self.flat.view(WIDTH, WIDTH))
        folded = self.cube.permute(1, 0, 2).reshape(WIDTH, WIDTH)
        one, other = self.tall[WIDTH : 2 * WIDTH].chunk(2, dim=1)
        return x + x @ folded + (x @ one) @ other.t()


class WeightProducts(nn.Module):
    """A weight that is made of others before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(0.4 * torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.a @ self.b).t().contiguous()
        weight = weight / weight.norm(dim=1, keepdim=True)
        return torch.tanh(F.linear(x, weight))


def weight_norm() -> nn.Module:
    """Linears under weight_norm: a magnitude and a direction in the place of the weight."""
    return Stack(*(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in "12"))


# Buffers, randomness, dtypes


class Statistics(nn.Module):
    """Counts its calls and keeps an average, in place, and computes with the average."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x - self.average)
        self.calls += 1
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * x.mean((0, 1)))
        return x / self.calls


class Dropping(nn.Module):
    """Dropout before and behind a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.25, self.training)
        return x + F.dropout(torch.relu(self.linear(x)), 0.5, self.training)


class Autocast(nn.Module):
    """Runs its MLP in bfloat16 by autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            x = self.mlp(x)
        return x.float()


class GatedHalf(nn.Module):
    """A bfloat16 linear and a gate in float32: parameters of two dtypes in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.rand(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x.bfloat16()).float() * self.gate)


class Gate(nn.Module):
    """A gate in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self.linear.weight.dtype == torch.float32
        return torch.sigmoid(self.linear(x))


class FullGate(nn.Module):
    """A layer whose gate is a unit of its own, with a policy of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.mlp = Gate(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x) * self.gate(x.float()).to(x.dtype)


class CastsInside(nn.Module):
    """Is given float32 although its parameters are bfloat16, and casts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return x + self.linear(x.to(self.linear.weight.dtype)).float()


# Inputs and outputs


class Keywords(nn.Module):
    """Takes what it needs by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(2))

    def forward(
        self, *, x: torch.Tensor, mask: torch.Tensor, scale: float, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * mask * scale
        return x if bias is None else x + bias


def by_keyword(generator: torch.Generator) -> Arguments:
    """Tensors and a number by keyword."""
    mask = (torch.rand(BATCH, LENGTH, 1, generator=generator) > 0.3).float()
    return (), {"mask": mask, "x": _features(generator), "scale": 0.5}


class Nested(nn.Module):
    """Takes a dict of lists, also from layer to layer."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, state: dict[str, Any], depth: int = 0) -> dict[str, Any]:
            one, [other, extra] = state["pair"]
            one, other = torch.tanh(self.one(other)), self.other(one) + extra
            return {"pair": [one, [other, extra]], "depth": depth + 1}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Nested.Layer() for _ in range(2))

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch, depth=batch["depth"])
        one, [other, _] = batch["pair"]
        return one * batch["depth"] + other


def nested(generator: torch.Generator) -> Arguments:
    """A dict that holds lists of lists."""
    one, other, extra = (_features(generator) for _ in range(3))
    return ({"pair": [one, [other, extra]], "depth": 0},), {}


@dataclass
class Batch:
    """Inputs with names."""

    x: torch.Tensor
    weight: torch.Tensor
    label: str = "batch"


class Pair(NamedTuple):
    """Inputs with names, in order."""

    x: torch.Tensor
    count: int


class Structures(nn.Module):
    """Takes a dataclass, passes a NamedTuple from layer to layer."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = MLP()

        def forward(self, pair: Pair) -> Pair:
            return Pair(self.mlp(pair.x) / (pair.count + 1), pair.count + 1)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Structures.Layer() for _ in range(2))

    def forward(self, batch: Batch) -> torch.Tensor:
        pair = Pair(batch.x * batch.weight, 0)
        for layer in self.layers:
            pair = layer(pair)
        return pair.x


def in_a_dataclass(generator: torch.Generator) -> Arguments:
    """A dataclass of two tensors and a string."""
    return (Batch(_features(generator), _features(generator, WIDTH)),), {}


def in_a_named_tuple(generator: torch.Generator) -> Arguments:
    """A NamedTuple of a tensor and an integer."""
    return (Pair(_features(generator), 3),), {}


class TakesNamedTuple(nn.Module):
    """Takes and returns a NamedTuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Structures.Layer() for _ in range(2))

    def forward(self, pair: Pair) -> Pair:
        for layer in self.layers:
            pair = layer(pair)
        return pair


@dataclass
class Output:
    """What a model returns, with names."""

    logits: torch.Tensor
    hidden: list[torch.Tensor]
    loss: torch.Tensor | None = None
    tokens: int = 0


class Returns(nn.Module):
    """Returns every layer's result, in the structure asked for."""

    class Layer(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.mlp, self.kind = MLP(), kind

        def forward(self, x: torch.Tensor) -> Any:
            y = self.mlp(x)
            if self.kind == "dict":
                return {"y": y, "length": x.shape[1], "nothing": None}
            if self.kind == "tuple":
                return [None, y, y.sum().detach()]
            return Output(y, [x.detach()], tokens=x.shape[1])

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Returns.Layer(kind) for _ in range(2))
        self.head, self.kind = nn.Linear(WIDTH, VOCABULARY), kind

    def forward(self, x: torch.Tensor) -> Any:
        hidden = []
        for layer in self.layers:
            result = layer(x)
            if self.kind == "dict":
                x = result["y"]
            elif self.kind == "tuple":
                _, x, _ = result
            else:
                x = result.logits
            hidden.append(x)
        logits, count = self.head(x), int(x.shape[1])
        if self.kind == "dict":
            return {"logits": logits, "hidden": tuple(hidden), "count": count, "cache": None}
        if self.kind == "tuple":
            return (count, None, logits, logits.argmax(-1), hidden)
        return Output(logits, hidden, tokens=count)


class SplitOutput(nn.Module):
    """Returns a list: two views of one result, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor | int]:
        for layer in self.layers:
            x = layer(x)
        return [*(x * 2).split(LENGTH // 2, dim=1), len(self.layers)]


# Checkpointing, custom functions, freezing, what is left out


class Checkpointed(nn.Module):
    """Recomputes each layer, non-reentrant; selectively: all but the matrix products."""

    def __init__(self, selective: bool = False, layer: Callable[..., nn.Module] = MLP) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.selective = selective

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {}
        if self.selective:
            options["context_fn"] = partial(create_selective_checkpoint_contexts, save_products)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, **options)
        return self.norm(x)


def save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Saves the results of matrix products."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


class CheckpointsInside(nn.Module):
    """A layer that recomputes a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(self.up(x)), 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(checkpoint(self.inner, x, use_reentrant=False))


class Square(torch.autograd.Function):
    """A linear without bias, squared, whose backward is written by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x @ weight.t()
        ctx.save_for_backward(x, weight, y)
        return y * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, y = ctx.saved_tensors
        inner = 2 * y * gradient
        return inner @ weight, inner.flatten(0, 1).t() @ x.flatten(0, 1)


class CustomFunction(nn.Module):
    """Uses a custom autograd Function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(Square.apply(x, self.weight))


def frozen_middle() -> nn.Module:
    """A stack whose second layer is frozen."""
    model = Stack(*(MLP() for _ in range(3)))
    model.layers[1].requires_grad_(False)
    return model


class Skips(nn.Module):
    """Leaves one layer out, and a parameter of another."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.used(x))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Skips.Partly(), MLP(), Skips.Partly()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != 1:
                x = layer(x)
        return x


class Detached(nn.Module):
    """A layer whose result is used without its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.layers
        return other(x) * one(x).detach()


class Inner(nn.Module):
    """A layer with units inside: its attention-like part and its MLP."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.mix, self.mlp, self.norm = EinsumAttention(), MLP(), nn.LayerNorm(WIDTH)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.norm(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.norm(self.mlp(x))


# What breaks a graph


class Straight(nn.Module):
    """Three layers without a loop: what breaks in one of them leaves the others captured."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        return self.norm(third(second(first(x))))


class Printed(nn.Module):
    """Prints between its layers, in a loop: torch.compile then leaves the whole frame alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            print(end="")
        return self.norm(x)


class Items(nn.Module):
    """Reads a number between its layers, and a branch depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.norm(x))
        scale = x.abs().max().item()
        x = self.layers[1](x / scale)
        if x.sum() > 0:
            x = -x
        return self.norm(self.layers[2](x))


@torch._dynamo.disable
def uncaptured(x: torch.Tensor) -> torch.Tensor:
    """What torch.compile is told to leave alone."""
    return torch.tanh(x) * 2


class CallsUncaptured(nn.Module):
    """A layer that calls what cannot be captured between its linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(uncaptured(self.up(x)))


class ReadsItem(nn.Module):
    """A layer that reads a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return x + y / (1 + y.abs().max().item())


class Branches(nn.Module):
    """A layer that goes one way or the other, by its data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 0:
            return x + torch.relu(y)
        return x - torch.tanh(y)


class BrokenStatistics(nn.Module):
    """BatchNorm and counters on both sides of a break."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Statistics(), MLP(), Statistics()])
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        x = second(first(self.norm(x)))
        torch._dynamo.graph_break()
        return self.norm(third(self.norm(x)))


ROWS: tuple[Row, ...] = (
    # Architectures
    Row("llama", lambda: Embedded(LlamaBlock(), LlamaBlock()), tokens),
    Row("gpt2", GPT2, tokens),
    Row("moe_expert_units", stack(DenseMoE, 1), features, ("layers.*.experts.*", "layers.*")),
    Row("moe_capacity", stack(CapacityMoE), features, placed="last"),
    Row(
        "moe_dispatch",
        stack(DispatchMoE),
        features,
        placed="last",
        fullgraph=False,
        eager=("layers.0", "layers.1"),
    ),
    Row("lora", lora, tokens),
    Row("conv_norms", ConvNet, images, placed="last"),
    Row("encoder_decoder", EncoderDecoder, two_sequences, ("encoder.*", "decoder.*")),
    Row("gru_cell", stack(GRUCell), features, placed="last"),
    Row("embedding_bag", Bags, tokens),
    # Units without a saved parameter, tied and shared parameters
    Row("embedding_units", EmbeddingUnits, tokens),
    Row("bias_units", lambda: Stack(Bias(), MLP(), Bias()), features, placed="last"),
    Row("one_element_parameters", stack(OneElement), features, placed="last"),
    Row("tied_embeddings_bf16", lambda: Embedded(MLP(), MLP(), tied=True), tokens, policy=BF16),
    Row("tied_in_a_layer", stack(TiedPair), features, placed="last"),
    Row("tied_across_a_break", TiedAcrossABreak, tokens, fullgraph=False),
    Row("around_the_layers", AroundLayers, features, placed="last"),
    Row("around_breaks", partial(AroundLayers, True), features, fullgraph=False),
    Row("called_twice", Twice, features, placed="last"),
    Row(
        "called_twice_around_a_break",
        partial(Twice, True),
        features,
        fullgraph=False,
        tolerance=1e-5,
        reason="a graph adds up the gradients of its own two uses before that of the other graph",
    ),
    Row("views", stack(Views), features, placed="last"),
    Row("weight_products", stack(WeightProducts), features, placed="last"),
    Row("weight_norm", weight_norm, features, placed="last"),
    # Buffers, randomness, dtypes
    Row("statistics", stack(Statistics), features, placed="last"),
    Row("autocast", stack(Autocast), features, placed="last"),
    Row("two_dtypes_in_a_layer", stack(GatedHalf), features, placed="last"),
    Row(
        "full_gate",
        stack(FullGate),
        features,
        ("layers.*.gate", "layers.*"),
        policy=BF16,
        policies={"layers.0.gate": FP32, "layers.1.gate": FP32},
    ),
    Row(
        "cast_inputs_false",
        stack(CastsInside),
        features,
        policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        policies={"": FP32},
        placed="last",
    ),
    Row(
        "output_dtype",
        stack(MLP),
        features,
        policy=dataclasses.replace(BF16, output_dtype=torch.float32),
        policies={"": FP32},
        placed="last",
    ),
    # Inputs and outputs
    Row("keywords", Keywords, by_keyword, placed="last"),
    Row("nested_inputs", Nested, nested, placed="last"),
    Row("dataclass_input", Structures, in_a_dataclass, placed="last"),
    Row("named_tuple", TakesNamedTuple, in_a_named_tuple),
    Row("dict_output", partial(Returns, "dict"), features),
    Row("tuple_output", partial(Returns, "tuple"), features, placed="last"),
    Row("dataclass_output", partial(Returns, "dataclass"), features),
    Row("list_of_views_output", SplitOutput, features),
    # Checkpointing, custom functions, freezing, what is left out
    Row("checkpoint_dropout", partial(Checkpointed, layer=Dropping), features),
    Row("selective_checkpoint", partial(Checkpointed, True, LlamaBlock), features, policy=BF16),
    Row("checkpoint_in_a_layer", stack(CheckpointsInside), features, placed="last"),
    Row("custom_function", stack(CustomFunction), features, placed="last"),
    Row("frozen_middle", frozen_middle, features, placed="last"),
    Row("skipped_layer", Skips, features, placed="last"),
    Row("detached_layer", Detached, features, placed="last"),
    Row("nested_units", stack(Inner), features, ("layers.*.mix", "layers.*.mlp", "layers.*")),
    # What breaks a graph
    Row(
        "print_in_the_loop",
        Printed,
        features,
        placed="last",
        fullgraph=False,
        eager=("layers.0", "layers.1", "layers.2"),
    ),
    Row("item_between", Items, features, placed="last", fullgraph=False),
    Row("statistics_around_a_break", BrokenStatistics, features, placed="last", fullgraph=False),
    Row(
        "uncaptured_in_a_layer",
        lambda: Straight(MLP(), CallsUncaptured(), MLP()),
        features,
        placed="last",
        fullgraph=False,
        eager=("layers.1",),
    ),
    Row(
        "item_in_a_layer",
        lambda: Straight(ReadsItem(), MLP(), ReadsItem()),
        features,
        fullgraph=False,
        eager=("layers.0", "layers.2"),
    ),
    Row(
        "branch_in_a_layer",
        lambda: Straight(MLP(), Branches(), MLP()),
        features,
        policy=BF16,
        fullgraph=False,
        eager=("layers.1",),
    ),
    Row(
        "break_in_nested_units",
        lambda: Straight(MLP(), Inner(True), MLP()),
        features,
        ("layers.1.mix", "layers.1.mlp", "layers.*"),
        placed="last",
        fullgraph=False,
        eager=("layers.1",),
    ),
)
