"""Runs test functions on several ranks: gloo, one process a rank, kept from test to test.

Starting a rank costs seconds, most of them the import of torch, so a `RankPool` starts its ranks
once and then hands them one job after another. What a job may leave behind is cleaned up between
jobs; after a job that failed, the ranks are thrown away and the next job gets new ones.
`run_script` runs a script that is a program of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

START_TIMEOUT = 90.0  # seconds until every rank has imported torch and joined the group
GROUP_TIMEOUT = 60.0  # seconds that a collective waits for the other ranks
GRACE = 5.0  # seconds that the other ranks get to answer once one has failed
STACKS = signal.SIGUSR1  # makes a rank write the stacks of its threads


class RankPool:
    """A gloo process group of `world_size` ranks that lasts from job to job.

    The ranks start with the first job, in the environment and with the `sys.path` of that moment.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._directory: Path | None = None

    def run(self, fn: Callable[..., T], *args: Any, timeout: float = 60.0) -> list[T]:
        """Calls `fn(*args)` on every rank and returns what it returned, in the order of the ranks.

        `fn` is found by its name in its module; arguments and results travel by pickle. Each rank
        enters it with the default process group up, one thread and the same seed.

        Raises:
            AssertionError: some rank raised; the message has the traceback of every one that did.
            TimeoutError: none raised, but some did not answer; the message has their stacks.
        """
        job = pickle.dumps((fn, args))
        if not self._processes:
            self._start()
        name = f"{fn.__module__}.{fn.__qualname__}"
        return self._exchange(name, job, timeout)

    def close(self) -> None:
        """Ends the ranks, whatever they are doing; the next job starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._processes, self._connections, self._directory = [], [], None

    @property
    def pids(self) -> list[int | None]:
        """The process ids of the ranks; empty while none run."""
        return [process.pid for process in self._processes]

    def _start(self) -> None:
        # The many ranks of a larger pool are forks. Those of a small one each begin anew, with
        # a hash seed of their own.
        starting = multiprocessing.get_context("spawn") if self.world_size <= 2 else _forks()
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        try:
            for rank in range(self.world_size):
                ours, theirs = starting.Pipe()
                self._connections.append(ours)
                process = starting.Process(
                    target=_serve,
                    args=(rank, self.world_size, self._directory, theirs),
                    name=f"rank{rank}of{self.world_size}",
                    daemon=True,
                )
                process.start()
                self._processes.append(process)
                theirs.close()  # so that we see the end of file when the rank dies
        except BaseException:
            self.close()
            raise
        self._exchange("start", None, START_TIMEOUT)

    def _exchange(self, name: str, job: bytes | None, timeout: float) -> list[Any]:
        """Sends a job (None: the ranks send the first answer themselves) and collects answers."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout
        try:
            if job is not None:
                for connection, rank in list(pending.items()):
                    try:
                        connection.send_bytes(job)
                    except OSError:
                        failures[rank] = self._obituary(rank)
                        del pending[connection]
            while pending:
                if failures:
                    deadline = min(deadline, time.monotonic() + GRACE)
                ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for answered in ready:
                    assert isinstance(answered, Connection)
                    rank = pending.pop(answered)
                    try:
                        ok, value = answered.recv()
                    except (EOFError, OSError):
                        ok, value = False, self._obituary(rank)
                    (results if ok else failures)[rank] = value
            silent = sorted(pending.values())
            stacks = self._stacks(silent)
        except BaseException:  # interrupted, for example by the time limit of the test
            self.close()
            raise
        if not failures and not silent:
            return [results[rank] for rank in range(self.world_size)]
        self.close()
        if failures:
            summary = f"{name} failed on {_ranks(failures)} of {self.world_size}"
        else:
            summary = f"{name}: no answer within {timeout:g} s from {_ranks(silent)}"
            summary += f" of {self.world_size}"
        reports: dict[tuple[str, str], list[int]] = {}  # the ranks that have the same to say
        for rank, text in sorted(failures.items()):
            reports.setdefault(("", text), []).append(rank)
        for rank, text in sorted(stacks.items()):
            reports.setdefault((", no answer", text), []).append(rank)
        message = summary + "\n"
        for (note, text), ranks in reports.items():
            message += f"\n--- {_ranks(ranks)}{note}\n{text.rstrip()}\n"
        raise (AssertionError if failures else TimeoutError)(message)

    def _obituary(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(GRACE)
        return f"the process ended with exit code {process.exitcode}\n{self._written(rank)}"

    def _stacks(self, ranks: Collection[int]) -> dict[int, str]:
        """What the threads of these ranks are doing, as far as the ranks can still tell."""
        for rank in ranks:
            # Until the handler is there, the signal would end the rank.
            pid = self._processes[rank].pid
            if pid is not None and self._stacks_file(rank).exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STACKS)
        if ranks:
            time.sleep(0.5)
        return {rank: self._written(rank) or "(no stacks)" for rank in ranks}

    def _stacks_file(self, rank: int) -> Path:
        assert self._directory is not None
        return _stacks_file(self._directory, rank)

    def _written(self, rank: int) -> str:
        file = self._stacks_file(rank)
        return file.read_text(errors="replace") if file.exists() else ""


