"""From a reuse histogram, which holds for one batch size, to the access distribution behind it.

A reuse histogram says which share of a batch's distinct rows (or of its lookups) belongs to rows that are hit once,
twice, 3 to 4 times, 5 to 8 times, ... Rows that are hit often show their popularity; rows hit once do not: most are a
few of many cold ones. But the whole histogram, with the number of rows never hit, is linear in the number of rows of
each popularity, so it determines the *mixture* of popularities well enough to say what other batches hold: the
problem of unseen species [Efron1976unseen]. The mixture is found by penalised least squares over log-densities: as
close to a power law as the histogram allows where rows are cold, as the histogram says where they are hot.

The bins and "share of distinct rows" are NeuroShard's (daochenzha/neuroshard, tools/gen_dlrm_data.py, bin_0 to bin_16)
and those of facebookresearch/dlrm_datasets (locality_stats.txt), which publishes the share of lookups too.

References:
    [Efron1976unseen] B. Efron, R. Thisted. Estimating the number of unseen species: how many words did Shakespeare
        know? Biometrika 63(3), 1976.
    [Madsen2004lsq] K. Madsen, H. B. Nielsen, O. Tingleff. Methods for non-linear least squares problems. DTU, 2004.
"""

from __future__ import annotations

from typing import Literal, Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.access import POPULATION_EXPONENTS, REUSE_EDGES, _exceeds, _power_law_bins

_EDGES = np.asarray(REUSE_EDGES, dtype=np.float64)
_POINTS_PER_OCTAVE = 3  # of the grid of popularities
_COLDEST = 2.0**-10  # hits below which, and below that share of a row's mean, rows are alike: hardly ever hit
_HOT_BIN = 5  # rows of this bin and later, hit 17 times or more, start with the popularity that they show
_SPREAD = 0.1  # share of the rows that start spread over common power laws: one could be too narrow to move away from
_FLOOR = 1e-4  # share of the rows that the start spreads over all popularities, so that none is ruled out
_CURVATURE = 0.03  # weight of the second differences of the log-density
_RIDGE = 1e-4  # weight of the log-density's distance from the start, where nothing else determines it
_PREPARATIONS = 100  # steps of expectation maximisation
_STEPS = 120  # of Levenberg-Marquardt
_PATIENCE = 3  # of them in a row that gain little: after one alone, damping may only have been too strong
_SUM_TOLERANCE = 0.02  # published shares have three digits


