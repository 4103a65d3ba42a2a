"""Active sampling: which groups to measure next, by where an ensemble's nets disagree.

References:
    [Seung1992committee] H. S. Seung, M. Opper, H. Sompolinsky. Query by Committee. COLT 1992.
"""

from __future__ import annotations

from typing import Iterator

import numpy as np

from torchrec_neuroshard.costs.features import ShardFeatures, segment_sums
from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.measure.collect import Sampled, sampled_groups
from torchrec_neuroshard.measure.pool import is_held_out
from torchrec_neuroshard.measure.specs import GroupSpec
from torchrec_neuroshard.training.dataset import spec_features

_CANDIDATES = 24  # per round; the first is taken by chance
_CHOSEN = 2  # per round, those with the largest disagreement
_OF_ANOTHER_SEQUENCE = 1 << 30  # added to the seed, so that candidates are none of the sequence taken by chance


def disagreement(model: GroupCostModel, specs: list[GroupSpec]) -> np.ndarray:
    """[specs] standard deviation over the model's nets of the logarithm of each group's predicted time."""
    parts = [spec_features(spec) for spec in specs]
    owner = np.repeat(np.arange(len(parts)), [len(part.work) for part in parts])
    z = segment_sums(model.contributions(ShardFeatures.concatenate(parts)), owner, len(parts))
    return model.spread(z)


def active_groups(model: GroupCostModel, seed: int, device: str = "cpu") -> Iterator[Sampled]:
    """An endless, reproducible sequence: by turns one group by chance and some on which the model's nets disagree.

    The groups taken by chance keep a store a fair sample, held-out base tables included; chosen ones never hold
    held-out base tables, so that held-out error stays that of a random sample.

    Args:
        model: an ensemble; with fewer than two nets nothing can disagree.
        seed: seed of the sample.
        device: "cpu" or "cuda", whose pool groups are drawn from.

    Raises:
        ValueError: the model has fewer than two nets.
    """
    if len(model.nets) < 2:
        raise ValueError(f"active sampling needs a model of at least two nets, this one has {len(model.nets)}")
    by_chance, candidates = (sampled_groups(s, device) for s in (seed, seed + _OF_ANOTHER_SEQUENCE))
    while True:
        yield next(by_chance)
        specs = [next(candidates).spec for _ in range(_CANDIDATES)]
        specs = [spec for spec in specs if spec.location == "device" and not is_held_out(spec)]
        for index in np.argsort(-disagreement(model, specs), kind="stable")[:_CHOSEN]:
            yield Sampled(specs[index], "active")
