"""Bytes that collectives move: how much each rank sends and receives, within its host and beyond.

An all-to-all goes straight to each receiver. The other collectives go round a ring, in which every rank passes the
same bytes to the next. Which ranks of a host sit where its ring enters and leaves depends on their order; here the
ranks of a host share those bytes evenly, so that a call costs the same however its ranks are numbered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

COLLECTIVES = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")
ALL_TO_ALL, REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE = range(len(COLLECTIVES))
BACKENDS = ("gloo", "nccl")
ELEMENT_BYTES = 4  # pooled embeddings travel as fp32 unless a codec says otherwise


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank moves, without what stays on the rank.

    Attributes:
        sent_local: [calls, ranks] bytes sent to ranks of the same host.
        sent_remote: [calls, ranks] bytes sent to other hosts.
        received_local: [calls, ranks] bytes received from the same host.
        received_remote: [calls, ranks] bytes received from other hosts.
        ranks_per_host: ranks of a host are consecutive.
    """

    sent_local: NDArray[np.float64]
    sent_remote: NDArray[np.float64]
    received_local: NDArray[np.float64]
    received_remote: NDArray[np.float64]
    ranks_per_host: int

    @classmethod
    def pooled(
        cls, batch_size_per_rank: NDArray[np.float64], dims: NDArray[np.float64], local_world_size: int
    ) -> Traffic:
        """All-to-all of pooled embeddings, forward: each rank sends its columns of every rank's samples.

        Args:
            batch_size_per_rank: [calls] samples per rank.
            dims: [calls, ranks] columns that each rank owns.
            local_world_size: ranks per host.
        """
        ranks = dims.shape[1]
        bytes_each = batch_size_per_rank[:, None] * dims * ELEMENT_BYTES
        peers = _peers(ranks, local_world_size)
        of_host = _host_sums(bytes_each, local_world_size)
        return cls(
            bytes_each * peers,
            bytes_each * (ranks - 1 - peers),
            of_host - bytes_each,
            bytes_each.sum(axis=1, keepdims=True) - of_host,
            local_world_size,
        )

    @classmethod
    def of(
        cls,
        kind: NDArray[np.int64],
        batch_size_per_rank: NDArray[np.float64],
        dims: NDArray[np.float64],
        backward: NDArray[np.bool_],
        local_world_size: int,
        backend: str,
    ) -> Traffic:
        """Traffic of calls of any kinds.

        Args:
            kind: [calls] index in :data:`COLLECTIVES`.
            batch_size_per_rank: [calls] samples per rank; 1 for an all-reduce.
            dims: [calls, ranks] all-to-all: columns that each rank owns. Others: columns of all tables together, or
                the floats of an all-reduce's buffer, the same for every rank.
            backward: [calls] direction of an all-to-all.
            local_world_size: ranks per host.
            backend: one of :data:`BACKENDS`; gloo's reduce-scatter all-reduces the whole input.
        """
        ranks = dims.shape[1]
        direct = cls.pooled(batch_size_per_rank, dims, local_world_size).where(backward)
        passes = np.asarray([0.0, 2.0 if backend == "gloo" else 1.0, 1.0, 2.0 / ranks])[kind]
        passed = (passes * batch_size_per_rank * (ranks - 1))[:, None] * dims * ELEMENT_BYTES
        hops = _host_ends(ranks, local_world_size)
        within, beyond = passed * (1.0 - hops), passed * hops
        turn = (kind == ALL_TO_ALL)[:, None]
        return cls(
            np.where(turn, direct.sent_local, within),
            np.where(turn, direct.sent_remote, beyond),
            np.where(turn, direct.received_local, within),
            np.where(turn, direct.received_remote, beyond),
            local_world_size,
        )

    def reversed(self) -> Traffic:
        """The backward direction: what was received is sent."""
        return Traffic(
            self.received_local, self.received_remote, self.sent_local, self.sent_remote, self.ranks_per_host
        )

    def where(self, backward: NDArray[np.bool_]) -> Traffic:
        """The backward direction for the calls where ``backward`` ([calls]) is true, the forward for others."""
        turn, other = backward[:, None], self.reversed()
        return Traffic(
            np.where(turn, other.sent_local, self.sent_local),
            np.where(turn, other.sent_remote, self.sent_remote),
            np.where(turn, other.received_local, self.received_local),
            np.where(turn, other.received_remote, self.received_remote),
            self.ranks_per_host,
        )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.sent_local.shape[1]

    @property
    def hosts(self) -> int:
        """Number of hosts; the last may be partly used."""
        return -(-self.ranks // self.ranks_per_host)

    @property
    def sent(self) -> NDArray[np.float64]:
        """[calls, ranks] bytes sent to any rank."""
        return self.sent_local + self.sent_remote

    @property
    def received(self) -> NDArray[np.float64]:
        """[calls, ranks] bytes received from any rank."""
        return self.received_local + self.received_remote

    @property
    def busiest(self) -> NDArray[np.float64]:
        """[calls] bytes of the rank that sends or receives most."""
        return np.maximum(self.sent, self.received).max(axis=1)

    @property
    def busiest_local(self) -> NDArray[np.float64]:
        """[calls] bytes of the rank that sends or receives most within its host."""
        return np.maximum(self.sent_local, self.received_local).max(axis=1)

    @property
    def busiest_remote(self) -> NDArray[np.float64]:
        """[calls] bytes of the rank that sends or receives most beyond its host."""
        return np.maximum(self.sent_remote, self.received_remote).max(axis=1)

    @property
    def host_remote(self) -> NDArray[np.float64]:
        """[calls, ranks] bytes that the rank's host sends or receives, whichever is more, for each of its ranks."""
        leaving, entering = (_host_sums(each, self.ranks_per_host) for each in (self.sent_remote, self.received_remote))
        return np.maximum(leaving, entering) / (_peers(self.ranks, self.ranks_per_host) + 1)

    @property
    def total(self) -> NDArray[np.float64]:
        """[calls] bytes that all ranks send."""
        return self.sent.sum(axis=1)


@dataclass(frozen=True)
class Calls:
    """Collective calls over equally many ranks and hosts.

    Attributes:
        kind: [calls] index in :data:`COLLECTIVES`.
        backward: [calls] direction of an all-to-all.
        traffic: bytes moved.
        wait_ms: [calls, ranks] how long each rank waits for the last one to start.
        link_ms_per_byte: [calls] ms that a byte of each rank takes to another host when all ranks of its host send at
            once; nan for the link that the model was measured on, or was told of.
    """

    kind: NDArray[np.int64]
    backward: NDArray[np.bool_]
    traffic: Traffic
    wait_ms: NDArray[np.float64]
    link_ms_per_byte: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.kind)

    def on_link(self, ms_per_byte: float | None) -> Calls:
        """The calls with this link where they do not name one; on a single host there is none."""
        if self.traffic.hosts == 1 or ms_per_byte is None:
            return self
        known = np.where(np.isnan(self.link_ms_per_byte), ms_per_byte, self.link_ms_per_byte)
        return replace(self, link_ms_per_byte=known)

    @classmethod
    def together(cls, kind: int, backward: NDArray[np.bool_], traffic: Traffic) -> Calls:
        """Calls of one kind, in [calls] directions, that all ranks enter together, over the model's own link."""
        calls, ranks = traffic.sent_local.shape
        return cls(
            np.full(calls, kind),
            backward,
            traffic,
            np.zeros((calls, ranks)),
            np.full(calls, np.nan),
        )


