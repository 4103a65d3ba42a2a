"""The disagreement of two measurements of the same things."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Iterable

import numpy as np
import pytest

from benchmarks.noise_floor import disagreement, main, noise_floor
from torchrec_neuroshard.measure.collective_pool import sample_collective
from torchrec_neuroshard.measure.pool import sample_group
from torchrec_neuroshard.measure.probe import DISTURBED
from torchrec_neuroshard.measure.specs import CollectiveSpec, GroupSpec, spec_id
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError

Record = dict[str, Any]


def summary(ms: float) -> dict[str, float]:
    return {"median": ms, "p10": ms, "p90": ms}


def group(index: int, factor: float = 1.0, machine: str = "made_up") -> Record:
    spec: GroupSpec = sample_group(5, index)
    times = {f"{name}_ms": summary(factor * ms) for name, ms in (("forward", 1.0), ("backward", 2.0), ("total", 3.0))}
    fields = {"kind": "group", "id": spec_id(spec), "spec": spec.to_json(), "lookups": spec.lookups}
    return {**fields, "hardware": {"name": machine}, **times}


def collective(index: int, ranks: int = 3, factors: tuple[float, ...] = (1.0, 1.0, 1.0), per_host: int = 0) -> Record:
    spec: CollectiveSpec = sample_collective(5, index, ranks, per_host)
    rank_ms = [summary(factor * (rank + 1.0)) for rank, factor in enumerate(factors)]
    fields = {"kind": "collective", "id": spec_id(spec), "spec": spec.to_json()}
    return {**fields, "hardware": {"name": "made_up"}, "rank_ms": rank_ms}


def store(path: Path, records: Iterable[Record]) -> Path:
    with MeasurementStore(path) as file:
        for record in records:
            file.append(record)
    return path


def test_equal_measurements_do_not_disagree(tmp_path: Path) -> None:
    records = [*(group(i) for i in range(10)), *(collective(i) for i in range(20))]
    found = noise_floor(store(tmp_path / "a.jsonl", records), store(tmp_path / "b.jsonl", reversed(records)))
    zero = {"median_ape": 0.0, "p95_ape": 0.0, "bias": 0.0}
    assert found["all groups"] == {"records": 10, "forward": zero, "backward": zero, "total": zero}
    assert found["all collectives"] == {"records": 20, "per_rank": zero, "slowest": zero}
    assert list(found)[:2] == ["all collectives", "all groups"]
    kinds = [label for label in found if label.startswith(("all_", "reduce_")) and "," not in label]
    assert sum(found[label]["records"] for label in kinds) == 20


def test_known_disagreement_is_found_where_it_is(tmp_path: Path) -> None:
    """The last rank is slower by a quarter; groups by a tenth. Rank times weigh alike, the slowest is the last rank."""
    first = [*(group(i, 1.1) for i in range(9)), *(collective(i, factors=(1.0, 1.0, 1.25)) for i in range(15))]
    second = [*(group(i) for i in range(9)), *(collective(i) for i in range(15))]
    one, other = store(tmp_path / "a.jsonl", first), store(tmp_path / "b.jsonl", second)
    found = noise_floor(one, other)
    assert found["all groups"]["total"]["bias"] == pytest.approx(0.1)
    assert found["all groups"]["total"]["p95_ape"] == pytest.approx(0.1)
    assert found["all collectives"]["per_rank"]["median_ape"] == 0.0
    assert found["all collectives"]["slowest"] == {"median_ape": 0.225, "p95_ape": 0.25, "bias": 0.25}
    assert noise_floor(other, one)["all groups"]["total"]["median_ape"] == found["all groups"]["total"]["median_ape"]


def test_layouts_and_kinds_are_told_apart(tmp_path: Path) -> None:
    records = [collective(i, 2, (1.0, 1.0)) for i in range(30)] + [collective(i, 2, (1.0, 1.0), 1) for i in range(30)]
    found = noise_floor(store(tmp_path / "a.jsonl", records), store(tmp_path / "b.jsonl", records))
    assert found["hosts x ranks 1x2"]["records"] == found["hosts x ranks 2x1"]["records"] == 30
    parts = [part["records"] for label, part in found.items() if label.startswith("hosts x ranks 1x2, ")]
    assert sum(parts) == 30 and len(parts) > 2


def test_only_like_records_are_paired(tmp_path: Path) -> None:
    first = store(tmp_path / "a.jsonl", [group(0), group(1), group(2, machine="other"), group(3)])
    second = store(tmp_path / "b.jsonl", [group(1), group(2), {**group(3), "disturbance": DISTURBED + 1}, group(4)])
    assert noise_floor(first, second)["all groups"]["records"] == 1
    with pytest.raises(RecordError, match="no spec was measured in both"):
        noise_floor(first, store(tmp_path / "c.jsonl", [group(9)]))


def test_disagreement_of_noise_is_the_noise() -> None:
    rng = np.random.default_rng(0)
    one, other = np.exp(rng.normal(0, 0.1, (2, 20_000)))
    found = disagreement(one.tolist(), other.tolist())
    assert found["median_ape"] == pytest.approx(0.6745 * 0.1 * np.sqrt(2), rel=0.05)
    assert abs(found["bias"]) < 0.01


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store(tmp_path / "a.jsonl", [collective(0), group(0)])
    assert main([str(path), str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["all groups"]["records"] == 1
    assert main([str(path), str(path)]) == 0
    table = capsys.readouterr().out
    assert "all collectives" in table and "per_rank" in table and "records" not in table
    assert main([str(path), str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl: cannot be read" in capsys.readouterr().err
    empty = store(tmp_path / "empty.jsonl", [])
    assert main([str(path), str(empty)]) == 2
    assert "no spec was measured in both" in capsys.readouterr().err
