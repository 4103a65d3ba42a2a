"""Sorting ids by blocks of rows: the price against FBGEMM's operator, roughly, and its shape."""

from __future__ import annotations

import time

import torch

from torchrec_neuroshard.costs.bucketize import bucketize_ms
from torchrec_neuroshard.costs.hardware import HARDWARE


def measured_ms(ids: int, bags: int, blocks: int) -> float:
    import fbgemm_gpu  # noqa: F401  (registers the operator)

    lengths = torch.full((bags,), ids // bags, dtype=torch.int64)
    values = torch.randint(0, 100_000, (int(lengths.sum()),))
    block_sizes = torch.tensor([-(-100_000 // blocks)], dtype=torch.int64)
    times = []
    for _ in range(7):
        begun = time.perf_counter()
        torch.ops.fbgemm.block_bucketize_sparse_features(lengths, values, False, False, block_sizes, blocks)
        times.append((time.perf_counter() - begun) * 1e3)
    return sorted(times)[1]


def test_the_price_is_of_the_operators_order() -> None:
    """Within a factor of five on any processor: shared machines are no stopwatch."""
    torch.set_num_threads(1)
    for ids, bags, blocks in ((100_000, 1_000, 8), (20_000, 5_000, 16)):
        priced = bucketize_ms(HARDWARE["generic_cpu"], ids, bags, blocks)
        assert 0.2 < measured_ms(ids, bags, blocks) / priced < 5.0


def test_more_ids_and_more_blocks_cost_more_and_nothing_costs_nothing() -> None:
    for name in ("generic_cpu", "h100_sxm"):
        spec = HARDWARE[name]
        assert bucketize_ms(spec, 0.0, 0.0, 8) == 0.0
        base = bucketize_ms(spec, 1e5, 1e3, 8)
        assert bucketize_ms(spec, 2e5, 1e3, 8) > base
        assert bucketize_ms(spec, 1e5, 1e3, 64) > base
    assert bucketize_ms(HARDWARE["h100_sxm"], 1e5, 1e3, 8) < bucketize_ms(HARDWARE["generic_cpu"], 1e5, 1e3, 8)
