"""Access distributions from reuse histograms: from exact ones, simulated batches and published ones."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from torchrec_neuroshard.access import REUSE_EDGES, AccessDistribution

ShareOf = Literal["rows", "lookups"]
BOTH: tuple[ShareOf, ...] = ("rows", "lookups")


def mixture(rows: int, one: float, other: float, share: float) -> AccessDistribution:
    """Two kinds of users: popularity that no power law has."""
    first, second = AccessDistribution.zipf(rows, one), AccessDistribution.zipf(rows, other)
    return AccessDistribution(first.counts, share * first.masses + (1 - share) * second.masses)


def counted(ids: NDArray[np.int64], share_of: ShareOf) -> NDArray[np.float64]:
    """[17] the reuse histogram of one batch, counted as NeuroShard counts it."""
    hits = np.unique(ids, return_counts=True)[1]
    bin_of_row = np.searchsorted(REUSE_EDGES, hits) - 1  # bins are (edge, next edge]
    shares = np.bincount(bin_of_row, weights=hits if share_of == "lookups" else None, minlength=17)
    return shares / shares.sum()


def assert_near(estimate: AccessDistribution, truth: AccessDistribution, lookups: float, rel: float) -> None:
    assert estimate.rows == truth.rows
    assert estimate.expected_unique(lookups) == pytest.approx(truth.expected_unique(lookups), rel=rel)
    for other in (lookups / 4, 2 * lookups):
        assert estimate.expected_unique(other) == pytest.approx(truth.expected_unique(other), rel=max(rel, 0.1))


@settings(max_examples=40, deadline=None)
@given(st.integers(50, 10**8), st.integers(100, 10**6), st.floats(0.0, 1.4), st.floats(0.0, 1.4), st.floats(0.0, 1.0))
def test_shares_of_lookups_lead_back(rows: int, lookups: int, one: float, other: float, share: float) -> None:
    truth = mixture(rows, one, other, share)
    shares = truth.reuse_histogram(lookups, "lookups")
    estimate = AccessDistribution.from_reuse_histogram(shares, rows, lookups, "lookups")
    assert_near(estimate, truth, lookups, rel=0.05)


@pytest.mark.parametrize(
    ("rows", "lookups", "one", "other", "share"),
    [
        (360_300, 7_731, 0.0, 1.390625, 0.75),  # the fit used to stop after one short step
        (2_880_754, 244_774, 0.0, 1.3745, 0.467),  # ... or to creep
        (53, 239_864, 0.0, 0.303, 0.946),  # all rows in one bin: none is missed
        (87, 25_762, 0.0, 0.242, 0.966),
    ],
)
def test_hard_mixtures_are_found(rows: int, lookups: int, one: float, other: float, share: float) -> None:
    truth = mixture(rows, one, other, share)
    estimate = AccessDistribution.from_reuse_histogram(
        truth.reuse_histogram(lookups, "lookups"), rows, lookups, "lookups"
    )
    assert_near(estimate, truth, lookups, rel=0.01)


@settings(max_examples=40, deadline=None)
@given(st.integers(50, 10**8), st.integers(100, 200_000), st.floats(0.0, 1.1), st.floats(0.0, 1.1), st.floats(0.0, 1.0))
def test_shares_of_rows_lead_back(rows: int, lookups: int, one: float, other: float, share: float) -> None:
    truth = mixture(rows, one, other, share)
    estimate = AccessDistribution.from_reuse_histogram(truth.reuse_histogram(lookups, "rows"), rows, lookups)
    assert_near(estimate, truth, lookups, rel=0.1)


@pytest.mark.parametrize("share_of", BOTH)
@pytest.mark.parametrize(("rows", "exponent"), [(10_000, 0.0), (10_000, 1.2), (1_000_000, 0.6), (10_000_000, 1.05)])
def test_the_histogram_is_reproduced(rows: int, exponent: float, share_of: ShareOf) -> None:
    shares = AccessDistribution.zipf(rows, exponent).reuse_histogram(65_536, share_of)
    estimate = AccessDistribution.from_reuse_histogram(shares, rows, 65_536, share_of)
    np.testing.assert_allclose(estimate.reuse_histogram(65_536, share_of), shares, atol=0.01)


@pytest.mark.parametrize("share_of", BOTH)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("rows", "exponent"), [(2_000, 0.8), (300_000, 0.3), (5_000_000, 1.05)])
def test_one_simulated_batch_predicts_others(rows: int, exponent: float, seed: int, share_of: ShareOf) -> None:
    truth, lookups = AccessDistribution.zipf(rows, exponent), 20_000
    batch = truth.sample(lookups, np.random.default_rng(seed))
    estimate = AccessDistribution.from_reuse_histogram(counted(batch, share_of), rows, lookups, share_of)
    assert_near(estimate, truth, lookups, rel=0.1 if share_of == "rows" else 0.03)


def test_published_shares_of_lookups_give_the_published_distinct_rows() -> None:
    """All 856 tables of dlrm_datasets 2021 as one: 887017990 lookups of 128435723 rows (its size is not published)."""
    shares = [0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052, 0.05]
    shares += [0.049, 0.048, 0.048, 0.043, 0.031, 0.023, 0.019]
    for rows in (400_000_000, 4_000_000_000):
        estimate = AccessDistribution.from_reuse_histogram(shares, rows, 887_017_990, "lookups")
        assert estimate.expected_unique(887_017_990) == pytest.approx(128_435_723, rel=0.02)
        of_rows = estimate.reuse_histogram(887_017_990, "rows")[:10]
        published = [0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001]
        np.testing.assert_allclose(of_rows, published, atol=0.012)


@pytest.mark.parametrize("share_of", BOTH)
@pytest.mark.parametrize(("rows", "lookups"), [(1, 1.0), (1, 1e6), (3, 1e6), (10**9, 1.0), (100, 40.0)])
def test_extreme_tables(rows: int, lookups: float, share_of: ShareOf) -> None:
    shares = AccessDistribution.zipf(rows, 0.0).reuse_histogram(lookups, share_of)
    estimate = AccessDistribution.from_reuse_histogram(shares, rows, lookups, share_of)
    assert estimate.rows == rows and np.all(np.diff(estimate.masses / estimate.counts) < 0)
    assert estimate.expected_unique(lookups) == pytest.approx(min(rows, lookups), rel=0.3)


def bins(**shares: float) -> list[float]:
    return [shares.get(f"b{index}", 0.0) for index in range(17)]


@pytest.mark.parametrize(
    ("shares", "rows", "lookups", "words"),
    [
        ([1.0], 10, 10.0, "17 shares"),
        (bins(b0=-1.0, b1=2.0), 10, 10.0, "at least 0"),
        (bins(b0=float("nan")), 10, 10.0, "17 shares"),
        (bins(b0=0.5), 10, 10.0, "sum to 1, got 0.5"),
        (bins(), 10, 10.0, "sum to 1"),
        (bins(b0=1.0), 10, 0.0, "number of lookups"),
        (bins(b0=1.0), 0, 10.0, "at least one row"),
        (bins(b0=1.0), 10, 1000.0, "hit 1000 rows or more, but the table has 10"),
        (bins(b0=0.5, b16=0.5), 10, 1000.0, "hit 32769 times or more, among 1000 lookups"),
    ],
)
def test_impossible_histograms_say_why(shares: list[float], rows: int, lookups: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AccessDistribution.from_reuse_histogram(shares, rows, lookups)
    with pytest.raises(ValueError, match="'rows' or of 'lookups'"):
        AccessDistribution.from_reuse_histogram(bins(b0=1.0), 10, 5.0, "bags")  # type: ignore[arg-type]
