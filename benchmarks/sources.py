"""Where a benchmark's workload comes from: a file, or one of the generated ones (``skewed:SEED``)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from benchmarks.skewed_workloads import SAMPLES_PER_RANK, skewed_workload
from torchrec_neuroshard.access import ID_ORDERS
from torchrec_neuroshard.workload import Workload, WorkloadError


def load_source(source: str) -> Workload:
    """Reads ``skewed:SEED`` or the path of a workload file.

    Raises:
        WorkloadError: neither a seed nor a usable file.
    """
    if not source.startswith("skewed:"):
        return Workload.load(source)
    seed = source.removeprefix("skewed:")
    if not seed.isdecimal():
        raise WorkloadError(f"{source}: the seed must be a whole number, as in skewed:3")
    return skewed_workload(int(seed))


def samples_per_rank(workload: Workload, world_size: int) -> int:
    """The batch of one rank: the workload's global batch shared out, else the comparison's own.

    Raises:
        WorkloadError: the global batch does not divide evenly.
    """
    if workload.batch_size is None:
        return SAMPLES_PER_RANK
    if workload.batch_size % world_size:
        raise WorkloadError(
            f"{workload.name}: batch_size {workload.batch_size} does not divide over {world_size} ranks; change either"
        )
    return workload.batch_size // world_size


def workload_id(workload: Workload) -> str:
    """A stable id of the tables and the batch."""
    fields = ("name", "num_embeddings", "embedding_dim", "pooling_factor", "num_features", "weighted", "data_type")
    content: list[Any] = [[getattr(table, field) for field in (*fields, "optimizer")] for table in workload.tables]
    constraints = {name: dict(constraint) for name, constraint in workload.constraints.items()}
    # Left out at their defaults, so that ids of older records stand.
    more = {table.name: [table.unpooled, table.id_order] for table in workload.tables}
    unusual = {name: fields for name, fields in more.items() if fields != [False, ID_ORDERS[0]]}
    if unusual:
        content.append(unusual)
    text = json.dumps([content, list(workload.zipf), workload.batch_size, constraints], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
