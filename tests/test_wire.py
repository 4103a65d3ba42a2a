"""What travels between ranks, and which tables share a TBE, follow the sharder and the constraints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from planner_models import bag_collection, bag_config
from torchrec.distributed.embedding_sharding import group_tables
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardedEmbeddingTable
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType, PoolingType

from torchrec_neuroshard.adapters.module_tables import collect_tables
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import (
    FUSED_KERNELS,
    TABLE_WISE,
    Cluster,
    Placement,
    Shard,
    ShardingProblem,
    TableOptions,
)

MODEL = bag_collection(bag_config("t", 1_000, 64, ["a", "b"]))


def table_of(sharder: Any, constraint: ParameterConstraints | None = None) -> Any:
    constraints = {"t": constraint} if constraint else None
    (entry,) = collect_tables(MODEL, [sharder], constraints, "cuda", 64)
    return entry.table


def half_precision(backward: CommType = CommType.FP16) -> EmbeddingBagCollectionSharder:
    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=backward)
    registry = get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    return EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)


@pytest.mark.parametrize(
    ("sharder", "constraint", "expected"),
    [
        (EmbeddingBagCollectionSharder(), None, 4.0),
        (half_precision(), None, 2.0),
        (half_precision(CommType.FP32), None, 3.0),
        (EmbeddingBagCollectionSharder(), ParameterConstraints(output_dtype=DataType.FP16), 2.0),
        (half_precision(CommType.FP32), ParameterConstraints(output_dtype=DataType.FP16), 3.0),
    ],
)
def test_values_are_as_wide_as_codec_or_output(
    sharder: Any, constraint: ParameterConstraints | None, expected: float
) -> None:
    assert table_of(sharder, constraint).wire_bytes == expected


def test_half_as_wide_values_cost_half_the_bytes() -> None:
    def comms_ms(table: Any) -> float:
        cluster = Cluster(2, 2, "cuda", np.full((2, 2), 1e12), hardware="h100_sxm")
        problem = ShardingProblem((table,), (TableOptions((TABLE_WISE,), 64),), cluster, 2**16, lambda t, w: (0.0, 0.0))
        placement = Placement((Shard(0, 0, 64, 0),), (TABLE_WISE,))
        return float(PlanSimulator(problem, CostModel.analytic("h100_sxm")).cost(placement).forward_comms_ms[0])

    full, half = comms_ms(table_of(EmbeddingBagCollectionSharder())), comms_ms(table_of(half_precision()))
    assert 0.45 < half / full < 0.75  # latency is the same


def test_tables_of_other_settings_have_a_tbe_of_their_own() -> None:
    plain = table_of(EmbeddingBagCollectionSharder())
    other = table_of(EmbeddingBagCollectionSharder(), ParameterConstraints(stochastic_rounding=True))
    assert plain.group_key(TABLE_WISE) != other.group_key(TABLE_WISE)


def test_tables_in_host_memory_share_the_tbe_of_the_others_as_in_torchrec() -> None:
    """TorchRec's own grouping: one group of tables with three kernels, and so in ours."""
    tables = [
        ShardedEmbeddingTable(
            num_embeddings=100,
            embedding_dim=64,
            name=f"t{index}",
            embedding_names=[f"t{index}"],
            data_type=DataType.FP32,
            pooling=PoolingType.SUM,
            local_rows=100,
            local_cols=64,
            compute_kernel=EmbeddingComputeKernel(kernel),
            feature_names=[f"f{index}"],
            fused_params={},
        )
        for index, kernel in enumerate(FUSED_KERNELS)
    ]
    (of_rank,) = group_tables([tables])
    assert len(of_rank) == 1
    (entry,) = collect_tables(MODEL, [EmbeddingBagCollectionSharder()], None, "cuda", 64)  # type: ignore[list-item]
    keys = {entry.with_kernel(kernel, 0.1).table.group_key(TABLE_WISE) for kernel in FUSED_KERNELS}
    assert len(keys) == 1
