"""What the store of :mod:`benchmarks.plan_ranking` holds: cases with their plans, and rounds.

A *case* is one workload on so many ranks with the plans that are ranked, one record that holds all of it, the tables
included. A *round* is one fresh process that measured all plans of a case, one record a plan. So a store alone says
what any cost model, of today or of later, makes of what was measured.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure_plans import PlanMeasurement, complete_rounds
from benchmarks.plan_records import PlannedResult
from benchmarks.skewed_workloads import skewed_workload_json
from benchmarks.sources import load_source, samples_per_rank, workload_id
from torchrec_neuroshard.measure.hardware import hardware_fingerprint, software_versions
from torchrec_neuroshard.measure.store import RecordError
from torchrec_neuroshard.workload import Workload, WorkloadError

CASE, ROUND = "ranking_case", "ranking_round"

CaseKey = tuple[str, int, int, int]  # workload id, ranks, samples per rank, seed


@dataclass(frozen=True)
class RankingCase:
    """One workload with the plans that are ranked.

    Attributes:
        workload: the tables.
        world_size: ranks.
        batch_size: samples per rank.
        seed: of the random plans.
        plans: label -> plan.
        cost_model: with which our planners made theirs: its name and provenance.
    """

    workload: Workload
    world_size: int
    batch_size: int
    seed: int
    plans: Mapping[str, PlannedResult]
    cost_model: Mapping[str, str]

    @cached_property
    def key(self) -> CaseKey:
        """What rounds know the case by."""
        return workload_id(self.workload), self.world_size, self.batch_size, self.seed

    @property
    def plan_ids(self) -> dict[str, str]:
        """Label -> id of the plan."""
        return {label: planned.plan_id for label, planned in self.plans.items()}


def case_key(source: str, world_size: int, seed: int) -> CaseKey:
    """The key of a workload's case, whether or not it is stored yet.

    Raises:
        WorkloadError: the workload cannot be used, or its batch does not divide over the ranks.
    """
    workload = load_source(source)
    return workload_id(workload), world_size, samples_per_rank(workload, world_size), seed


def case_record(case: RankingCase, source: str) -> dict[str, Any]:
    """The record of a case whose workload came from ``source``."""
    return {
        "kind": CASE,
        **_case_fields(case),
        "workload_file": _source_content(source),
        "cost_model": dict(case.cost_model),
        "plans": {label: planned.to_json() for label, planned in case.plans.items()},
        **_circumstances(),
    }


def round_record(
    case: RankingCase, label: str, result: PlanMeasurement, number: int, order: int, process: str
) -> dict[str, Any]:
    """The record of one plan in one round.

    Args:
        case: the case.
        label: of the plan.
        result: what was measured.
        number: of the round.
        order: place of the plan within the round.
        process: that measured; tells rounds apart.
    """
    return {
        "kind": ROUND,
        **_case_fields(case),
        "planner": label,
        "plan_id": case.plans[label].plan_id,
        "round": number,
        "order": order,
        "process": process,
        "rank_ms": {str(rank): round(ms, 4) for rank, ms in sorted(result.rank_ms.items())},
        "bottleneck_ms": round(result.bottleneck_ms, 4),
        **_circumstances(),
    }


def _case_fields(case: RankingCase) -> dict[str, Any]:
    names = ("workload_id", "world_size", "batch_size_per_rank", "seed")
    return {"workload": case.workload.name, **dict(zip(names, case.key))}


def _circumstances() -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": hardware_fingerprint("cpu")["name"],
        "versions": software_versions(),
    }


def _source_content(source: str) -> dict[str, Any]:
    """Content of the workload file, or what would stand in that of a generated workload."""
    if source.startswith("skewed:"):
        return skewed_workload_json(int(source.removeprefix("skewed:")), None)
    content: dict[str, Any] = json.loads(Path(source).read_text(encoding="utf-8"))
    return {"name": Path(source).stem, **content}


class RankingRecords:
    """The records of a store by case.

    Args:
        records: in the order they were written; other kinds are passed over.

    Raises:
        RecordError: a case cannot be read.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self.cases: dict[CaseKey, RankingCase] = {}
        self._rounds: dict[CaseKey, list[dict[str, Any]]] = {}
        for record in records:
            if record.get("kind") == CASE:
                case = _read_case(record)
                self.cases.setdefault(case.key, case)
            elif record.get("kind") == ROUND:
                key = (record["workload_id"], record["world_size"], record["batch_size_per_rank"], record["seed"])
                self._rounds.setdefault(key, []).append(dict(record))

    def complete(self, case: RankingCase) -> int:
        """Number of rounds that measured every plan of the case."""
        return complete_rounds(self._rounds.get(case.key, []), case.plan_ids)

    def first_times(self, case: RankingCase) -> dict[str, dict[int, float]]:
        """Label -> rank -> ms from the first round that timed all ranks of a plan; without plans not measured yet."""
        times: dict[str, dict[int, float]] = {}
        for record in self._rounds.get(case.key, []):
            if len(record["rank_ms"]) == case.world_size:
                times.setdefault(record["planner"], {int(rank): ms for rank, ms in record["rank_ms"].items()})
        return times

    def bottleneck_ms(self, case: RankingCase) -> NDArray[np.float64]:
        """[plans, rounds] of the complete rounds, plans in the case's order."""
        rounds: dict[str, dict[str, float]] = {}
        for record in self._rounds.get(case.key, []):
            rounds.setdefault(record["process"], {})[record["planner"]] = float(record["bottleneck_ms"])
        whole = [times for times in rounds.values() if times.keys() >= case.plans.keys()]
        return np.asarray([[times[label] for times in whole] for label in case.plans], dtype=np.float64)


def _read_case(record: Mapping[str, Any]) -> RankingCase:
    try:
        workload = Workload.parse(record["workload_file"], str(record["workload"]))
        case = RankingCase(
            workload,
            int(record["world_size"]),
            int(record["batch_size_per_rank"]),
            int(record["seed"]),
            {label: PlannedResult.from_json(planned) for label, planned in record["plans"].items()},
            record["cost_model"],
        )
    except (KeyError, TypeError, WorkloadError) as error:
        name = record.get("workload")
        raise RecordError(f"the case of {name!r} cannot be read ({error!r}); measure it anew") from error
    if case.key[0] != record["workload_id"]:
        raise RecordError(f"the tables of {record['workload']!r} are not those that were measured; measure it anew")
    return case
