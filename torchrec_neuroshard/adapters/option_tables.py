"""From TorchRec's ``ShardingOption`` to what the simulator knows: the table, and how its shards lie."""

from __future__ import annotations

import math
from typing import Any, Mapping, Sequence

from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption

from torchrec_neuroshard.access import ID_ORDERS
from torchrec_neuroshard.adapters.module_kinds import module_kind
from torchrec_neuroshard.adapters.module_tables import DATA_TYPES
from torchrec_neuroshard.adapters.optimizers import FusedOptimizer, optimizer_of
from torchrec_neuroshard.adapters.plan_placement import option_kernel, spread_of
from torchrec_neuroshard.adapters.table_constraints import DENSE, SHARDING_TYPES
from torchrec_neuroshard.adapters.table_stats import TableStats
from torchrec_neuroshard.problem import (
    DATA_PARALLEL,
    FUSED,
    FUSED_KERNELS,
    ROW_TYPES,
    SPREAD_TYPES,
    Cluster,
    Spread,
    Table,
)


class OptionTables:
    """Reads sharding options as the planner reads tables.

    Args:
        cluster: the ranks.
        constraints: the user's constraints by table name.
        table_stats: measured pooling factors and access distributions; they win over the options' input lengths.
        optimizer: of tables on which nothing is set.
    """

    def __init__(
        self,
        cluster: Cluster,
        constraints: Mapping[str, ParameterConstraints] | None,
        table_stats: TableStats | None,
        optimizer: FusedOptimizer,
    ) -> None:
        self._cluster = cluster
        self._constraints = constraints or {}
        self._table_stats = table_stats
        self._optimizer = optimizer

    def covers(self, option: ShardingOption) -> bool:
        """Whether the simulator knows the option's sharding type, kernel, data type, module and cut."""
        kernels = (DENSE,) if option.sharding_type == DATA_PARALLEL else FUSED_KERNELS
        return (
            option.sharding_type in SHARDING_TYPES
            and option.compute_kernel in kernels
            and option.tensor.dtype in DATA_TYPES
            and (kind := module_kind(option.module[1])) is not None
            and kind.unpooled != option.is_pooled
            and self._is_cut_as_usual(option)
        )

    def spread(self, option: ShardingOption) -> Spread | None:
        """How the shards lie, where they are not placed one by one; on hosts in turn where they have no ranks yet."""
        if option.sharding_type not in SPREAD_TYPES:
            return None
        size = self._cluster.ranks_per_host
        ranks = [shard.rank for shard in option.shards]
        if any(rank is None for rank in ranks):
            ranks = [number % (size * max(1, self._cluster.hosts)) for number in range(len(ranks))]
        pieces = [(int(shard.size[1]), int(rank or 0)) for shard, rank in zip(option.shards, ranks)]
        return spread_of(option.sharding_type, pieces, self._cluster)

    def key(self, option: ShardingOption) -> tuple[Any, ...]:
        """What two options agree in whose :meth:`table` is the same."""
        return option.fqn, self._kernel(option), option.is_pooled, self.covers(option)

    def table(self, option: ShardingOption, fused_params: Mapping[str, Any]) -> Table:
        """The table of an option, with its kernel; one that is not covered as a pooled table of the fused kernel.

        Args:
            option: the option; its ``fqn`` names the table.
            fused_params: the sharder's fused params.
        """
        rows, dim = option.tensor.shape
        stats, path, name = self._table_stats, option.path, option.name
        features = _num_features(option)
        measured = stats.pooling_factor(path, name) if stats else None
        kernel, load_factor = self._kernel(option)
        return Table(
            name=option.fqn,
            num_embeddings=rows,
            embedding_dim=dim,
            pooling_factor=self._pooling_factor(option, features) if measured is None else measured,
            num_features=features,
            weighted=bool(option.is_weighted),
            data_type=DATA_TYPES.get(option.tensor.dtype, "fp32"),
            optimizer=optimizer_of(option.tensor, fused_params, self._optimizer).cost_name,
            access=stats.distribution(path, name) if stats else None,
            module=path,
            id_order=stats.id_order(path, name) if stats else ID_ORDERS[0],
            unpooled=self.covers(option) and not option.is_pooled,
            kernel=kernel,
            load_factor=load_factor,
        )

    def _kernel(self, option: ShardingOption) -> tuple[str, float]:
        """(kernel, load factor) as a :class:`Table` has them."""
        return option_kernel(option) if self.covers(option) else (FUSED, 0.0)

    def _pooling_factor(self, option: ShardingOption, features: int) -> float:
        """Mean ids per sample over all features."""
        lengths = [float(length) for length in option.input_lengths]
        constraint = self._constraints.get(option.name)
        poolings: Sequence[float] | None = option.num_poolings or getattr(constraint, "num_poolings", None)
        sizes: Sequence[float] | None = getattr(constraint, "batch_sizes", None)
        if not poolings and not sizes:
            # TorchRec's default is [1.0], whatever the number of features.
            return float(features) if lengths == [1.0] else math.fsum(lengths)
        poolings, sizes = poolings or [1.0] * len(lengths), sizes or [option.batch_size] * len(lengths)
        weights = [float(pooling) * float(size) / option.batch_size for pooling, size in zip(poolings, sizes)]
        return math.fsum(length * weight for length, weight in zip(lengths, weights))

    def _is_cut_as_usual(self, option: ShardingOption) -> bool:
        """Whether rows are cut into the blocks that TorchRec's run time expects, which are what the simulator knows."""
        if option.sharding_type not in ROW_TYPES:
            return True
        spread, cluster = self.spread(option), self._cluster
        assert spread is not None
        rows, dim = option.tensor.shape
        blocks = spread.blocks(rows, dim, cluster.world_size, cluster.ranks_per_host)
        return [[block.rows, block.width] for block in blocks] == [list(shard.size) for shard in option.shards]


def _num_features(option: ShardingOption) -> int:
    """Features that look the table up."""
    kind = module_kind(option.module[1])
    configs = kind.configs if kind is not None else ()
    found = (len(config.feature_names) for config in configs if config.name == option.name)
    return max(1, next(found, len(option.input_lengths)))
