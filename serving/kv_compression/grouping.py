"""Groups of similar rows: a summary says more about rows that are alike than about neighbours."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
# Power that a query may have in directions not seen, over the mean of those seen.
FLOOR = 0.5
# Rows of a part from which the direction of its cut is found, and rounds of the power iteration.
_SAMPLE, _ROUNDS = 64, 3


def similar_groups(x: Floats, size: int, *, step: int = 0, label: Rows | None = None) -> list[Rows]:
    """Rows of x [N, f] in groups of at most ``size``, by cutting along the first principal
    direction again and again where the two sides differ most; at multiples of ``step`` rows. label
    [N]: parts to begin with, one unless given. With the default step, ``size``, only the last group
    of a part may be smaller. Neighbours are alike. Deterministic."""
    label = np.zeros(len(x), np.int64) if label is None else label
    ends = np.cumsum(np.bincount(label))[:-1]
    parts = np.split(np.argsort(label, kind="stable"), ends)
    while any(len(p) > size for p in parts):
        sides = iter(_cut([p for p in parts if len(p) > size], x, size, step or size))
        parts = [s for p in parts for s in ((next(sides), next(sides)) if len(p) > size else (p,))]
    return [p for p in parts if len(p)]


def _cut(parts: list[Rows], x: Floats, size: int, step: int) -> list[Rows]:
    """Both sides of each part, cut so that the sums of squares within them are least: at a multiple
    of ``step`` rows, no closer to an end than half a group or an eighth."""
    sizes = np.array([len(p) for p in parts])
    starts = np.cumsum(sizes) - sizes
    rows = np.concatenate(parts)
    n = min(_SAMPLE, int(sizes.max()))
    sample = rows[starts[:, None] + np.arange(n) * sizes[:, None] // n]
    along = [x[p] @ u for p, u in zip(parts, _directions(x[sample]), strict=True)]
    part = np.repeat(np.arange(len(parts)), sizes)
    flat = np.concatenate(along)
    order = np.lexsort((flat, part))
    flat = flat[order] - (np.add.reduceat(flat, starts) / sizes)[part]
    left = np.arange(1, len(flat) + 1) - starts[part]
    right = sizes[part] - left
    edge = np.maximum(step, -(-np.maximum(size // 2, sizes // 8) // step) * step)[part]
    fits = (left % step == 0) & ((left == edge) | ((left > edge) & (right >= edge)))
    gain = np.cumsum(flat, dtype=np.float64) ** 2 * (1 / left + 1 / np.maximum(right, 1))
    gain[~fits] = -1
    cuts = [a + 1 + gain[a : a + n].argmax() for a, n in zip(starts, sizes, strict=True)]
    rows = rows[order]
    return [
        rows[a:b] for a, b in itertools.pairwise([*np.stack([starts, cuts], 1).flat, len(rows)])
    ]


def clusters(x: Floats, most: int = 48, rounds: int = 4) -> Rows:
    """[N]: the cluster of each row of x [N, f]; k-means on a sample of the rows. Deterministic."""
    count = max(1, min(most, len(x) // 64))
    rng = np.random.default_rng(0)
    part = x[rng.permutation(len(x))[: 32 * count]]
    power = (part**2).sum(1)
    away, at = np.full(len(part), np.inf), 0
    centres = np.empty((count, x.shape[1]), np.float32)
    for c in range(count):  # k-means++: far rows are likely to start the next
        centres[c] = part[at]
        away = np.minimum(away, np.maximum(power + power[at] - 2 * part @ centres[c], 0))
        upto = np.cumsum(away)
        at = min(int(np.searchsorted(upto, rng.random() * upto[-1])), len(part) - 1)
    for _ in range(rounds):
        member = np.eye(count, dtype=np.float32)[_nearest(part, centres)]
        sizes = member.sum(0)[:, None]
        centres = np.where(sizes > 0, member.T @ part / np.maximum(sizes, 1), centres)
    return _nearest(x, centres)


def _nearest(x: Floats, centres: Floats) -> Rows:
    return np.asarray((x @ centres.T - (centres**2).sum(1) / 2).argmax(1), np.int64)


def features(keys: Floats, values: Floats, queries: Floats, value_weight: float = 1.5) -> Floats:
    """[N, dk + dv]: distances mean what attention makes of them. keys [N, dk] count as the scores
    that ``queries`` [n, dk] (scaled) give them, with a share of their power in every direction
    (another query may come), values [N, dv] relative to their norm."""
    power, axes = np.linalg.eigh(queries.T @ queries / len(queries))
    metric = axes * np.sqrt(np.maximum(power, 0) + FLOOR * power.mean())
    size = max(float(np.sqrt(np.vdot(values, values) / max(len(values), 1))), 1e-30)
    x = np.empty((len(keys), keys.shape[1] + values.shape[1]), np.float32)
    np.matmul(keys, metric.astype(np.float32), out=x[:, : keys.shape[1]])
    np.multiply(values, np.float32(value_weight / size), out=x[:, keys.shape[1] :])
    return x


def _directions(x: Floats) -> Floats:
    """The first principal direction [B, f] of rows [B, n, f], nearly."""
    x = x - np.full((1, x.shape[1]), 1 / x.shape[1], np.float32) @ x
    far = np.einsum("bnf,bnf->bn", x, x).argmax(1)
    u = x[np.arange(len(x)), far][:, :, None]
    for _ in range(_ROUNDS):
        u = x.transpose(0, 2, 1) @ (x @ u)
        u /= np.abs(u).max(1, keepdims=True) + 1e-30
    return np.asarray(u[..., 0], np.float32)
