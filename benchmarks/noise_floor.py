"""How far two measurements of the same thing are apart: what no cost model can be better than.

    python -m benchmarks.noise_floor FILE_A FILE_B [--json]

Give two measurement files that were made with the same seed in different processes (best with an hour between them).
Records are paired by what they measured. A model that knew the true mean time would be off by less than two noisy
measurements are from each other, by a factor of about the square root of two.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from typing import Any, Callable, Sequence

import numpy as np

from torchrec_neuroshard.measure.specs import CollectiveSpec, GroupSpec
from torchrec_neuroshard.measure.store import RecordError
from torchrec_neuroshard.training.collective_data import layout_name
from torchrec_neuroshard.training.dataset import records_of_kind, undisturbed

Record = dict[str, Any]
Times = dict[str, list[float]]


def group_times(record: Record) -> Times:
    """Median ms of a group's forward, backward, and both."""
    return {name: [float(record[f"{name}_ms"]["median"])] for name in ("forward", "backward", "total")}


def collective_times(record: Record) -> Times:
    """Median ms of a collective's ranks, and of the slowest of them."""
    ranks = [float(timing["median"]) for timing in record["rank_ms"]]
    return {"per_rank": ranks, "slowest": [max(ranks)]}


def group_labels(record: Record) -> list[str]:
    """What a group's disagreement counts towards."""
    spec = GroupSpec.from_json(record["spec"])
    return ["all groups", f"groups, {spec.optimizer}, {spec.data_type}, {spec.compute_kernel}, pooling {spec.pooling}"]


def collective_labels(record: Record) -> list[str]:
    """What a collective's disagreement counts towards."""
    spec = CollectiveSpec.from_json(record["spec"])
    name = f"{spec.name} {spec.direction}" if spec.name == "all_to_all" else spec.name
    layout = layout_name(spec.hosts, spec.ranks_per_host)
    return ["all collectives", name, f"hosts x ranks {layout}", f"hosts x ranks {layout}, {name}"]


_KINDS: dict[str, tuple[Callable[[Record], Times], Callable[[Record], list[str]]]] = {
    "group": (group_times, group_labels),
    "collective": (collective_times, collective_labels),
}


def disagreement(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Median and p95 of the difference as a share of the second time, and the geometric mean ratio less 1.

    The same figures as a model's errors have, with the first measurement for the prediction; taken in both
    directions, so that the order of the files does not matter but for the sign of the bias.

    Args:
        first: ms of one file.
        second: ms of the other, paired.
    """
    one, other = np.asarray(first), np.asarray(second)
    errors = np.concatenate([np.abs(one / other - 1.0), np.abs(other / one - 1.0)])
    return {
        "median_ape": round(float(np.median(errors)), 4),
        "p95_ape": round(float(np.percentile(errors, 95)), 4),
        "bias": round(float(np.exp(np.mean(np.log(one / other))) - 1.0), 4),
    }


def noise_floor(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Disagreement of two measurement files, by what was measured.

    Args:
        first: a ``.jsonl`` file, maybe compressed.
        second: another, of the same specs on the same kind of machine.

    Returns:
        label -> {"records": pairs, and for each time that records hold: "median_ape", "p95_ape", "bias"}.

    Raises:
        RecordError: a file is damaged, or the files have no record in common.
        OSError: a file cannot be read.
    """
    pairs: dict[str, dict[str, tuple[list[float], list[float]]]] = defaultdict(lambda: defaultdict(lambda: ([], [])))
    records: dict[str, int] = defaultdict(int)
    for kind, (times_of, labels_of) in _KINDS.items():
        ours, theirs = ({_key(r): r for r in undisturbed(records_of_kind(kind, [path]))} for path in (first, second))
        for key in ours.keys() & theirs.keys():
            one, other = times_of(ours[key]), times_of(theirs[key])
            for label in labels_of(ours[key]):
                records[label] += 1
                for name in one:
                    pairs[label][name][0].extend(one[name])
                    pairs[label][name][1].extend(other[name])
    if not pairs:
        raise RecordError(
            f"{first}, {second}: no spec was measured in both on the same kind of machine; measure again with the seed "
            "of the first file into a new one"
        )
    return {
        label: {"records": records[label], **{name: disagreement(*times) for name, times in pairs[label].items()}}
        for label in sorted(pairs, key=lambda label: (not label.startswith("all "), label))
    }


def _key(record: Record) -> tuple[str, str]:
    return str(record["hardware"]["name"]), str(record["id"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the disagreement of two files; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs=2, metavar="FILE", help="measurement files of the same specs")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    try:
        found = noise_floor(*options.files)
    except RecordError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: cannot be read ({error.strerror})", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(found, allow_nan=False))
        return 0
    width = max(map(len, found))
    for label, figures in found.items():
        for name, errors in figures.items():
            if name == "records":
                continue
            shown = f"median {errors['median_ape']:6.1%}  p95 {errors['p95_ape']:6.1%}  bias {errors['bias']:+6.1%}"
            print(f"{label:{width}}  {figures['records']:5d} pairs  {name:9}  {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
