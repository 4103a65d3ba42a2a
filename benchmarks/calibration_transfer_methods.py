"""What :mod:`benchmarks.calibration_transfer` trains: base models, and models from few records with and without one."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.group_net import GroupNet
from torchrec_neuroshard.costs.prior import GroupPrior
from torchrec_neuroshard.measure.specs import GroupSpec
from torchrec_neuroshard.training.calibrate import as_start, calibration_config, nearest_groups, refitted
from torchrec_neuroshard.training.dataset import GroupData, GroupSplit, group_data, split_groups
from torchrec_neuroshard.training.drift import evened
from torchrec_neuroshard.training.evaluate import accuracy_of, predict_groups
from torchrec_neuroshard.training.pretrain import without_drift
from torchrec_neuroshard.training.train_groups import TrainingConfig, train_group_model

MISSING_PART, NEW_MACHINE = "missing part", "new machine"  # the experiments
BASE, REFITTED, CALIBRATED = "base as it is", "prior refitted", "calibrated"  # the methods
SCRATCH, FULL = "from scratch", "full model"
NEAREST, JOINT = "nearest", "joint"  # bases of a new machine: the one that fits best, one trained on all together
ALL, MISSING = "all", "missing part"  # subsets of the held-out groups

PARTS: Mapping[str, Callable[[GroupSpec], bool]] = {
    "fp16": lambda spec: spec.data_type == "fp16",
    "weighted": lambda spec: spec.weighted,
    "large_batch": lambda spec: spec.batch_size > 8192,
}

# Training on few records from random weights: enough steps, but not too many passes.
_SCRATCH_BATCH, _SCRATCH_STEPS, _SCRATCH_EPOCHS = 64, 1500, (60, 200)

Row = dict[str, Any]
Log = Callable[[str], None]


@dataclass(frozen=True)
class TransferConfig:
    """What is trained.

    Attributes:
        sizes: numbers of records to calibrate with.
        draws: independent draws of so many records.
        training: hyper-parameters of the models of one machine's many records; its nets and seed are for all models.
        base_epochs: passes for models of other machines; None for as many.
        missing: names of :data:`PARTS`; a group that belongs to any of them is of the missing part.
        joint: also a base that is trained on all base machines together, when there are several.
    """

    sizes: tuple[int, ...] = (100, 300, 1000)
    draws: int = 3
    training: TrainingConfig = TrainingConfig()
    base_epochs: int | None = None
    missing: tuple[str, ...] = tuple(PARTS)
    joint: bool = True


class Machine:
    """One machine's groups, as if it had run evenly.

    Args:
        records: its undisturbed group records.
        missing: names of :data:`PARTS`.
        kept: where its drift is kept between runs.
        log: called with a line for each step.

    Raises:
        ValueError: a part of the split would hold no record.
    """

    def __init__(self, records: Sequence[dict[str, Any]], missing: Sequence[str], kept: Kept, log: Log) -> None:
        data = group_data(records)
        split_groups(data)  # too few records are told before any training
        self.name = data.machine[0]
        log_drift = kept.array(f"drift of {self.name}", lambda: without_drift(data, log)[1])
        self.data: GroupData = evened(data, log_drift)
        specs = (GroupSpec.from_json(record["spec"]) for record in records)
        self.missing: NDArray[np.bool_] = np.asarray([any(PARTS[part](spec) for part in missing) for spec in specs])

    @cached_property
    def split(self) -> GroupSplit:
        """All its groups."""
        return split_groups(self.data)

    @property
    def test_missing(self) -> NDArray[np.bool_]:
        """[held-out groups] which of them are of the missing part."""
        return self.missing[self.data.held_out]

    def without_part(self) -> GroupSplit:
        """Training and validation groups that are not of the missing part."""
        return split_groups(self.data.subset(~self.missing | self.data.held_out))

    def draw(self, records: int, seed: int) -> GroupSplit:
        """Some groups of its training space, training and validation together, and all held-out ones.

        Raises:
            ValueError: it has fewer groups, or they leave a part of the split empty.
        """
        free = np.flatnonzero(~self.data.held_out)
        if records > len(free):
            raise ValueError(f"{self.name} has {len(free)} records of training tables, fewer than {records}")
        keep = self.data.held_out.copy()
        keep[np.random.default_rng([seed, records]).permutation(free)[:records]] = True
        return split_groups(self.data.subset(keep))


class Kept:
    """Models and arrays of a folder, made when they are not there yet.

    Args:
        folder: made when missing. What lies in it must come of the same records and hyper-parameters.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def array(self, name: str, make: Callable[[], NDArray[np.float64]]) -> NDArray[np.float64]:
        """An array by name."""
        content = self._content(name, lambda: {"array": torch.as_tensor(make())})
        found: NDArray[np.float64] = content["array"].numpy()
        return found

    def model(self, name: str, make: Callable[[], GroupCostModel]) -> GroupCostModel:
        """A model by name."""

        def state() -> dict[str, Any]:
            model = make()
            return {"prior": model.prior.to_json(), "nets": [net.state_dict() for net in model.nets]}

        content = self._content(name, state)
        nets = []
        for weights in content["nets"]:
            net = GroupNet()
            net.load_state_dict(weights)
            nets.append(net)
        return GroupCostModel(GroupPrior.from_json(content["prior"]), tuple(nets))

    def _content(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path = self._folder / f"{name.replace(' ', '_').replace('/', '_')}.pt"
        if not path.is_file():
            temporary = path.with_suffix(".part")
            torch.save(make(), temporary)
            os.replace(temporary, path)
        content: dict[str, Any] = torch.load(path, weights_only=True)
        return content


def machines_of(
    records: Iterable[dict[str, Any]], missing: Sequence[str], kept: Kept, log: Log = print
) -> list[Machine]:
    """The machines that some records come from, the one with most records first."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_name.setdefault(record["hardware"]["name"], []).append(record)
    parts = sorted(by_name.values(), key=len, reverse=True)
    return [Machine(part, missing, kept, log) for part in parts]


class Transfer:
    """Both experiments on one target machine.

    Args:
        target: the machine that is judged.
        others: the machines that bases of the second experiment come from; may be empty.
        config: what is trained.
        kept: where base and full models are kept between runs.
        log: called with a line for each step.

    Raises:
        ValueError: the target has too few records, or all of them are of the missing part.
    """

    def __init__(
        self, target: Machine, others: Sequence[Machine], config: TransferConfig, kept: Kept, log: Log = print
    ) -> None:
        self.target, self.others, self.config = target, others, config
        self._kept, self._log = kept, log
        target.without_part()  # too few records are told before any training
        for size in config.sizes:
            for draw in range(config.draws):
                target.draw(size, draw)

    def rows(self, done: Iterable[Row]) -> Iterator[Row]:
        """Results as they come, without those that are done; each is told apart by :func:`key_of`.

        Errors and biases are shares (0.1 is 10 %).
        """
        known = {key_of(row) for row in done}
        for row in self._planned():
            if key_of(row) in known:
                continue
            started = time.process_time()
            model, machine = self._model(row)
            seconds = round(time.process_time() - started, 1)
            self._log(f"{machine or self.target.name}, {row['method']}, {row['records'] or 'all'} records: {seconds} s")
            yield {**row, "base_machine": machine, "errors": self._errors(model), "cpu_seconds": seconds}

    def _planned(self) -> Iterator[Row]:
        """What identifies each result, in the order in which they are made."""
        draws = [(size, draw) for size in self.config.sizes for draw in range(self.config.draws)]
        yield _row(FULL)
        yield from (_row(SCRATCH, size, draw) for size, draw in draws)
        bases = [(MISSING_PART, "")]
        if self.others:
            bases.append((NEW_MACHINE, NEAREST))
        if len(self.others) > 1 and self.config.joint:
            bases.append((NEW_MACHINE, JOINT))
        for experiment, base in bases:
            yield _row(BASE, None, 0, experiment, base)
            for size, draw in draws:
                yield from (_row(method, size, draw, experiment, base) for method in (REFITTED, CALIBRATED))

    def _model(self, row: Row) -> tuple[GroupCostModel, str]:
        """The model of a planned result, and the name of the machine that its base is of ("" without a base)."""
        method, records, draw = row["method"], row["records"], row["draw"]
        if method == FULL:
            return self._trained("full", self.target.split), ""
        split = self.target.split if records is None else self.target.draw(records, draw)
        nets, seed = self.config.training.nets, self.config.training.seed + 1000 * draw
        if method == SCRATCH:
            return train_group_model(split, scratch_config(records, nets, seed), self._quiet), ""
        base, machine = self._base(row["experiment"], row["base"], split)
        if method == REFITTED:
            base = refitted(base, split.train)
        if method == CALIBRATED:
            base = train_group_model(split, calibration_config(records, nets, seed), self._quiet, start=as_start(base))
        return base, machine

    def _base(self, experiment: str, kind: str, split: GroupSplit) -> tuple[GroupCostModel, str]:
        """The model that is calibrated with a split, and the machine whose prior it has."""
        if experiment == MISSING_PART:
            return self._trained("without part", self.target.without_part()), self.target.name
        epochs = self.config.base_epochs
        if kind == JOINT:
            largest, *others = self.others
            name = "joint " + " ".join(machine.name for machine in self.others)
            beside = [other.split.train for other in others]
            return self._trained(name, largest.split, beside, epochs), largest.name
        models = {other.name: self._trained(other.name, other.split, epochs=epochs) for other in self.others}
        nearest = nearest_groups(models, split.train)
        return models[nearest], nearest

    def _trained(
        self, name: str, split: GroupSplit, beside: Sequence[GroupData] = (), epochs: int | None = None
    ) -> GroupCostModel:
        config = self.config.training if epochs is None else replace(self.config.training, epochs=epochs)

        def make() -> GroupCostModel:
            self._log(f"training the model {name!r} on {len(split.train)} groups")
            return train_group_model(split, config, self._quiet, beside)

        return self._kept.model(name, make)

    def _errors(self, model: GroupCostModel) -> dict[str, Any]:
        """Accuracy on the target's held-out groups, on all and on the missing part."""
        test, missing = self.target.split.test, self.target.test_missing
        predicted = predict_groups(model, test)
        result = {ALL: accuracy_of(predicted, test)}
        if missing.any():
            result[MISSING] = accuracy_of(predicted[missing], test.subset(missing))
        return result

    @staticmethod
    def _quiet(_: str) -> None:
        pass


def scratch_config(records: int, nets: int, seed: int = 0) -> TrainingConfig:
    """Hyper-parameters for training on few records from random weights."""
    epochs = int(np.clip(_SCRATCH_STEPS * _SCRATCH_BATCH / records, *_SCRATCH_EPOCHS))
    return TrainingConfig(nets, epochs, _SCRATCH_BATCH, seed=seed)


def _row(method: str, records: int | None = None, draw: int = 0, experiment: str = "", base: str = "") -> Row:
    return {
        "kind": "result",
        "experiment": experiment,  # "" for models without a base, which both experiments are compared with
        "base": base,
        "method": method,
        "records": records,  # None for a model that does not depend on a draw
        "draw": draw,
    }


def key_of(row: Row) -> tuple[Any, ...]:
    """What tells a result from the others of a run."""
    return tuple(row[name] for name in ("experiment", "base", "method", "records", "draw"))
