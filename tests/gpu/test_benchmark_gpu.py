"""The benchmark measures on a GPU, and what it compares computes the same gradients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]

BENCHMARK = Path(__file__).parents[2] / "examples" / "benchmark.py"
SMALL = (
    *("--layers", "4", "--hidden", "256", "--intermediate", "512", "--heads", "4"),
    *("--kv-heads", "2", "--tokens", "128", "--steps", "3", "--warm-up", "2"),
)


@pytest.mark.parametrize("order", ["chunks", "interleaved", "accumulation"])
def test_every_variant_reduces_the_same_gradients(order: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    command = [
        *(sys.executable, str(BENCHMARK), "--emulated-ranks", "2", *SMALL, "--order", order),
        *("--budgets", "0,auto,all", "--json", str(path), "--picture", str(tmp_path / "it.png")),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = {each["name"]: each for each in json.loads(path.read_text())["results"]}
    assert len(results) == 14
    for name, result in results.items():
        if name.startswith("compute"):
            assert result["gathers"] == result["reductions"] == 0
        else:
            # Products in other kernels round otherwise.
            assert abs(result["check"]) < 2e-3, (name, result["check"])
            assert result["communication"] > 0
    everything = results["ours compiled all"]
    assert everything["gathers"] == everything["reductions"] == 4
    assert results["fsdp2"]["reductions"] == 16
