"""What stands for a group of rows, and how well it did on the queries seen so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugins.compressed_sparse_attention.ref import MAX_VARIANCE
from serving.kv_compression.grouping import Floats, Rows
from serving.kv_compression.history import Stats

Halves = NDArray[np.float16]
# No entry is judged worse than this many times the variance it expects.
_WORST = 1e4


def summarise(
    k: Floats, v: Floats, sizes: Rows | None = None, *, sound: bool = False
) -> tuple[Halves, Floats]:
    """Many groups at once: k [E, n, dk], v [E, n, dv] -> entries [E, 2*dk + dv], stats [E, 2]. Of
    group e the first sizes[e] rows count (n unless given), the others must be copies of these.

    The meaning is that of ``plugins.compressed_sparse_attention.ref.summarise``.
    """
    counts = np.full(len(k), k.shape[1], np.float32) if sizes is None else sizes.astype(np.float32)
    share = _first(counts, k.shape[1]) / counts[:, None, None]
    centre = ((k.min(1) + k.max(1)) / 2 if sound else (share @ k)[:, 0]).astype(np.float16)
    mean_v = (share @ v)[:, 0].astype(np.float16)
    away = k - centre[:, None].astype(np.float32)
    away_v = v - mean_v[:, None].astype(np.float32)
    far = np.einsum("end,end->en", away_v, away_v)
    if sound:
        exact = np.abs(away).max(1)
        spread = exact.astype(np.float16)
        up = np.nextafter(spread, np.float16(np.inf))
        # fp32 sums may be off in their last bits: one more step of either type covers that.
        spread, reach = np.where(spread <= exact, up, spread), np.sqrt(far.max(1)) * (1 + 1e-6)
    else:
        away *= away
        spread = np.sqrt(share @ away)[:, 0].astype(np.float16)
        reach = np.sqrt((share[:, 0] * far).sum(1))
    entries = np.concatenate([centre, spread, mean_v], axis=1)
    return entries, np.stack([counts, reach], axis=1).astype(np.float32)


def summarise_groups(
    k: Floats, v: Floats, groups: Sequence[Rows], *, sound: bool = False
) -> tuple[Halves, Floats]:
    """As ``summarise``, of groups of rows of k [T, dk], v [T, dv]; of any sizes but 0."""
    entries = np.zeros((len(groups), 2 * k.shape[1] + v.shape[1]), np.float16)
    figures = np.zeros((len(groups), 2), np.float32)
    for some, rows, sizes in _padded(groups):
        entries[some], figures[some] = summarise(k[rows], v[rows], sizes, sound=sound)
    return entries, figures


def _first(sizes: Any, n: int) -> Floats:
    """[E, 1, n]: one for the first sizes[e] of n rows, zero for the others."""
    return np.asarray(np.arange(n) < sizes[:, None, None], np.float32)


def _padded(groups: Sequence[Rows]) -> Iterator[tuple[Rows, Rows, Rows]]:
    """Groups of about one size: which, their rows [E, n] (n a power of two; the first row again
    where a group is smaller) and sizes [E]."""
    sizes = np.array([len(g) for g in groups], np.int64)
    widths = np.exp2(np.ceil(np.log2(sizes))).astype(np.int64)
    for n in np.unique(widths):
        some = np.flatnonzero(widths == n)
        rows = np.repeat([[groups[e][0]] for e in some], n, axis=1)
        rows[np.arange(n) < sizes[some, None]] = np.concatenate([groups[e] for e in some])
        yield some, rows, sizes[some]


class Seen:
    """What the seen queries [n, dk] of one head read, weights [T, n]; to judge entries by."""

    def __init__(self, stats: Stats, head: int) -> None:
        self.queries = stats.queries[head]
        weights = stats.keys[head] @ self.queries.T
        self.top = weights.max(0)[:, None]
        weights -= self.top.T
        self.weights = np.exp(weights, out=weights)
        self.total = weights.sum(0)[:, None]
        self.output = (weights.T @ stats.values[head]) / self.total
        self.recent = slice(-stats.recent_queries, None)

    def judge(
        self, members: Sequence[Rows], entries: Halves, figures: Floats
    ) -> tuple[Floats, Floats]:
        """value_spread [E]: an entry's own, raised where the estimate was worse than its figures
        say: as the op weighs it, by the mean square of the relative error over the expected one,
        queries weighed by the mass they were thought to find there. loss [E]: the squared error of
        the output that the op would expect from leaving the entry unread, mean over the recent
        queries.

        members[e]: rows of entry e; entries [E, 2*dk + dv], figures [E, 2]: theirs, calibrated.
        """
        q, late = self.queries, self.recent
        count, spread = figures.T
        dk = q.shape[1]
        centre, wide, mean_v = np.split(entries.astype(np.float32), [dk, 2 * dk], axis=1)
        var = np.minimum(q**2 @ (wide**2).T, MAX_VARIANCE)
        estimate = count * np.exp(q @ centre.T - self.top + var / 2)
        mass = np.empty_like(estimate)
        for some, rows, sizes in _padded(members):
            mass[:, some] = (_first(sizes, rows.shape[1]) @ self.weights[rows])[:, 0].T
        weight = estimate / self.total + np.float32(1e-12)
        noise = np.expm1(var) / count
        found = (weight * (mass / np.maximum(estimate, 1e-30) - 1) ** 2).sum(0)
        worse = np.clip(found / np.maximum((weight * noise).sum(0), 1e-30), 1, _WORST)
        away2 = ((mean_v - self.output.mean(0)) ** 2).sum(1)
        value_spread = np.sqrt(worse * (spread**2 + away2) - away2)
        size2 = np.maximum((self.output[late] ** 2).sum(1, keepdims=True), 1e-30)
        error = weight[late] ** 2 * noise[late] * (value_spread**2 + away2) / size2
        return value_spread, error.mean(0)