class RankPools:
    """Pools by world size. The least recently used one is closed when there would be too many."""

    def __init__(self, keep: int = 4) -> None:
        self._keep = keep
        self._pools: OrderedDict[int, RankPool] = OrderedDict()

    def __call__(self, world_size: int) -> RankPool:
        """The pool of `world_size` ranks."""
        if world_size not in self._pools:
            while len(self._pools) >= self._keep:
                self._pools.popitem(last=False)[1].close()
            self._pools[world_size] = RankPool(world_size)
        self._pools.move_to_end(world_size)
        return self._pools[world_size]

    def close(self) -> None:
        """Closes every pool."""
        while self._pools:
            self._pools.popitem()[1].close()


def _forks() -> Any:
    """Starts processes that are forks of one that has imported torch."""
    forks: Any = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["fsdp_fx.compile.backend"])
    return forks


def run_script(
    script: Path, *arguments: str, world_size: int = 2, cwd: Path, timeout: float = 110.0
) -> str:
    """Runs a script as `torchrun --nproc-per-node world_size` would, but in forks: seconds less.

    Returns:
        What rank 0 printed.

    Raises:
        AssertionError: some rank failed, or did not end; the message has what each has written.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    outputs = [cwd / f"rank{rank}.out" for rank in range(world_size)]
    for rank, output in enumerate(outputs):
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
        }
        process = _forks().Process(
            target=_run_script, args=(script, arguments, cwd, environment, output), daemon=True
        )
        process.start()
        processes.append(process)
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    written = [output.read_text() if output.exists() else "" for output in outputs]
    if any(code != 0 for code in codes):  # None: it has not ended
        ends = zip(codes, written, strict=True)
        raise AssertionError(
            "\n".join(
                f"--- rank {i}, exit code {code}\n{text}" for i, (code, text) in enumerate(ends)
            )
        )
    return written[0]


def _run_script(
    script: Path, arguments: Sequence[str], cwd: Path, environment: dict[str, Any], output: Path
) -> None:
    """The life of a process of `run_script`."""
    with output.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.chdir(cwd)
    import torch

    torch.set_num_threads(1)
    sys.argv = [str(script), *arguments]
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code:
            traceback.print_exc()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def clean_up() -> None:
    """Drops what a test leaves behind in its process: compiled code and reference cycles."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    gc.collect()
    # What is left is modules and caches, for good: a million objects that every later
    # collection would go through, a fifth of the time that tests take.
    gc.freeze()


def _serve(rank: int, world_size: int, directory: Path, connection: Connection) -> None:
    """The life of one rank: joins the group, then runs jobs until the pool goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides when a rank ends
    stacks = _stacks_file(directory, rank)
    scratch = stacks.with_suffix(".new")
    with scratch.open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(STACKS, file)
        scratch.rename(stacks)  # the pool takes the file as the sign that the handler is there
        connection.send_bytes(_answer(_join, rank, world_size, directory))
        while True:
            try:
                job = connection.recv_bytes()
            except (EOFError, OSError):
                break
            connection.send_bytes(_answer(_perform, job))
    os._exit(0)  # the other ranks may be gone: take no leave of them


def _join(rank: int, world_size: int, directory: Path) -> None:
    # Many ranks share few cores, and the group stays on this machine.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(directory / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT),
    )
    dist.barrier()


def _perform(job: bytes) -> Any:
    import torch

    clean_up()
    random.seed(0)
    torch.manual_seed(0)
    fn, args = pickle.loads(job)
    return fn(*args)


def _answer(call: Callable[..., Any], *args: Any) -> bytes:
    """What the pool is sent: whether `call` succeeded, and its result or else the traceback."""
    try:
        return pickle.dumps((True, call(*args)))
    except BaseException as error:  # SystemExit and pytest's outcomes too
        frame = error.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
            frame = frame.tb_next
        return pickle.dumps((False, "".join(traceback.format_exception(type(error), error, frame))))


def _stacks_file(directory: Path, rank: int) -> Path:
    return directory / f"stacks{rank}"


def _ranks(ranks: Collection[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))
