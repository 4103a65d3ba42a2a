"""The cost models that :mod:`benchmarks.cost_model_ablation` compares, each trained on the same groups."""

from __future__ import annotations

import copy
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.cost_model_ablation_paper import PaperConfig, PaperGroups, paper_features, train_paper_model
from torchrec_neuroshard.costs.additive import AdditiveGroupModel, GroupCosts
from torchrec_neuroshard.costs.features import FEATURES, ShardFeatures
from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.measure.specs import GroupSpec
from torchrec_neuroshard.training.dataset import GroupData, GroupSplit, group_data, split_groups
from torchrec_neuroshard.training.distil import distilled
from torchrec_neuroshard.training.evaluate import predict_groups
from torchrec_neuroshard.training.pretrain import without_drift
from torchrec_neuroshard.training.train_groups import TrainingConfig, train_group_model

PARTS = ("train", "validation", "test")
ONE_BATCH_METHOD = "paper, one batch size"
_PAPER_METHODS: tuple[tuple[str, str, bool], ...] = (  # name, features, learns the logarithm of the cost
    ("paper", "paper", False),
    ("paper + batch", "paper + batch", False),
    ("paper + batch, log cost", "paper + batch", True),
    ("paper's nets, our features", "ours", False),
    ("paper's nets, our features, log cost", "ours", True),
)
_WITH_PASSES = "paper + batch"  # the method that gets nets for forward and for backward too
_LEAST_GROUPS = 200  # training groups of one batch size, below which the pure form is left out

Log = Callable[[str], None]


@dataclass(frozen=True)
class AblationConfig:
    """What is trained.

    Attributes:
        epochs: of the paper's nets.
        ours: hyper-parameters of our nets; the seed is that of ``seeds``.
        seeds: everything is trained once for each.
        passes: also trains the paper's nets (with batch) for forward and for backward alone.
        distil_groups: sampled groups on which our mean head learns from the ensemble.
        distil_epochs: passes over these and the training groups.
        batch_size: of the paper's pure form; None for the commonest one of the training groups.
    """

    epochs: int = PaperConfig.epochs
    ours: TrainingConfig = field(default_factory=TrainingConfig)
    seeds: tuple[int, ...] = (0,)
    passes: bool = False
    distil_groups: int = 4000
    distil_epochs: int = 40
    batch_size: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What one trained method predicts for the held-out groups.

    Attributes:
        method: its name.
        seed: of its training.
        total_ms: [groups] forward plus backward.
        passes_ms: [groups, 2] forward and backward; None for a method that predicts the sum alone.
        seconds: processor time of training; 0 for a method that shares the training of another.
        one_batch: trained on groups of the paper's setting with one batch size, and to be judged on those only.
        best_epoch: of the paper's nets, the one whose weights were kept.
    """

    method: str
    seed: int
    total_ms: NDArray[np.float64]
    passes_ms: NDArray[np.float64] | None
    seconds: float
    one_batch: bool = False
    best_epoch: int | None = None


class AblationData:
    """The split, and the paper's features of each of its parts.

    Args:
        records: undisturbed group records of one machine.
        batch_size: of the paper's pure form; None for the commonest one of the training groups.
        as_measured: leave the drift of the machine's speed in; it is taken out of all groups as when a model is
            trained that ships (:mod:`torchrec_neuroshard.training.drift`).
        log: called with a line for each step.

    Raises:
        ValueError: a part of the split would hold no record.
    """

    def __init__(
        self,
        records: Iterable[dict[str, Any]],
        batch_size: int | None = None,
        as_measured: bool = False,
        log: Log = print,
    ) -> None:
        records = list(records)
        groups = group_data(records)
        split_groups(groups)  # too few records are told before any training
        self.split: GroupSplit = split_groups(groups if as_measured else without_drift(groups, log)[0])
        by_id = {record["id"]: GroupSpec.from_json(record["spec"]) for record in records}
        self.specs = {part: [by_id[id] for id in self.part(part).ids] for part in PARTS}
        self._paper = {part: np.concatenate([paper_features(s) for s in self.specs[part]]) for part in PARTS}
        settled = Counter(spec.batch_size for spec in self.specs["train"] if in_papers_setting(spec))
        commonest = settled.most_common(1)[0][0] if settled else 0
        self.batch_size = commonest if batch_size is None else batch_size

    def part(self, part: str) -> GroupData:
        """The groups of one of :data:`PARTS`."""
        data: GroupData = getattr(self.split, part)
        return data

    def features(self, part: str, kind: str) -> NDArray[np.float64]:
        """[shards, features] of one part; ``kind`` is "paper", "paper + batch" (its logarithm) or "ours"."""
        if kind == "ours":
            return self.part(part).shards.features
        if kind == "paper":
            return self._paper[part]
        data = self.part(part)
        return np.column_stack([self._paper[part], np.log2(data.batch_size[data.group])])

    def paper_groups(self, part: str, kind: str, target: str = "total") -> PaperGroups:
        """One part for the paper's nets; ``target`` is "total", "forward" or "backward"."""
        data = self.part(part)
        forward, backward = data.measured_ms.T
        cost = {"total": forward + backward, "forward": forward, "backward": backward}[target]
        first = np.searchsorted(data.group, np.arange(len(data) + 1))
        return PaperGroups(self.features(part, kind), first.astype(np.int64), cost)

    def one_batch(self, part: str) -> NDArray[np.bool_]:
        """[groups] those of the paper's setting that have the one batch size."""
        return np.asarray([in_papers_setting(s) and s.batch_size == self.batch_size for s in self.specs[part]], bool)


