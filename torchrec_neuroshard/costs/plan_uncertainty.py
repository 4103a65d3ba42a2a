"""How sure a plan's prediction is, and which of its tables lie outside what the cost model has seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.features import shard_features
from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.costs.simulator import PlanSimulator, kind_work
from torchrec_neuroshard.problem import Placement, ShardingProblem

_WORDS = {
    "log_rows": "number of rows",
    "log_dim": "shard width",
    "log_batch": "global batch",
    "log_bag_length": "pooling factor",
    "log_lookups": "lookups per batch",
    "log_table_bytes": "shard size",
}
_NAMED = 3  # tables named in a sentence


@dataclass(frozen=True)
class PlanUncertainty:
    """What a model's ensemble says about a plan.

    Attributes:
        expected_error: typical relative error of the slowest rank's compute.
        spread: [ranks] disagreement of the nets on each rank's compute.
        unlike_ranks: ranks that hold a group on which the nets disagree more than on nearly all measured ones.
        outside: by feature, the tables with a shard beyond what was measured.
    """

    expected_error: float
    spread: NDArray[np.float64]
    unlike_ranks: tuple[int, ...]
    outside: dict[str, tuple[str, ...]]

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "expected_error": round(self.expected_error, 4),
            "spread_per_rank": self.spread.round(4).tolist(),
            "ranks_unlike_measured_groups": list(self.unlike_ranks),
            "tables_outside_measured_range": {name: list(tables) for name, tables in self.outside.items()},
        }

    def summary(self) -> str:
        """The expected error, in words."""
        return f"The slowest rank's compute is typically off by {100 * self.expected_error:.0f} %."

    def sentences(self) -> list[str]:
        """What the user should know beyond the figures."""
        result = []
        for name, tables in self.outside.items():
            named = ", ".join(tables[:_NAMED]) + (", ..." if len(tables) > _NAMED else "")
            result.append(
                f"Outside what the cost model was measured on ({_WORDS[name]}): {len(tables)} of the tables ({named}); "
                "their cost is extrapolated."
            )
        if self.unlike_ranks:
            result.append(
                f"On {len(self.unlike_ranks)} of {len(self.spread)} ranks the cost model's nets disagree more than on "
                "99 % of the groups it was measured on: predictions there are a guess. `torchrec-neuroshard calibrate` "
                "measures such groups."
            )
        return result


def plan_uncertainty(problem: ShardingProblem, placement: Placement, model: CostModel) -> PlanUncertainty | None:
    """Asks the ensemble about a plan; None where the model has none (analytic models)."""
    ensemble, known = model.ensemble, model.uncertainty
    if not isinstance(ensemble, GroupCostModel) or known is None or not placement.shards:
        return None
    simulator = PlanSimulator(problem, model.by_ensemble())
    z = simulator.of(placement).group_sums(placement).z[..., : ensemble.z_dim]
    ranks, groups = z.shape[:2]
    flat = z.reshape(ranks * groups, -1)
    spread = ensemble.spread(flat).reshape(ranks, groups)
    group_ms = ensemble.predict(flat).sum(axis=1).reshape(ranks, groups)
    of_rank = (spread * group_ms).sum(axis=1) / np.maximum(group_ms.sum(axis=1), 1e-9)
    slowest = int(group_ms.sum(axis=1).argmax())
    pairs = sorted({(shard.table, shard.width) for shard in placement.shards})
    tables = np.asarray([table for table, _ in pairs])
    outside = {
        name: tuple(problem.tables[table].name for table in np.unique(tables[mask]))
        for name, mask in known.outside(shard_features(kind_work(problem, pairs))).items()
    }
    return PlanUncertainty(
        float(known.expected_error(of_rank[slowest])),
        of_rank,
        tuple(np.flatnonzero((spread > known.largest_spread).any(axis=1)).tolist()),
        outside,
    )
