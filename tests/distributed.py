"""Runs a function on several gloo ranks and returns what each returned."""

from __future__ import annotations

import os
import queue
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from wanted_torchrec import check_torchrec


class RankError(RuntimeError):
    """A rank raised, died or did not finish in time; the message says which and holds its traceback."""


def run_ranks(
    worker: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    local_world_size: int | None = None,
    timeout: float = 240.0,
) -> list[Any]:
    """Calls ``worker(rank, *arguments)`` on each rank of a fresh gloo group.

    Args:
        worker: a module-level function; its result must pickle.
        world_size: ranks, one process each with one thread.
        local_world_size: ranks per pretended host, by which TorchRec forms its groups; None makes one host of all.
        timeout: seconds after which the ranks are ended.

    Returns:
        [ranks] what each rank returned.

    Raises:
        RankError: a rank raised, died or did not finish in time.
    """
    local = world_size if local_world_size is None else local_world_size
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        processes = [
            context.Process(target=_rank_main, args=(worker, rank, world_size, local, str(store), results, arguments))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, results, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(processes: list[Any], results: Any, deadline: float) -> list[Any]:
    outcomes: dict[int, Any] = {}
    while len(outcomes) < len(processes):
        try:
            rank, value, error = results.get(timeout=0.5)
        except queue.Empty:
            dead = [r for r, p in enumerate(processes) if r not in outcomes and p.exitcode not in (None, 0)]
            if dead:
                raise RankError(f"rank {dead[0]} died with exit code {processes[dead[0]].exitcode}") from None
            if time.monotonic() > deadline:
                missing = [r for r in range(len(processes)) if r not in outcomes]
                raise RankError(f"ranks {missing} did not finish in time") from None
            continue
        if error is not None:
            raise RankError(f"rank {rank} failed:\n{error}")
        outcomes[rank] = value
    return [outcomes[rank] for rank in range(len(processes))]


def _rank_main(
    worker: Callable[..., Any],
    rank: int,
    world_size: int,
    local_world_size: int,
    store: str,
    results: Any,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank % local_world_size),
        LOCAL_WORLD_SIZE=str(local_world_size),
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    try:
        check_torchrec()
        results.put((rank, worker(rank, *arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        dist.destroy_process_group()
