"""Row-wise shards: TorchRec's cut, and expected lookups and distinct rows against batches that FBGEMM bucketizes."""

from __future__ import annotations

import fbgemm_gpu  # noqa: F401  (registers the operators)
import numpy as np
import pytest
import torch
from torchrec.distributed.embedding_types import ShardingType
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets

from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.costs.features import shard_features
from torchrec_neuroshard.costs.row_wise import row_wise_work
from torchrec_neuroshard.layout import row_blocks
from torchrec_neuroshard.problem import Table

BATCH = 4096


def table(rows: int, exponent: float, pooling: float, id_order: str) -> Table:
    access = AccessDistribution.zipf(rows, exponent)
    return Table(
        "t", rows, 64, pooling, num_features=2, weighted=True, data_type="fp16", access=access, id_order=id_order
    )


@pytest.mark.parametrize(("rows", "ranks"), [(1000, 8), (1001, 8), (10, 4), (5, 4), (3, 8), (1, 2), (7, 1)])
def test_blocks_are_cut_as_torchrec_cuts_them(rows: int, ranks: int) -> None:
    sizes, offsets = calculate_shard_sizes_and_offsets(
        torch.empty(rows, 4, device="meta"), ranks, ranks, ShardingType.ROW_WISE.value
    )
    blocks = row_blocks(rows, ranks)
    assert [last - first for first, last in blocks] == [size[0] for size in sizes]
    assert [first for first, _ in blocks] == [offset[0] for offset in offsets]


def test_blocks_need_rows_and_ranks() -> None:
    with pytest.raises(ValueError, match="at least one row and one rank"):
        row_blocks(10, 0)


@pytest.mark.parametrize("id_order", ["scattered", "frequency"])
@pytest.mark.parametrize(("rows", "exponent", "ranks"), [(50_000, 0.7, 8), (100_003, 0.4, 4), (9, 0.5, 4)])
def test_work_is_what_fbgemm_bucketizes(rows: int, exponent: float, ranks: int, id_order: str) -> None:
    whole = table(rows, exponent, 10.0, id_order)
    works = row_wise_work(whole, ranks, BATCH)
    rng = np.random.default_rng(0)
    lookups, distinct = np.zeros(ranks), np.zeros(ranks)
    batches = 8
    for _ in range(batches):  # each with its own places of the popular rows: which block has a hot row is chance
        ids = whole.distribution.sample(BATCH * 10, rng)
        ids = ids if id_order == "frequency" else rng.permutation(rows)[ids]
        lengths, values, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
            torch.full((BATCH,), 10), torch.from_numpy(ids), False, False, torch.tensor([-(-rows // ranks)]), ranks
        )
        per_rank = lengths.view(ranks, BATCH).sum(dim=1)
        lookups += per_rank.numpy() / batches
        distinct += [part.unique().numel() / batches for part in values.split(per_rank.tolist())]
    for work, seen, unique in zip(works, lookups, distinct):
        assert work.pooling_factor * BATCH == pytest.approx(seen, rel=0.05 if rows > 100 else 0.4, abs=1e-9)
        expected = work.access.expected_unique(work.pooling_factor * BATCH)
        assert expected == pytest.approx(unique, rel=0.05, abs=1e-9)


@pytest.mark.parametrize("id_order", ["scattered", "frequency"])
def test_every_rank_makes_all_bags_at_full_width(id_order: str) -> None:
    whole = table(1_000_001, 0.9, 20.0, id_order)
    works = row_wise_work(whole, 8, BATCH)
    assert sum(work.rows for work in works) == 1_000_001 and len(works) == 8
    assert sum(work.pooling_factor for work in works) == pytest.approx(20.0)
    assert {(work.dim, work.num_features, work.batch_size) for work in works} == {(64, 2, BATCH)}
    assert {(work.element_bytes, work.weighted, work.optimizer) for work in works} == {(2, True, "sgd")}
    heaviest = max(work.pooling_factor for work in works) / 20.0
    assert heaviest > 0.7 if id_order == "frequency" else heaviest == pytest.approx(1 / 8, rel=1e-4)


def test_empty_blocks_have_features_too() -> None:
    works = row_wise_work(table(5, 0.5, 2.0, "scattered"), 4, BATCH)
    assert [work.rows for work in works] == [2, 2, 1, 1] and works[-1].pooling_factor == 0.0
    features = shard_features(works)
    assert np.isfinite(features.features).all() and np.isfinite(features.work).all()
