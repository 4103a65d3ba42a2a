"""The pool that measured collectives are drawn from: what plans of recommendation models ask of the network."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.measure.collective_calls import ELEMENT_BYTES, split_sizes
from torchrec_neuroshard.measure.specs import COLLECTIVES, CollectiveSpec

_SHARES = (0.5, 0.5 / 3, 0.5 / 3, 0.5 / 3)  # of COLLECTIVES


@dataclass(frozen=True)
class Pace:
    """How large the calls of a kind of device are; speeds are rough, only to keep records within their cap.

    Attributes:
        batch_exponents: range of the logarithm to base 2 of the samples per rank.
        all_reduce_exponents: likewise of an all-reduce's floats.
        local_bytes_per_ms: of all ranks of a host together.
        link_gbps: of a link between hosts that nobody named.
        caps_ms: (probability, longest call): most records are cheap.
    """

    batch_exponents: tuple[float, float]
    all_reduce_exponents: tuple[float, float]
    local_bytes_per_ms: float
    link_gbps: float
    caps_ms: tuple[tuple[float, float], ...]


# gloo's ranks of one machine on a few shared cores; GPUs that NVLink joins, each with a NIC of its own.
PACES = {
    "cpu": Pace((5, 11), (8, 24), 5e5, 10.0, ((0.85, 40.0), (0.15, 250.0))),
    "cuda": Pace((6, 15), (8, 28), 1e9, 400.0, ((0.85, 4.0), (0.15, 25.0))),
}


def sample_collective(
    seed: int,
    index: int,
    world_size: int,
    local_world_size: int = 0,
    link_gbps: float | None = None,
    device: str = "cpu",
) -> CollectiveSpec:
    """The ``index``-th collective of the sample for some ranks; any prefix of the sequence covers the space.

    Half are all-to-alls (uneven dim sums, both directions), the rest is shared by the other collectives. Half have
    start delays. Calls that would take long are shrunk.

    Args:
        seed: seed of the sample.
        index: position in the sample.
        world_size: number of ranks.
        local_world_size: ranks per host; 0 when all are on one host.
        link_gbps: Gbit/s of the link between hosts; None when unknown or on one host.
        device: "cpu" or "cuda", whose ranks are given more to move.
    """
    pace = PACES[device]
    rng = np.random.default_rng([seed, index, world_size, local_world_size])
    name = str(rng.choice(COLLECTIVES, p=_SHARES))
    batch_size = int(2 ** rng.uniform(*pace.batch_exponents))
    dims: tuple[int, ...] = (4 * round(2 ** rng.uniform(2, 12) / 4),)
    if name == "all_to_all":
        total = 2 ** rng.uniform(5, 12.5)
        shares = rng.dirichlet(np.full(world_size, float(rng.choice([0.7, 2.0, 10.0, 100.0]))))
        dims = tuple(int(4 * round(total * share * world_size / 4 / 2)) for share in shares)
    elif name == "all_reduce":
        batch_size, dims = 1, (int(2 ** rng.uniform(*pace.all_reduce_exponents)),)
    backward = name == "all_to_all" and rng.random() < 0.5
    delays = tuple(np.round(rng.exponential(float(rng.choice([1.0, 5.0])), world_size), 3).tolist())
    spec = CollectiveSpec(
        name=name,
        world_size=world_size,
        batch_size_per_rank=batch_size,
        dims=dims,
        direction="backward" if backward else "forward",
        start_delays_ms=delays if rng.random() < 0.5 else (),
        seed=index,
        local_world_size=local_world_size,
        link_gbps=link_gbps,
    )
    chances, caps = zip(*pace.caps_ms)
    return _shrink(spec, float(rng.choice(caps, p=chances)), pace)


def estimated_call_ms(spec: CollectiveSpec, pace: Pace = PACES["cpu"]) -> float:
    """A rough time of one call, only to keep records within their cap."""
    between = _bytes_between(spec)
    host = np.arange(spec.world_size) // spec.ranks_per_host
    remote = host[:, None] != host[None, :]
    leaving = np.bincount(host, (between * remote).sum(axis=1))
    entering = np.bincount(host, (between * remote).sum(axis=0))
    link_bytes_per_ms = (spec.link_gbps or pace.link_gbps) * 1e9 / 8 / 1e3
    return float(max(between.sum() / pace.local_bytes_per_ms, max(leaving.max(), entering.max()) / link_bytes_per_ms))


def _bytes_between(spec: CollectiveSpec) -> NDArray[np.float64]:
    """[sender, receiver] bytes as gloo sends them: an all-to-all straight to each receiver, the others round a ring.

    Counted at the link between two hosts: gloo's reduce-scatter all-reduces the whole input.
    """
    ranks = spec.world_size
    if spec.name == "all_to_all":
        between = np.asarray([split_sizes(spec, rank)[0] for rank in range(ranks)], dtype=np.float64)
        np.fill_diagonal(between, 0.0)
    else:
        own = float(spec.batch_size_per_rank * spec.dims[0])
        each = {"reduce_scatter": 2.0 * own, "all_gather": own, "all_reduce": 2.0 * own / ranks}[spec.name]
        between = np.roll(np.eye(ranks), 1, axis=1) * (ranks - 1) * each
    return between * ELEMENT_BYTES


def _shrink(spec: CollectiveSpec, cap_ms: float, pace: Pace) -> CollectiveSpec:
    """Halves the batch, or an all-reduce's buffer, until a call fits its cap."""
    while estimated_call_ms(spec, pace) > cap_ms:
        if spec.name == "all_reduce" and spec.dims[0] > 1:
            spec = replace(spec, dims=(spec.dims[0] // 2,))
        elif spec.batch_size_per_rank > 1:
            spec = replace(spec, batch_size_per_rank=spec.batch_size_per_rank // 2)
        else:
            break
    return spec
