"""The multi-rank harness itself."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from ranks import RankPool, RankPools, run_script

T = TypeVar("T")


def _sum_over_ranks(value: int) -> tuple[int, int, int, int, float]:
    total = torch.tensor(value + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), int(total), os.getpid(), torch.get_num_threads(), torch.rand(()).item()


def _echo(value: T) -> T:
    return value


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"broken by {rank}")
    _wait_for_the_others()


def _wait_for_the_others() -> None:
    dist.barrier()


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def _return_what_cannot_travel() -> object:
    return threading.Lock()


def test_results_come_in_the_order_of_the_ranks_from_ranks_that_stay(ranks: RankPools) -> None:
    first = ranks(2).run(_sum_over_ranks, 10)
    second = ranks(2).run(_sum_over_ranks, 20)
    assert [rank for rank, *_ in first] == [0, 1]
    assert [total for _, total, *_ in first] == [21, 21]
    assert [total for _, total, *_ in second] == [41, 41]
    pids = [pid for _, _, pid, *_ in first]
    assert pids == [pid for _, _, pid, *_ in second] == ranks(2).pids
    assert os.getpid() not in pids
    assert [threads for *_, threads, _ in first] == [1, 1]
    assert len({random for *_, random in first + second}) == 1  # every job has the same seed


def test_tensors_travel_both_ways(ranks: RankPools) -> None:
    big = torch.arange(1 << 18)  # more than a pipe holds
    for result in ranks(2).run(_echo, {"big": big}):
        assert torch.equal(result["big"], big)


def test_an_error_of_one_rank_is_reported_and_the_ranks_replaced(
    ranks: RankPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranks.GRACE", 1.0)
    ranks(2).run(_echo, 1)
    before = ranks(2).pids
    with pytest.raises(AssertionError) as caught:
        ranks(2).run(_fail_on, 1)
    message = str(caught.value)
    assert message.startswith("test_ranks._fail_on failed on rank 1 of 2\n")
    raised, stuck = message.split("--- rank 1\n")[1].split("--- rank 0, no answer\n")
    assert raised.startswith("Traceback")
    assert raised.count("  File ") == 1  # the harness keeps itself out
    assert "in _fail_on\n" in raised
    assert raised.rstrip().endswith("ValueError: broken by 1")
    assert "_wait_for_the_others" in stuck
    assert ranks(2).run(_echo, 2) == [2, 2]
    assert not set(before) & set(ranks(2).pids)


def test_a_result_that_cannot_travel_is_an_error_of_every_rank(ranks: RankPools) -> None:
    with pytest.raises(AssertionError, match=r"_cannot_travel failed on ranks 0, 1") as caught:
        ranks(2).run(_return_what_cannot_travel)
    assert str(caught.value).count("TypeError") == 1  # ranks with the same to say share a report


def test_a_rank_that_does_not_answer_is_killed_and_shows_its_stack(ranks: RankPools) -> None:
    ranks(2).run(_echo, 1)
    pids = ranks(2).pids
    with pytest.raises(TimeoutError) as caught:
        ranks(2).run(_hang_on, 0, timeout=2.0)
    message = str(caught.value)
    assert message.startswith("test_ranks._hang_on: no answer within 2 s from rank 0 of 2\n")
    assert "in _hang_on" in message
    assert "rank 1" not in message
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert ranks(2).run(_echo, 2) == [2, 2]


def test_a_rank_that_dies_is_reported(ranks: RankPools) -> None:
    with pytest.raises(AssertionError, match=r"failed on rank 1 of 2") as caught:
        ranks(2).run(_die_on, 1)
    assert "the process ended with exit code -9" in str(caught.value)


def test_a_function_without_a_module_level_name_is_refused_before_any_rank_starts() -> None:
    pool = RankPool(2)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pool.run(lambda: None)
    assert not pool.pids


def test_the_least_recently_used_pool_makes_room() -> None:
    closed: list[int] = []
    pools = RankPools(keep=2)
    for size in (2, 4):
        pools(size).close = lambda size=size: closed.append(size)  # type: ignore[method-assign, misc]
    assert pools(2) is pools(2)
    pools(8)
    assert closed == [4]
    pools.close()
    assert closed == [4, 2]


@pytest.mark.parametrize(("fake_group", "size"), [(4, 4)], indirect=["fake_group"])
def test_a_fake_group_of_any_size(fake_group: dist.ProcessGroup, size: int) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (0, size)


def test_a_fake_group_has_two_ranks_by_default(fake_group: dist.ProcessGroup) -> None:
    assert fake_group.size() == 2
    dist.all_reduce(torch.ones(2))


def test_no_fake_group_outlives_its_test() -> None:
    assert not dist.is_initialized()


def test_a_script_runs_as_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nranks = torch.tensor([dist.get_rank()])\n"
        "dist.all_reduce(ranks)\nprint('sum', int(ranks), sys.argv[1:], __name__)\n"
    )
    assert run_script(script, "--a", world_size=3, cwd=tmp_path) == "sum 3 ['--a'] __main__\n"


def test_a_script_that_fails_or_hangs_on_a_rank_is_an_error_with_what_it_wrote(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nprint('begun', flush=True)\nif os.environ['RANK'] == '1':\n"
    )
    begun = script.read_text()
    script.write_text(begun + "    1 / 0\n")
    with pytest.raises(AssertionError, match=r"(?s)rank 1, exit code 1\nbegun.*ZeroDivisionError"):
        run_script(script, cwd=tmp_path)
    script.write_text(begun + "    time.sleep(600)\n")
    with pytest.raises(AssertionError, match=r"rank 1, exit code None\nbegun"):
        run_script(script, cwd=tmp_path, timeout=5.0)
