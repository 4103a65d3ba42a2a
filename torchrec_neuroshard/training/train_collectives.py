"""Fits the cost model of collectives: priors by least squares, then the equivariant residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from torchrec_neuroshard.costs.collective_model import (
    LAYOUT_FEATURES,
    RANK_FEATURES,
    CollectiveModel,
    CollectiveNet,
    rank_features,
)
from torchrec_neuroshard.costs.collective_prior import (
    DESIGN,
    LINK,
    CollectivePrior,
    CollectivePriors,
    design,
    shared_ms,
)
from torchrec_neuroshard.costs.collective_traffic import COLLECTIVES
from torchrec_neuroshard.training.collective_data import CollectiveData
from torchrec_neuroshard.training.train_groups import smooth_l1

MINIMUM_COLLECTIVES = 20  # records below which fitting makes no sense
_NOMINAL_LINK_MS_PER_BYTE = 8e-7  # 10 Gbit/s: a unit, where nobody named the link
_OUTLIER = 0.2  # relative error beyond which a record pulls less on the prior
_MOST_OVERLAP = 6.0
_RIDGE = 0.2  # pull of each constant to its start: those that records cannot tell apart share what they explain
_LEAST_START = 0.2  # share of the typical time that each constant begins with, so that none is out of the race
_SLOWEST_LINK = 1.0  # logarithm of the time that a byte takes on a link over what the link is limited to


@dataclass(frozen=True)
class CollectiveConfig:
    """How the residual is trained.

    Attributes:
        nets: networks averaged.
        hidden: width of their layers.
        epochs: passes over the records.
        batch_size: calls of a step.
        learning_rate: at its peak.
        weight_decay: of AdamW.
        noise: added to a call's inputs in each step, as a share of their spread: records are noisy and few.
        layout_noise: likewise to the numbers of ranks and hosts. Training sees a handful of them, so a net that leans
            on them is wrong for others; without it, errors on unseen numbers of ranks were a sixth higher.
        seed: of weights and order.
    """

    nets: int = 2
    hidden: int = 24
    epochs: int = 30
    batch_size: int = 64
    learning_rate: float = 4e-3
    weight_decay: float = 3e-2
    noise: float = 0.15
    layout_noise: float = 1.0
    seed: int = 0


def fit_collective_priors(data: Sequence[CollectiveData]) -> CollectivePriors:
    """Fits the constants of each kind of collective to the slowest rank's times, on relative error.

    Kinds with few records share what all records together tell. Calls whose ranks start apart hide part of the
    transfer behind the wait, so they count only where there are too few others.

    Raises:
        ValueError: the records are of several backends, which move different bytes for one call.
    """
    backends = {part.backend for part in data}
    if len(backends) != 1:
        raise ValueError(f"records must come from one backend, found {sorted(backends)}")
    links = np.concatenate([part.calls.link_ms_per_byte for part in data])
    named = links[~np.isnan(links)]
    link = float(np.median(named)) if named.size else None
    unit = link or _NOMINAL_LINK_MS_PER_BYTE
    cores = min(part.cores for part in data)
    rows, targets, kinds, waited = [], [], [], []
    for part in data:
        calls = part.calls.on_link(unit)
        rows.append(design(calls.traffic, calls.link_ms_per_byte, cores))
        targets.append(part.transfer_ms.max(axis=1))
        kinds.append(calls.kind)
        waited.append(calls.wait_ms.max(axis=1) > 0)
    columns, target = np.concatenate(rows), np.concatenate(targets)
    kind, apart = np.concatenate(kinds), np.concatenate(waited)

    def fit(members: NDArray[np.bool_]) -> CollectivePrior:
        together = members & ~apart
        used = together if together.sum() >= MINIMUM_COLLECTIVES else members
        return _prior(columns[used], target[used], unit, link is not None)

    of_all = fit(np.ones(len(target), dtype=bool))
    priors = [
        fit(kind == index) if (kind == index).sum() >= MINIMUM_COLLECTIVES else of_all
        for index in range(len(COLLECTIVES))
    ]
    return CollectivePriors(tuple(priors), backends.pop(), shared=True, link_ms_per_byte=link, cores=cores)


def _prior(columns: NDArray[np.float64], target: NDArray[np.float64], unit: float, limited: bool) -> CollectivePrior:
    """Constants of one kind from [calls, DESIGN] and [calls] ms; crossing bytes are in ``unit`` ms per byte.

    Starts from non-negative least squares on relative error, and improves the logarithms of the constants until the
    ratio of measured to predicted is small. Over a link of known limit no byte is faster than the limit.
    """
    scale = columns.mean(axis=0)
    used = np.flatnonzero(scale > 0)
    linear, _ = nnls(columns[:, used] / scale[used] / target[:, None], np.ones(len(target)))
    start = np.log(np.maximum(linear, _LEAST_START * float(np.median(target))) / scale[used])
    low, high = np.full(len(used) + 1, -np.inf), np.full(len(used) + 1, np.inf)
    low[-1], high[-1] = 1.0, _MOST_OVERLAP
    if limited and LINK in used:
        place = int(np.flatnonzero(used == LINK)[0])
        low[place], high[place] = 0.0, _SLOWEST_LINK
        start[place] = np.clip(start[place], 0.01, _SLOWEST_LINK - 0.01)

    def log_ratio(parameters: NDArray[np.float64]) -> NDArray[np.float64]:
        weights = np.zeros(len(DESIGN))
        weights[used] = np.exp(parameters[:-1])
        predicted = np.maximum(shared_ms(columns, weights, float(parameters[-1])), 1e-6)
        doubt = _RIDGE * (parameters[:-1] - start)
        result: NDArray[np.float64] = np.concatenate([np.log(predicted / target), doubt])
        return result

    found = least_squares(
        log_ratio, np.append(start, 1.5), bounds=(low, high), loss="soft_l1", f_scale=_OUTLIER, max_nfev=200
    ).x
    solution = np.zeros(len(DESIGN))
    solution[used] = np.exp(found[:-1])
    if limited and LINK not in used:
        solution[LINK] = 1.0  # this kind was not measured between hosts
    constants = dict(zip(DESIGN, solution.tolist()))
    constants["inter_host_ms_per_byte"] *= unit
    return CollectivePrior(**constants, overlap=float(found[-1]))


@dataclass(frozen=True)
class _Set:
    """Calls of one layout as tensors: inputs [calls, ranks, features], log of measured over prior, base log ms."""

    inputs: torch.Tensor
    target: torch.Tensor
    base: torch.Tensor
    slowest: torch.Tensor

    @classmethod
    def of(cls, part: CollectiveData, priors: CollectivePriors) -> _Set:
        calls = part.calls.on_link(priors.link_ms_per_byte)
        parts = priors.parts(calls)
        prior = priors.joined(calls, parts)
        base = np.log(calls.wait_ms + prior[:, None])
        measured = np.log(part.measured_ms)
        arrays = (rank_features(calls, parts, prior), measured - base, base, measured.max(axis=1))
        return cls(*(torch.as_tensor(array, dtype=torch.float32) for array in arrays))


def train_collective_model(
    data: Sequence[CollectiveData],
    config: CollectiveConfig = CollectiveConfig(),  # noqa: B008 (frozen)
    log: Callable[[str], None] = print,
) -> CollectiveModel:
    """Trains on calls of all kinds, rank counts and hosts together; one model serves all."""
    priors = fit_collective_priors(data)
    torch.manual_seed(config.seed)
    net = CollectiveNet(config.nets, config.hidden)
    sets = [_Set.of(part, priors) for part in data]
    net.fit_inputs(torch.cat([each.inputs.flatten(0, 1) for each in sets]))
    targets = torch.cat([each.target.flatten() for each in sets])
    net.residual_low.copy_(torch.quantile(targets, 0.005))
    net.residual_high.copy_(torch.quantile(targets, 0.995).clamp_min(0.0))

    batches = [-(-len(each.inputs) // config.batch_size) for each in sets]
    steps = config.epochs * sum(batches)
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.learning_rate, total_steps=steps)
    generator = np.random.default_rng(config.seed)
    share = torch.full((RANK_FEATURES,), config.noise)
    share[list(LAYOUT_FEATURES)] = config.layout_noise
    spread = share * net.spread
    total = 0.0
    for _ in range(config.epochs):
        chosen = [
            (index, rows)
            for index, count in enumerate(batches)
            for rows in np.array_split(generator.permutation(len(sets[index].inputs)), count)
        ]
        total = 0.0
        for position in generator.permutation(len(chosen)):
            index, rows = chosen[position]
            loss = _loss(net, sets[index], torch.as_tensor(rows), spread)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
    log(f"collectives: training loss {total / sum(batches):.4f}")
    return CollectiveModel(priors, net)


def _loss(net: CollectiveNet, data: _Set, rows: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Error of each rank's time, and of the slowest's; each net learns for itself.

    Args:
        net: what is trained.
        data: calls of one layout.
        rows: [calls] those to take.
        spread: [RANK_FEATURES] standard deviation of noise on the inputs, alike for all ranks of a call.
    """
    residual, slowest = net(data.inputs[rows] + spread * torch.randn(len(rows), 1, len(spread)))
    per_rank = smooth_l1(residual - data.target[rows]).mean()
    # The slowest is built on what the ranks' own predictions are, not the other way round.
    longest = (residual.detach() + data.base[rows]).amax(dim=-1)
    return per_rank + smooth_l1(longest + slowest - data.slowest[rows]).mean()
