"""Fits the cost model of collectives: prior by least squares, then the equivariant residual."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any, Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls

from torchrec_neuroshard.costs.collective_model import CollectiveModel, CollectiveNet, rank_features
from torchrec_neuroshard.costs.collective_prior import AllToAllTraffic, CollectivePrior
from torchrec_neuroshard.measure.specs import CollectiveSpec
from torchrec_neuroshard.training.dataset import records_of_kind
from torchrec_neuroshard.training.train_groups import smooth_l1

MINIMUM_COLLECTIVES = 20  # records below which fitting makes no sense


@dataclass(frozen=True)
class CollectiveData:
    """All-to-alls of one number of ranks.

    Attributes:
        batch_size: [calls] samples per rank.
        dims: [calls, ranks] columns each rank owns.
        backward: [calls] direction.
        delays_ms: [calls, ranks] start delays.
        measured_ms: [calls, ranks] median time from own start to own end.
    """

    batch_size: NDArray[np.float64]
    dims: NDArray[np.float64]
    backward: NDArray[np.bool_]
    delays_ms: NDArray[np.float64]
    measured_ms: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.batch_size)

    @property
    def traffic(self) -> AllToAllTraffic:
        """Bytes moved by each rank; all ranks were on one host."""
        ranks = self.dims.shape[1]
        return AllToAllTraffic.pooled(self.batch_size, self.dims, ranks).where(self.backward)

    @property
    def wait_ms(self) -> NDArray[np.float64]:
        """[calls, ranks] how long each rank waits for the last one to start."""
        return self.delays_ms.max(axis=1, keepdims=True) - self.delays_ms

    @property
    def transfer_ms(self) -> NDArray[np.float64]:
        """[calls, ranks] measured time without the wait, at least a tenth of a millisecond."""
        return np.maximum(self.measured_ms - self.wait_ms, 0.1)


def load_collectives(paths: Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """The collective records of some measurement files that this model is for (see :func:`is_modelled`)."""
    return [record for record in records_of_kind("collective", paths) if is_modelled(record)]


def is_modelled(record: dict[str, Any]) -> bool:
    """Whether a record is an all-to-all within one host, which is all that this model has inputs for."""
    return record["spec"].get("name") == "all_to_all" and not record["spec"].get("local_world_size")


def collective_data(records: Iterable[dict[str, Any]]) -> list[CollectiveData]:
    """Arrays by number of ranks, rising, of the records that this model is for (see :func:`is_modelled`)."""
    by_ranks: dict[int, list[tuple[CollectiveSpec, list[float]]]] = {}
    for record in filter(is_modelled, records):
        spec = CollectiveSpec.from_json(record["spec"])
        by_ranks.setdefault(spec.world_size, []).append((spec, [t["median"] for t in record["rank_ms"]]))
    result = []
    for ranks, calls in sorted(by_ranks.items()):
        specs = [spec for spec, _ in calls]
        result.append(
            CollectiveData(
                np.asarray([float(s.batch_size_per_rank) for s in specs]),
                np.asarray([s.dims for s in specs], dtype=np.float64),
                np.asarray([s.direction == "backward" for s in specs]),
                np.asarray([s.start_delays_ms or (0.0,) * ranks for s in specs]),
                np.asarray([times for _, times in calls]),
            )
        )
    return result


def is_test_collective(record: dict[str, Any]) -> bool:
    """Whether only evaluation sees this record (15 %, decided by its id)."""
    return int(hashlib.sha256(record["id"].encode()).hexdigest()[:8], 16) / 2**32 < 0.15


def fit_collective_prior(data: Iterable[CollectiveData]) -> CollectivePrior:
    """Non-negative least squares on relative error; all ranks of the records share one host."""

    rows, targets = [], []
    for part in data:
        traffic, ranks = part.traffic, part.dims.shape[1]
        busiest = np.maximum(traffic.sent_local, traffic.received_local).max(axis=1)
        total = traffic.sent_local.sum(axis=1)
        rows.append(np.column_stack([np.ones(len(part)), np.full(len(part), ranks - 1.0), busiest, total]))
        targets.append(part.transfer_ms.max(axis=1))
    design, target = np.concatenate(rows), np.concatenate(targets)
    scale = np.maximum(design.mean(axis=0), 1e-12)
    solution, _ = nnls(design / scale / target[:, None], np.ones(len(target)))
    latency, peer, per_byte, total_per_byte = (solution / scale).tolist()
    return CollectivePrior(max(latency, 0.05), peer, per_byte, per_byte, total_per_byte)


def train_collective_model(
    data: list[CollectiveData], epochs: int = 300, seed: int = 0, log: Callable[[str], None] = print
) -> CollectiveModel:
    """Trains on [number of ranks] sets of calls together; one network serves all."""
    prior = fit_collective_prior(data)
    torch.manual_seed(seed)
    net = CollectiveNet()
    sets = []
    for part in data:
        predicted = prior.predict(part.traffic)
        inputs = torch.as_tensor(
            rank_features(part.traffic, part.backward, part.wait_ms, predicted), dtype=torch.float32
        )
        target = torch.as_tensor(np.log(part.transfer_ms / predicted[:, None]), dtype=torch.float32)
        # Of a rank that waited long, little of the measured time is transfer: weigh it by that share.
        weight = torch.as_tensor(part.transfer_ms / (part.transfer_ms + part.wait_ms), dtype=torch.float32)
        sets.append((inputs, target, weight))
    flat = torch.cat([inputs.flatten(0, 1) for inputs, _, _ in sets])
    net.mean.copy_(flat.mean(dim=0))
    net.scale.copy_(flat.std(dim=0).clamp_min(1e-3))
    targets = torch.cat([target.flatten() for _, target, _ in sets])
    net.residual_low.copy_(torch.quantile(targets, 0.005))
    net.residual_high.copy_(torch.quantile(targets, 0.995))

    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=epochs * sum(min(4, len(inputs)) for inputs, _, _ in sets)
    )
    generator = np.random.default_rng(seed)
    for _ in range(epochs):
        batches = [
            (index, rows)
            for index, (inputs, _, _) in enumerate(sets)
            for rows in np.array_split(generator.permutation(len(inputs)), min(4, len(inputs)))
        ]
        for position in generator.permutation(len(batches)):
            index, rows = batches[position]
            inputs, target, weight = (tensor[rows] for tensor in sets[index])
            loss = (smooth_l1(net(inputs) - target) * weight).sum() / weight.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    log(f"collectives: training loss {loss.item():.4f} (mean absolute log error)")
    return CollectiveModel(prior, net)
