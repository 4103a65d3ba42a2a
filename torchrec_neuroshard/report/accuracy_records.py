"""Records to evaluate a cost model on: read from files, checked, and filtered."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any, Collection, Sequence

from torchrec_neuroshard.measure.pool import is_held_out
from torchrec_neuroshard.measure.specs import GroupSpec
from torchrec_neuroshard.measure.store import RecordError
from torchrec_neuroshard.training.collective_data import is_test_collective
from torchrec_neuroshard.training.dataset import records_of_kind, undisturbed

_COLLECT = "torchrec-neuroshard measure compute --out FILE"

Record = dict[str, Any]


@dataclass(frozen=True)
class EvaluationRecords:
    """Usable records of some measurement files, and what became of the others.

    Attributes:
        files: where they came from.
        groups: undisturbed records of fused groups; of several of one group on one machine, the last.
        collectives: undisturbed records of collectives.
        disturbed_groups: group records dropped because the machine was disturbed.
        disturbed_collectives: likewise of collectives.
        witnesses: undisturbed groups that are not evaluated, but tell with the others how fast the machine ran.
        held_out_only: only what training does not see was kept: groups that hold a held-out base table, and
            the collectives set aside for tests.
    """

    files: tuple[str, ...]
    groups: tuple[Record, ...]
    collectives: tuple[Record, ...]
    disturbed_groups: int
    disturbed_collectives: int
    held_out_only: bool
    witnesses: tuple[Record, ...] = ()

    @property
    def hardware(self) -> Counter[str]:
        """Name of each machine that records were taken on, with their number."""
        return Counter(str(record["hardware"]["name"]) for record in (*self.groups, *self.collectives))

    def counts_json(self) -> dict[str, Any]:
        """A JSON object that says what the figures are made of."""
        return {
            "files": list(self.files),
            "groups": len(self.groups),
            "collectives": len(self.collectives),
            "dropped_as_disturbed": {"groups": self.disturbed_groups, "collectives": self.disturbed_collectives},
            "held_out_only": self.held_out_only,
            "hardware": dict(sorted(self.hardware.items())),
        }


def load_evaluation_records(
    paths: Sequence[str | os.PathLike[str]], held_out: bool = False, ranks_held_out: Collection[int] = ()
) -> EvaluationRecords:
    """Reads and checks measurement files.

    Args:
        paths: ``.jsonl``, ``.jsonl.gz`` or ``.jsonl.xz`` files; kinds may be mixed.
        held_out: keep only what training does not see.
        ranks_held_out: numbers of ranks that the model's training did not see, as its card tells.

    Raises:
        RecordError: a file is damaged, a record cannot be used, or none is left; the message names the remedy.
        OSError: a file cannot be read.
    """
    files = tuple(str(path) for path in paths)
    found_groups = records_of_kind("group", paths)
    found_collectives = records_of_kind("collective", paths)
    if not found_groups and not found_collectives:
        raise RecordError(f"{', '.join(files)}: there are no records; collect some first ({_COLLECT})")
    groups, collectives = found_groups, found_collectives
    if held_out:
        groups = [record for record in groups if _is_held_out(record)]
        collectives = [record for record in collectives if is_test_collective(record, ranks_held_out)]
        if not groups and not collectives:
            raise RecordError(
                f"{', '.join(files)}: none of {len(found_groups)} groups and {len(found_collectives)} collectives is "
                "held out; leave out --held-out, or add records (about one in seven of a sample is held out)"
            )
    kept_groups, kept_collectives = undisturbed(groups), undisturbed(collectives)
    if not kept_groups and not kept_collectives:
        raise RecordError(
            f"{', '.join(files)}: all {len(groups) + len(collectives)} records were taken while the machine was "
            f"disturbed; collect again on a quiet machine ({_COLLECT})"
        )
    return EvaluationRecords(
        files,
        tuple(kept_groups),
        tuple(kept_collectives),
        len(groups) - len(kept_groups),
        len(collectives) - len(kept_collectives),
        held_out,
        tuple(undisturbed(record for record in found_groups if not _is_held_out(record))) if held_out else (),
    )


def _is_held_out(record: Record) -> bool:
    return is_held_out(GroupSpec.from_json(record["spec"]))
