"""Real text that every machine has: the source files of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

__all__ = ["Text"]

SIZE = 2**21  # bytes that are read


class Text:
    """The first bytes of the standard library's top-level modules, by name.

    Args:
        size: how many bytes to read at most.

    Raises:
        FileNotFoundError: this Python has no source files.
    """

    def __init__(self, size: int = SIZE) -> None:
        directory = Path(sysconfig.get_paths()["stdlib"])
        content = bytearray()
        for path in sorted(directory.glob("*.py")):
            content += path.read_bytes()[: size - len(content)]
            if len(content) >= size:
                break
        if not content:
            raise FileNotFoundError(f"{directory} holds no Python source files to learn from")
        self.content = torch.frombuffer(content, dtype=torch.uint8)

    def batch(
        self, rows: int, length: int, step: int, rank: int, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences and, for each byte of them, the next byte.

        Args:
            rows: number of sequences.
            length: bytes of each.
            step: which training step; another step has other sequences.
            rank: which data-parallel rank; another rank has other sequences.
            device: where the tensors go.
        """
        generator = torch.Generator().manual_seed(step * 1_000_003 + rank)
        last = len(self.content) - length
        starts = torch.randint(last, (rows, 1), generator=generator)
        sequences = self.content[starts + torch.arange(length + 1)].long().to(device)
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
