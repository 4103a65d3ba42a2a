"""What a report tells of a plan beyond its figures, and what of it the user is warned of while planning."""

from __future__ import annotations

import logging
from typing import Iterable, Mapping, Sequence

from torchrec.distributed.planner.types import ParameterConstraints

from torchrec_neuroshard.adapters.module_tables import ShardableTable
from torchrec_neuroshard.adapters.topology import DetectedMachine
from torchrec_neuroshard.costs.coverage import unmeasured_kinds
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.problem import Placement

_NAMED = 5  # tables named in a sentence


class Notes:
    """Sentences for one report.

    Args:
        logger: of warnings.
        said: what was logged already, over all plans of a planner; nothing is logged twice.
    """

    def __init__(self, logger: logging.Logger, said: set[str]) -> None:
        self.sentences: list[str] = []
        self._logger, self._said = logger, said

    def add(self, sentences: Iterable[str]) -> None:
        """Sentences for the report alone."""
        self.sentences += sentences

    def warn(self, sentence: str, key: str | None = None, level: int = logging.WARNING) -> None:
        """A sentence for the report that is logged too, once for each ``key``."""
        self.sentences.append(sentence)
        if (key or sentence) not in self._said:
            self._said.add(key or sentence)
            self._logger.log(level, sentence)


def note_assumptions(
    notes: Notes,
    detected: DetectedMachine | None,
    default_batch_size: int | None,
    constraints: Mapping[str, ParameterConstraints] | None,
    has_stats: bool,
) -> None:
    """Says what is assumed where the user said nothing.

    Args:
        notes: gets the sentences.
        detected: the machines, where they were detected.
        default_batch_size: samples per rank, where they were not given.
        constraints: the user's.
        has_stats: whether statistics of the tables were given.
    """
    if detected is not None:
        notes.warn(f"Topology detected: {detected}", level=logging.INFO)
    if default_batch_size is not None:
        notes.warn(
            f"batch_size was not given: planning for TorchRec's default of {default_batch_size} samples per rank. "
            "Costs depend on it: pass batch_size=."
        )
    given = (constraints or {}).values()
    if not has_stats and all(list(constraint.pooling_factors) == [1.0] for constraint in given):
        notes.warn(
            "Neither table_stats nor pooling factors in the constraints were given: planning as if every feature "
            "had one id per sample. Measure them with TableStats.from_batches(batches, model) and pass "
            "table_stats=."
        )


def note_coverage(notes: Notes, model: CostModel, tables: Sequence[ShardableTable], device: str) -> None:
    """Says what of the tables and the device a cost model does not cover."""
    measured_on = model.card.get("hardware", {}).get("device", device)
    if measured_on != device:
        notes.warn(
            f"Cost model {model.name!r} describes {measured_on} ranks, but the plan is for {device}: "
            "its predictions do not apply. Drop cost_model= for the hardware's own."
        )
    if model.provenance != "analytic" and model.collectives_source != "measured":
        notes.add(
            [
                f"Collectives were not measured on {model.hardware}. Their link speeds are the topology's where it "
                f"gives any, else {model.collectives_source}."
            ]
        )
    for gap in unmeasured_kinds(model, (entry.table for entry in tables)):
        notes.warn(gap)


def note_changed_numerics(notes: Notes, tables: Sequence[ShardableTable], placement: Placement) -> None:
    """Says which tables with a row-wise optimizer are split by columns."""
    narrower = {s.table for s in placement.shards if s.width < tables[s.table].table.embedding_dim}
    narrower |= {t for t, spread in enumerate(placement.spreads) if spread is not None and len(spread.pieces) > 1}
    split = sorted(tables[t].table.name for t in narrower if not tables[t].optimizer.elementwise)
    if split:
        shown = ", ".join(split[:_NAMED]) + (f" and {len(split) - _NAMED} more" if len(split) > _NAMED else "")
        notes.warn(
            f"Column splits change the numerics of {len(split)} table(s) with a row-wise optimizer ({shown}): each "
            "shard keeps its own state per row, and optimizer checkpoints do not reshard. "
            "column_split='never' avoids it.",
            key="numerics",
        )
