"""How far a cost model is from what was measured: overall, and by what was measured."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Iterable, Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from torchrec_neuroshard.costs.hardware import HARDWARE
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.measure.pool import is_held_out
from torchrec_neuroshard.measure.specs import GroupSpec
from torchrec_neuroshard.report.accuracy_bins import Breakdown, Times
from torchrec_neuroshard.report.accuracy_records import EvaluationRecords, Record
from torchrec_neuroshard.training.collective_data import CollectiveData, collective_data, layout_name
from torchrec_neuroshard.training.dataset import group_data
from torchrec_neuroshard.training.drift import ReferenceSpeed, at_speed_of_model, drift
from torchrec_neuroshard.training.evaluate import (
    accuracy_of,
    collective_accuracy_of,
    kendall_tau,
    percentage_errors,
    predict_collectives,
    predict_groups,
)
from torchrec_neuroshard.training.host_link import host_memory_times

SCHEMA_VERSION = 1

_DIM_EDGES = (8, 16, 32, 64, 128, 256, 512)
_ROW_EDGES = (1e3, 1e4, 1e5, 1e6, 1e7, 1e8)
_POOLING_EDGES = (2, 5, 10, 20, 50, 100)
_SHARD_EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_BATCH_EDGES = (256, 1024, 4096, 16384, 65536)
_RANK_BATCH_EDGES = (64, 256, 1024, 4096)


@dataclass(frozen=True)
class PartAccuracy:
    """Errors of one part of a cost model: that of fused groups, or that of collectives.

    Attributes:
        times: what was compared, by name, such as "forward"; shown as one cloud of points each.
        overall: errors over all records of each of ``times``, rank correlations, and the number of records.
        breakdowns: errors of ``broken_down`` by one property each.
        broken_down: name in ``times`` of what the breakdowns are of.
    """

    times: dict[str, Times]
    overall: dict[str, Any]
    breakdowns: tuple[Breakdown, ...]
    broken_down: str

    def to_json(self) -> dict[str, Any]:
        """A JSON object: overall figures, and under "by" the bins of each breakdown."""
        return {
            **self.overall,
            "broken_down": self.broken_down,
            "by": {breakdown.name: [bin.to_json() for bin in breakdown.bins] for breakdown in self.breakdowns},
        }


@dataclass(frozen=True)
class AccuracyReport:
    """Accuracy of one cost model on one set of records.

    Attributes:
        cost_model: {"name", "provenance", "hardware"} of the cost model.
        records: what it was compared with.
        groups: accuracy on fused groups; None without such records.
        collectives: accuracy on collectives; None without such records.
        warnings: what a reader must know before believing the figures.
    """

    cost_model: dict[str, str]
    records: EvaluationRecords
    groups: PartAccuracy | None
    collectives: PartAccuracy | None
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, model: CostModel, records: EvaluationRecords) -> AccuracyReport:
        """Compares a model's predictions with records."""
        return cls(
            {"name": model.name, "provenance": model.provenance, "hardware": model.hardware},
            records,
            _groups(model, records.groups, records.witnesses) if records.groups else None,
            _collectives(model, records.collectives) if records.collectives else None,
            tuple(_warnings(model, records)),
        )

    @property
    def parts(self) -> dict[str, PartAccuracy]:
        """The parts that have records, by a title for people."""
        parts = {"fused groups": self.groups, "collectives": self.collectives}
        return {title: part for title, part in parts.items() if part is not None}

    def to_json(self) -> dict[str, Any]:
        """A JSON object; errors and biases are shares (0.1 is 10 %), absent parts are null."""
        return {
            "schema": SCHEMA_VERSION,
            "cost_model": dict(self.cost_model),
            "records": self.records.counts_json(),
            "groups": self.groups.to_json() if self.groups is not None else None,
            "collectives": self.collectives.to_json() if self.collectives is not None else None,
            "warnings": list(self.warnings),
        }

    def print_to(self, console: Console) -> None:
        """Prints overall errors and breakdowns as tables; warnings are the caller's to show."""
        model = self.cost_model
        console.print(
            f"cost model {model['name']} ({model['provenance']}, {model['hardware']}) on "
            f"{len(self.records.groups)} groups and {len(self.records.collectives)} collectives of "
            f"{', '.join(self.records.files)}" + (", held-out only" if self.records.held_out_only else ""),
            markup=False,
            soft_wrap=True,
        )
        for title, part in self.parts.items():
            console.print(_overall_table(title, part))
            for line in _remarks(part):
                console.print(line, markup=False)
            console.print(_breakdown_table(title, part))


