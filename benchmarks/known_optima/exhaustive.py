"""The best placement of a few tables under any simulator, by enumeration.

A rank's *state* is what it holds of each table: nothing, or a shard of one of the widths that are allowed. A
placement is a state for each rank. Few states make many placements (6 tables on 3 ranks: 15,625 states, half a million
placements, renumbered ranks apart), so states are priced once, all together, and placements look their prices up.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.known_optima.reference import (
    NO_PLACEMENT,
    Optimum,
    Ways,
    finer_ways,
    interchangeable_ranks,
    placement_from,
    reference_ways,
)
from torchrec_neuroshard.costs.additive_simulator import Objective, simulate
from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import COLUMN_WISE, TABLE_WISE, Placement, ShardingProblem

_CHUNK = 1 << 18  # placements whose totals are taken at a time
_STATES_CHUNK = 1 << 15  # states priced at a time
_PARTS = (32, 16, 8, 4)  # of a table, finest first


def exhaustive_optimum(problem: ShardingProblem, objective: Objective, ways: Ways | None = None) -> Optimum:
    """The placement with the least total of all that fit.

    Args:
        problem: 6 tables on 3 ranks, or 7 on 2, take about a second.
        objective: what prices placements; the total is that of the simulator's ``cost``, collectives included.
        ways: to cut tables; None for those of the reference.

    Raises:
        ValueError: a table may not be written as either sharding type, so that fused groups would depend on splits.
    """
    if any(set(options.sharding_types) != {TABLE_WISE, COLUMN_WISE} for options in problem.options):
        raise ValueError("every table must allow table_wise and column_wise")
    simulator = simulate(problem, objective)
    ways = reference_ways(problem) if ways is None else ways
    states = _States.of(simulator, ways)
    held = _placements(problem, states, ways)
    if not len(held):
        return NO_PLACEMENT
    total = _totals(simulator, states, held)
    best = _placement(problem, states, held[np.argmin(total)])
    total_ms = simulator.cost(best).total_ms
    return Optimum(total_ms, total_ms, best)


def affordable_ways(problem: ShardingProblem, most_placements: int = 1_500_000) -> Ways:
    """The finest ways to cut tables that leave no more placements, and states, than can be enumerated."""
    ranks = problem.cluster.world_size
    renumberings = math.factorial(ranks) if interchangeable_ranks(problem) else 1
    for parts in _PARTS:
        ways = finer_ways(problem, parts)
        states = math.prod(1 + len({width for widths in table for width in widths}) for table in ways)
        placements = math.prod(sum(1 for widths in table for _ in _homes(widths, ranks)) for table in ways)
        if placements <= most_placements * renumberings and states <= most_placements:
            return ways
    return reference_ways(problem)


@dataclass(frozen=True)
class _States:
    """All that a rank can hold. State number s holds the piece ``s // strides[t] % sizes[t]`` of table t.

    Attributes:
        widths: [tables] widths of a table's pieces; the first is 0, no piece.
        strides: [tables] of the states' numbers.
        memory: [states, 2] bytes.
    """

    widths: tuple[tuple[int, ...], ...]
    strides: tuple[int, ...]
    memory: NDArray[np.float64]

    @classmethod
    def of(cls, simulator: PlanSimulator, ways: Ways) -> _States:
        widths = tuple((0, *sorted({width for split in table for width in split})) for table in ways)
        strides = tuple(np.cumprod([1, *map(len, widths)]).tolist())
        states = cls(widths, strides[:-1], np.zeros((strides[-1], 2)))
        states.memory[:] = states.sums(simulator, np.arange(strides[-1]), lambda kinds: simulator.memory[kinds])
        return states

    def __len__(self) -> int:
        return len(self.memory)

    def piece(self, table: int, states: NDArray[np.int64]) -> NDArray[np.int64]:
        """[states] which piece of a table states hold; 0 for none."""
        return states // self.strides[table] % len(self.widths[table])

    def sums(
        self,
        simulator: PlanSimulator,
        states: NDArray[np.int64],
        values: Callable[[NDArray[np.int64]], NDArray[np.float64]],
        tables: list[int] | None = None,
    ) -> NDArray[np.float64]:
        """Sums of the pieces of states, added up in the order of the tables, as the simulator does.

        Args:
            simulator: knows the kinds of shards.
            states: [states] their numbers.
            values: kinds -> [kinds, ...] what is added up.
            tables: those that count; None for all.
        """
        result = None
        for table in range(len(self.widths)) if tables is None else tables:
            of_pieces = values(simulator.kinds((table, width) for width in self.widths[table][1:]))
            of_pieces = np.concatenate([np.zeros_like(of_pieces[:1]), of_pieces])
            added = of_pieces[self.piece(table, states)]
            result = added if result is None else result + added
        assert result is not None
        return result


def _placements(problem: ShardingProblem, states: _States, ways: Ways) -> NDArray[np.int32]:
    """[placements, ranks] states of all placements that fit, each once however its ranks are numbered."""
    ranks = problem.cluster.world_size
    # [states, ranks] whether a rank has the memory for a state
    fits: NDArray[np.bool_] = np.all(states.memory[:, None, :] <= problem.cluster.capacity[None], axis=2)
    held = np.zeros((1, ranks), dtype=np.int32)
    # Ranks are numbered in the order in which shards first use them, where numbers mean nothing.
    used = np.full(1, 0 if interchangeable_ranks(problem) else ranks, dtype=np.int8)
    for table, splits in enumerate(ways):
        parts, parts_used = [], []
        for widths in splits:
            added = [states.widths[table].index(width) * states.strides[table] for width in widths]
            for homes in _homes(widths, ranks):
                seen, allowed = used, np.ones(len(held), dtype=bool)
                for rank in homes:
                    allowed &= rank <= seen
                    seen = np.maximum(seen, rank + 1)
                more = held[allowed]  # a copy
                fitting = np.ones(len(more), dtype=bool)
                for rank, number in zip(homes, added):
                    more[:, rank] += number
                    fitting &= fits[more[:, rank], rank]
                parts.append(more[fitting])
                parts_used.append(seen[allowed][fitting])
        held, used = np.concatenate(parts), np.concatenate(parts_used)
    return held


def _homes(widths: tuple[int, ...], ranks: int) -> list[tuple[int, ...]]:
    """Different ranks for the shards of a table: equal shards, which stand together, in rising order."""
    return [
        homes
        for homes in itertools.permutations(range(ranks), len(widths))
        if all(
            first < second or narrower < wider
            for first, second, wider, narrower in zip(homes, homes[1:], widths, widths[1:])
        )
    ]


def _totals(simulator: PlanSimulator, states: _States, held: NDArray[np.int32]) -> NDArray[np.float64]:
    """[placements] ms of an iteration."""
    problem = simulator.problem
    modules = sorted({table.module for table in problem.tables})
    occurring = np.unique(held).astype(np.int64)
    rank_ms = np.zeros((len(states), 2))
    # All tables of a module have the same sharding type, so groups do not depend on what is split.
    for group in sorted({table.group_key(COLUMN_WISE) for table in problem.tables}):
        members = [index for index, table in enumerate(problem.tables) if table.group_key(COLUMN_WISE) == group]
        for first in range(0, len(occurring), _STATES_CHUNK):
            some = occurring[first : first + _STATES_CHUNK]
            sums = states.sums(simulator, some, lambda kinds: simulator.z[kinds], members)
            rank_ms[some] += simulator.group_ms(sums)
    columns, ids = np.zeros((len(states), len(modules))), np.zeros((len(states), len(modules)))
    for number, module in enumerate(modules):
        members = [index for index, table in enumerate(problem.tables) if table.module == module]
        columns[occurring, number] = states.sums(simulator, occurring, lambda kinds: simulator.columns[kinds], members)
        ids[occurring, number] = states.sums(simulator, occurring, lambda kinds: simulator.ids[kinds], members)
    comms_ms = _Traffic(columns, held, interchangeable_ranks(problem), simulator.comms_ms)
    input_dist_ms = _Traffic(ids, held, interchangeable_ranks(problem), simulator.input_dist_ms)
    chunks = [slice(first, first + _CHUNK) for first in range(0, len(held), _CHUNK)]
    return np.concatenate(
        [simulator.total_ms(rank_ms[held[chunk]], comms_ms[chunk], input_dist_ms[chunk]) for chunk in chunks]
    )


class _Traffic:
    """Prices of collectives by placement: those whose ranks move the same are priced once.

    Args:
        moved: [states, lookups] what a rank in each state moves.
        held: [placements, ranks] states.
        interchangeable: the order of ranks does not matter.
        price: [plans, lookups, ranks] -> [plans, ...] ms.
    """

    def __init__(
        self,
        moved: NDArray[np.float64],
        held: NDArray[np.int32],
        interchangeable: bool,
        price: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    ) -> None:
        ranks = held.shape[1]
        amounts, amount = np.unique(moved, axis=0, return_inverse=True)
        of_ranks = amount.reshape(-1)[held].astype(np.int64)
        if interchangeable:
            of_ranks.sort(axis=1)
        powers = len(amounts) ** np.arange(ranks)
        keys, self._key = np.unique(of_ranks @ powers, return_inverse=True)
        digits = keys[:, None] // powers % len(amounts)  # [keys, ranks]
        self._price = price(amounts[digits].transpose(0, 2, 1))

    def __getitem__(self, placements: slice) -> NDArray[np.float64]:
        """[placements, ...] ms."""
        result: NDArray[np.float64] = self._price[self._key[placements]]
        return result


def _placement(problem: ShardingProblem, states: _States, held: NDArray[np.int32]) -> Placement:
    pieces = [
        (table, states.widths[table][piece], rank)
        for table in range(len(problem.tables))
        for rank, piece in enumerate(states.piece(table, held.astype(np.int64)).tolist())
        if piece
    ]
    return placement_from(problem, pieces)
