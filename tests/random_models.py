"""Random models, constraints and topologies for the planner's property test, and an independent check of plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_neuroshard.adapters import compat

OPTIMIZERS = (
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.ADAM,
)
BAG_TYPES = (
    "table_wise",
    "column_wise",
    "row_wise",
    "data_parallel",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
)
SEQUENCE_TYPES = ("table_wise", "row_wise", "column_wise", "data_parallel")
KERNELS = ("fused", "fused_uvm_caching", "fused_uvm", "dense")


@dataclass
class RandomCase:
    """One random planning problem.

    Attributes:
        model: on the meta device.
        tables: (module path, name) -> (rows, dim, whether it is a sequence table).
        constraints: the user's, by table name; names are unique over modules.
        topology: the machines, some with unequal memory.
        sharders: of all modules.
        optimizer: fused into the backward pass.
        batch_size: samples per rank.
    """

    model: nn.Module
    tables: dict[tuple[str, str], tuple[int, int, bool]]
    constraints: dict[str, ParameterConstraints]
    topology: Topology
    sharders: list[Any]
    optimizer: EmbOptimType
    batch_size: int
    sizes: list[float] = field(default_factory=list)


def random_case(seed: int) -> RandomCase:
    """The case of a seed."""
    rng = np.random.default_rng(seed)
    tables: dict[tuple[str, str], tuple[int, int, bool]] = {}
    model = nn.ModuleDict()
    for number in range(int(rng.integers(1, 4))):
        path = f"module{number}"
        sequence = bool(rng.random() < 0.25)
        dims = [int(4 * rng.integers(1, 65))] * 8 if sequence else [int(d) for d in 4 * rng.integers(1, 65, size=8)]
        count = int(rng.integers(1, 6))
        names = [f"{path}_t{index}" for index in range(count)]
        rows = [int(10 ** rng.uniform(0, 6)) for _ in names]
        data_type = DataType.FP16 if rng.random() < 0.2 else DataType.FP32
        common = [
            {
                "name": name,
                "num_embeddings": n,
                "embedding_dim": dim,
                "feature_names": [f"{name}_f{f}" for f in range(int(rng.integers(1, 3)))],
                "data_type": data_type,
            }
            for name, n, dim in zip(names, rows, dims)
        ]
        meta = torch.device("meta")
        if sequence:
            model[path] = EmbeddingCollection(tables=[EmbeddingConfig(**c) for c in common], device=meta)
        else:
            weighted = bool(rng.random() < 0.2)
            configs = [EmbeddingBagConfig(**c) for c in common]
            model[path] = EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=meta)
        tables.update({(path, name): (n, dim, sequence) for name, n, dim in zip(names, rows, dims)})
    optimizer = OPTIMIZERS[int(rng.integers(len(OPTIMIZERS)))]
    fused_params = {"optimizer": optimizer}
    return RandomCase(
        model,
        tables,
        {name: _constraint(rng, sequence) for (_, name), (_, _, sequence) in tables.items() if rng.random() < 0.5},
        _topology(rng, sum(4.0 * n * dim for n, dim, _ in tables.values())),
        [
            EmbeddingBagCollectionSharder(fused_params=fused_params),
            EmbeddingCollectionSharder(fused_params=fused_params),
        ],
        optimizer,
        int(rng.choice([1, 16, 256])),
    )


def _constraint(rng: np.random.Generator, sequence: bool) -> ParameterConstraints:
    known = SEQUENCE_TYPES if sequence else BAG_TYPES
    kinds = [kind for kind in known if rng.random() < 0.4] if rng.random() < 0.6 else None
    kernels = [kernel for kernel in KERNELS if rng.random() < 0.6] if rng.random() < 0.4 else None
    return ParameterConstraints(
        sharding_types=kinds or None,
        compute_kernels=kernels or None,
        min_partition=int(4 * rng.integers(1, 33)) if rng.random() < 0.4 and not sequence else None,
        pooling_factors=[float(np.round(10 ** rng.uniform(-1, 2), 2))],
    )


def _topology(rng: np.random.Generator, bytes_of_tables: float) -> Topology:
    world_size = int(rng.integers(1, 9))
    local = int(rng.integers(1, world_size + 1))
    device = "cuda" if rng.random() < 0.7 else "cpu"
    share = bytes_of_tables / world_size * float(2 ** rng.uniform(-1, 4)) + 2**22
    memory = {"hbm_cap": int(share), "ddr_cap": int(share * 4 ** rng.uniform(0, 2))}
    if device == "cpu":
        memory = {"ddr_cap": int(share)}
    topology = Topology(world_size, device, local_world_size=local, **memory)
    if rng.random() < 0.2:  # one rank has less memory than the others
        smaller = topology.devices[int(rng.integers(world_size))].storage
        smaller.hbm, smaller.ddr = int(smaller.hbm * 0.5), int(smaller.ddr * 0.5)
    return topology


def faults_of(case: RandomCase, plan: ShardingPlan, options: list[ShardingOption], capacity: Any) -> list[str]:
    """What is wrong with a plan; every rule is TorchRec's own, and written down here a second time.

    Args:
        case: what was to be planned.
        plan: the plan.
        options: its sharding options, with ranks.
        capacity: [ranks, 2] bytes of HBM and DDR.
    """
    faults = []
    world, local = case.topology.world_size, case.topology.local_world_size
    planned = {(path, name) for path, module in plan.plan.items() for name in module}  # type: ignore[attr-defined]
    if planned != set(case.tables):
        faults.append(f"tables planned: {sorted(planned)}, of the model: {sorted(case.tables)}")
    for path, name in sorted(planned & set(case.tables)):
        sharding: Any = plan.plan[path][name]  # type: ignore[index]
        rows, dim, sequence = case.tables[path, name]
        kind, ranks = sharding.sharding_type, list(sharding.ranks)
        constraint = case.constraints.get(name, ParameterConstraints())
        if constraint.sharding_types and kind not in constraint.sharding_types:
            faults.append(f"{name}: {kind} is not in {constraint.sharding_types}")
        if constraint.compute_kernels and sharding.compute_kernel not in constraint.compute_kernels:
            faults.append(f"{name}: {sharding.compute_kernel} is not in {constraint.compute_kernels}")
        if (kind == "data_parallel") != (sharding.compute_kernel == "dense"):
            faults.append(f"{name}: {kind} with {sharding.compute_kernel}")
        if not all(0 <= rank < world for rank in ranks):
            faults.append(f"{name}: ranks {ranks} of {world}")
        if kind == "data_parallel":
            if sorted(ranks) != list(range(world)):
                faults.append(f"{name}: replicas on {ranks}")
            continue
        shards = [(*shard.shard_offsets, *shard.shard_sizes) for shard in sharding.sharding_spec.shards]
        if [shard.placement.rank() for shard in sharding.sharding_spec.shards] != ranks:
            faults.append(f"{name}: placements are not those of ranks {ranks}")
        covered = np.zeros((min(rows, 64), dim), dtype=int)
        for first, offset, count, width in shards:
            # Large tables are checked on 64 rows that lie evenly over them, and by their total below.
            picked = np.linspace(0, rows - 1, len(covered)).astype(int)
            covered[(picked >= first) & (picked < first + count), offset : offset + width] += 1
            if width % 4:
                faults.append(f"{name}: width {width}")
        if not (covered == 1).all() or sum(count * width for _, _, count, width in shards) != rows * dim:
            faults.append(f"{name}: {shards} do not make up {rows} x {dim}")
        faults += [f"{name}: {fault}" for fault in _layout_faults(kind, shards, ranks, rows, dim, world, local)]
        if sequence and len({width for _, _, _, width in shards}) > 1:
            faults.append(f"{name}: sequence shards of several widths {shards}")
        least = min(constraint.min_partition or 4, dim)
        if kind == "column_wise" and min(width for _, _, _, width in shards) < least:
            faults.append(f"{name}: {shards} are narrower than min_partition {constraint.min_partition}")
    return faults + _memory_faults(case, options, capacity)


def _layout_faults(
    kind: str, shards: list[tuple[int, ...]], ranks: list[int], rows: int, dim: int, world: int, local: int
) -> list[str]:
    """Rules of the single types."""
    if kind == "table_wise" and len(shards) != 1:
        return [f"table_wise with {len(shards)} shards"]
    if kind == "column_wise" and len(set(ranks)) < len(ranks) and len(shards) <= world:
        return [f"two shards on one rank: {ranks}"]
    if kind == "row_wise":
        block = -(-rows // world)
        sizes = [max(0, min(block, rows - rank * block)) for rank in range(world)]
        if [count for _, _, count, _ in shards] != sizes or ranks != list(range(world)):
            return [f"row blocks {shards} on {ranks}"]
    if kind in ("table_row_wise", "grid_shard"):
        if world % local:
            return [f"{kind} on {world} ranks of hosts of {local}, which the run time takes for one host"]
        block = -(-rows // local)
        sizes = [max(0, min(block, rows - rank * block)) for rank in range(local)]
        for start in range(0, len(shards), local):
            piece, on = shards[start : start + local], ranks[start : start + local]
            if [count for _, _, count, _ in piece] != sizes or len({width for _, _, _, width in piece}) != 1:
                return [f"blocks {piece}"]
            if on != list(range(on[0], on[0] + local)) or on[0] % local or on[0] + local > world:
                return [f"blocks on {on}, hosts have {local} ranks"]
        if kind == "table_row_wise" and len(shards) != local:
            return [f"table_row_wise with {len(shards)} shards on hosts of {local}"]
    if kind == "table_column_wise" and len({rank // local for rank in ranks}) != 1:
        return [f"table_column_wise on ranks {ranks}, hosts have {local}"]
    return []


def _memory_faults(case: RandomCase, options: list[ShardingOption], capacity: Any) -> list[str]:
    """TorchRec's own estimate of each rank against its capacity; ours is never less."""
    estimator = EmbeddingStorageEstimator(case.topology, case.constraints)
    estimator.estimate(options, **compat.sharder_maps(case.sharders))
    used = np.zeros((case.topology.world_size, 2))
    for option in options:
        for shard in option.shards:
            used[shard.rank] += (shard.storage.hbm, shard.storage.ddr)
    over = np.flatnonzero((used > np.asarray(capacity) * (1 + 1e-9)).any(axis=1))
    return [f"rank {rank} takes {used[rank]} of {capacity[rank]}" for rank in over]
