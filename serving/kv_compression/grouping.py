"""Groups of similar rows: a summary says more about rows that are alike than about neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
# Power that a query may have in directions not seen, over the mean of those seen.
FLOOR = 0.5
# Rows from which the direction of a cut is found, and how often the power iteration is repeated.
_SAMPLE, _ROUNDS = 256, 3


def similar_groups(features: Floats, size: int, *, step: int = 0) -> list[Rows]:
    """Rows [N, f] in groups of at most ``size``, by cutting along the first principal direction
    again and again where the two sides differ most; at multiples of ``step`` rows. With the default
    step, ``size``, only the last group may be smaller. Deterministic."""
    rng = np.random.default_rng(0)
    groups: list[Rows] = []
    stack = [(np.arange(len(features)), features)]
    while stack:
        rows, x = stack.pop()
        if len(rows) <= size:
            groups.append(rows)
            continue
        along = x @ _direction(x, rng)
        order = np.argsort(along)
        cut = _best_cut(along[order], size, step or size)
        for side in (order[cut:], order[:cut]):
            stack.append((rows[side], x[side]))
    return groups


def clusters(x: Floats, most: int = 48, rounds: int = 5) -> Rows:
    """[N]: the cluster of each row of x [N, f]; k-means on a sample of the rows. Deterministic."""
    count = max(1, min(most, len(x) // 64))
    rng = np.random.default_rng(0)
    part = x[rng.permutation(len(x))[: 64 * count]]
    centres = part[:1]
    away = ((part - centres[0]) ** 2).sum(1)
    while len(centres) < count:  # k-means++: far rows are likely to start the next
        at = np.searchsorted(np.cumsum(away), rng.random() * away.sum())
        chosen = part[min(int(at), len(part) - 1)]
        centres = np.concatenate([centres, chosen[None]])
        away = np.minimum(away, ((part - chosen) ** 2).sum(1))
    for _ in range(rounds):
        label = _nearest(part, centres)
        filled = np.bincount(label, minlength=count) > 0
        sums = np.stack([part[label == c].sum(0) for c in range(count)])
        sizes = np.maximum(np.bincount(label, minlength=count), 1)
        centres = np.where(filled[:, None], sums / sizes[:, None], centres).astype(np.float32)
    return _nearest(x, centres)


def _nearest(x: Floats, centres: Floats) -> Rows:
    return np.asarray((x @ centres.T - (centres**2).sum(1) / 2).argmax(1), np.int64)


def features(keys: Floats, values: Floats, queries: Floats, value_weight: float = 1.5) -> Floats:
    """[N, dk + dv]: distances mean what attention makes of them. keys [N, dk] count as the scores
    that ``queries`` [n, dk] (scaled) give them, with a share of their power in every direction
    (another query may come), values [N, dv] relative to their norm."""
    power, axes = np.linalg.eigh(queries.T @ queries / len(queries))
    metric = axes * np.sqrt(np.maximum(power, 0) + FLOOR * power.mean())
    size = max(float(np.sqrt((values**2).sum(1).mean())), 1e-30)
    weighted = (values - values.mean(0)) * np.float32(value_weight / size)
    return np.concatenate([keys @ metric.astype(np.float32), weighted], axis=1)


def _direction(x: Floats, rng: np.random.Generator) -> Any:
    """The first principal direction [f] of rows [N, f], nearly; from a sample of them."""
    part = x[:: max(1, len(x) // _SAMPLE)]
    part = part - part.mean(0)
    u = rng.standard_normal(x.shape[1], np.float32)
    for _ in range(_ROUNDS):
        u = part.T @ (part @ u)
        u /= np.linalg.norm(u) + 1e-30
    return u


def _best_cut(along: Floats, size: int, step: int) -> int:
    """Where to cut sorted values [N > size] so that the sums of squares within both sides are
    least: at a multiple of ``step`` rows, no closer to an end than half a group or an eighth."""
    n = len(along)
    edge = max(step, -(-max(size // 2, n // 8) // step) * step)
    cuts = np.arange(edge, max(n - edge, edge) + 1, step)
    cuts = cuts[cuts < n]
    total = np.cumsum(along - along.mean(), dtype=np.float64)[cuts - 1] ** 2
    return int(cuts[np.argmax(total / cuts + total / (n - cuts))])
