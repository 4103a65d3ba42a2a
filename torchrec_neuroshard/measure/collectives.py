"""Times collectives with torch.distributed (gloo on CPU, NCCL on CUDA).

Run it under torchrun, on one host or many, or let it start the ranks itself, on this host or on two emulated ones:

    torchrun --nproc_per_node 2 -m torchrec_neuroshard.measure.collectives --out FILE --minutes 8 --seed 0
    python -m torchrec_neuroshard.measure.collectives --world-size 2 --out FILE --minutes 8 --seed 0
    python -m torchrec_neuroshard.measure.collectives --world-size 4 --hosts 2 --link-gbps 1 --out FILE
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tqdm import tqdm

from torchrec_neuroshard import cuda
from torchrec_neuroshard.measure import netns
from torchrec_neuroshard.measure.collect import CollectionResult, describe, records_of_this_machine
from torchrec_neuroshard.measure.collective_calls import prepared_call
from torchrec_neuroshard.measure.collective_pool import sample_collective
from torchrec_neuroshard.measure.processes import end_with_parent
from torchrec_neuroshard.measure.specs import CollectiveSpec, spec_id
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError
from torchrec_neuroshard.measure.timing import RepetitionPolicy, Timing

POLICY = RepetitionPolicy(warmup=2, minimum=5, maximum=20, seconds=0.25, relative_error=0.02)

_STOP = -1


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
    call = prepared_call(spec, rank, device)
    delay_seconds = spec.start_delays_ms[rank] / 1e3 if spec.start_delays_ms else 0.0

    def step() -> float:
        _synchronize(device)
        dist.barrier()
        # Ranks may share a core, so an early rank sleeps: spinning would hold the others up.
        time.sleep(delay_seconds)
        started = time.perf_counter()
        call()
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
    out: Path,
    device: torch.device,
    minutes: float,
    seed: int,
    limit: int | None = None,
    local_world_size: int = 0,
    link_gbps: float | None = None,
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
        local_world_size: ranks per host; 0 when all are on one host.
        link_gbps: Gbit/s of the link between hosts; None when unknown or on one host.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    store = MeasurementStore(out) if rank == 0 else None
    done = {record["id"] for record in store if record["kind"] == "collective"} if store else set()
    sample = partial(
        sample_collective,
        seed,
        world_size=world_size,
        local_world_size=local_world_size,
        link_gbps=link_gbps,
        device=device.type,
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    begun = time.monotonic()
    written = index = skipped = 0
    with tqdm(total=limit, unit=" collectives", disable=rank != 0) as bar:
        while True:
            if rank == 0:
                while spec_id(sample(index)) in done:
                    index += 1
                    skipped += 1
                if time.monotonic() - begun > 60 * minutes or (limit is not None and written >= limit):
                    index = _STOP
            index = _from_rank_0(index, device)
            if index == _STOP:
                break
            spec = sample(index)
            started = time.monotonic()
            samples = measure_collective(spec, device)
            if store is not None:
                store.append(
                    {
                        **describe("collective", spec, device),
                        "backend": dist.get_backend(),
                        "hosts": spec.hosts,
                        "local_world_size": spec.ranks_per_host,
                        "link_gbps": spec.link_gbps,
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
        cuda.synchronize(device)


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
    parser.add_argument(
        "--hosts", type=int, default=1, help="2: emulate two hosts in network namespaces when not under torchrun"
    )
    parser.add_argument("--link-gbps", type=float, help="Gbit/s of each host's link, in each direction")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Collects as the command line says; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    return _run_rank(options) if "RANK" in os.environ else _start_ranks(options, arguments)


def _start_ranks(options: argparse.Namespace, arguments: list[str]) -> int:
    """Starts the ranks, which run this module again with the same arguments."""
    module = ["-m", __spec__.name, *arguments]
    try:
        _check_hosts(options)
        with MeasurementStore(options.out) as store:
            records_of_this_machine(store, "collective", torch.device(options.device))
        if options.hosts > 1:
            return netns.run_on_two_hosts(module, options.world_size // 2, options.link_gbps)
    except OSError as error:
        print(f"--out {options.out}: cannot be written ({error.strerror})", file=sys.stderr)
        return 2
    except (RecordError, netns.NetnsError, ValueError) as error:
        # Said here once, rather than by torchrun about a rank.
        print(error, file=sys.stderr)
        return 2
    ranks = ["--standalone", "--nproc_per_node", str(options.world_size)]
    command = [sys.executable, "-m", "torch.distributed.run", *ranks, *module]
    os.execv(sys.executable, command)  # replaces this process: signals and the exit code are torchrun's


def _check_hosts(options: argparse.Namespace) -> None:
    if options.world_size < 2:
        raise ValueError(f"--world-size {options.world_size}: a collective needs at least 2 ranks")
    if options.hosts not in (1, 2):
        raise ValueError(
            f"--hosts {options.hosts}: this machine emulates 1 or 2 hosts; for more, run this module under torchrun "
            "on the hosts themselves"
        )
    if options.hosts == 1 and options.link_gbps is not None:
        raise ValueError("--link-gbps is the speed between hosts; pass --hosts 2 with it")
    if options.hosts == 2 and options.link_gbps is None:
        raise ValueError("--hosts 2 needs --link-gbps, the speed of the link between the hosts, such as 1")
    if options.hosts == 2 and not 0 < options.link_gbps < float("inf"):
        raise ValueError(f"--link-gbps {options.link_gbps} must be a positive number")
    if options.hosts == 2 and options.device != "cpu":
        raise ValueError("--hosts 2 emulates hosts for gloo only (NCCL bypasses the link); pass --device cpu")
    if options.world_size % options.hosts:
        raise ValueError(f"--world-size {options.world_size} cannot be shared evenly by {options.hosts} hosts")


def _run_rank(options: argparse.Namespace) -> int:
    """One rank's share of a collection, under torchrun."""
    end_with_parent()  # a torchrun that is killed outright would leave its ranks measuring
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = cuda.use_device_of_rank(int(os.environ["LOCAL_RANK"]))
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    if local_world_size == int(os.environ["WORLD_SIZE"]):
        local_world_size = 0
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        result = collect_collectives(
            options.out, device, options.minutes, options.seed, options.limit, local_world_size, options.link_gbps
        )
    except (RecordError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print(f"{result.written} records written, {result.skipped} were there, {result.seconds:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