def in_papers_setting(spec: GroupSpec) -> bool:
    """Whether a group is of the one kind that the paper measures: fused SGD on fp32 tables, sums without weights."""
    kind = (spec.kernel, spec.pooling, spec.optimizer, spec.data_type, spec.weighted)
    return kind == ("fused", "sum", "sgd", "fp32", False)


def train_and_predict(data: AblationData, config: AblationConfig, log: Log = print) -> list[Outcome]:
    """Trains every method once for each seed; predictions are for the held-out groups."""
    outcomes = []
    for seed in config.seeds:
        for outcomes_of in (_paper_outcomes, _one_batch_outcome, _our_outcomes):
            for outcome in outcomes_of(data, config, seed):
                best = "" if outcome.best_epoch is None else f", best after epoch {outcome.best_epoch}"
                log(f"seed {seed}, {outcome.method}: {outcome.seconds:.0f} s{best}")
                outcomes.append(outcome)
    return outcomes


def _paper_outcomes(data: AblationData, config: AblationConfig, seed: int) -> Iterator[Outcome]:
    for method, kind, log_cost in _PAPER_METHODS:
        hyper = PaperConfig(epochs=config.epochs, log_cost=log_cost, seed=seed)
        started = time.process_time()
        targets = ("total", "forward", "backward") if config.passes and method == _WITH_PASSES else ("total",)
        models = [train_paper_model(*(data.paper_groups(p, kind, t) for p in PARTS[:2]), hyper) for t in targets]
        total, *passes = (model.predict(data.paper_groups("test", kind)) for model in models)
        seconds = time.process_time() - started
        both = np.column_stack(passes) if passes else None
        yield Outcome(method, seed, total, both, seconds, best_epoch=models[0].best_epoch)


def _one_batch_outcome(data: AblationData, config: AblationConfig, seed: int) -> Iterator[Outcome]:
    """The paper as it is: its features without a batch, where there is one batch size and one kind of group."""
    started = time.process_time()
    train, validation = (data.paper_groups(p, "paper").select(data.one_batch(p)) for p in ("train", "validation"))
    if len(train) >= _LEAST_GROUPS and len(validation) and data.one_batch("test").any():
        model = train_paper_model(train, validation, PaperConfig(epochs=config.epochs, seed=seed))
        predicted = model.predict(data.paper_groups("test", "paper"))
        seconds = time.process_time() - started
        yield Outcome(ONE_BATCH_METHOD, seed, predicted, None, seconds, True, model.best_epoch)


def _our_outcomes(data: AblationData, config: AblationConfig, seed: int) -> Iterator[Outcome]:
    started = time.process_time()
    ours = train_group_model(data.split, replace(config.ours, seed=seed), log=lambda _: None)
    seconds = time.process_time() - started
    mean_head = distilled(ours, data.split.train, config.distil_groups, config.distil_epochs, log=lambda _: None)
    variants: tuple[tuple[str, GroupCosts], ...] = (
        ("ours", ours),
        ("ours, mean head", mean_head),
        ("ours, one net", GroupCostModel(ours.prior, ours.nets[:1])),
        ("ours without the set residual", _without_residual(ours)),
        ("sum of single-table costs", AdditiveGroupModel(ours)),
        ("prior alone", GroupCostModel(ours.prior)),
    )
    for method, model in variants:
        yield _outcome(method, seed, model, data.split.test, seconds if method == "ours" else 0.0)
    started = time.process_time()
    swapped = GroupSplit(*(_with_features(data.part(p), data.features(p, "paper + batch")) for p in PARTS))
    model = train_group_model(swapped, replace(config.ours, seed=seed, nets=1), log=lambda _: None)
    yield _outcome("our net, paper's features + batch", seed, model, swapped.test, time.process_time() - started)


def _outcome(method: str, seed: int, model: GroupCosts, test: GroupData, seconds: float) -> Outcome:
    passes = predict_groups(model, test)
    return Outcome(method, seed, passes.sum(axis=1), passes, seconds)


def _without_residual(model: GroupCostModel) -> GroupCostModel:
    """The same nets with the residual of the set held at zero: launch plus corrected costs of single shards."""
    nets = copy.deepcopy(model.nets)
    with torch.no_grad():
        for net in nets:
            net.residual_low.zero_()
            net.residual_high.zero_()
    return GroupCostModel(model.prior, nets)


def _with_features(data: GroupData, features: NDArray[np.float64]) -> GroupData:
    """The groups with other inputs of the nets, padded by zeros; the prior keeps its work terms."""
    padding = len(FEATURES) - features.shape[1]
    if padding < 0:
        raise ValueError(f"our nets have {len(FEATURES)} inputs, but there are {features.shape[1]} features")
    padded = np.pad(features, ((0, 0), (0, padding)))
    return replace(data, shards=ShardFeatures(data.shards.work, padded, data.shards.regime))


def method_names(outcomes: Sequence[Outcome]) -> list[str]:
    """Names of the methods in the order in which they were trained."""
    return list(dict.fromkeys(outcome.method for outcome in outcomes))
