"""A group cost that adds up: each shard costs what it would cost alone.

Used by ablations and wherever a user insists on an additive objective. The same interface as
:class:`~torchrec_neuroshard.costs.group_model.GroupCostModel`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.features import ShardFeatures


class GroupCosts(Protocol):
    """What the simulator asks of a model of fused groups."""

    @property
    def z_dim(self) -> int:
        """Length of a shard's contribution."""
        ...

    def contributions(self, shards: ShardFeatures) -> NDArray[np.float64]:
        """[shards, z_dim] what each shard adds to its group's sum."""
        ...

    def predict(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """[groups, 2] forward and backward ms of groups with sums [groups, z_dim]."""
        ...


class AdditiveGroupModel:
    """Sums the costs that another model predicts for each shard alone."""

    z_dim = 2

    def __init__(self, single: GroupCosts) -> None:
        self._single = single

    def contributions(self, shards: ShardFeatures) -> NDArray[np.float64]:
        """[shards, 2] forward and backward ms of each shard alone."""
        return self._single.predict(self._single.contributions(shards))

    def predict(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sums themselves."""
        return z
