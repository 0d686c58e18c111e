"""200 training steps on streams, with schedules that change and collectives that are late.

What happens in them is in `long_training.py`; what the collectives do, in `slow_ranks.py`.
Ranks have a GPU each and NCCL where there are several GPUs. On one GPU there is one rank of
two, alone, so that the host is as far ahead as it can be; two ranks that go through the host;
and NCCL with one rank. ``pytest -s`` prints how far from the reference each run was.
"""

from __future__ import annotations

import logging
import random
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from slow_ranks import Way, nap, start

from long_training import Size, Stretch, Training, lives
from ranks import clean_up

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(not GPUS, reason="needs a GPU"),
    pytest.mark.timeout(600),
]

LONG = (
    Stretch("interleaved", 4, 10),
    Stretch("one_by_one", 3, 4),
    Stretch("chunk_by_chunk", 4, 4),
    Stretch("interleaved", 4, 5),
)
SHORT = (
    Stretch("interleaved", 4, 4),
    Stretch("one_by_one", 3, 3),
    Stretch("interleaved", 4, 1),
)
SIZE = Size(width=256, layers=3, rows=2, length=64)


def _rank(
    rank: int,
    ranks: int,
    store: str,
    way: Way,
    policy: str,
    compiler: str | None,
    stretches: tuple[Stretch, ...],
    on: str,
) -> None:
    device = torch.device("cuda", rank % GPUS) if on == "cuda" else torch.device("cpu")
    if on == "cuda":
        torch.cuda.set_device(device)
    mesh = start(way, device, rank, ranks, store)
    clean_up()
    logging.getLogger("fsdp_fx").setLevel(logging.ERROR)  # one line for each new order of events
    draw = random.Random(100 + rank)
    training = Training(
        device, mesh, SIZE, policy, rank, alone=way == "alone", pause=lambda: nap(draw, device)
    )
    for life in lives(stretches, on, policy):
        began = time.monotonic()
        training.live(life, compiler)
        if rank == 0:
            took = time.monotonic() - began
            worst = ", ".join(f"{what} {error:.1g}" for what, error in training.worst.items())
            print(
                f"{took:5.1f} s, {training.step} steps, off by {worst}; {life.options}", flush=True
            )
    assert training.aborts >= 8
    if stretches == LONG:
        assert training.step >= 200
    dist.destroy_process_group()


def run(
    way: Way, policy: str, compiler: str | None, stretches: tuple[Stretch, ...], on: str = "cuda"
) -> None:
    """Trains on as many ranks as there can be."""
    ranks = max(GPUS, 1) if way == "nccl" else 2
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, f"{folder}/store", way, policy, compiler, stretches, on)
        mp.spawn(_rank, arguments, nprocs=1 if way == "alone" else ranks)


# One rank over NCCL communicates with nobody; ranks that share a GPU are slow.
NCCL = LONG if GPUS > 1 else SHORT
HOST = SHORT


@pytest.mark.parametrize(
    ("way", "policy", "stretches"),
    [("alone", "fp32", LONG), ("host", "bf16", HOST), ("nccl", "fp32", NCCL)],
    ids=["alone", "host", "nccl"],
)
def test_eager_training_equals_the_reference_and_leaves_no_memory(
    way: Way, policy: str, stretches: tuple[Stretch, ...]
) -> None:
    run(way, policy, None, stretches)


@pytest.mark.parametrize(
    ("way", "policy", "stretches"),
    [("alone", "bf16", LONG), ("host", "fp32", HOST), ("nccl", "bf16", NCCL)],
    ids=["alone", "host", "nccl"],
)
def test_compiled_training_equals_the_reference_and_leaves_no_memory(
    way: Way, policy: str, stretches: tuple[Stretch, ...]
) -> None:
    run(way, policy, "inductor", stretches)


if __name__ == "__main__":  # on the CPU, to try the test itself
    run("alone", "fp32", None, LONG, on="cpu")
