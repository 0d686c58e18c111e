"""What is printed, logged and traced of programs and graphs, and what changed between passes."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from expecttest import TestCase

from fsdp_fx.inspection import Topic
from fsdp_fx.passes import PassOptions, pass_results, plan
from traces import TWO_CHUNKS, trace
from training import (
    Setup,
    chunk_by_chunk,
    interleaved,
    make_chunks,
    make_data,
    run_actions,
    set_up,
)


def _train(chunks: int = 2, windows: int = 2) -> Setup:
    setup = set_up(make_chunks(chunks, 2), region_compiler="eager")
    for step in range(windows):
        run_actions(setup.callables, list(interleaved(chunks, 2)), make_data(step, 2), rank=0)
        setup.context.finish_grad_sync()
    return setup


@pytest.fixture(scope="module")
def printed(request: pytest.FixtureRequest) -> dict[tuple[str, str, str], str]:
    """Every graph of a training run, as text: by chunk, direction and variant."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        return {
            (key.chunk, key.direction, key.variant): graph.print_readable(print_output=False)
            for key, graph in _train().context.compiled_graphs.items()
        }
    finally:
        torch.distributed.destroy_process_group()
        torch._dynamo.reset()


def test_every_transformed_graph_prints_as_python_code(
    printed: dict[tuple[str, str, str], str],
) -> None:
    assert {direction for _, direction, _ in printed} == {"forward", "backward"}
    assert any(variant.startswith("slice") for *_, variant in printed)
    for key, text in printed.items():
        functions = [node.name for node in ast.parse(text).body]
        assert functions[0] == re.sub(r"\W+", "_", text.splitlines()[0].removeprefix("# ")), key
        called = set(re.findall(r"\b(region_\d+)\(\[", text))
        assert called, key
        assert called <= set(functions), f"{key}: regions that are called but not printed"


def test_a_printed_graph_names_its_units_their_bytes_and_the_calls_that_use_it(
    printed: dict[tuple[str, str, str], str],
) -> None:
    recorded = printed["c0", "backward", "on demand"]
    assert "# runs for chunk c0, microbatch 0, backward\n" in recorded
    assert "# runs for chunk c0, microbatch 1, backward\n" in recorded
    assert "# c0.layers.1, 8.6 KiB: gather if absent, wait" in recorded
    assert "# c0.layers.0, 8.6 KiB of gradients: reduce" in recorded
    slices = [text for (*_, variant), text in printed.items() if variant != "on demand"]
    assert any(": gather ahead" in text for text in slices)
    assert all("not bound yet" not in text for text in printed.values())


@pytest.mark.usefixtures("fake_group")
def test_a_graph_that_chunks_share_names_the_units_of_each() -> None:
    setup = set_up(make_chunks(4, 1), region_compiler="eager")
    run_actions(setup.callables, list(chunk_by_chunk(4, 1)), make_data(0, 1), rank=0)
    setup.context.finish_grad_sync()
    graphs = setup.context.compiled_graphs
    shared = next(graph for key, graph in graphs.items() if key.chunk == "c1")
    assert shared is next(graph for key, graph in graphs.items() if key.chunk == "c2")
    text = str(shared)
    assert "#   unit_0: c1.layers.0 | c2.layers.0, 8.6 KiB" in text
    assert "class region_" not in text, "str() leaves out the operators"


@pytest.mark.usefixtures("fake_group")
def test_arguments_that_a_host_graph_cannot_follow_are_refused() -> None:
    graph = next(iter(_train(1, 1).context.compiled_graphs.values()))
    with pytest.raises(TypeError, match="not colored"):
        graph.print_readable(colored=True)


class PassByPass(TestCase):
    def test_what_each_pass_changed_is_a_diff_of_the_printed_programs(self) -> None:
        results = pass_results(
            trace("c0 F0: a; c0 B0: a", {"c0.a": 600}),
            PassOptions(memory_budget=0),
        )
        names = [result.name for result in results]
        assert names == [
            *("trace", "gathers", "reductions", "after_forward", "residency", "prefetch", "frees")
        ]
        residency = results[4].program.diff(results[3].program)
        self.assertExpectedInline(
            "\n".join(line for line in residency.splitlines() if line[0] in "+-"),
            """\
--- before
+++ after
-# program: 2 events, 1 unit, 1 chunk; 2 gathers (0 ahead), 0 frees, 1 reduction; peak 2.3 KiB resident
+# program: 2 events, 1 unit, 1 chunk; 1 gather (0 ahead), 0 frees, 1 reduction; peak 1.2 KiB resident
-    gather_c0_a_B0 = gather("c0.a")                                       # c0.a, backward, microbatch 0, 1.2 KiB
-    wait_c0_a_B0 = wait(gather_c0_a_B0)                                   # c0.a, backward, microbatch 0, 1.2 KiB
-    compute(wait_c0_a_B0, event="c0.a B0")                                # c0.a, backward, microbatch 0, 1.2 KiB
+    compute(wait_c0_a_F0, event="c0.a B0")                                # c0.a, backward, microbatch 0, 1.2 KiB""",
        )


