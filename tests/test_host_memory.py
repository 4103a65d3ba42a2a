"""Rows in host memory: published times that set no constant, what an LRU cache lacks, and bounds."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.costs.features import ShardWork, shard_features
from torchrec_neuroshard.costs.hardware import HARDWARE
from torchrec_neuroshard.costs.host_memory import UVM, UVM_CACHING, host_memory_ms, missed_rows
from torchrec_neuroshard.costs.model import CostModel

ROWS, BATCH, TABLES = 26_843_545, 104_857, 10  # dynamicemb's benchmark: unpooled, one id per sample


def shards(optimizer: str) -> list[ShardWork]:
    access = AccessDistribution.zipf(ROWS, 1.05)
    shard = ShardWork(ROWS, 128, 1.0, 1, BATCH, 4, False, optimizer, access, pooling="none")
    return [shard] * TABLES


@pytest.mark.parametrize(
    ("kernel", "optimizer", "direction", "milliseconds"),
    [
        (UVM, "sgd", 0, 7.93),
        (UVM, "sgd", 1, 5.63),
        (UVM, "adam", 1, 16.1),
        (UVM_CACHING, "sgd", 0, 3.36),
        (UVM_CACHING, "sgd", 1, 0.788),
        (UVM_CACHING, "adam", 1, 11.0),
    ],
)
def test_h100_preset_is_near_published_lookups_in_host_memory(
    kernel: str, optimizer: str, direction: int, milliseconds: float
) -> None:
    """NVIDIA/recsys-examples@43465ae, dynamicemb benchmark_results.json; the cache has the rows of 100 batches."""
    group, model = shards(optimizer), CostModel.analytic("h100_sxm").groups
    in_hbm = model.predict(model.contributions(shard_features(group)).sum(axis=0)[None])[0]
    load_factor = group[0].access.expected_unique(100 * BATCH) / ROWS
    more = host_memory_ms(HARDWARE["h100_sxm"], group, kernel, load_factor)
    assert in_hbm[direction] + more[direction] == pytest.approx(milliseconds, rel=0.3)


@pytest.mark.parametrize(("exponent", "cache_rows"), [(0.0, 5_000), (0.8, 2_000), (1.05, 8_000)])
def test_misses_are_those_of_a_simulated_lru_cache(exponent: float, cache_rows: int) -> None:
    access, lookups, batches = AccessDistribution.zipf(20_000, exponent), 1_000, 80
    rng = np.random.default_rng(0)
    cache: OrderedDict[int, None] = OrderedDict()
    missed = []
    for _ in range(batches):
        count = 0
        for row in access.sample(lookups, rng).tolist():
            count += row not in cache
            cache[row] = None
            cache.move_to_end(row)
            if len(cache) > cache_rows:
                cache.popitem(last=False)
        missed.append(count)
    assert missed_rows(access, lookups, cache_rows) == pytest.approx(np.mean(missed[40:]), rel=0.05)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 10**8), st.floats(0.0, 1.5), st.floats(1.0, 1e6), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_larger_caches_miss_less(rows: int, exponent: float, lookups: float, one: float, other: float) -> None:
    access = AccessDistribution.zipf(rows, exponent)
    less, more = sorted((one, other))
    few, many = missed_rows(access, lookups, more * rows), missed_rows(access, lookups, less * rows)
    assert -1e-6 * rows <= few <= many * (1 + 1e-6) + 1e-6 * rows
    assert many <= access.expected_unique(lookups) * (1 + 1e-6)
    assert missed_rows(access, lookups, rows) == 0.0


def test_caching_pays_less_than_reading_in_place() -> None:
    group, spec = shards("sgd"), HARDWARE["a100_sxm_80gb"]
    in_place, cached = host_memory_ms(spec, group, UVM), host_memory_ms(spec, group, UVM_CACHING, 0.2)
    assert cached[0] < in_place[0] and cached[1] == 0.0 < in_place[1]
    assert host_memory_ms(spec, group, UVM_CACHING, 0.01)[0] > cached[0]
    assert host_memory_ms(spec, shards("adagrad"), UVM_CACHING)[1] > 0.0
    assert host_memory_ms(spec, shards("rowwise_adagrad"), UVM_CACHING)[1] == 0.0  # its state lies on the device


@pytest.mark.parametrize("name", sorted(HARDWARE))
def test_only_gpus_have_a_host_link(name: str) -> None:
    if HARDWARE[name].device == "cuda":
        assert host_memory_ms(HARDWARE[name], shards("sgd"), UVM)[0] > 0.0
    else:
        with pytest.raises(ValueError, match="over no link"):
            host_memory_ms(HARDWARE[name], shards("sgd"), UVM)
    with pytest.raises(ValueError, match="fused_uvm or fused_uvm_caching"):
        host_memory_ms(HARDWARE["h100_sxm"], shards("sgd"), "fused")