def _groups(model: CostModel, records: Sequence[Record], witnesses: Sequence[Record]) -> PartAccuracy:
    everything = group_data((*records, *witnesses))
    all_predicted = predict_groups(model.groups, everything) + host_memory_times(model, (*records, *witnesses))
    predicted = all_predicted[: len(records)]
    log_drift = drift(np.log(everything.measured_ms / all_predicted), everything, _reference_speed(model, records))
    evaluated = np.arange(len(everything)) < len(records)
    data = everything.subset(evaluated)
    evened = at_speed_of_model(data, log_drift[: len(records)])
    overall = accuracy_of(predicted, data)
    if all(_describes(model, record["hardware"]["name"]) for record in records):  # else it is the machine, not drift
        overall["at_speed_of_model"] = accuracy_of(predicted, evened)
    times = {
        "forward": Times(predicted[:, 0], data.measured_ms[:, 0]),
        "backward": Times(predicted[:, 1], data.measured_ms[:, 1]),
        "total": Times(predicted.sum(axis=1), data.measured_ms.sum(axis=1)),
    }
    specs = [GroupSpec.from_json(record["spec"]) for record in records]
    breakdowns = _group_breakdowns(times["total"], specs, records)
    return PartAccuracy(times, overall, breakdowns, "total")


def _reference_speed(model: CostModel, records: Sequence[Record]) -> ReferenceSpeed | None:
    """What the model's card says about reference times, if all records are of its machine."""
    known = model.card.get("reference_speed")
    if known is None or any(record["hardware"]["name"] != model.hardware for record in records):
        return None
    return ReferenceSpeed.from_json(known)


def _group_breakdowns(total: Times, specs: Sequence[GroupSpec], records: Sequence[Record]) -> tuple[Breakdown, ...]:
    rows = np.asarray([float(sum(shard.rows for shard in spec.shards)) for spec in specs])
    pooling = np.asarray([sum(s.pooling_factor for s in spec.shards) / len(spec.shards) for spec in specs])
    shards = np.asarray([len(spec.shards) for spec in specs])
    batch_size = np.asarray([spec.batch_size for spec in specs])
    return (
        total.by_range("mean_dim", "mean dim, by lookups", np.asarray([mean_dim(spec) for spec in specs]), _DIM_EDGES),
        total.by_range("rows", "rows of all shards", rows, _ROW_EDGES),
        total.by_range("mean_pooling_factor", "mean pooling factor", pooling, _POOLING_EDGES),
        total.by_range("shards", "shards in the group", shards, _SHARD_EDGES, whole=True),
        total.by_range("batch_size", "batch of the TBE", batch_size, _BATCH_EDGES),
        total.by_value("optimizer", "optimizer", [spec.optimizer for spec in specs]),
        total.by_value("data_type", "data type", [spec.data_type for spec in specs]),
        total.by_value("weighted", "weighted lookups", ["yes" if spec.weighted else "no" for spec in specs]),
        total.by_value("kernel", "kernel", [spec.compute_kernel for spec in specs]),
        total.by_value("kernel_and_dim", "kernel and mean dim", *_kernels_and_dims(specs)),
        total.by_value("pooling", "pooling", [spec.pooling for spec in specs]),
        total.by_value("base_tables", "base tables", [_base_tables(spec) for spec in specs]),
        _by_hardware(total, records),
    )


def _kernels_and_dims(specs: Sequence[GroupSpec]) -> tuple[list[str], tuple[str, ...]]:
    """Labels of kernel and width together, and the order in which they are shown."""
    widths = [int(2 ** np.ceil(np.log2(mean_dim(spec)))) for spec in specs]
    both = [(spec.compute_kernel, width) for spec, width in zip(specs, widths)]
    labels = {pair: f"{pair[0]}, at most {pair[1]}" for pair in sorted(set(both))}
    return [labels[pair] for pair in both], tuple(labels.values())


def mean_dim(spec: GroupSpec) -> float:
    """Mean dim of a group's shards, each weighted by its lookups: the columns an average lookup reads."""
    lookups = [shard.pooling_factor for shard in spec.shards]
    if not any(lookups):
        lookups = [1.0] * len(spec.shards)
    return sum(n * shard.dim for n, shard in zip(lookups, spec.shards)) / sum(lookups)


def _base_tables(spec: GroupSpec) -> str:
    """Whether training may have seen a group's tables; groups of measured plans name no base table."""
    if is_held_out(spec):
        return "held out"
    return "training" if any(shard.base for shard in spec.shards) else "not from the pool"


def _collectives(model: CostModel, records: Sequence[Record]) -> PartAccuracy:
    data = collective_data(records)
    in_order = [records[position] for part in data for position in part.positions.tolist()]
    predicted = [predict_collectives(model.collectives, part) for part in data]
    slowest = Times(
        np.concatenate([times.slowest for times in predicted]),
        np.concatenate([part.measured_ms.max(axis=1) for part in data]),
    )
    per_rank = Times(
        np.concatenate([times.per_rank.ravel() for times in predicted]),
        np.concatenate([part.measured_ms.ravel() for part in data]),
    )
    times = {"per rank": per_rank, "slowest rank": slowest}
    overall = {
        **collective_accuracy_of(predicted, data),
        "kendall_tau": kendall_tau(slowest.predicted, slowest.measured),
    }
    return PartAccuracy(times, overall, _collective_breakdowns(slowest, data, in_order), "slowest rank")


