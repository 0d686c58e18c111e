"""What the benchmark measures: the orders that it runs, and how it counts and shows.

The measuring itself needs a GPU: tests/gpu/test_benchmark_gpu.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import benchmark
from benchmark import Action, Counts, Result, actions_of, run_step


@pytest.mark.parametrize("microbatches", [1, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("order", ["chunks", "interleaved", "accumulation"])
def test_every_order_runs_each_microbatch_forward_and_backward_once(
    order: str, chunks: int, microbatches: int
) -> None:
    actions = actions_of(order, chunks, microbatches)
    assert len(actions) == len(set(actions)) == 2 * chunks * microbatches
    place = {action: index for index, action in enumerate(actions)}
    for chunk in range(chunks):
        for microbatch in range(microbatches):
            forward = place[Action("F", chunk, microbatch)]
            backward = place[Action("B", chunk, microbatch)]
            assert forward < backward
            if chunk:
                assert place[Action("F", chunk - 1, microbatch)] < forward
                assert backward < place[Action("B", chunk - 1, microbatch)]


def test_orders_differ_in_what_is_in_flight() -> None:
    def most_in_flight(order: str) -> int:
        depth = most = 0
        for action in actions_of(order, 2, 8):
            depth += 1 if action.kind == "F" else -1
            most = max(most, depth)
        return most

    assert [most_in_flight(o) for o in ("chunks", "interleaved", "accumulation")] == [16, 5, 2]


@pytest.mark.parametrize("order", ["chunks", "interleaved", "accumulation"])
def test_step_computes_the_gradients_of_the_chunks_in_a_row(order: str) -> None:
    torch.manual_seed(0)
    chunks = [torch.nn.Linear(4, 4) for _ in range(2)]
    batch = [torch.randn(3, 4) for _ in range(3)]
    upstream = torch.randn(3, 4)
    run_step(actions_of(order, 2, 3), chunks, batch, upstream)
    found = [chunk.weight.grad.clone() for chunk in chunks if chunk.weight.grad is not None]
    for chunk in chunks:
        chunk.zero_grad()
    for each in batch:
        chunks[1](chunks[0](each)).backward(upstream)
    for chunk, gradient in zip(chunks, found, strict=True):
        assert chunk.weight.grad is not None
        torch.testing.assert_close(chunk.weight.grad, gradient)


def test_time_of_overlapping_intervals_counts_once() -> None:
    assert benchmark.length([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 5.0
    assert benchmark.length([]) == 0.0


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "gather"),
        ("emulated_all_gather", "gather"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce-scatter"),
        ("ncclDevKernel_AllReduce_Sum_f64_RING_LL", "other collectives"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "products"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>", "attention"),
        ("at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel", "copies"),
        ("void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>", "copies"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("triton_red_fused__fused_rms_norm_0", "other"),
    ],
)
def test_kernels_are_told_apart_by_their_names(kernel: str, kind: str) -> None:
    assert benchmark.kind_of(kernel) == kind


def test_collectives_of_a_step_are_counted_with_their_bytes() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        counts = Counts()
        whole, part = torch.empty(8), torch.empty(4)
        with benchmark.counting(counts):
            dist.all_gather_into_tensor(whole, part)
            dist.all_gather_into_tensor(output_tensor=whole, input_tensor=part)
            dist.reduce_scatter_tensor(output=part, input=whole)
        dist.all_gather_into_tensor(whole, part)
        assert counts == Counts(gathers=2, reductions=1, moved=3 * 32)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("budget", "options"),
    [
        ("0", {}),
        ("auto", {"memory_budget": "auto", "reduce_gradients": "planned"}),
        ("auto+1.5GiB", {"memory_budget": "auto+1.5GiB", "reduce_gradients": "planned"}),
        ("2GiB", {"memory_budget": 2 << 30, "reduce_gradients": "planned"}),
        ("all", {"memory_budget": 1 << 50, "reduce_gradients": "planned"}),
        (
            "auto/bf16",
            {
                "memory_budget": "auto",
                "reduce_gradients": "planned",
                "kept_gradient_dtype": torch.bfloat16,
            },
        ),
    ],
)
def test_budgets_become_options_of_a_context(budget: str, options: dict[str, Any]) -> None:
    assert benchmark.options_of(budget) == options


def test_unknown_budget_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"--budgets: 'lots' is none of"):
        benchmark.options_of("lots")
    with pytest.raises(SystemExit, match="gradients may be kept in bf16, not in 'int8'"):
        benchmark.options_of("auto/int8")


def results() -> list[Result]:
    common: dict[str, Any] = {
        "spread": (1.0, 2.0),
        "reserved": 3.0,
        "host": 1.0,
        "first": 1500.0,
        "gathers": 4,
        "reductions": 2,
        "moved": 0.5,
        "communication": 1.0,
        "alone": 0.25,
        "kernels": {"products": 1.0, "idle": 0.0},
        "norm": 1.0,
        "check": 0.0,
        "steps": [1.0],
    }
    return [
        Result(name="fsdp2", family="fsdp2", step=2.0, peak=2.0, on_demand=None, **common),
        Result(name="ours eager 0", family="ours", step=1.5, peak=2.0, on_demand=1, **common),
        Result(name="ours eager all", family="ours", step=1.25, peak=4.0, on_demand=1, **common),
    ]


def test_table_has_a_row_for_each_variant_and_its_kernels() -> None:
    head, first, _, last, empty, kernels, *_ = benchmark.show(results()).splitlines()
    assert head.split()[:3] == ["variant", "step", "ms"]
    assert first.split()[:2] == ["fsdp2", "2.0"]
    assert last.split()[:4] == ["ours", "eager", "all", "1.2"]
    assert len(first) == len(last) == len(head)
    assert empty == ""
    assert kernels.split() == ["kernels,", "ms", "products"]


def test_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    benchmark.draw(results(), path, "three variants")
    assert path.read_bytes().startswith(b"\x89PNG")
