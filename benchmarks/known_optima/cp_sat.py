"""The best placement where costs add up, with a proof, by OR-Tools' CP-SAT [Perron2023cpsat].

A variable for each (table, rank, width) says that the rank holds such a shard. A rank holds at most one shard of a
table, the widths of a table's shards add up to its dim, and the largest of the ranks' sums is minimised.

CP-SAT takes whole numbers. Costs are scaled so that a lower bound of the optimum is 2 million units for each table, and
rounded: a rank's sum of at most one shard a table is off by at most half a unit a table, so of two placements the
better one is told to within a unit a table, half a millionth of the optimum.

References:
    [Perron2023cpsat] L. Perron, F. Didier, S. Gay. The CP-SAT-LP Solver. CP 2023.
"""

from __future__ import annotations

import numpy as np
from ortools.sat.python import cp_model

from benchmarks.known_optima.reference import (
    NO_PLACEMENT,
    Optimum,
    allowed_width,
    interchangeable_ranks,
    placement_from,
    reference_ways,
)
from torchrec_neuroshard.costs.additive_simulator import AdditiveObjective, AdditiveSimulator
from torchrec_neuroshard.problem import WIDTH_MULTIPLE, ShardingProblem

_UNITS_PER_TABLE = 2_000_000

Key = tuple[int, int, int]  # table, width, rank


def cp_sat_optimum(
    problem: ShardingProblem, objective: AdditiveObjective, unit: int | None = None, limit: float = 60.0
) -> Optimum:
    """The placement whose slowest rank has the least sum of shards' costs.

    Args:
        problem: up to 12 tables on 4 ranks take seconds.
        objective: costs of single shards.
        unit: cut tables into shards of any multiple of this many columns (and as the problem allows); None cuts them
            as the reference does.
        limit: work after which the best placement so far is returned, in CP-SAT's deterministic seconds, which are
            about those of a clock.

    Raises:
        ValueError: a shard's bytes are not a whole number.
    """
    simulator = AdditiveSimulator(problem, objective)
    widths = [_widths(problem, table, unit) for table in range(len(problem.tables))]
    model, holds = _placement_model(problem, widths, most_shards=problem.cluster.world_size if unit else 2)
    costs = _costs(simulator, widths)
    scale = _UNITS_PER_TABLE * len(problem.tables) / _bound_ms(problem, costs)
    ranks = range(problem.cluster.world_size)
    horizon = int(scale * sum(costs.values())) + len(holds)
    loads = [model.new_int_var(0, horizon, f"load {rank}") for rank in ranks]
    for rank in ranks:
        terms = [(variable, costs[table, width]) for (table, width, home), variable in holds.items() if home == rank]
        model.add(loads[rank] == sum(variable * round(scale * cost) for variable, cost in terms))
    if interchangeable_ranks(problem):
        for rank in ranks[1:]:
            model.add(loads[rank - 1] >= loads[rank])
        model.minimize(loads[0])
    else:
        slowest = model.new_int_var(0, horizon, "slowest")
        model.add_max_equality(slowest, loads)
        model.minimize(slowest)

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = limit
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return NO_PLACEMENT
    bound = solver.best_objective_bound / scale
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Optimum(float("inf"), bound, None)
    placement = placement_from(problem, (key for key, variable in holds.items() if solver.boolean_value(variable)))
    total_ms = simulator.cost(placement).total_ms
    return Optimum(total_ms, total_ms if status == cp_model.OPTIMAL else min(bound, total_ms), placement)


def _widths(problem: ShardingProblem, table: int, unit: int | None) -> list[int]:
    """Widths that a shard of the table may have, widest first."""
    dim = problem.tables[table].embedding_dim
    if unit is None:
        return sorted({width for widths in reference_ways(problem)[table] for width in widths}, reverse=True)
    if unit % WIDTH_MULTIPLE:
        raise ValueError(f"unit must be a multiple of {WIDTH_MULTIPLE}, got {unit}")
    narrower = [width for width in range(unit, dim, unit) if allowed_width(problem, table, width)]
    return [dim, *reversed(narrower)]


def _placement_model(
    problem: ShardingProblem, widths: list[list[int]], most_shards: int
) -> tuple[cp_model.CpModel, dict[Key, cp_model.IntVar]]:
    """What makes a placement valid, memory included; no objective yet."""
    ranks = range(problem.cluster.world_size)
    model = cp_model.CpModel()
    holds = {
        (table, width, rank): model.new_bool_var(f"table {table} width {width} rank {rank}")
        for table, allowed in enumerate(widths)
        for width in allowed
        for rank in ranks
    }
    for table, allowed in enumerate(widths):
        for rank in ranks:
            model.add_at_most_one(holds[table, width, rank] for width in allowed)
        shards = [(width, holds[table, width, rank]) for width in allowed for rank in ranks]
        model.add(sum(width * variable for width, variable in shards) == problem.tables[table].embedding_dim)
        model.add(sum(variable for _, variable in shards) <= most_shards)
    for rank in ranks:
        for kind, capacity in enumerate(problem.cluster.capacity[rank]):
            sizes = [(problem.shard_memory(t, w)[kind], variable) for (t, w, r), variable in holds.items() if r == rank]
            if any(size != int(size) for size, _ in sizes):
                raise ValueError("bytes of shards must be whole numbers")
            if np.isfinite(capacity):
                model.add(sum(int(size) * variable for size, variable in sizes) <= int(np.floor(capacity)))
    return model, holds


def _costs(simulator: AdditiveSimulator, widths: list[list[int]]) -> dict[tuple[int, int], float]:
    """(table, width) -> ms."""
    pairs = [(table, width) for table, allowed in enumerate(widths) for width in allowed]
    kinds = simulator.kinds(pairs)
    return dict(zip(pairs, simulator.alone_ms[kinds].sum(axis=1).tolist()))


def _bound_ms(problem: ShardingProblem, costs: dict[tuple[int, int], float]) -> float:
    """A lower bound of the optimum: every column at the least price that shards of its table have, spread evenly."""
    total = 0.0
    for table, of in enumerate(problem.tables):
        total += of.embedding_dim * min(ms / width for (t, width), ms in costs.items() if t == table)
    return max(total / problem.cluster.world_size, 1e-9)
