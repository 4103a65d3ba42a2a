"""What a search may be told, and what it returns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torchrec_neuroshard.costs.simulator import PlanCost, PlanSimulator
from torchrec_neuroshard.problem import Placement


@dataclass(frozen=True)
class SearchConfig:
    """Settings of :func:`~torchrec_neuroshard.search.driver.find_placement`.

    Attributes:
        beam_width: split candidates kept at each level (the paper's K).
        proposals: tables, by cost and by size each, that a level tries to split (the paper's N).
        levels: most splits tried one after another (the paper's L).
        patience: stop the beam after this many levels without improvement.
        grid: caps on the widest rank tried in each placement (the paper's M).
        grid_span: largest cap, as a multiple of the mean columns per rank.
        refine: improve the best placements by moves, swaps, splits and merges.
        repack_rounds: times that a few tables are taken off and put back the best way.
        repack_patience: stop that after so many times in a row that found nothing; few tables, which are cheap to
            put back, get more.
        prove_bound: where costs add up, also prove how low any plan could be (takes about as long as the search).
        timeout_seconds: stop improving after this long; a plan is returned all the same. None: no limit.
        seed: seeds the repacking, the only random part.
    """

    beam_width: int = 3
    proposals: int = 10
    levels: int = 10
    patience: int = 1
    grid: int = 11
    grid_span: float = 1.5
    refine: bool = True
    repack_rounds: int = 400
    repack_patience: int = 60
    prove_bound: bool = False
    timeout_seconds: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"beam_width": 1, "proposals": 1, "patience": 1, "grid": 1}
        least |= {"levels": 0, "repack_rounds": 0, "repack_patience": 0, "seed": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
                raise ValueError(f"{name} must be a whole number of at least {smallest}, got {value!r}")
        if not 1.0 <= self.grid_span < math.inf:
            raise ValueError(f"grid_span must be a number of at least 1, got {self.grid_span}")
        if self.timeout_seconds is not None and not 0 < self.timeout_seconds < math.inf:
            raise ValueError(f"timeout_seconds must be a positive number or None, got {self.timeout_seconds}")


@dataclass(frozen=True)
class SearchResult:
    """A placement, its predicted cost, and how it was found.

    Attributes:
        placement: the best placement found.
        cost: its predicted cost.
        seconds: wall time of the search.
        log: one entry per step: {"step", "seconds", "predicted_ms", "shards"}.
        lower_bound_ms: what every plan costs at least; None where it was not asked for, or cannot be proved.
        simulator: what predicted it, of the problem with the placement's kernels and nothing spread; None where the
            placement was not searched for.
    """

    placement: Placement
    cost: PlanCost
    seconds: float
    log: tuple[dict[str, Any], ...]
    lower_bound_ms: float | None = None
    simulator: PlanSimulator | None = field(default=None, repr=False, compare=False)
