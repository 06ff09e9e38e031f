"""Physical compaction of one attention layer of one sequence, and its way back.

Kept rows move to the front of a smaller slot [Hk, C, d], similar ones side by side (RoPE is in the
keys: their order means nothing to attention); rows that go are summarised by group. Rows come back
by their absolute position. Entries follow ``plugins.compressed_sparse_attention.ref``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plugins.compressed_sparse_attention.ref import BLOCK, MAX_VARIANCE
from serving.kv_compression.grouping import Floats, Rows, clusters, features, similar_groups
from serving.kv_compression.history import Mask, Stats

Halves = NDArray[np.float16]
# No entry is judged worse than this many times the variance it expects.
_WORST = 50.0


@dataclass
class CompactLayer:
    """A layer's view of a compacted sequence; the slot arrays themselves are the caller's.

    positions[h]: absolute positions of the rows of head h in slot order; groups[h][e]: those of
    evicted group e (empty once they are back); summaries [Hk, S, 2*dk + dv], stats [Hk, S, 2] as
    the op takes them, entry ``blocks + e`` for group e. ``summarised[h]``: slot blocks that have
    their entry (the others are recent and read anyhow).
    """

    positions: list[Rows]
    groups: list[list[Rows]]
    summaries: Halves
    stats: Floats
    blocks: int
    sound: bool = False
    summarised: list[int] = field(default_factory=list)

    def rows(self) -> NDArray[np.int64]:
        """[Hk]: slot rows in use."""
        return np.array([len(p) for p in self.positions], np.int64)

    def evicted(self, head: int, chosen: NDArray[np.uint8]) -> list[int]:
        """Groups that the op asked for; chosen [S] is its output for this head."""
        wanted = np.flatnonzero(chosen[self.blocks :])
        return [int(e) for e in wanted if len(self.groups[head][e])]

    def summary_bytes(self) -> int:
        """Of entries that describe something."""
        used = int((self.stats[..., 0] > 0).sum())
        return used * (self.summaries.shape[-1] * 2 + 8)


def compact(
    stats: Stats,
    scores: Floats,
    pinned: Mask,
    rows: int,
    slot_k: Floats,
    slot_v: Floats,
    *,
    group: int = 64,
    recent: int = 64,
    sound: bool = False,
    max_groups: int | None = None,
) -> CompactLayer:
    """Keep about ``rows`` rows of each head (never more, unless the pinned ones alone are more) at
    the front of slot_k [Hk, C, dk], slot_v [Hk, C, dv].

    First those ``pinned`` [Hk, T], which every step reads, and the last ``recent`` positions; then,
    by ``scores`` [Hk, T], whole blocks of similar rows: a block of unlike ones has no summary worth
    reading. Evicted rows form groups of up to ``group`` similar ones, neighbours of
    which are merged while there are more than ``max_groups``. The arrays in ``stats`` must
    not overlap the slot. Raises ValueError when the slot is too small.
    """
    arranged = [
        _arrange(stats, h, scores[h], pinned[h], rows, group, recent) for h in range(len(scores))
    ]
    for _, _, groups in arranged:
        _merge(groups, max_groups)
    blocks = -(-slot_k.shape[1] // BLOCK)
    if max(len(order) for order, _, _ in arranged) > slot_k.shape[1]:
        raise ValueError(f"{rows} rows and the pinned ones do not fit a slot of {slot_k.shape[1]}")
    heads, width = len(scores), 2 * stats.keys.shape[2] + stats.values.shape[2]
    entries = blocks + max(len(groups) for _, _, groups in arranged)
    layer = CompactLayer(
        [order for order, _, _ in arranged],
        [groups for _, _, groups in arranged],
        np.zeros((heads, entries, width), np.float16),
        np.zeros((heads, entries, 2), np.float32),
        blocks,
        sound,
        [0] * heads,
    )
    for h, (order, always, groups) in enumerate(arranged):
        keys, values = stats.keys[h], stats.values[h]
        slot_k[h, : len(order)], slot_v[h, : len(order)] = keys[order], values[order]
        for size in {len(g) for g in groups}:
            same = [e for e, g in enumerate(groups) if len(g) == size]
            at = np.stack([groups[e] for e in same])
            _fill(layer, h, blocks + np.array(same), keys[at], values[at])
        advance(layer, h, slot_k, slot_v)
        if not sound:
            _judge(layer, h, stats)
        layer.stats[h, : always // BLOCK, 1] = np.inf
    return layer


def append(layer: CompactLayer, position: int, slot_k: Floats, slot_v: Floats) -> None:
    """The step's own row, at an absolute position, was written behind the others of each head."""
    for h, held in enumerate(layer.positions):
        layer.positions[h] = np.append(held, position)
        advance(layer, h, slot_k, slot_v)


