"""The search over a model's tables, with what ``column_split`` makes of their options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from time import perf_counter
from typing import Callable

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.adapters.module_tables import ShardableTable
from torchrec_neuroshard.adapters.storage import ShardStorage
from torchrec_neuroshard.costs.additive_simulator import Objective
from torchrec_neuroshard.problem import Cluster, InfeasibleError, ShardingProblem
from torchrec_neuroshard.search import SearchConfig, SearchResult, find_placement
from torchrec_neuroshard.search.refine import refine

# How long is looked for what narrower splits would save, and from which saving it is worth saying.
_SHORTEST_LOOK_SECONDS, _LOOK_SHARE = 0.3, 0.25
_WORTH_SAYING = 0.02
_LEAST_SECONDS = 1e-3  # the search makes one plan, however short the time


@dataclass(frozen=True)
class SplitSearch:
    """Searches; with ``column_split="auto"``, narrower when nothing else fits.

    Attributes:
        tables: the model's tables.
        cluster: the ranks.
        batch_size: samples per rank.
        storage: bytes of shards.
        objective: what to minimise.
        column_split: one of ``module_tables.COLUMN_SPLITS``.
        config: of the search.
        seconds_left: time left for the whole of it; None without a limit.
        occupied_ms: [ranks, 2] forward and backward of what is not planned here.
    """

    tables: tuple[ShardableTable, ...]
    cluster: Cluster
    batch_size: int
    storage: ShardStorage
    objective: Objective
    column_split: str
    config: SearchConfig
    seconds_left: Callable[[], float | None]
    occupied_ms: NDArray[np.float64] | None = None

    def find(self, warn: Callable[[str], None], note: Callable[[str], None]) -> tuple[ShardingProblem, SearchResult]:
        """Returns the problem that was solved, and its solution.

        Args:
            warn: told what the user should hear of.
            note: told what is worth a line in the report.

        Raises:
            InfeasibleError: the tables do not fit.
        """
        problem = self._problem(self.column_split)
        narrower = self.narrowest()
        held_back = narrower.options != problem.options
        try:
            result = self._search(problem)
        except InfeasibleError:
            if not held_back:
                raise
            result = self._search(narrower)
            warn(
                "No plan fits in memory with the widths that column_split='auto' prefers, so columns were split "
                "narrower."
            )
            return narrower, result
        if held_back:
            self._note_narrower_gain(narrower, result, note)
        return problem, result

    def narrowest(self) -> ShardingProblem:
        """The problem with the narrowest shards that ``column_split`` can lead to."""
        return self._problem("any" if self.column_split == "auto" else self.column_split)

    def _search(self, problem: ShardingProblem) -> SearchResult:
        left = self.seconds_left()
        config = self.config
        if left is not None:
            config = dataclasses.replace(config, timeout_seconds=max(left, _LEAST_SECONDS))
        return find_placement(problem, self.objective, config)

    def _note_narrower_gain(self, narrower: ShardingProblem, result: SearchResult, note: Callable[[str], None]) -> None:
        """Says what column_split="any" would save, by refining the plan found: a lower bound, cheaply."""
        begun = perf_counter()
        limit, left = max(_SHORTEST_LOOK_SECONDS, _LOOK_SHARE * result.seconds), self.seconds_left()
        if left is not None:
            if left < limit:
                return
            limit = min(limit, left)
        assert result.simulator is not None  # it was searched for
        simulator = result.simulator.with_options(narrower.options).of(result.placement)
        placement = refine(simulator, result.placement, lambda: perf_counter() - begun > limit)
        gain = 1.0 - simulator.cost(placement).total_ms / result.cost.total_ms
        if gain >= _WORTH_SAYING:
            note(
                f"Narrower column splits would save at least {gain:.0%} of the predicted time; column_split='auto' "
                "holds back, because with row-wise optimizers they change the numerics. column_split='any' takes them."
            )

    def _problem(self, column_split: str) -> ShardingProblem:
        return ShardingProblem(
            tables=tuple(entry.table for entry in self.tables),
            options=tuple(entry.options(column_split) for entry in self.tables),
            cluster=self.cluster,
            batch_size=self.batch_size,
            memory=self.storage,
            occupied_ms=self.occupied_ms,
        )
