"""Ratios of measured times over interleaved rounds, with their 95 % interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Sequence

import numpy as np
from scipy import stats

LOSS_RATIO = 1.03
LOSS_RATIO_ALL_TYPES = 1.02  # in the comparison over all sharding types
LOSS_ROUNDS = 7
CONFIDENCE = 0.95


@dataclass(frozen=True)
class RatioEstimate:
    """A ratio of two plans' times.

    Attributes:
        ratio: geometric mean over the rounds.
        low: lower end of the 95 % interval (Student's t on the logarithms); 0 with a single round.
        high: upper end; infinite with a single round.
        rounds: number of rounds.
    """

    ratio: float
    low: float
    high: float
    rounds: int

    def is_loss(self, limit: float = LOSS_RATIO) -> bool:
        """Enough rounds, and the whole interval above the limit."""
        return self.rounds >= LOSS_ROUNDS and self.low > limit

    def may_be_loss(self, limit: float = LOSS_RATIO) -> bool:
        """Too few rounds to say, and the interval does not exclude a loss that the ratio suggests."""
        return self.rounds < LOSS_ROUNDS and self.ratio > limit


def ratio_estimate(times: Sequence[float], reference: Sequence[float]) -> RatioEstimate:
    """Estimates times / reference from pairs measured in the same round.

    Args:
        times: [rounds] of one plan.
        reference: [rounds] of the plan compared against, same rounds in the same order.

    Raises:
        ValueError: there is no round, or the rounds do not pair.
    """
    if not times or len(times) != len(reference):
        raise ValueError(f"need rounds that pair, got {len(times)} and {len(reference)}")
    logs = np.log(np.asarray(times) / np.asarray(reference))
    mean, rounds = float(logs.mean()), len(logs)
    if rounds == 1:
        return RatioEstimate(math.exp(mean), 0.0, math.inf, 1)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, rounds - 1) * logs.std(ddof=1) / math.sqrt(rounds))
    return RatioEstimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half), rounds)


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive values.

    Raises:
        ValueError: there is none.
    """
    if not values:
        raise ValueError("the geometric mean of nothing")
    return float(np.exp(np.log(np.asarray(values)).mean()))
