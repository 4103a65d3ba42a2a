"""Traffic of the pooled-embedding all-to-all and the analytic prior of its time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Mapping

import numpy as np
from numpy.typing import NDArray

ELEMENT_BYTES = 4  # pooled embeddings travel as fp32 unless a codec says otherwise


@dataclass(frozen=True)
class AllToAllTraffic:
    """Bytes that each rank moves, without what stays on the rank.

    Attributes:
        sent_local: [calls, ranks] bytes sent to ranks of the same host.
        sent_remote: [calls, ranks] bytes sent to other hosts.
        received_local: [calls, ranks] bytes received from the same host.
        received_remote: [calls, ranks] bytes received from other hosts.
    """

    sent_local: NDArray[np.float64]
    sent_remote: NDArray[np.float64]
    received_local: NDArray[np.float64]
    received_remote: NDArray[np.float64]

    @classmethod
    def pooled(
        cls, batch_size_per_rank: NDArray[np.float64], dims: NDArray[np.float64], local_world_size: int
    ) -> AllToAllTraffic:
        """Forward direction: each rank sends its columns of every rank's samples.

        Args:
            batch_size_per_rank: [calls] samples per rank.
            dims: [calls, ranks] columns that each rank owns.
            local_world_size: ranks per host.
        """
        calls, ranks = dims.shape
        bytes_each = batch_size_per_rank[:, None] * dims * ELEMENT_BYTES
        host = np.arange(ranks) // local_world_size
        per_host = np.zeros((calls, host[-1] + 1))
        np.add.at(per_host.T, host, bytes_each.T)
        peers = np.bincount(host)[host] - 1
        return cls(
            bytes_each * peers,
            bytes_each * (ranks - 1 - peers),
            per_host[:, host] - bytes_each,
            bytes_each.sum(axis=1, keepdims=True) - per_host[:, host],
        )

    def reversed(self) -> AllToAllTraffic:
        """The backward direction: what was received is sent."""
        return AllToAllTraffic(self.received_local, self.received_remote, self.sent_local, self.sent_remote)

    def where(self, backward: NDArray[np.bool_]) -> AllToAllTraffic:
        """The backward direction for the calls where ``backward`` ([calls]) is true, the forward for others."""
        turn, other = backward[:, None], self.reversed()
        return AllToAllTraffic(
            np.where(turn, other.sent_local, self.sent_local),
            np.where(turn, other.sent_remote, self.sent_remote),
            np.where(turn, other.received_local, self.received_local),
            np.where(turn, other.received_remote, self.received_remote),
        )


@dataclass(frozen=True)
class CollectivePrior:
    """``latency + peers x peer_ms + slowest rank's bytes / bandwidth + all bytes x total_ms_per_byte``.

    The last term is for ranks that share cores or one memory bus (gloo on one host).

    Attributes:
        latency_ms: fixed cost of a call.
        peer_ms: cost of each further rank.
        intra_host_ms_per_byte: inverse bandwidth within a host.
        inter_host_ms_per_byte: inverse bandwidth between hosts.
        total_ms_per_byte: cost of each byte that any rank moves.
    """

    latency_ms: float
    peer_ms: float
    intra_host_ms_per_byte: float
    inter_host_ms_per_byte: float
    total_ms_per_byte: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a finite number of at least 0, got {value}")

    def predict(self, traffic: AllToAllTraffic) -> NDArray[np.float64]:
        """[calls] ms of a call that all ranks enter together."""
        ranks = traffic.sent_local.shape[1]
        if ranks == 1:
            return np.zeros(len(traffic.sent_local))
        local = np.maximum(traffic.sent_local, traffic.received_local).max(axis=1)
        remote = np.maximum(traffic.sent_remote, traffic.received_remote).max(axis=1)
        total = (traffic.sent_local + traffic.sent_remote).sum(axis=1)
        moving = np.maximum(local * self.intra_host_ms_per_byte, remote * self.inter_host_ms_per_byte)
        return self.latency_ms + self.peer_ms * (ranks - 1) + moving + total * self.total_ms_per_byte

    def to_json(self) -> dict[str, Any]:
        """A JSON object; :meth:`from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> CollectivePrior:
        """Reads what :meth:`to_json` wrote."""
        return cls(**{name: float(value) for name, value in record.items()})