def restore(
    layer: CompactLayer,
    head: int,
    groups: Sequence[int],
    keys: Floats,
    values: Floats,
    slot_k: Floats,
    slot_v: Floats,
) -> int:
    """Bring evicted groups of a head back behind its other rows; returns how many rows came.

    keys [Hk, T, dk], values [Hk, T, dv]: the host copy, by absolute position. Raises ValueError,
    and changes nothing, when the slot is too small.
    """
    back = [layer.groups[head][e] for e in groups]
    rows = np.concatenate([*back, np.zeros(0, np.int64)])
    start = len(layer.positions[head])
    end = start + len(rows)
    if end > slot_k.shape[1]:
        raise ValueError(f"{end} rows do not fit a slot of {slot_k.shape[1]}")
    slot_k[head, start:end], slot_v[head, start:end] = keys[head, rows], values[head, rows]
    layer.positions[head] = np.concatenate([layer.positions[head], rows])
    for e in groups:
        layer.groups[head][e] = np.zeros(0, np.int64)
        layer.stats[head, layer.blocks + e] = 0
    advance(layer, head, slot_k, slot_v)
    return len(rows)


def release(
    layer: CompactLayer,
    head: int,
    rows: Sequence[Rows],
    slot_k: Floats,
    slot_v: Floats,
) -> None:
    """Let restored groups of a head go again; rows[i]: absolute positions of one of them.

    Later rows of the slot move up; the groups get their entries back. Raises ValueError when there
    is no free entry or a row is not in the slot.
    """
    free = [e for e, g in enumerate(layer.groups[head]) if not len(g)]
    held = layer.positions[head]
    gone = np.isin(held, np.concatenate([*rows, np.zeros(0, np.int64)]))
    if len(free) < len(rows) or gone.sum() != sum(map(len, rows)):
        raise ValueError("only rows in the slot can go, as many groups as were restored")
    for e, group in zip(free, rows, strict=False):
        at = [int(np.flatnonzero(held == p)[0]) for p in group]
        k, v = slot_k[head, at][None], slot_v[head, at][None]
        _fill(layer, head, np.array([layer.blocks + e]), k, v)
        layer.groups[head][e] = group
    first = int(np.argmax(gone)) if gone.any() else len(held)
    stay = first + np.flatnonzero(~gone[first:])
    for slot in (slot_k, slot_v):
        slot[head, first : first + len(stay)] = slot[head, stay]
    layer.positions[head] = held[~gone]
    layer.stats[head, first // BLOCK : layer.blocks] = 0
    layer.summarised[head] = min(layer.summarised[head], first // BLOCK)
    advance(layer, head, slot_k, slot_v)


def advance(layer: CompactLayer, head: int, slot_k: Floats, slot_v: Floats) -> None:
    """Summarise the blocks of a head that have become full."""
    first, full = layer.summarised[head], len(layer.positions[head]) // BLOCK
    if full > first:
        rows = slice(first * BLOCK, full * BLOCK)
        k, v = (a[head, rows].reshape(full - first, BLOCK, -1) for a in (slot_k, slot_v))
        _fill(layer, head, np.arange(first, full), k, v)
        layer.summarised[head] = full


def _arrange(
    stats: Stats, head: int, scores: Floats, pinned: Mask, rows: int, group: int, recent: int
) -> tuple[Rows, int, list[Rows]]:
    """Slot order of the rows that stay, how many of them come first and are pinned (filled up to
    whole blocks with the best of the others), and the groups of those that go."""
    body = np.arange(max(stats.length - recent, 0))
    tail = np.arange(len(body), stats.length)
    always, rest = body[pinned[body]], body[~pinned[body]]
    best = np.argsort(-scores[rest], kind="stable")[: -len(always) % BLOCK]
    always, rest = np.concatenate([always, rest[best]]), np.delete(rest, best)
    x = features(stats.keys[head, rest], stats.values[head, rest], stats.queries[head])
    label = clusters(x)
    blocks = max(0, (rows - len(always) - len(tail)) // BLOCK)
    kept, gone = [], []
    for c, share in enumerate(_blocks_by_cluster(scores[rest], label, blocks)):
        mine = np.flatnonzero(label == c)
        mine = mine[np.argsort(-scores[rest[mine]], kind="stable")]
        stay, go = mine[: share * BLOCK], mine[share * BLOCK :]
        kept += [rest[stay[g]] for g in similar_groups(x[stay], BLOCK)]
        gone += [rest[go[g]] for g in similar_groups(x[go], group, step=4)]
    return np.concatenate([always, *kept, tail]), len(always), [g for g in gone if len(g)]


def _merge(groups: list[Rows], most: int | None) -> None:
    """Join neighbours, the smallest pair first, until there are at most ``most``."""
    while most is not None and len(groups) > max(most, 1):
        sizes = np.array([len(g) for g in groups])
        i = int(np.argmin(sizes[:-1] + sizes[1:]))
        groups[i : i + 2] = [np.concatenate(groups[i : i + 2])]


def _blocks_by_cluster(scores: Floats, label: Rows, blocks: int) -> Rows:
    """[clusters]: whole blocks of each that stay: as many as the ``blocks`` * 32 best rows would
    take, remainders given to those with the largest."""
    top = np.argsort(-scores, kind="stable")[: blocks * BLOCK]
    size = int(label.max(initial=-1)) + 1
    wanted = np.bincount(label[top], minlength=size)
    share = wanted // BLOCK
    room = np.bincount(label, minlength=size) // BLOCK - share
    more = np.argsort(-(wanted % BLOCK) * (room > 0), kind="stable")
    share[more[: min(blocks - share.sum(), (room > 0).sum())]] += 1
    return np.asarray(share, np.int64)


def _fill(layer: CompactLayer, head: int, where: Rows, k: Floats, v: Floats) -> None:
    """Entries ``where`` [E] from k [E, n, dk], v [E, n, dv]."""
    layer.summaries[head, where], layer.stats[head, where] = summarise(k, v, sound=layer.sound)


def _judge(layer: CompactLayer, head: int, stats: Stats) -> None:
    """Raise value_spread where an entry's estimate was worse, on queries seen so far, than its own
    figures say: as the op weighs it, by the mean square of the relative error over the expected
    one. Entries are weighed by the mass they were thought to have."""
    q, keys = stats.queries[head], stats.keys[head]
    score = q @ keys.T
    top = score.max(1, keepdims=True)
    p = np.exp(score - top)
    share = p / p.sum(1, keepdims=True)
    mean_value = share.mean(0) @ stats.values[head]
    full = layer.positions[head][: layer.summarised[head] * BLOCK]
    where = np.r_[: layer.summarised[head], layer.blocks + np.arange(len(layer.groups[head]))]
    members = [full[i : i + BLOCK] for i in range(0, len(full), BLOCK)] + layer.groups[head]
    entry = layer.summaries[head, where].astype(np.float32)
    count, spread = layer.stats[head, where].T
    dk = q.shape[1]
    centre, wide, mean_v = np.split(entry, [dk, 2 * dk], axis=1)
    var = np.minimum(q**2 @ (wide**2).T, MAX_VARIANCE)
    estimate = count * np.exp(q @ centre.T - top + var / 2)
    starts = np.cumsum([0, *(len(m) for m in members[:-1])])
    mass = np.add.reduceat(p[:, np.concatenate(members)], starts, axis=1)
    weight = estimate / p.sum(1, keepdims=True) + np.float32(1e-12)
    found = (weight * (mass / np.maximum(estimate, 1e-30) - 1) ** 2).sum(0)
    expected = (weight * np.expm1(var) / count).sum(0)
    worse = np.clip(found / np.maximum(expected, 1e-30), 1, _WORST)
    away2 = ((mean_v - mean_value) ** 2).sum(1)
    layer.stats[head, where, 1] = np.sqrt(worse * (spread**2 + away2) - away2)


def summarise(k: Floats, v: Floats, *, sound: bool = False) -> tuple[Halves, Floats]:
    """Many groups at once: k [E, n, dk], v [E, n, dv] -> entries [E, 2*dk + dv], stats [E, 2].

    The meaning is that of ``plugins.compressed_sparse_attention.ref.summarise``.
    """
    centre = ((k.min(1) + k.max(1)) / 2 if sound else k.mean(1)).astype(np.float16)
    mean_v = v.mean(1).astype(np.float16)
    away = k - centre[:, None].astype(np.float32)
    far = ((v - mean_v[:, None].astype(np.float32)) ** 2).sum(2)
    if sound:
        exact = np.abs(away).max(1)
        spread = exact.astype(np.float16)
        up = np.nextafter(spread, np.float16(np.inf))
        # fp32 sums may be off in their last bits: one more step of either type covers that.
        spread, reach = np.where(spread <= exact, up, spread), np.sqrt(far.max(1)) * (1 + 1e-6)
    else:
        spread, reach = np.sqrt((away**2).mean(1)).astype(np.float16), np.sqrt(far.mean(1))
    counts = np.full(len(k), k.shape[1], np.float32)
    entries = np.concatenate([centre, spread, mean_v], axis=1)
    return entries, np.stack([counts, reach], axis=1).astype(np.float32)
