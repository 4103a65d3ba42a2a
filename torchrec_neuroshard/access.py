"""Access distributions: how a table's lookups spread over its rows.

A distribution is kept as a rank-frequency histogram (rows sorted by falling popularity, cut into
logarithmic bins), which depends on neither the batch size nor the number of samples it was estimated
from. Whatever a batch of ``n`` lookups needs, such as its expected number of distinct rows, is derived.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Sequence

import numpy as np
from numpy.typing import NDArray

# Exponents averaged by :meth:`AccessDistribution.population`, the default for a table of unknown skew.
# They span the pool that the shipped cost models were trained on.
POPULATION_EXPONENTS: tuple[float, ...] = (0.0, 0.3, 0.6, 0.9, 1.05, 1.2)

# Hits of one row within a batch, by which a reuse histogram bins: 1, 2, 3 to 4, 5 to 8, ..., 16385 to 32768, more.
# The bins in which Meta's dlrm_datasets publish reuse, and which NeuroShard's features are made of.
REUSE_EDGES: tuple[int, ...] = (0, *(2**power for power in range(16)))  # a bin ends with the next bin's edge

# How a table's ids lie: popular rows anywhere, or ids counting up from the most popular row.
SCATTERED = "scattered"
ID_ORDERS: tuple[str, ...] = (SCATTERED, "frequency")

_BINS_PER_OCTAVE = 3
_HEAD_COUNT = 5  # observations from which a row's own share is trusted


@dataclass(frozen=True, eq=False)
class AccessDistribution:
    """Rank-frequency histogram of the lookups of one table.

    Attributes:
        counts: [bins] number of rows in each bin, most popular rows first.
        masses: [bins] share of the lookups that go to each bin; sums to 1.
    """

    counts: NDArray[np.float64]
    masses: NDArray[np.float64]

    def __post_init__(self) -> None:
        if self.counts.shape != self.masses.shape or self.counts.ndim != 1:
            raise ValueError(
                f"counts and masses must be vectors of one length, got {self.counts.shape} and {self.masses.shape}"
            )
        if not (np.isfinite(self.counts).all() and np.all(self.counts > 0) and np.all(self.masses >= 0)):
            raise ValueError("counts must be positive and finite, and masses must not be negative")
        if abs(float(self.masses.sum()) - 1.0) > 1e-6:
            raise ValueError(f"masses must sum to 1, got {float(self.masses.sum())}")

    @classmethod
    def zipf(cls, rows: int, exponent: float) -> AccessDistribution:
        """Bounded power law: the row of popularity rank ``r`` is looked up in proportion to ``r**-exponent``.

        Args:
            rows: number of rows of the table.
            exponent: 0 is uniform; production tables range from 0.6 to 1.3.
        """
        if rows < 1:
            raise ValueError(f"a table needs at least one row, got {rows}")
        if exponent < 0:
            raise ValueError(f"a Zipf exponent must not be negative, got {exponent}")
        return _zipf(int(rows), float(exponent))

    @classmethod
    def population(cls, rows: int) -> AccessDistribution:
        """The default for a table of unknown skew: the mean over :data:`POPULATION_EXPONENTS`."""
        return _population(int(rows))

    @classmethod
    def from_ids(cls, ids: NDArray[np.int64] | Sequence[int], rows: int) -> AccessDistribution:
        """Estimates the distribution from observed lookups.

        Rows seen at least :data:`_HEAD_COUNT` times keep their observed share. All others, seen or not, form
        a power-law tail whose exponent is the one for which a sample of this size is expected to hold as
        many distinct rows as it did, so that larger batches are extrapolated along the tail.

        Args:
            ids: [lookups] row ids in [0, rows).
            rows: number of rows of the table.

        Raises:
            ValueError: an id lies outside the table.
        """
        array = np.asarray(ids, dtype=np.int64)
        if array.size == 0:
            return cls.population(rows)
        if array.min() < 0 or array.max() >= rows:
            raise ValueError(f"ids span [{array.min()}, {array.max()}] but the table has rows [0, {rows})")
        seen = np.sort(np.unique(array, return_counts=True)[1])[::-1].astype(np.float64)
        head = seen[seen >= _HEAD_COUNT]
        head_counts, head_masses = np.empty(0), np.empty(0)
        if head.size:
            edges = _bin_edges(head.size)
            head_counts = np.diff(edges).astype(np.float64)
            head_masses = np.diff(np.concatenate([[0.0], np.cumsum(head)])[edges]) / array.size
        if head.size == rows:
            return cls(head_counts, head_masses / head_masses.sum())

        def with_tail(exponent: float) -> AccessDistribution:
            tail_counts, tail_masses = _power_law_bins(rows - head.size, exponent, first_rank=head.size)
            masses = np.concatenate([head_masses, tail_masses * (1.0 - head_masses.sum())])
            return cls(np.concatenate([head_counts, tail_counts]), masses / masses.sum())

        low, high = 0.0, 4.0
        for _ in range(30):
            middle = (low + high) / 2
            if with_tail(middle).expected_unique(array.size) > seen.size:
                low = middle
            else:
                high = middle
        return with_tail(low)

    @classmethod
    def from_reuse_histogram(
        cls,
        histogram: Sequence[float] | NDArray[np.float64],
        rows: int,
        lookups: float,
        share_of: Literal["rows", "lookups"] = "rows",
    ) -> AccessDistribution:
        """The distribution under which a batch of ``lookups`` ids is expected to have this reuse histogram.

        Unlike the histogram it holds for batches of any size (see :mod:`torchrec_neuroshard.access_histogram`).
        Shares of lookups determine it better: of distinct rows, those hit most are a share too small to tell how
        often, and how many distinct rows there are follows from that.

        Args:
            histogram: [17] shares of the batch's distinct rows that are hit 1, 2, 3 to 4, 5 to 8, ..., more than
                32768 times (:data:`REUSE_EDGES`), as NeuroShard's bin_0 to bin_16.
            rows: number of rows of the table.
            lookups: ids in the batch that the histogram was measured on: samples times pooling factor.
            share_of: "lookups" when the shares are of the batch's lookups instead.

        Raises:
            ValueError: the histogram is none, or not that of so many lookups of a table with so many rows.
        """
        from torchrec_neuroshard.access_histogram import fit_reuse_histogram

        return cls(*fit_reuse_histogram(histogram, rows, lookups, share_of))

    @property
    def rows(self) -> int:
        """Number of rows of the table."""
        return int(round(float(self.counts.sum())))

    def expected_unique(self, lookups: float) -> float:
        """Expected number of distinct rows among ``lookups`` independent draws."""
        if lookups <= 0:
            return 0.0
        probability = np.minimum(self.masses / self.counts, 1.0 - 1e-15)
        return float((self.counts * -np.expm1(lookups * np.log1p(-probability))).sum())

    def reuse_histogram(self, lookups: float, share_of: Literal["rows", "lookups"] = "rows") -> NDArray[np.float64]:
        """How often rows are hit in a batch of ``lookups`` independent draws, in expectation.

        Args:
            lookups: ids in the batch, of all its samples together.
            share_of: "rows" for the share of the batch's distinct rows in each bin (NeuroShard's bin_0 to bin_16),
                "lookups" for the share of the batch's lookups that go to them.

        Returns:
            [17] shares by hits of the row, in the bins of :data:`REUSE_EDGES`; they sum to 1, or are all 0 without
            lookups.
        """
        edges = np.asarray(REUSE_EDGES, dtype=np.float64)
        if lookups <= 0:
            return np.zeros(edges.size)
        probability = np.minimum(self.masses / self.counts, 1.0)
        if share_of == "rows":
            beyond = self.counts @ _exceeds(lookups, probability, edges)
        else:  # the row of a lookup has one hit more than the other lookups give it
            beyond = self.masses @ _exceeds(lookups - 1.0, probability, edges - 1.0)
        shares = np.maximum(-np.diff(beyond, append=0.0), 0.0)
        return np.asarray(shares / shares.sum())

    def top_mass(self, rows: float) -> float:
        """Share of the lookups that go to the ``rows`` most popular rows."""
        ends = np.cumsum(self.counts)
        cumulative = np.cumsum(self.masses)
        return float(np.interp(rows, np.concatenate([[0.0], ends]), np.concatenate([[0.0], cumulative])))

    def row_block(
        self, first_row: int, last_row: int, rows: int, id_order: str = "scattered"
    ) -> tuple[float, AccessDistribution]:
        """What a contiguous block of the table's rows sees, as a row-wise shard does.

        Args:
            first_row: first id of the block.
            last_row: id behind the last one of the block.
            rows: rows of the table.
            id_order: one of :data:`ID_ORDERS`. "scattered": popular rows lie anywhere, and the block is expected to
                hold its share of each popularity (so counts of the hottest rows are fractions: which block a hot row
                falls into is not known). "frequency": ids count up from the most popular row.

        Returns:
            The block's share of the table's lookups, and how they spread over the block's rows.

        Raises:
            ValueError: the block is empty or not within the table, or the order is unknown.
        """
        if not 0 <= first_row < last_row <= rows:
            raise ValueError(f"rows [{first_row}, {last_row}) are no block of a table of {rows} rows")
        if id_order not in ID_ORDERS:
            raise ValueError(f"id_order must be one of {', '.join(ID_ORDERS)}, got {id_order!r}")
        share = (last_row - first_row) / rows
        if id_order == "scattered":
            return share, AccessDistribution(self.counts * share, self.masses)
        scale = float(self.counts.sum()) / rows  # 1, but for rounding
        ends = np.cumsum(self.counts)
        inside = np.minimum(ends, last_row * scale) - np.maximum(ends - self.counts, first_row * scale)
        bins = np.flatnonzero(inside > 1e-9 * self.counts)
        counts = inside[bins]
        masses = self.masses[bins] * (counts / self.counts[bins])
        lookups = float(masses.sum())
        if lookups <= 0.0:  # rows that are never looked up: any distribution serves
            return 0.0, AccessDistribution.zipf(last_row - first_row, 0.0)
        return min(lookups, 1.0), AccessDistribution(counts, masses / lookups)

    def sample(self, lookups: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draws [lookups] popularity ranks in [0, rows); rank 0 is the most popular row."""
        cumulative = np.cumsum(self.masses)
        starts = np.concatenate([[0.0], np.cumsum(self.counts)[:-1]])
        draws = rng.random(lookups) * cumulative[-1]
        bins = np.minimum(np.searchsorted(cumulative, draws, side="right"), self.masses.size - 1)
        within = (draws - (cumulative - self.masses)[bins]) / np.maximum(self.masses[bins], 1e-300)
        ranks = starts[bins] + np.floor(np.clip(within, 0.0, 1.0 - 1e-12) * self.counts[bins])
        return ranks.astype(np.int64)


