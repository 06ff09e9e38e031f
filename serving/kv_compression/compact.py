"""Physical compaction of one attention layer of one sequence.

Kept rows move to the front of a smaller slot [Hk, C, d], similar ones side by side (RoPE is in the
keys: their order means nothing to attention); rows that go are summarised by group. Entries follow
``plugins.compressed_sparse_attention.ref``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plugins.compressed_sparse_attention.ref import BLOCK
from serving.kv_compression.arrange import arrange
from serving.kv_compression.grouping import Floats, Rows
from serving.kv_compression.history import Mask, Stats
from serving.kv_compression.summaries import Halves, Seen, summarise_groups


@dataclass(frozen=True)
class CompactLayer:
    """A layer's view of a compacted sequence; the slot arrays themselves are the caller's.

    positions[h]: absolute positions of the rows of head h in slot order; groups[h][e]: those of
    evicted group e; summaries [Hk, S, 2*dk + dv], stats [Hk, S, 2] as the op takes them: full slot
    blocks first, entry ``blocks + e`` for group e.
    """

    positions: list[Rows]
    groups: list[list[Rows]]
    summaries: Halves
    stats: Floats
    blocks: int

    def rows(self) -> NDArray[np.int64]:
        """[Hk]: slot rows in use."""
        return np.array([len(p) for p in self.positions], np.int64)

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
    )
    for h, (order, always, groups) in enumerate(arranged):
        keys, values = stats.keys[h], stats.values[h]
        slot_k[h, : len(order)], slot_v[h, : len(order)] = keys[order], values[order]
        full = len(order) // BLOCK
        members = [*order[: full * BLOCK].reshape(full, BLOCK), *groups]
        where = np.r_[:full, blocks : blocks + len(groups)]
        made, figures = summarise_groups(keys, values, members, sound=sound)
        if members and not sound:
            figures[:, 1] = seen[h].judge(members, made, figures)[0]
        layer.summaries[h, where], layer.stats[h, where] = made, figures
        layer.stats[h, : always // BLOCK, 1] = np.inf
    return layer