def waits(start_delays_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """[calls, ranks] how long each rank waits for the last to start, from how late each starts."""
    result: NDArray[np.float64] = start_delays_ms.max(axis=1, keepdims=True) - start_delays_ms
    return result


@lru_cache(maxsize=64)
def _host(ranks: int, local_world_size: int) -> NDArray[np.int64]:
    return np.arange(ranks) // local_world_size


@lru_cache(maxsize=64)
def _peers(ranks: int, local_world_size: int) -> NDArray[np.int64]:
    """[ranks] other ranks of the same host."""
    host = _host(ranks, local_world_size)
    peers: NDArray[np.int64] = np.bincount(host)[host] - 1
    return peers


def _host_ends(ranks: int, local_world_size: int) -> NDArray[np.float64]:
    """[ranks] share of what a ring's rank passes on that leaves its host: one of the host's ranks passes it all."""
    if ranks <= local_world_size:
        return np.zeros(ranks)
    return 1.0 / (_peers(ranks, local_world_size) + 1)


def _host_sums(values: NDArray[np.float64], local_world_size: int) -> NDArray[np.float64]:
    """[calls, ranks] sum over the ranks of each rank's host."""
    if values.shape[1] <= local_world_size:
        return np.broadcast_to(values.sum(axis=1, keepdims=True), values.shape)
    host = _host(values.shape[1], local_world_size)
    sums = np.zeros((len(values), host[-1] + 1))
    np.add.at(sums.T, host, values.T)
    result: NDArray[np.float64] = sums[:, host]
    return result