def _collective_breakdowns(
    slowest: Times, data: Sequence[CollectiveData], records: Sequence[Record]
) -> tuple[Breakdown, ...]:
    ranks = np.concatenate([np.full(len(part), part.ranks) for part in data])
    hosts = np.concatenate([np.full(len(part), part.hosts) for part in data])
    layouts = [layout_name(part.hosts, part.local_world_size) for part in data for _ in range(len(part))]
    kinds = [name for part in data for name in part.kind_names]
    delayed = ["yes" if delays.any() else "no" for part in data for delays in part.delays_ms]
    batch_size = np.concatenate([part.batch_size for part in data])
    both = list(zip(ranks.tolist(), kinds))
    labels = {pair: f"{pair[0]} ranks, {pair[1]}" for pair in sorted(set(both))}
    return (
        slowest.by_value("kind", "collective", kinds),
        slowest.by_count("ranks", "ranks", ranks),
        slowest.by_count("hosts", "hosts", hosts),
        slowest.by_value("layout", "hosts x ranks of each", layouts),
        slowest.by_value(
            "ranks_and_kind", "ranks and collective", [labels[pair] for pair in both], tuple(labels.values())
        ),
        slowest.by_value("start_delays", "ranks start apart", delayed),
        slowest.by_range("batch_size_per_rank", "samples per rank", batch_size, _RANK_BATCH_EDGES),
        _by_hardware(slowest, records),
    )


def _by_hardware(times: Times, records: Sequence[Record]) -> Breakdown:
    return times.by_value("hardware", "machine", [record["hardware"]["name"] for record in records])


def _describes(model: CostModel, machine: str) -> bool:
    """Whether a model is of the kind of machine that records name; a preset recognises its own by their names."""
    preset = HARDWARE.get(model.hardware) if model.provenance == "analytic" else None
    return machine == model.hardware or (preset is not None and re.search(preset.pattern, machine) is not None)


def _warnings(model: CostModel, records: EvaluationRecords) -> Iterable[str]:
    others = {name: count for name, count in records.hardware.items() if not _describes(model, name)}
    if others:
        machines = ", ".join(f"{name} ({count})" for name, count in sorted(others.items()))
        kind = "was measured on" if model.provenance == "measured" else "is made from the data sheet of"
        yield (
            f"cost model {model.name} {kind} {model.hardware}, but records come from {machines}: the errors hold the "
            "difference between the machines, not only the model's own; evaluate on records of the model's machine, or "
            "train on records of this one (torchrec-neuroshard pretrain)"
        )
    if records.disturbed_groups or records.disturbed_collectives:
        yield (
            f"{records.disturbed_groups} groups and {records.disturbed_collectives} collectives were dropped: they "
            "were taken while the machine was disturbed"
        )


def _overall_table(title: str, part: PartAccuracy) -> RichTable:
    table = RichTable("time", *_ERROR_HEADINGS, title=f"{title}: {part.overall['records']} records")
    table.title_justify = "left"
    _align(table, texts=1)
    for name, times in part.times.items():
        errors = percentage_errors(times.predicted, times.measured)
        table.add_row(name, str(len(times.measured)), *_error_cells(errors))
    return table


def _remarks(part: PartAccuracy) -> Iterable[str]:
    tau = part.overall["kendall_tau"]
    words = [f"Kendall tau {'undefined' if tau is None else f'{tau:.3f}'}"]
    if "kendall_tau_strata" in part.overall:
        strata = part.overall["kendall_tau_strata"]
        shown = "without pairs" if strata is None else f"{strata:.3f}"
        words.append(f"within strata (same batch, lookups within 25 %) {shown}")
        words.append(f"p10 to p90 within a record spans {part.overall['noise_within_record_median']:.1%} in the median")
    yield "; ".join(words)
    if "at_speed_of_model" in part.overall:
        errors = part.overall["at_speed_of_model"]["total"]
        yield (
            "with the machine's drift taken out, as reference times and neighbouring records tell it: total "
            f"{errors['median_ape']:.1%} median, {errors['p95_ape']:.1%} p95"
        )


def _breakdown_table(title: str, part: PartAccuracy) -> RichTable:
    table = RichTable(
        "by", "range or value", *_ERROR_HEADINGS, title=f"{title}: error of {part.broken_down} by property"
    )
    table.title_justify = "left"
    _align(table, texts=2)
    for breakdown in part.breakdowns:
        for number, bin in enumerate(breakdown.bins):
            last = number == len(breakdown.bins) - 1
            heading = breakdown.title if number == 0 else ""
            table.add_row(heading, escape(bin.label), str(bin.records), *_error_cells(bin.errors), end_section=last)
    return table


_ERROR_HEADINGS = ("n", "median", "p95", "bias")


def _align(table: RichTable, texts: int) -> None:
    for column in table.columns[texts:]:
        column.justify = "right"


def _error_cells(errors: dict[str, float]) -> tuple[str, str, str]:
    return f"{errors['median_ape']:.1%}", f"{errors['p95_ape']:.1%}", f"{errors['bias']:+.1%}"
