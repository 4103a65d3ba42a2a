"""Trains a sharded model beside the unsharded one and compares them: outputs, weights and optimizers after each step.

The reference knows the plan only where numerics depend on it: row-wise Adagrad keeps one momentum per row *and shard*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from planner_models import bag_collection, bag_config, cpu_topology
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan, ShardingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_neuroshard.adapters.module_tables import collect_tables
from torchrec_neuroshard.adapters.sharding_plan import sharding_plan
from torchrec_neuroshard.problem import COLUMN_TYPES, DATA_PARALLEL, SPREAD_TYPES, Placement, Shard

LOCAL_BATCH = 10
LEARNING_RATE = 0.3
# Large, so that an eps added at another place than the reference's shows.
EPS = 1e-2

HOST_TYPES = (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)

Block = tuple[int, int, int, int]  # row, column, rows, columns


@dataclass(frozen=True)
class PlacedTable:
    """A table and where it is to lie.

    Attributes:
        name: of the table.
        rows: num_embeddings.
        dim: embedding_dim.
        features: names.
        kind: sharding type.
        pieces: (rank, width) of its column shards in column order, or (host, width) for table_row_wise and
            grid_shard, whose shards are cut into rows over a host's ranks; () for types that lie on all ranks.
    """

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    kind: str
    pieces: tuple[tuple[int, int], ...] = ()


# Tables by the name of their collection; a collection whose name begins with "weighted" is weighted.
Collections = Mapping[str, Sequence[PlacedTable]]


class Bags(nn.Module):
    """EmbeddingBagCollections side by side; returns [samples, columns] of all features, by name."""

    def __init__(self, collections: Collections, device: str) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {
                name: bag_collection(
                    *(bag_config(table.name, table.rows, table.dim, table.features) for table in tables),
                    weighted=name.startswith("weighted"),
                    device=device,
                )
                for name, tables in collections.items()
            }
        )

    def forward(self, batch: dict[str, KeyedJaggedTensor]) -> torch.Tensor:
        outputs = [module(batch[name]) for name, module in self.bags.items()]
        # Sharded modules order features by sharding type.
        return torch.cat([output[key] for output in outputs for key in sorted(output.keys())], dim=1)


class AllTypesSharder(EmbeddingBagCollectionSharder):
    """Offers on a CPU, too, the types that TorchRec can run there and does not offer."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(dict.fromkeys([*super().sharding_types(compute_device_type), *super().sharding_types("cuda")]))


class BlockRowWiseAdagrad:
    """Row-wise Adagrad whose blocks of a table each keep their own momentum: one fp32 per row of the block."""

    def __init__(self, blocks: Mapping[nn.Parameter, Sequence[Block]]) -> None:
        self._blocks = [
            (parameter, block, torch.zeros(block[2], 1)) for parameter, found in blocks.items() for block in found
        ]

    def step(self) -> None:
        for parameter, (row, column, rows, columns), momentum in self._blocks:
            assert parameter.grad is not None
            where = slice(row, row + rows), slice(column, column + columns)
            gradient = parameter.grad[where]
            momentum += (gradient**2).mean(dim=1, keepdim=True)
            parameter.data[where] -= LEARNING_RATE * gradient / (momentum.sqrt() + EPS)


_FBGEMM = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def sharders_of(optimizer: str) -> list[Any]:
    """Sharders that fuse an optimizer: sgd, adagrad or rowwise_adagrad."""
    keywords = {} if optimizer == "sgd" else {"eps": EPS}
    return [AllTypesSharder(fused_params={"optimizer": _FBGEMM[optimizer], "learning_rate": LEARNING_RATE, **keywords})]