def fit_reuse_histogram(
    histogram: Sequence[float] | NDArray[np.float64], rows: int, lookups: float, share_of: Literal["rows", "lookups"]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rows and lookups by popularity, most popular first.

    Args:
        histogram: [17] shares by hits of a row, in the bins of :data:`~torchrec_neuroshard.access.REUSE_EDGES`.
        rows: rows of the table.
        lookups: ids in the batch that the histogram describes.
        share_of: what the shares are of: the batch's distinct rows, or its lookups.

    Returns:
        counts [points], which sum to ``rows``, and masses [points], which sum to 1.

    Raises:
        ValueError: the histogram is none, or cannot be that of so many lookups of such a table.
    """
    shares = _checked(histogram, rows, lookups, share_of)
    rates = _popularities(rows, lookups)  # [points] expected hits, rising
    start = _start(shares, rates, rows, lookups, share_of)
    terms, wanted = _equations(shares, rates, rows, lookups, share_of)
    counts = _solve(start, terms, wanted)[::-1]
    keep = counts > 1e-12 * rows
    counts = counts[keep] * (rows / counts[keep].sum())
    masses = counts * rates[::-1][keep]
    return counts, masses / masses.sum()


def _checked(
    histogram: Sequence[float] | NDArray[np.float64], rows: int, lookups: float, share_of: str
) -> NDArray[np.float64]:
    """[17] the shares, which sum to exactly 1."""
    shares = np.asarray(histogram, dtype=np.float64)
    if shares.shape != _EDGES.shape or not np.isfinite(shares).all() or (shares < 0).any():
        raise ValueError(
            f"a reuse histogram has {_EDGES.size} shares of at least 0 (rows hit once, twice, 3 to 4 times, 5 to 8 "
            f"times, ..., more than {REUSE_EDGES[-1]} times)"
        )
    if share_of not in ("rows", "lookups"):
        raise ValueError(f"the shares of a reuse histogram are of 'rows' or of 'lookups', got {share_of!r}")
    if abs(float(shares.sum()) - 1.0) > _SUM_TOLERANCE:
        raise ValueError(f"the shares of a reuse histogram must sum to 1, got {float(shares.sum()):g}")
    if rows < 1:
        raise ValueError(f"a table needs at least one row, got {rows}")
    if not (np.isfinite(lookups) and lookups >= 1):
        raise ValueError(f"a reuse histogram needs the number of lookups that it was measured on, got {lookups}")
    shares = shares / shares.sum()
    fewest, most = _EDGES + 1.0, np.append(_EDGES[1:], lookups)
    hottest = int(np.flatnonzero(shares)[-1])
    if fewest[hottest] > lookups:
        raise ValueError(
            f"the reuse histogram has rows that are hit {fewest[hottest]:g} times or more, among {lookups:g} lookups; "
            "give the lookups of the batch that it was measured on"
        )
    most = np.minimum(most, lookups)
    needed = lookups / float(shares @ most) if share_of == "rows" else float((lookups * shares / most).sum())
    if needed > 1.01 * rows + 1.0:
        raise ValueError(
            f"the reuse histogram says that {lookups:g} lookups hit {needed:.0f} rows or more, but the table has "
            f"{rows}; give the lookups of the batch that it was measured on"
        )
    return shares


def _popularities(rows: int, lookups: float) -> NDArray[np.float64]:
    """[points] grid of a row's expected hits, from hardly any to all lookups; one point is the mean over the rows.

    Without that point, rows that are all alike would start as rows of the next two points, and it is a long way back.
    """
    mean = lookups / rows
    coldest, middle, hottest = np.log2(_COLDEST * min(1.0, mean)), np.log2(mean), np.log2(lookups)
    below, above = (int(np.ceil(octaves * _POINTS_PER_OCTAVE)) for octaves in (middle - coldest, hottest - middle))
    grid = [np.linspace(coldest, middle, below + 1), np.linspace(middle, hottest, above + 1)[1:]]
    return np.asarray(np.exp2(np.concatenate(grid)))


def _hits_of_bins(lookups: float) -> NDArray[np.float64]:
    """[17] about how often a row of each bin is hit: the mean under a steep power law."""
    return np.minimum(np.maximum(1.4 * _EDGES, _EDGES + 1.0), lookups)


def _rows_of_bins(
    shares: NDArray[np.float64], rows: int, lookups: float, share_of: str
) -> tuple[NDArray[np.float64], bool]:
    """[17] about how many rows each bin holds, and whether those are all of the table's.

    Where hardly a row is hit 4 times or less, none is likely to be missed: then they are all of the table's, if the
    histogram admits as many.
    """
    hits, fewest = _hits_of_bins(lookups), _EDGES + 1.0
    if share_of == "rows":
        found, most = shares * (lookups / float(shares @ hits)), lookups / float(shares @ fewest)
    else:
        found, most = lookups * shares / hits, lookups * float((shares / fewest).sum())
    seen = float(found.sum())
    every_row = bool(found[:3].sum() < 1e-3 * seen) and rows <= most
    fitting = rows * (1.0 - 1e-6) / seen
    return np.asarray(found * (fitting if every_row else min(1.0, fitting))), every_row


def _start(
    shares: NDArray[np.float64], rates: NDArray[np.float64], rows: int, lookups: float, share_of: str
) -> NDArray[np.float64]:
    """[points] rows that fit the histogram roughly.

    Rows hit often start where they were seen, the others on the power law with as many distinct rows. Expectation
    maximisation then brings both closer to the histogram: it would take long to arrive, but is never lost on the way.
    """
    found, _ = _rows_of_bins(shares, rows, lookups, share_of)
    low, high = 0.0, 4.0
    for _ in range(14):
        middle = (low + high) / 2
        counts, masses = _power_law_bins(rows, middle)
        if float(counts @ (1.0 - _never(masses / counts, lookups))) > found.sum():
            low = middle
        else:
            high = middle
    spread = [_on_grid(rates, rows, lookups, exponent) for exponent in POPULATION_EXPONENTS]
    cold = (1.0 - _SPREAD) * _on_grid(rates, rows, lookups, low) + _SPREAD * np.mean(spread, axis=0)
    bins = np.searchsorted(_EDGES, rates) - 1  # of the rows hit as often as expected
    points = np.bincount(bins[bins >= _HOT_BIN], minlength=_EDGES.size)
    start = np.where(bins >= _HOT_BIN, found[bins] / np.maximum(points[bins], 1), cold)
    start = np.maximum(start, _FLOOR * np.minimum(rows, lookups / rates) / rates.size)
    probability = np.minimum(rates / lookups, 1.0)
    seen = -np.diff(_exceeds(lookups, probability, _EDGES), append=0.0)
    hit = np.column_stack([_never(probability, lookups), seen])  # [points, 18]
    content = np.append(rows - found.sum(), found)
    for _ in range(_PREPARATIONS):
        start = start * (hit @ (content / np.maximum(start @ hit, 1e-30)))
    return np.asarray(np.maximum(start, 1e-12))


def _on_grid(rates: NDArray[np.float64], rows: int, lookups: float, exponent: float) -> NDArray[np.float64]:
    """[points] rows of a power law by expected hits."""
    counts, masses = _power_law_bins(rows, exponent)
    hits = np.log2(np.maximum(masses / counts * lookups, rates[0]))
    position = np.interp(hits, np.log2(rates), np.arange(rates.size))
    left = np.minimum(position.astype(np.int64), rates.size - 2)
    lower = np.bincount(left, counts * (left + 1 - position), rates.size)
    return np.asarray(lower + np.bincount(left + 1, counts * (position - left), rates.size))


def _never(probability: NDArray[np.float64], lookups: float) -> NDArray[np.float64]:
    """[points] probability that a row is not hit at all."""
    return np.asarray(np.exp(lookups * np.log1p(-np.minimum(probability, 1.0 - 1e-15))))


def _equations(
    shares: NDArray[np.float64], rates: NDArray[np.float64], rows: int, lookups: float, share_of: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What ``rows of a popularity @ terms`` should be: terms [points, 20] and values [20], in standard deviations.

    One equation for each bin, one for the rows never hit, where there should be none, one for the number of rows, one
    for the number of lookups. A bin may be off by what
    chance does to its rows, less because published histograms are often means over batches or tables.
    """
    probability = np.minimum(rates / lookups, 1.0)
    found, every_row = _rows_of_bins(shares, rows, lookups, share_of)
    deviation = 0.005 * found + 0.02 * np.sqrt(found) + 0.01
    if share_of == "rows":  # how many distinct rows there are is not said, and follows from the number of lookups
        hit = -np.diff(_exceeds(lookups, probability, _EDGES), append=0.0)
        terms, wanted = hit - hit.sum(axis=1, keepdims=True) * shares, np.zeros(_EDGES.size)
    else:
        terms = -np.diff(_exceeds(lookups - 1.0, probability, _EDGES - 1.0), append=0.0) * rates[:, None]
        wanted, deviation = lookups * shares, deviation * _hits_of_bins(lookups)
    missed = _never(probability, lookups) * (every_row / (0.001 * rows))
    totals = np.column_stack([np.full(rates.size, 1.0 / rows), rates / lookups]) * 1e4
    return np.column_stack([terms / deviation, missed, totals]), np.append(wanted / deviation, [0.0, 1e4, 1e4])


def _solve(start: NDArray[np.float64], terms: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """[points] rows ``start * exp(x)`` for which the equations hold best and ``x`` is straight.

    Levenberg-Marquardt, damped by how much of a promised gain a step keeps [Madsen2004lsq, section 3.2]. A straight
    ``x`` turns a power law into another one, so only what is no power law is penalised.
    """
    bend = np.diff(np.eye(start.size), 2, axis=0)
    penalty = _CURVATURE * bend.T @ bend + _RIDGE * np.eye(start.size)

    def loss(x: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        error = (start * np.exp(x)) @ terms - wanted
        return float(error @ error + x @ penalty @ x), error

    x, damping, small = np.zeros(start.size), 1.0, 0
    current, error = loss(x)
    for step in range(_STEPS):
        slope = (start * np.exp(x))[:, None] * terms
        curvature, gradient = slope @ slope.T + penalty, slope @ error + penalty @ x
        growth = 2.0
        while True:
            move = np.clip(np.linalg.solve(curvature + damping * np.eye(start.size), -gradient), -2.0, 2.0)
            better, its_error = loss(x + move)
            if better < current or damping > 1e12:
                break
            damping, growth = damping * growth, 2.0 * growth
        if better >= current:
            break
        gain, promised = current - better, -float(move @ (2.0 * gradient + curvature @ move))
        kept = min(gain / promised, 1.0) if promised > 0 else 0.0
        damping = max(damping * max(1.0 / 3.0, 1.0 - (2.0 * kept - 1.0) ** 3), 1e-6)
        small = small + 1 if gain < 1e-3 * current else 0
        x, current, error = x + move, better, its_error
        if step > 3 and small == _PATIENCE:
            break
    return np.asarray(start * np.exp(x))
