"""The demo's processes: one a rank, and the parent that listens to them.

A rank sends what it has to say through its own pipe. Whatever happens to a rank
reaches the parent as a message or as the end of its pipe; the parent then ends the
others, so that nobody waits for a rank that is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from .training import RUNS, Options, RunName, RunResult, train

__all__ = ["Failure", "Finished", "Progress", "RankError", "run_ranks"]

GRACE = 2.0  # seconds in which an earlier failure than the one heard of may still arrive


@dataclass(frozen=True)
class Progress:
    """A rank has done ``steps`` steps of a run; ``loss`` where the last stage is."""

    run: RunName
    steps: int
    loss: float | None


@dataclass(frozen=True)
class Finished:
    """A rank has finished a run."""

    run: RunName
    result: RunResult


@dataclass(frozen=True)
class Failure:
    """A rank has failed, at ``moment`` in seconds of the clock that the ranks share."""

    moment: float
    text: str


class RankError(RuntimeError):
    """A rank failed. The message is what it said, with its traceback."""


Message = Progress | Finished | Failure


def run_ranks(options: Options) -> Iterator[tuple[int, Progress | Finished]]:
    """Run every run on every rank; yield each message with the rank that sent it.

    The ranks are ended when the iterator is closed, however far they are.

    Raises:
        RankError: a rank failed.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="fsdp-fx-demo-") as directory:
        processes: list[BaseProcess] = []
        ends: list[Connection] = []
        try:
            for rank in range(options.ranks):
                ours, theirs = spawn.Pipe(duplex=False)
                process: BaseProcess = spawn.Process(
                    target=_rank_main, args=(rank, options, directory, theirs), daemon=True
                )
                process.start()
                theirs.close()  # the end of the pipe is the end of the rank
                processes.append(process)
                ends.append(ours)
            yield from _listen(ends, processes)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _listen(
    ends: list[Connection], processes: list[BaseProcess]
) -> Iterator[tuple[int, Progress | Finished]]:
    failures: dict[int, Failure] = {}
    deadline = None
    open_ends = {end: rank for rank, end in enumerate(ends)}
    unfinished = [len(RUNS)] * len(ends)
    while open_ends:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(open_ends), left)
        if not ready:
            break
        for end in ready:
            assert isinstance(end, Connection)
            rank = open_ends[end]
            try:
                message: Message = end.recv()
            except (EOFError, OSError):
                del open_ends[end]
                if unfinished[rank] and rank not in failures:
                    processes[rank].join(GRACE)
                    code = processes[rank].exitcode
                    # It died without a message, so it did not fail for want of a partner.
                    failures[rank] = Failure(0.0, f"it ended with exit code {code}\n")
            else:
                if isinstance(message, Failure):
                    failures[rank] = message
                elif not failures:
                    unfinished[rank] -= isinstance(message, Finished)
                    yield rank, message
        if failures and deadline is None:
            deadline = time.monotonic() + GRACE
    if failures:
        # Ranks that lost their partner fail in turn: the first one is the cause.
        rank, failure = min(failures.items(), key=lambda item: item[1].moment)
        raise RankError(f"rank {rank} failed:\n{failure.text}")


def _rank_main(rank: int, options: Options, directory: str, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when a rank ends
    try:
        _join(rank, options, directory)
        for name in RUNS:
            torch.compiler.reset()

            def report(steps: int, loss: float | None, name: RunName = name) -> None:
                connection.send(Progress(name, steps, loss))

            connection.send(Finished(name, train(name, options, report)))
        dist.barrier()
    except BaseException:
        connection.send(Failure(time.time(), traceback.format_exc()))
    connection.close()
    os._exit(0)  # the others may be gone: take no leave of them


def _join(rank: int, options: Options, directory: str) -> None:
    torch.set_num_threads(1)
    # The ranks are processes enough for the cores there are.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    backend = "gloo"
    if options.device == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
    elif "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the group stays on this machine
    dist.init_process_group(
        backend,
        init_method=(Path(directory) / "store").as_uri(),
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(minutes=10),
    )