def dense_optimizer(optimizer: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The same optimizer, not fused, of parameters that are whole."""
    if optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=LEARNING_RATE)
    kind = torch.optim.Adagrad if optimizer == "adagrad" else RowWiseAdagrad
    return kind(parameters, lr=LEARNING_RATE, eps=EPS)


def plan_of(collections: Collections, model: nn.Module, sharders: list[Any], world_size: int) -> ShardingPlan:
    """What our adapters make of the placement that the tables ask for."""
    tables = collect_tables(model, sharders, None, "cpu", LOCAL_BATCH)
    placed = {f"bags.{name}.{table.name}": table for name, tables in collections.items() for table in tables}
    wanted = [placed[f"{entry.module_path}.{entry.name}"] for entry in tables]
    shards = []
    for index, table in enumerate(wanted):
        offset = 0
        for owner, width in table.pieces:
            shards.append(Shard(index, offset, width, owner))
            offset += width
    placement = Placement(tuple(shards), tuple(table.kind for table in wanted))
    assert {table.kind for table in wanted} <= {*COLUMN_TYPES, *SPREAD_TYPES}
    return sharding_plan(tables, placement, cpu_topology(world_size), LOCAL_BATCH)


def torchrec_plan_of(collections: Collections, world_size: int, local_world_size: int) -> ShardingPlan:
    """The plan that the tables ask for, of any type that TorchRec runs, without our planner's code."""
    return ShardingPlan(
        {
            f"bags.{name}": EmbeddingModuleShardingPlan(
                {table.name: _parameter_sharding(table, world_size, local_world_size) for table in tables}
            )
            for name, tables in collections.items()
        }
    )


def _parameter_sharding(table: PlacedTable, world_size: int, local_world_size: int) -> ParameterSharding:
    if table.kind == DATA_PARALLEL:
        return ParameterSharding(DATA_PARALLEL, "dense", list(range(world_size)))
    hosts = table.kind in HOST_TYPES
    ranks_of: list[tuple[list[int], int]] = [  # (ranks over which rows are cut, width)
        (list(range(where * local_world_size, (where + 1) * local_world_size)) if hosts else [where], width)
        for where, width in table.pieces
    ] or [(list(range(world_size)), table.dim)]
    ranks, shards, column = [], [], 0
    for owners, width in ranks_of:
        block = -(-table.rows // len(owners))
        for number, rank in enumerate(owners):
            ranks.append(rank)
            shards.append(
                ShardMetadata(
                    shard_offsets=[number * block, column],
                    shard_sizes=[min(block, table.rows - number * block), width],
                    placement=f"rank:{rank}/cpu",
                )
            )
        column += width
    return ParameterSharding(table.kind, "fused", ranks, EnumerableShardingSpec(shards))


def blocks_of(entry: ParameterSharding, weight: torch.Tensor) -> list[Block]:
    """The blocks in which a plan cuts a table; one for a table that is whole on every rank."""
    if entry.sharding_spec is None:
        return [(0, 0, *weight.shape)]  # type: ignore[list-item]
    return [(*shard.shard_offsets, *shard.shard_sizes) for shard in entry.sharding_spec.shards]  # type: ignore[misc]


def random_batch(collections: Collections, rank: int, step: int) -> dict[str, KeyedJaggedTensor]:
    """A batch of one rank: 0 to 4 ids per feature and sample, some of them repeated."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    batch = {}
    for name, tables in collections.items():
        features = [(feature, table.rows) for table in tables for feature in table.features]
        lengths = torch.randint(0, 5, (len(features), LOCAL_BATCH), generator=generator)
        ids = [
            torch.randint(0, rows, (int(counts.sum()),), generator=generator)
            for (_, rows), counts in zip(features, lengths)
        ]
        values = torch.cat(ids)
        weighted = name.startswith("weighted")
        batch[name] = KeyedJaggedTensor(
            keys=[feature for feature, _ in features],
            values=values,
            lengths=lengths.flatten(),
            weights=torch.rand(values.numel(), generator=generator) if weighted else None,
        )
    return batch


def loss_of(columns: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient differs from column to column and sample to sample."""
    coefficients = torch.linspace(-1.0, 1.0, columns.shape[1])
    return (columns * coefficients).sum() + 0.5 * (columns**2).sum()


def local_parts(state: Mapping[str, Any], whole: Mapping[str, torch.Tensor]) -> Iterator[tuple[Any, torch.Tensor]]:
    """(what this rank holds of a table, the same part of the whole one) of every shard and replica of a state dict."""
    for name, tensor in state.items():
        if not hasattr(tensor, "local_shards"):  # a replica
            yield tensor, whole[name]
            continue
        for shard in tensor.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            yield shard.tensor, whole[name][row : row + rows, column : column + columns]


def largest_difference(state: Mapping[str, Any], whole: Mapping[str, torch.Tensor]) -> float:
    return max((float((part - wanted).abs().max()) for part, wanted in local_parts(state, whole)), default=0.0)


class ShardedModel:
    """A model under DistributedModelParallel with the optimizer of its replicas, which nothing fuses."""

    def __init__(self, collections: Collections, plan: ShardingPlan, sharders: list[Any], optimizer: str) -> None:
        self.collections = collections
        self.dmp = DistributedModelParallel(
            Bags(collections, "meta"), device=torch.device("cpu"), plan=plan, sharders=sharders
        )
        replicas = dict(in_backward_optimizer_filter(self.dmp.named_parameters()))
        self.dense = (
            KeyedOptimizerWrapper(replicas, lambda parameters: dense_optimizer(optimizer, list(parameters)))
            if replicas
            else None
        )

    def load(self, whole: Mapping[str, torch.Tensor]) -> None:
        """Takes its part of the weights of an unsharded model."""
        with torch.no_grad():
            for part, wanted in local_parts(self.dmp.state_dict(), whole):
                part.copy_(wanted)

    def step(self, rank: int, step: int) -> torch.Tensor:
        """Trains one step on a rank's batch; returns the outputs before it."""
        if self.dense is not None:
            self.dense.zero_grad()
        output = self.dmp(random_batch(self.collections, rank, step))
        loss_of(output).backward()
        if self.dense is not None:
            self.dense.step()
        return output.detach()


def train_beside_reference(
    rank: int,
    world_size: int,
    collections: Collections,
    optimizer: str,
    plan_for: Callable[[nn.Module, list[Any]], ShardingPlan],
    steps: int = 3,
    whole_rows: bool = False,
) -> dict[str, float]:
    """Trains under a plan and unsharded, from the same weights and on the same batches.

    Args:
        rank: of the caller.
        world_size: ranks.
        collections: the tables.
        optimizer: sgd, adagrad or rowwise_adagrad.
        plan_for: makes the plan from (model on the meta device, sharders).
        steps: training steps.
        whole_rows: row-wise Adagrad's reference keeps one momentum per row, whatever the plan.

    Returns:
        Largest differences over all steps of "outputs" and "weights" (this rank's shards and replicas), how far the
        step that moved a table least moved it ("moved"), and how many shards and replicas this rank holds ("held").
    """
    torch.manual_seed(7)
    reference = Bags(collections, "cpu")
    sharders = sharders_of(optimizer)
    plan = plan_for(Bags(collections, "meta"), sharders)
    sharded = ShardedModel(collections, plan, sharders, optimizer)
    sharded.load(reference.state_dict())

    weights = dict(reference.named_parameters())
    blocks = {}
    for path, module_plan in plan.plan.items():
        for name, entry in module_plan.items():
            weight = weights[f"{path}.embedding_bags.{name}.weight"]
            blocks[weight] = [(0, 0, *weight.shape)] if whole_rows else blocks_of(entry, weight)
    assert len(blocks) == len(weights)
    update: Any = (
        BlockRowWiseAdagrad(blocks)
        if optimizer == "rowwise_adagrad"
        else dense_optimizer(optimizer, list(weights.values()))
    )
    worst = {"outputs": 0.0, "weights": 0.0, "moved": float("inf")}
    for step in range(steps):
        output = sharded.step(rank, step)
        expected = [reference(random_batch(collections, other, step)) for other in range(world_size)]
        worst["outputs"] = max(worst["outputs"], float((output - expected[rank].detach()).abs().max()))
        reference.zero_grad()
        # TorchRec averages gradients over ranks; the reference sees the batches of all of them.
        (sum(loss_of(columns) for columns in expected) / world_size).backward()
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        with torch.no_grad():
            update.step()
            worst["moved"] = min(
                worst["moved"], min(float((w - before[name]).abs().max()) for name, w in weights.items())
            )
            worst["weights"] = max(
                worst["weights"], largest_difference(sharded.dmp.state_dict(), reference.state_dict())
            )
    return {**worst, "held": float(sum(1 for _ in local_parts(sharded.dmp.state_dict(), reference.state_dict())))}
