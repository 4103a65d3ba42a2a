"""The fewest bytes that any plan sends over the link between two hosts: a bound that plans can be held against."""

from __future__ import annotations

from benchmarks.two_hosts_plans import RANKS
from torchrec_neuroshard.workload import Workload

_FLOAT_BYTES, _ID_BYTES, _LENGTH_BYTES = 4, 8, 8  # fp32; ids and lengths as examples/synthetic_data.py makes them


def least_link_bytes(workload: Workload) -> float:
    """Payload of a step in both directions, where each table is sharded in whichever way moves least.

    A table that is not replicated has half of its ids, with their lengths, and half of its pooled outputs cross the
    link, and as many gradients cross back, whatever ranks have it: each host's samples need what lies on the other.
    Tables of one rank, columns on ranks of one call and rows within a host differ in how often ids or lengths cross;
    rows over both hosts, with the collectives that TorchRec runs, send outputs more than once. A replicated table's
    gradient goes round a ring of all ranks, which enters and leaves each host once.

    Args:
        workload: trained with one global batch a step.

    Returns:
        Bytes, without headers.
    """
    assert workload.batch_size is not None
    crossing = workload.batch_size / 2  # samples of a feature whose other half of the work is on the other host
    total = 0.0
    for table, pooling in zip(workload.tables, workload.feature_pooling):
        width = table.embedding_dim * _FLOAT_BYTES
        sharded = sum(crossing * (2 * width + _LENGTH_BYTES + ids * _ID_BYTES) for ids in pooling)
        ring_hops = 2
        replicated = ring_hops * 2 * (RANKS - 1) / RANKS * table.num_embeddings * width
        total += min(sharded, replicated)
    return total
