"""What stands for a group of rows, and how well it did on the queries seen so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from plugins.compressed_sparse_attention.ref import MAX_VARIANCE
from serving.kv_compression.grouping import Floats, Rows
from serving.kv_compression.history import Stats

Halves = NDArray[np.float16]
# No entry is judged worse than this many times the variance it expects.
_WORST = 1e4


def summarise(k: Floats, v: Floats, *, sound: bool = False) -> tuple[Halves, Floats]:
    """Many groups at once: k [E, n, dk], v [E, n, dv] -> entries [E, 2*dk + dv], stats [E, 2].

    The meaning is that of ``plugins.compressed_sparse_attention.ref.summarise``.
    """
    share = np.full((1, k.shape[1]), 1 / k.shape[1], np.float32)
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
        power = np.einsum("end,end->ed", away, away) / k.shape[1]
        spread, reach = np.sqrt(power).astype(np.float16), np.sqrt(far.mean(1))
    counts = np.full(len(k), k.shape[1], np.float32)
    entries = np.concatenate([centre, spread, mean_v], axis=1)
    return entries, np.stack([counts, reach], axis=1).astype(np.float32)


def summarise_groups(
    k: Floats, v: Floats, groups: Sequence[Rows], *, sound: bool = False
) -> tuple[Halves, Floats]:
    """As ``summarise``, of groups of rows of k [T, dk], v [T, dv]; of any sizes but 0."""
    entries = np.zeros((len(groups), 2 * k.shape[1] + v.shape[1]), np.float16)
    figures = np.zeros((len(groups), 2), np.float32)
    for same, rows in _by_size(groups):
        entries[same], figures[same] = summarise(k[rows], v[rows], sound=sound)
    return entries, figures


def _by_size(groups: Sequence[Rows]) -> Iterator[tuple[Rows, Rows]]:
    """Which groups are of one size, and their rows [groups, size]."""
    sizes = np.array([len(g) for g in groups], np.int64)
    for size in np.unique(sizes):
        same = np.flatnonzero(sizes == size)
        yield same, np.stack([groups[e] for e in same])


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
        for same, rows in _by_size(members):
            ones = np.ones((1, rows.shape[1]), np.float32)
            mass[:, same] = (ones @ self.weights[rows])[:, 0].T
        weight = estimate / self.total + np.float32(1e-12)
        noise = np.expm1(var) / count
        found = (weight * (mass / np.maximum(estimate, 1e-30) - 1) ** 2).sum(0)
        worse = np.clip(found / np.maximum((weight * noise).sum(0), 1e-30), 1, _WORST)
        away2 = ((mean_v - self.output.mean(0)) ** 2).sum(1)
        value_spread = np.sqrt(worse * (spread**2 + away2) - away2)
        size2 = np.maximum((self.output[late] ** 2).sum(1, keepdims=True), 1e-30)
        error = weight[late] ** 2 * noise[late] * (value_spread**2 + away2) / size2
        return value_spread, error.mean(0)
