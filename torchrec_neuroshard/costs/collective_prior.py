"""The analytic prior of a collective's time, with constants of their own for each kind of collective."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.collective_traffic import ALL_TO_ALL, BACKENDS, COLLECTIVES, Calls, Traffic

PARTS = ("fixed", "busiest", "total", "link")  # what a prior's time is made of
_LINK_OVERLAP = 6.0  # how sharply a link that cores share gives way to them, or they to it; fitted on 2 to 6 ranks

# Constants that are multiplied with something, in the order of the columns of design()
DESIGN = (
    "latency_ms",
    "peer_ms",
    "intra_host_ms_per_byte",
    "inter_host_ms_per_byte",
    "total_ms_per_byte",
    "message_ms",
    "remote_peer_ms",
    "excess_ms",
)
LINK = DESIGN.index("inter_host_ms_per_byte")
_FIXED = [DESIGN.index(name) for name in ("latency_ms", "peer_ms", "message_ms", "remote_peer_ms", "excess_ms")]
_BYTES = [DESIGN.index("intra_host_ms_per_byte"), DESIGN.index("total_ms_per_byte")]


@dataclass(frozen=True)
class CollectivePrior:
    """Constants of one kind of collective.

    ``fixed`` is the latency, plus the cost of each further rank, plus that of each message between two ranks.
    ``moving`` is the slowest rank's bytes over its bandwidth, plus all bytes times ``total_ms_per_byte``. Messages and
    the bytes of all ranks count where ranks share cores or one memory bus (gloo on one host). A call takes
    ``(fixed ** overlap + moving ** overlap) ** (1 / overlap)``: while ranks wait for their turn, bytes move.

    Attributes:
        latency_ms: fixed cost of a call.
        peer_ms: cost of each further rank.
        intra_host_ms_per_byte: inverse bandwidth of a rank within its host.
        inter_host_ms_per_byte: inverse bandwidth of a rank between hosts while all ranks of its host send.
        total_ms_per_byte: cost of each byte that any rank moves.
        message_ms: cost of each pair of ranks, in each direction.
        remote_peer_ms: further cost of each further rank where there is more than one host.
        excess_ms: cost of each rank beyond the cores, which waits for a time slice (about 3 ms on Linux).
        overlap: 1 where fixed costs and bytes add up, more where the one hides the other.
    """

    latency_ms: float
    peer_ms: float
    intra_host_ms_per_byte: float
    inter_host_ms_per_byte: float
    total_ms_per_byte: float
    message_ms: float = 0.0
    remote_peer_ms: float = 0.0
    excess_ms: float = 0.0
    overlap: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
        if self.overlap < 1:
            raise ValueError(f"overlap must be at least 1, got {self.overlap}")

    def fixed_ms(self, ranks: int, hosts: int, excess: int) -> float:
        """What a call costs that moves nothing.

        Args:
            ranks: number of ranks.
            hosts: number of hosts.
            excess: ranks beyond the cores.
        """
        return (
            self.latency_ms
            + (self.peer_ms + (self.remote_peer_ms if hosts > 1 else 0.0)) * (ranks - 1)
            + self.message_ms * ranks * (ranks - 1)
            + self.excess_ms * excess
        )


@dataclass(frozen=True)
class CollectivePriors:
    """The priors of all kinds of collectives on one kind of machine.

    Attributes:
        kinds: one for each of :data:`COLLECTIVES`, in that order.
        backend: one of :data:`BACKENDS`, which decides how many bytes a collective moves.
        shared: the ranks of a host share its cores, which handle all bytes, and its link, for which the host that
            moves most beyond itself counts; a call takes as long as the slower of the two. Otherwise each rank has
            links of its own, within and between hosts, which work at the same time.
        cores: cores that all ranks shared where the constants were measured; 0 when each rank has its own.
        link_ms_per_byte: the link that ``inter_host_ms_per_byte`` was measured on (ms per byte of a rank while all
            ranks of its host send); None when no link was measured or it has no known limit.
    """

    kinds: tuple[CollectivePrior, ...]
    backend: str
    shared: bool
    link_ms_per_byte: float | None = None
    cores: int = 0

    def __post_init__(self) -> None:
        if len(self.kinds) != len(COLLECTIVES):
            raise ValueError(f"there must be one prior for each of {COLLECTIVES}, got {len(self.kinds)}")
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {self.backend!r}")
        if self.link_ms_per_byte is not None and not 0 < self.link_ms_per_byte < float("inf"):
            raise ValueError(f"link_ms_per_byte must be a positive number or None, got {self.link_ms_per_byte}")

    @classmethod
    def uniform(cls, prior: CollectivePrior, device: str) -> CollectivePriors:
        """One prior for every kind, each rank with links of its own: what data sheets tell.

        Args:
            prior: the constants.
            device: "cuda", whose ranks talk through NCCL, or "cpu", through gloo.
        """
        return cls((prior,) * len(COLLECTIVES), "nccl" if device == "cuda" else "gloo", shared=False)

    def map(self, link_ms_per_byte: float | None, **changes: float) -> CollectivePriors:
        """The same with some constants of every kind changed, for another link."""
        kinds = tuple(replace(prior, **changes) for prior in self.kinds)
        return replace(self, kinds=kinds, link_ms_per_byte=link_ms_per_byte)

    def on_link(self, ms_per_byte: float) -> CollectivePriors:
        """The same on another link between hosts, that a byte of a rank takes so long to cross.

        What was measured between hosts scales with the link that it was measured on; over a link that nobody named, it
        is no faster than the given one.
        """
        if self.link_ms_per_byte is None:
            slowest = max(ms_per_byte, max(prior.inter_host_ms_per_byte for prior in self.kinds))
            return self.map(ms_per_byte, inter_host_ms_per_byte=slowest)
        ratio = ms_per_byte / self.link_ms_per_byte
        kinds = (replace(p, inter_host_ms_per_byte=p.inter_host_ms_per_byte * ratio) for p in self.kinds)
        return replace(self, kinds=tuple(kinds), link_ms_per_byte=ms_per_byte)

    def parts(self, calls: Calls) -> NDArray[np.float64]:
        """[calls, PARTS] ms of each part of calls that all ranks enter together, as if it were alone."""
        ranks, hosts, traffic = calls.traffic.ranks, calls.traffic.hosts, calls.traffic
        if ranks == 1:
            return np.zeros((len(calls), len(PARTS)))
        fixed = np.asarray([prior.fixed_ms(ranks, hosts, excess_ranks(ranks, self.cores)) for prior in self.kinds])
        intra = np.asarray([prior.intra_host_ms_per_byte for prior in self.kinds])[calls.kind]
        inter = np.asarray([prior.inter_host_ms_per_byte for prior in self.kinds])[calls.kind]
        total = np.asarray([prior.total_ms_per_byte for prior in self.kinds])[calls.kind]
        if self.link_ms_per_byte is not None:
            link = calls.on_link(self.link_ms_per_byte).link_ms_per_byte
            inter = inter * np.nan_to_num(link) / self.link_ms_per_byte
        if self.shared:
            busiest, crossing = traffic.busiest * intra, traffic.host_remote.max(axis=1) * inter
        else:
            within, beyond = traffic.busiest_local * intra, traffic.busiest_remote * inter
            busiest, crossing = np.where(within >= beyond, within, 0.0), np.where(within >= beyond, 0.0, beyond)
        return np.stack([fixed[calls.kind], busiest, traffic.total * total, crossing], axis=1)

    def predict(self, calls: Calls) -> NDArray[np.float64]:
        """[calls] ms of calls that all ranks enter together."""
        return self.joined(calls, self.parts(calls))

    def joined(self, calls: Calls, parts: NDArray[np.float64]) -> NDArray[np.float64]:
        """[calls] ms from the :meth:`parts` of the calls."""
        fixed, busiest, total, link = parts.T
        overlap = np.asarray([prior.overlap for prior in self.kinds])[calls.kind]
        if self.shared:
            return blend(blend(fixed, busiest + total, overlap), link, _LINK_OVERLAP)
        return blend(fixed, busiest + total + link, overlap)

    def all_to_all(self, traffic: Traffic) -> NDArray[np.float64]:
        """[calls] ms of all-to-alls with this traffic."""
        forward = np.zeros(len(traffic.sent_local), dtype=bool)
        return self.predict(Calls.together(ALL_TO_ALL, forward, traffic))

    def to_json(self) -> dict[str, Any]:
        """A JSON object; :meth:`from_json` reads it back."""
        return {
            "backend": self.backend,
            "shared": self.shared,
            "link_ms_per_byte": self.link_ms_per_byte,
            "cores": self.cores,
            "kinds": {name: asdict(prior) for name, prior in zip(COLLECTIVES, self.kinds)},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> CollectivePriors:
        """Reads what :meth:`to_json` wrote."""
        link = record["link_ms_per_byte"]
        kinds = [
            CollectivePrior(**{name: float(value) for name, value in record["kinds"][kind].items()})
            for kind in COLLECTIVES
        ]
        return cls(
            tuple(kinds),
            str(record["backend"]),
            bool(record["shared"]),
            None if link is None else float(link),
            int(record["cores"]),
        )


def excess_ranks(ranks: int, cores: int) -> int:
    """Ranks beyond the cores that they share; 0 where each has its own."""
    return max(0, ranks - cores) if cores else 0


def blend(
    first: NDArray[np.float64], second: NDArray[np.float64], power: NDArray[np.float64] | float
) -> NDArray[np.float64]:
    """[...] between the sum of two times (power 1) and the longer of them (a high power)."""
    longer = np.maximum(np.maximum(first, second), 1e-12)  # powers of shares neither overflow nor vanish
    result: NDArray[np.float64] = longer * ((first / longer) ** power + (second / longer) ** power) ** (1.0 / power)
    return np.where(longer > 1e-12, result, 0.0)


def shared_ms(columns: NDArray[np.float64], weights: NDArray[np.float64], overlap: float) -> NDArray[np.float64]:
    """[calls] prior of ranks that share links: :meth:`CollectivePriors.joined`, for fitting.

    Args:
        columns: [calls, DESIGN] from :func:`design`.
        weights: [DESIGN] the constants, that of the link as a factor.
        overlap: of one kind.
    """
    terms = columns * weights
    fixed, moving = terms[:, _FIXED].sum(axis=1), terms[:, _BYTES].sum(axis=1)
    return blend(blend(fixed, moving, overlap), terms[:, LINK], _LINK_OVERLAP)


def design(traffic: Traffic, link_ms_per_byte: NDArray[np.float64], cores: int) -> NDArray[np.float64]:
    """[calls, constants] what each constant of :class:`CollectivePrior` is multiplied with, of ranks that share links.

    The columns are in the order of :data:`DESIGN`; that of ``inter_host_ms_per_byte`` is relative to the link.

    Args:
        traffic: bytes moved.
        link_ms_per_byte: [calls] of each call's link.
        cores: cores that all ranks share; 0 when each has its own.
    """
    ranks, hosts = traffic.ranks, traffic.hosts
    calls = len(traffic.total)
    crossing = traffic.host_remote.max(axis=1) * np.nan_to_num(link_ms_per_byte)
    columns: Sequence[NDArray[np.float64]] = [
        np.ones(calls),
        np.full(calls, ranks - 1.0),
        traffic.busiest,
        crossing,
        traffic.total,
        np.full(calls, float(ranks * (ranks - 1))),
        np.full(calls, ranks - 1.0 if hosts > 1 else 0.0),
        np.full(calls, float(excess_ranks(ranks, cores))),
    ]
    return np.stack(columns, axis=1)
