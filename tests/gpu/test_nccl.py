"""NCCL between GPUs: every context of `long_training.py`, replicated units, and the examples.

Orders, policies and compilers one by one are in `test_streams.py`, budgets in
`test_budgets.py`, late collectives in `test_stress.py`.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from long_training import Size, Stretch, Training, lives
from ranks import clean_up

GPUS = torch.cuda.device_count()
EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [
    pytest.mark.skipif(not GPUS, reason="needs a GPU"),
    pytest.mark.timeout(600),
]

STRETCHES = (
    Stretch("interleaved", 4, 4),
    Stretch("one_by_one", 3, 2),
    Stretch("interleaved", 4, 1),
)


def _rank(
    rank: int, store: str, layout: tuple[int, ...], policy: str, compiler: str | None, on: str
) -> None:
    if on == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=torch.Size(layout).numel(),
    )
    clean_up()
    logging.getLogger("fsdp_fx").setLevel(logging.ERROR)  # one line for each new order of events
    names = ("replicate", "shard")[-len(layout) :]
    mesh = init_device_mesh(on, layout, mesh_dim_names=names)
    device = torch.device(on, rank) if on == "cuda" else torch.device(on)
    size = Size(width=256, layers=2, rows=2, length=32)
    training = Training(device, mesh, size, policy, rank)
    for life in lives(STRETCHES, on, policy):
        training.live(life, compiler)
    dist.destroy_process_group()


def train(layout: tuple[int, ...], policy: str, compiler: str | None, on: str = "cuda") -> None:
    """Trains on as many ranks as the layout has: shards, or replicas and their shards."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", layout, policy, compiler, on)
        mp.spawn(_rank, arguments, nprocs=torch.Size(layout).numel())


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("policy", "compiler"), [("fp32", None), ("bf16", "inductor")])
def test_shards_on_every_gpu_train_as_the_reference(policy: str, compiler: str | None) -> None:
    train((GPUS,), policy, compiler)


@pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")
@pytest.mark.parametrize(("policy", "compiler"), [("bf16", None), ("fp32", "inductor")])
def test_replicas_of_shards_train_as_the_reference(policy: str, compiler: str | None) -> None:
    train((2, GPUS // 2), policy, compiler)


PIPELINES = [
    ("pipelined", "--schedule", "1F1B", "--compile"),
    ("pipelined", "--schedule", "InterleavedZeroBubble"),
    ("megatron_style", "--memory-budget", "auto", "--reduce-gradients", "planned"),
    ("megatron_style", "--order", "grouped", "--compile"),
]
ACCUMULATION = [
    ("grad_accumulation", "--memory-budget", "auto", "--reduce-gradients", "planned"),
    ("grad_accumulation", "--compile", "--dtype", "bfloat16"),
    ("lora",),
]


def run_example(arguments: Sequence[str], ranks: int, on: str = "cuda") -> None:
    """An example exits with an error if its model is not the whole model."""
    name, *options = arguments
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), str(EXAMPLES / f"{name}.py")),
        *("--device", on, "--steps", "3", *options),
    ]
    finished = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.endswith("\nequal to the model whole\n"), finished.stdout


@pytest.mark.parametrize("arguments", ACCUMULATION, ids=" ".join)
def test_example_trains_as_the_model_whole_on_every_gpu(arguments: Sequence[str]) -> None:
    run_example(arguments, GPUS)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("arguments", PIPELINES, ids=" ".join)
def test_pipeline_of_two_ranks_trains_as_the_model_whole(arguments: Sequence[str]) -> None:
    # Two pipeline ranks, each of two shards if there are GPUs for that.
    run_example(arguments, 4 if GPUS >= 4 else 2)


@pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")
def test_experts_on_four_gpus_train_as_the_model_whole() -> None:
    run_example(("combined_1f1b", "--delay-weight-gradients"), 4)