def scatter_ranks(ranks: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Maps popularity ranks to row ids that lie scattered over the table (a fixed affine permutation)."""
    multiplier, shift = scattering(rows)
    return (ranks * multiplier + shift) % rows


def scattering(rows: int) -> tuple[int, int]:
    """(multiplier, shift) of :func:`scatter_ranks` for a table of so many rows."""
    multiplier = max(1, int(rows * 0.6180339887))
    while np.gcd(multiplier, rows) != 1:
        multiplier += 1
    return multiplier, 7


def _exceeds(draws: float, probability: NDArray[np.float64], hits: NDArray[np.float64]) -> NDArray[np.float64]:
    """[bins, hits] probability that more than ``hits`` of ``draws`` go to a row; binomial, for real ``draws`` too."""
    from scipy.special import betainc

    draws = max(draws, 0.0)
    mean = (draws * probability)[:, None]
    deviations = 10.0 * (np.sqrt(mean) + 1.0)  # beyond which a tail is less than rounding
    result = (hits < np.maximum(mean - deviations, 0.0)).astype(np.float64)
    bins, columns = np.nonzero((hits >= 0) & (hits < draws) & (np.abs(hits - mean) <= deviations))
    result[bins, columns] = betainc(hits[columns] + 1.0, draws - hits[columns], probability[bins])
    return result


def _bin_edges(rows: int) -> NDArray[np.int64]:
    """[bins + 1] edges: single ranks first, then _BINS_PER_OCTAVE bins for each doubling of the rank."""
    octaves = np.log2(rows + 1)
    grid = np.exp2(np.linspace(0.0, octaves, max(2, int(np.ceil(octaves * _BINS_PER_OCTAVE)) + 1)))
    edges = np.unique(np.round(grid).astype(np.int64)) - 1
    edges[-1] = rows
    return edges


@lru_cache(maxsize=65536)
def _zipf(rows: int, exponent: float) -> AccessDistribution:
    return AccessDistribution(*_power_law_bins(rows, exponent))


@lru_cache(maxsize=65536)
def _population(rows: int) -> AccessDistribution:
    members = [AccessDistribution.zipf(rows, exponent) for exponent in POPULATION_EXPONENTS]
    return AccessDistribution(members[0].counts, np.mean([member.masses for member in members], axis=0))


def _power_law_bins(rows: int, exponent: float, first_rank: int = 0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bins the power law over the ranks [first_rank, first_rank + rows): counts and masses, both [bins]."""
    edges = _bin_edges(rows)
    # Midpoint rule: the integral from r - 1/2 to r + 1/2 stands for r**-exponent.
    positions = edges.astype(np.float64) + first_rank + 0.5
    if abs(exponent - 1.0) < 1e-9:
        masses = np.diff(np.log(positions))
    else:
        masses = np.diff(positions ** (1.0 - exponent)) / (1.0 - exponent)
    return np.diff(edges).astype(np.float64), masses / masses.sum()
