"""What a plan asks of a cost model that its card does not cover."""

from __future__ import annotations

from collections import Counter
from typing import Iterable

from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.problem import Table

_FEW_RECORDS = 30  # below which a property counts as not measured


def unmeasured_kinds(model: CostModel, tables: Iterable[Table]) -> list[str]:
    """One sentence for each property of tables that the model's records hold hardly any example of.

    Args:
        model: analytic models, and cards that do not list what was measured, claim nothing and get no sentence.
        tables: what is to be planned.
    """
    measured = model.card.get("measured_kinds", {})
    counts: Counter[tuple[str, str]] = Counter()
    for table in tables:
        for name in ("optimizer", "data_type", "weighted"):
            counts[name, str(getattr(table, name))] += 1
    return [
        f"Cost model {model.name!r} was trained on {measured[name].get(value, 0)} records with {name} {value}, which "
        f"{number} of the tables have: their predicted cost is a guess. Measure such groups and train a model of "
        "your own, or give another cost_model=."
        for (name, value), number in sorted(counts.items())
        if name in measured and measured[name].get(value, 0) < _FEW_RECORDS
    ]