def test_the_result_of_the_last_pass_is_the_plan_and_equal_programs_have_no_diff() -> None:
    window, options = trace(TWO_CHUNKS, {"c0": 10, "c1": 10}, default=600), PassOptions()
    planned = plan(window, options)
    last = pass_results(window, options)[-1].program
    assert str(last) == str(planned)
    assert planned.diff(last) == ""


@pytest.mark.usefixtures("fake_group")
def test_the_context_shows_how_its_program_was_planned() -> None:
    setup = set_up(make_chunks(1, 2))
    assert setup.context.pass_results() == ()
    run_actions(setup.callables, list(interleaved(1, 2)), make_data(0, 2), rank=0)
    setup.context.finish_grad_sync()
    *_, last = setup.context.pass_results()
    assert str(last.program) == str(setup.context.program)


@pytest.mark.usefixtures("fake_group")
def test_what_the_documentation_says_to_print_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "compile.md").read_text(encoding="utf-8")
    section = page.partition("## Looking inside")[2]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    context = _train(1, 2).context
    for block in blocks:
        exec(block, {"ctx": context})
    printed = capsys.readouterr().out
    assert "GraphKey(chunk='c0', direction='backward'" in printed
    assert (
        "residency.prefetch(unit_0)                # c0.layers.0, 8.6 KiB: gather ahead" in printed
    )
    assert "pass frees\n--- before" in printed
    loggers = set(re.findall(r"^\| `(fsdp_fx[.\w]*)` \|", page, re.MULTILINE))
    assert loggers == {"fsdp_fx", *(f"fsdp_fx.{topic}" for topic in get_args(Topic))}


@pytest.mark.usefixtures("fake_group")
def test_topics_are_loggers_below_fsdp_fx(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="fsdp_fx"):
        _train(1, 2)
    by_topic: dict[str, list[str]] = {}
    for record in caplog.records:
        by_topic.setdefault(record.name, []).append(record.getMessage())
    programs = by_topic["fsdp_fx.programs"]
    assert len(programs) == 2
    assert "# program: " in programs[0]
    assert "# pass prefetch\n--- before\n+++ after" in programs[1]
    assert len(by_topic["fsdp_fx.regions"]) == 2, "a forward and a backward graph"
    assert "torch.ops.aten" in by_topic["fsdp_fx.regions"][0]
    assert any("graph 0 backward, slice" in text for text in by_topic["fsdp_fx.graph_code"])
    assert any("graph 0 forward: " in text for text in by_topic["fsdp_fx"])


@pytest.mark.usefixtures("fake_group")
def test_nothing_is_printed_for_logs_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_fx.compile.host_graph import HostGraph

    def fail(*_: object, **__: object) -> str:
        raise AssertionError("printed")

    # pytest listens to everything; a training loop does not.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])
    monkeypatch.setattr(HostGraph, "print_readable", fail)
    monkeypatch.setattr("fsdp_fx.compile.backend.region_texts", fail)
    _train(1, 2)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
from test_inspection import _train

_train(1, 2)
torch.distributed.destroy_process_group()
"""


def test_torchs_own_switches_show_programs_and_graphs(tmp_path: Path) -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parent))
    environment = {**os.environ, "TORCH_LOGS": "+fsdp_fx", "TORCH_TRACE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "# program: " in done.stderr
    names = set()
    for file in tmp_path.iterdir():
        for line in file.read_text().splitlines():
            start = line.find("{")
            if line.startswith("V") and start != -1 and '"artifact"' in line:
                names.add(json.loads(line[start:])["artifact"]["name"])
    ours = {name for name in names if name.startswith("fsdp_fx_")}
    assert {"fsdp_fx_graph_0_forward_regions", "fsdp_fx_graph_0_backward_regions"} <= ours
    assert any(re.fullmatch(r"fsdp_fx_program_[0-9a-f]{12}", name) for name in ours)
    assert any(re.fullmatch(r"fsdp_fx_graph_0_forward_slice_\d+", name) for name in ours)
