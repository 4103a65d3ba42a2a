"""Times the all-to-all of pooled embeddings with torch.distributed (gloo on CPU, NCCL on CUDA).

Run it under torchrun, or let it start the ranks of this host itself:

    torchrun --nproc_per_node 2 -m torchrec_neuroshard.measure.collectives --out FILE --minutes 8 --seed 0
    python -m torchrec_neuroshard.measure.collectives --world-size 2 --out FILE --minutes 8 --seed 0
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import time
from pathlib import Path
from typing import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tqdm import tqdm

from torchrec_neuroshard.measure.collect import CollectionResult, describe
from torchrec_neuroshard.measure.pool import sample_collective
from torchrec_neuroshard.measure.specs import CollectiveSpec, spec_id
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError, read_records
from torchrec_neuroshard.measure.timing import RepetitionPolicy, Timing

POLICY = RepetitionPolicy(warmup=2, minimum=5, maximum=20, seconds=0.25, relative_error=0.02)

_STOP = -1


def split_sizes(spec: CollectiveSpec, rank: int) -> tuple[list[int], list[int]]:
    """Floats that a rank sends to and receives from each rank: (input splits, output splits), both [ranks].

    Forward: a rank holds its own columns for the global batch and sends every rank that rank's samples; it
    receives everybody's columns for its own samples. Backward is the reverse.
    """
    own_columns = [spec.batch_size_per_rank * spec.dims[rank]] * spec.world_size
    own_samples = [spec.batch_size_per_rank * dim for dim in spec.dims]
    return (own_columns, own_samples) if spec.direction == "forward" else (own_samples, own_columns)


def measure_collective(
    spec: CollectiveSpec, device: torch.device, policy: RepetitionPolicy = POLICY
) -> NDArray[np.float64]:
    """Times a collective; every rank of the default process group must call it with the same arguments.

    A rank's time runs from its own start, which its start delay puts off, to its own end: a rank that comes
    early also times its wait for the others.

    Returns:
        [ranks, repetitions] ms, the same on every rank.

    Raises:
        ValueError: the spec is for another number of ranks than the process group has.
    """
    if spec.world_size != dist.get_world_size():
        raise ValueError(f"the spec is for {spec.world_size} ranks but the process group has {dist.get_world_size()}")
    rank = dist.get_rank()
    inputs, outputs = split_sizes(spec, rank)
    sent = torch.ones(sum(inputs), device=device)
    received = torch.empty(sum(outputs), device=device)
    delay_seconds = spec.start_delays_ms[rank] / 1e3 if spec.start_delays_ms else 0.0

    def step() -> float:
        _synchronize(device)
        dist.barrier()
        # Ranks may share a core, so an early rank sleeps: spinning would hold the others up.
        time.sleep(delay_seconds)
        started = time.perf_counter()
        dist.all_to_all_single(received, sent, outputs, inputs)
        _synchronize(device)
        return (time.perf_counter() - started) * 1e3

    begun = time.perf_counter()
    for _ in range(policy.warmup):
        step()
    samples: list[float] = []
    while len(samples) < policy.maximum:
        samples.append(step())
        if len(samples) < policy.minimum:
            continue
        times = np.asarray(samples)
        settled = times.std(ddof=1) <= policy.relative_error * times.mean() * np.sqrt(times.size)
        if not _any_rank(not settled and time.perf_counter() - begun < policy.seconds, device):
            break
    mine = torch.tensor(samples, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(spec.world_size)]
    dist.all_gather(gathered, mine)
    return torch.stack(gathered).cpu().numpy()


def collect_collectives(
    out: Path, device: torch.device, minutes: float, seed: int, limit: int | None = None
) -> CollectionResult:
    """Measures sampled collectives until the time or the number of records is reached; all ranks call it.

    Rank 0 keeps the store and tells the others what is next and when to stop. Records that the store already
    holds are skipped, so a rerun with the same seed resumes where a killed run stopped.

    Args:
        out: file that rank 0 appends to.
        device: this rank's device.
        minutes: time budget; checked between records.
        seed: seed of the sample.
        limit: stop after this many new records.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    store = MeasurementStore(out) if rank == 0 else None
    done = {record["id"] for record in store if record["kind"] == "collective"} if store else set()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    begun = time.monotonic()
    written = index = skipped = 0
    with tqdm(total=limit, unit=" collectives", disable=rank != 0) as bar:
        while True:
            if rank == 0:
                while spec_id(sample_collective(seed, index, world_size)) in done:
                    index += 1
                    skipped += 1
                if time.monotonic() - begun > 60 * minutes or (limit is not None and written >= limit):
                    index = _STOP
            index = _from_rank_0(index, device)
            if index == _STOP:
                break
            spec = sample_collective(seed, index, world_size)
            started = time.monotonic()
            samples = measure_collective(spec, device)
            if store is not None:
                store.append(
                    {
                        **describe("collective", spec, device),
                        "backend": dist.get_backend(),
                        "pinned_cores": cores,
                        "load_average": round(os.getloadavg()[0], 2),
                        "rank_ms": [Timing.of(row).to_json() for row in samples],
                        "seconds": round(time.monotonic() - started, 2),
                    }
                )
            written += 1
            index += 1
            bar.update()
    return CollectionResult(written, skipped, time.monotonic() - begun)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any rank: what ranks agree on, so that none leaves a loop alone."""
    tensor = torch.tensor([int(flag)], device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return bool(tensor.item())


def _from_rank_0(value: int, device: torch.device) -> int:
    tensor = torch.tensor([value], device=device)
    dist.broadcast(tensor, 0)
    return int(tensor.item())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchrec_neuroshard.measure.collectives", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help=".jsonl file to append records to")
    parser.add_argument("--minutes", type=float, default=8.0, help="time budget (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    parser.add_argument("--limit", type=int, help="stop after this many new records")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--world-size", type=int, default=2, help="ranks to start when not under torchrun (default: 2)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Collects as the command line says; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    if "RANK" not in os.environ:
        try:
            if options.out.exists():
                collections.deque(read_records(options.out), maxlen=0)
        except RecordError as error:  # said here once, rather than by torchrun about a rank
            print(error, file=sys.stderr)
            return 2
        ranks = ["--standalone", "--nproc_per_node", str(options.world_size)]
        command = [sys.executable, "-m", "torch.distributed.run", *ranks, "-m", __spec__.name, *arguments]
        os.execv(sys.executable, command)  # replaces this process: signals and the exit code are torchrun's
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        result = collect_collectives(options.out, device, options.minutes, options.seed, options.limit)
    except RecordError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print(f"{result.written} records written, {result.skipped} were there, {result.seconds:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
