"""What a model's ensemble says about plans: finalists re-ranked, tables outside the data named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.problems import random_problem, untrained_model
from torchrec_neuroshard.costs.features import FEATURES, shard_features
from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.group_net import GroupNet
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.costs.plan_uncertainty import plan_uncertainty
from torchrec_neuroshard.costs.simulator import PlanSimulator, kind_work
from torchrec_neuroshard.costs.uncertainty import RANGED, Uncertainty
from torchrec_neuroshard.search import find_placement
from torchrec_neuroshard.search.driver import _choose


def nets(count: int, seed: int = 0) -> tuple[GroupNet, ...]:
    torch.manual_seed(seed)
    made = tuple(GroupNet() for _ in range(count))
    for net in made:
        torch.nn.init.normal_(net.head[-1].weight, std=0.3)  # type: ignore[arg-type]
    return made


def model_with_ensemble(largest_spread: float = 10.0, rows: float = 60.0) -> CostModel:
    model = untrained_model()
    assert isinstance(model.groups, GroupCostModel)
    low, high = dict.fromkeys(RANGED, -60.0), dict.fromkeys(RANGED, 60.0)
    high["log_rows"] = rows
    known = Uncertainty(0.05, 0.5, largest_spread, low, high)
    return dataclasses.replace(model, ensemble=GroupCostModel(model.groups.prior, nets(4)), uncertainty=known)


def test_the_ensemble_chooses_among_finalists() -> None:
    problem, model = random_problem(3, tables=12, ranks=3), model_with_ensemble()
    simulator = PlanSimulator(problem, model)
    judge = PlanSimulator(problem, model.by_ensemble())
    best = find_placement(problem, dataclasses.replace(model, ensemble=None)).placement
    limit = simulator.cost(best).total_ms * 1.02
    shards = list(best.shards)
    rivals = [best]
    for index, shard in enumerate(shards):
        for rank in range(3):
            moved = [*shards[:index], dataclasses.replace(shard, rank=rank), *shards[index + 1 :]]
            rivals.append(dataclasses.replace(best, shards=tuple(moved)))
    chosen = _choose(simulator, rivals)
    close = [placement for placement in rivals if simulator.cost(placement).total_ms <= limit]
    assert simulator.cost(chosen).total_ms <= limit
    assert judge.cost(chosen).total_ms <= judge.cost(best).total_ms
    assert judge.cost(chosen).total_ms == pytest.approx(min(judge.cost(p).total_ms for p in close[:16]))


def test_a_search_with_an_ensemble_is_deterministic_and_near_the_mean_heads_best() -> None:
    problem, model = random_problem(5, tables=15, ranks=4), model_with_ensemble()
    first, again = find_placement(problem, model), find_placement(problem, model)
    assert first.placement == again.placement
    alone = find_placement(problem, dataclasses.replace(model, ensemble=None))
    assert alone.cost.total_ms <= first.cost.total_ms <= 1.02 * alone.cost.total_ms * (1 + 1e-9)


def test_uncertainty_of_a_plan_is_that_of_its_groups() -> None:
    problem, model = random_problem(7, tables=10, ranks=3), model_with_ensemble()
    placement = find_placement(problem, model).placement
    found = plan_uncertainty(problem, placement, model)
    assert found is not None and found.spread.shape == (3,) and (found.spread > 0).all()
    assert found.unlike_ranks == () and found.outside == {} and found.sentences() == []
    assert 0.05 < found.expected_error < 0.05 + 0.5 * found.spread.max() + 1e-9
    assert found.to_json()["spread_per_rank"] == pytest.approx(found.spread, abs=1e-4)


def test_tables_and_ranks_beyond_the_data_are_named() -> None:
    problem = random_problem(7, tables=10, ranks=3)
    model = model_with_ensemble(largest_spread=0.0, rows=10.0)
    placement = find_placement(problem, model).placement
    found = plan_uncertainty(problem, placement, model)
    assert found is not None
    pairs = sorted({(shard.table, shard.width) for shard in placement.shards})
    rows = shard_features(kind_work(problem, pairs)).features[:, FEATURES.index("log_rows")]
    expected = sorted({problem.tables[table].name for (table, _), value in zip(pairs, rows) if value > 10.5})
    assert sorted(found.outside["log_rows"]) == expected and expected
    ranks = {shard.rank for shard in placement.shards}
    assert set(found.unlike_ranks) == ranks
    said = " ".join(found.sentences())
    assert "number of rows" in said and expected[0] in said and "disagree" in said


def test_models_without_an_ensemble_say_nothing() -> None:
    problem, model = random_problem(7, tables=4, ranks=2), untrained_model()
    placement = find_placement(problem, model).placement
    assert plan_uncertainty(problem, placement, model) is None
    assert np.isfinite(PlanSimulator(problem, model.by_ensemble()).cost(placement).total_ms)
