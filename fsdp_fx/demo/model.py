"""A small decoder-only transformer over bytes, cut into pipeline stages.

Plain PyTorch: nothing here knows of FSDP, pipelining or this package.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["BYTES", "ModelShape", "Stage", "next_byte_loss"]

BYTES = 256  # the vocabulary


@dataclass(frozen=True)
class ModelShape:
    """How large the model is.

    Args:
        layers: transformer layers, over all stages.
        width: size of a token's representation.
        heads: attention heads.
        context: most tokens that a sequence may have.
    """

    layers: int = 8
    width: int = 64
    heads: int = 4
    context: int = 64


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(positions)


class Head(nn.Module):
    """The logits of the next byte."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.logits = nn.Linear(shape.width, BYTES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(x))


class Stage(nn.Module):
    """One pipeline stage: an equal share of the layers.

    The first stage also embeds the tokens, the last one ends in logits. The initial
    weights depend on ``index`` and ``seed`` only.

    Args:
        shape: size of the whole model.
        index: which stage, from 0.
        stages: number of stages; divides ``shape.layers``.
        seed: of the initial weights.
    """

    def __init__(self, shape: ModelShape, index: int, stages: int, seed: int = 0) -> None:
        super().__init__()
        if shape.layers % stages:
            raise ValueError(f"{shape.layers} layers do not divide into {stages} stages")
        self.embedding = Embedding(shape) if index == 0 else None
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers // stages))
        self.head = Head(shape) if index == stages - 1 else None
        generator = torch.Generator().manual_seed(seed * stages + index)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.05, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens in at the first stage, logits out at the last; hidden states between."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) if self.head is not None else x


def next_byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in nats a byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
