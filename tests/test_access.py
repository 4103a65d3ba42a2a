"""Access distributions: bounds, extrapolation from a sample, and sampling."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_neuroshard.access import ID_ORDERS, AccessDistribution, scatter_ranks

rows_strategy = st.integers(1, 10**8)
exponents = st.floats(0.0, 1.5)


@given(rows_strategy, exponents)
def test_zipf_is_a_distribution_of_falling_popularity(rows: int, exponent: float) -> None:
    distribution = AccessDistribution.zipf(rows, exponent)
    assert distribution.rows == rows
    assert distribution.masses.sum() == pytest.approx(1.0)
    per_row = distribution.masses / distribution.counts
    assert np.all(np.diff(per_row) <= 1e-9 * per_row[:-1])


@given(rows_strategy, exponents, st.lists(st.floats(0.5, 1e9), min_size=2, max_size=6))
def test_expected_unique_is_monotone_and_bounded(rows: int, exponent: float, lookups: list[float]) -> None:
    distribution = AccessDistribution.zipf(rows, exponent)
    lookups = sorted(lookups)
    unique = [distribution.expected_unique(n) for n in lookups]
    for n, value, following in zip(lookups, unique, [*unique[1:], np.inf]):
        assert 0.0 < value <= rows * (1 + 1e-9)
        assert value <= max(n, 1.0) * (1 + 1e-9)
        assert value <= following * (1 + 1e-12)


def test_expected_unique_of_extremes() -> None:
    distribution = AccessDistribution.zipf(1000, 0.9)
    assert distribution.expected_unique(0) == 0.0
    assert distribution.expected_unique(1) == pytest.approx(1.0)
    assert distribution.expected_unique(1e12) == pytest.approx(1000)
    assert AccessDistribution.zipf(1, 0.5).expected_unique(100) == pytest.approx(1.0)


@given(st.integers(10, 10**7), st.floats(0.0, 1.3), st.floats(0.05, 1.5))
def test_more_skew_means_fewer_unique_rows(rows: int, exponent: float, more: float) -> None:
    lookups = 5000
    flat = AccessDistribution.zipf(rows, exponent).expected_unique(lookups)
    steep = AccessDistribution.zipf(rows, exponent + more).expected_unique(lookups)
    assert steep <= flat * (1 + 1e-9)


@given(rows_strategy, exponents, st.floats(0.0, 1.0))
def test_top_mass_is_monotone_and_ends_at_one(rows: int, exponent: float, share: float) -> None:
    distribution = AccessDistribution.zipf(rows, exponent)
    assert share - 1e-9 <= distribution.top_mass(share * rows) <= 1.0 + 1e-9  # popular rows get more than their share
    assert distribution.top_mass(rows) == pytest.approx(1.0)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([1000, 30_000, 1_000_000]), st.floats(0.0, 1.2), st.integers(0, 2**31))
def test_a_sample_predicts_ten_times_larger_batches(rows: int, exponent: float, seed: int) -> None:
    truth = AccessDistribution.zipf(rows, exponent)
    sample = 50_000
    ids = scatter_ranks(truth.sample(sample, np.random.default_rng(seed)), rows)
    estimate = AccessDistribution.from_ids(ids, rows)
    assert estimate.rows == rows
    for lookups in (sample, 10 * sample):
        assert estimate.expected_unique(lookups) == pytest.approx(truth.expected_unique(lookups), rel=0.05)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 200), st.lists(st.integers(0, 199), max_size=400))
def test_any_ids_give_a_distribution(rows: int, ids: list[int]) -> None:
    ids = [i % rows for i in ids]
    estimate = AccessDistribution.from_ids(ids, rows)
    assert estimate.rows == rows
    if ids:
        assert estimate.expected_unique(len(ids)) <= rows * (1 + 1e-9)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 10**6), exponents, st.integers(0, 2**31))
def test_sample_matches_the_masses(rows: int, exponent: float, seed: int) -> None:
    distribution = AccessDistribution.zipf(rows, exponent)
    draws = 20_000
    ranks = distribution.sample(draws, np.random.default_rng(seed))
    assert ranks.min() >= 0 and ranks.max() < rows
    for top in {1, max(1, rows // 10), max(1, rows // 2)}:
        expected = distribution.top_mass(top)
        tolerance = 5 * np.sqrt(max(expected * (1 - expected), 1e-4) / draws)
        assert abs(np.mean(ranks < top) - expected) < tolerance + 0.01


@given(st.integers(1, 3000))
def test_scattering_is_a_permutation(rows: int) -> None:
    ids = scatter_ranks(np.arange(rows), rows)
    assert np.array_equal(np.sort(ids), np.arange(rows))


def test_population_lies_between_its_members() -> None:
    rows, lookups = 100_000, 50_000
    middle = AccessDistribution.population(rows).expected_unique(lookups)
    flat, steep = (AccessDistribution.zipf(rows, a).expected_unique(lookups) for a in (0.0, 1.2))
    assert steep < middle < flat


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"ids span \[0, 12\].*\[0, 10\)"):
        AccessDistribution.from_ids([0, 12], 10)
    with pytest.raises(ValueError, match="at least one row"):
        AccessDistribution.zipf(0, 1.0)
    with pytest.raises(ValueError, match="must not be negative"):
        AccessDistribution.zipf(10, -0.1)
    with pytest.raises(ValueError, match="sum to 1"):
        AccessDistribution(np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match="one length"):
        AccessDistribution(np.ones(2), np.full(3, 1 / 3))


@pytest.mark.parametrize(("id_order", "share"), [("frequency", 0.64), ("scattered", 0.125)])
def test_the_first_of_eight_row_blocks(id_order: str, share: float) -> None:
    distribution = AccessDistribution.zipf(1_000_000, 0.8)
    found, block = distribution.row_block(0, 125_000, 1_000_000, id_order)
    assert found == pytest.approx(share, abs=0.01)
    assert block.rows == 125_000


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1000, 10**8),  # in smaller blocks the chance that moves lookups between them matters
    exponent=st.floats(0.0, 1.3),
    blocks=st.integers(1, 8),
    lookups=st.integers(100, 10**6),
    id_order=st.sampled_from(ID_ORDERS),
)
def test_row_blocks_add_up_to_the_table(rows: int, exponent: float, blocks: int, lookups: int, id_order: str) -> None:
    distribution = AccessDistribution.zipf(rows, exponent)
    edges = np.linspace(0, rows, blocks + 1).astype(int)
    parts = [distribution.row_block(a, b, rows, id_order) for a, b in zip(edges[:-1], edges[1:])]
    assert sum(share for share, _ in parts) == pytest.approx(1.0)
    assert [block.rows for _, block in parts] == np.diff(edges).tolist()
    unique = sum(block.expected_unique(share * lookups) for share, block in parts)
    assert unique == pytest.approx(distribution.expected_unique(lookups), rel=0.02, abs=0.5)
    if id_order == "frequency":
        shares = [share / block.rows for share, block in parts]
        assert np.all(np.diff(shares) <= 1e-9)


def test_blocks_that_nobody_looks_up_and_bad_blocks() -> None:
    half = AccessDistribution(np.asarray([50.0, 50.0]), np.asarray([1.0, 0.0]))
    share, block = half.row_block(60, 100, 100, "frequency")
    assert share == 0.0 and block.rows == 40
    for first, last in ((0, 0), (5, 101), (-1, 5)):
        with pytest.raises(ValueError, match="no block of a table of 100 rows"):
            half.row_block(first, last, 100)
    with pytest.raises(ValueError, match="scattered, frequency"):
        half.row_block(0, 10, 100, "random")
