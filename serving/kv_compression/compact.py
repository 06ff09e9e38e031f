"""Physical compaction of one attention layer of one sequence, and its way back.

Kept rows move to the front of a smaller slot [Hk, C, d], similar ones side by side (RoPE is in the
keys: their order means nothing to attention); rows that go are summarised by group. Rows come back
by their absolute position. Entries follow ``plugins.compressed_sparse_attention.ref``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plugins.compressed_sparse_attention.ref import BLOCK
from serving.kv_compression.arrange import arrange
from serving.kv_compression.grouping import Floats, Rows
from serving.kv_compression.history import Mask, Stats
from serving.kv_compression.summaries import Halves, Seen, summarise, summarise_groups


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
    reading. Evicted rows form groups of up to ``group`` similar ones, neighbours of which are
    merged while there are more than ``max_groups``. The arrays in ``stats`` must not overlap the
    slot. Raises ValueError when the slot is too small.
    """
    seen = [Seen(stats, h) for h in range(len(scores))]
    arranged = [
        arrange(stats, h, seen[h], scores[h], pinned[h], rows, group, recent, max_groups)
        for h in range(len(scores))
    ]
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
        at = slice(blocks, blocks + len(groups))
        layer.summaries[h, at], layer.stats[h, at] = summarise_groups(
            keys, values, groups, sound=sound
        )
        advance(layer, h, slot_k, slot_v)
        if not sound and (layer.summarised[h] or groups):
            full = order[: layer.summarised[h] * BLOCK]
            where = np.r_[: layer.summarised[h], blocks + np.arange(len(groups))]
            members = [full[i : i + BLOCK] for i in range(0, len(full), BLOCK)] + groups
            made = layer.summaries[h, where], layer.stats[h, where]
            layer.stats[h, where, 1] = seen[h].judge(members, *made)[0]
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
    """Bring evicted groups of a head back behind its other rows; returns how many rows came. The
    blocks they fill are read at each step until ``advance`` has summarised them.

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
        layer.stats[head, layer.blocks + e, 0] = 0
    layer.stats[head, layer.summarised[head] : end // BLOCK] = BLOCK, np.inf
    return len(rows)


def release(
    layer: CompactLayer,
    head: int,
    groups: Mapping[int, Rows],
    slot_k: Floats,
    slot_v: Floats,
) -> None:
    """Let restored groups {e: its positions} of a head go again; later rows of the slot move up.

    Raises ValueError when a group was not restored or a row is not in the slot; else as
    ``restore``.
    """
    if any(len(layer.groups[head][e]) for e in groups):
        raise ValueError("only groups that were restored can go")
    held = layer.positions[head]
    rows = np.concatenate([*groups.values(), np.zeros(0, np.int64)])
    stay = len(held) - len(rows)
    if not np.array_equal(held[stay:], rows):  # other rows came after them
        named = np.zeros(int(max(held.max(initial=0), rows.max(initial=0))) + 1, bool)
        named[rows] = True
        gone = named[held]
        if gone.sum() != len(rows):
            raise ValueError("only rows in the slot can go")
        first = int(np.argmax(gone))
        later = first + np.flatnonzero(~gone[first:])
        for slot in (slot_k, slot_v):
            slot[head, first:stay] = slot[head, later]
        layer.positions[head], stay = held[~gone], first
    else:
        layer.positions[head] = held[:stay]
    for e, group in groups.items():
        layer.groups[head][e] = group
        layer.stats[head, layer.blocks + e, 0] = len(group)
    layer.stats[head, stay // BLOCK : layer.blocks] = 0
    layer.summarised[head] = min(layer.summarised[head], stay // BLOCK)
    layer.stats[head, layer.summarised[head] : len(layer.positions[head]) // BLOCK] = BLOCK, np.inf


def advance(layer: CompactLayer, head: int, slot_k: Floats, slot_v: Floats) -> None:
    """Summarise the blocks of a head that have become full."""
    first, full = layer.summarised[head], len(layer.positions[head]) // BLOCK
    if full > first:
        rows = slice(first * BLOCK, full * BLOCK)
        k, v = (a[head, rows].reshape(full - first, BLOCK, -1) for a in (slot_k, slot_v))
        _fill(layer, head, np.arange(first, full), k, v)
        layer.summarised[head] = full


def _fill(layer: CompactLayer, head: int, where: Rows, k: Floats, v: Floats) -> None:
    """Entries ``where`` [E] from k [E, n, dk], v [E, n, dv]."""
    layer.summaries[head, where], layer.stats[head, where] = summarise(k, v, sound=layer.sound)
