"""The retention that is served: what a compacted layer keeps of its rows."""

from __future__ import annotations

from serving.kv_compression.bounds import rows_within
from serving.kv_compression.compact import CompactLayer, compact
from serving.kv_compression.grouping import Floats
from serving.kv_compression.history import Stats
from serving.kv_compression.retention import ReasoningAware, outstanding

POLICY = ReasoningAware()
SINKS = 4
# Rows of an evicted group at most, and of one on average.
GROUP, MEAN_GROUP = 64, 44


def rows_kept(budget: float, length: int, key_dim: int, value_dim: int) -> int:
    """Of each head, so that they and all summaries take ``budget`` of the bytes."""
    return rows_within(budget, length, key_dim, value_dim, MEAN_GROUP)


def compact_layer(
    stats: Stats,
    rows: int,
    slot_k: Floats,
    slot_v: Floats,
    *,
    sound: bool = False,
    max_groups: int | None = None,
) -> CompactLayer:
    """``compact`` with the served policy: sinks and rows that a summary would misjudge are pinned.
    Raises ValueError when the slot is too small."""
    pinned = outstanding(stats, POLICY.distinct, POLICY.heavy)
    pinned[:, :SINKS] = True
    return compact(
        stats, POLICY.scores(stats), pinned, rows, slot_k, slot_v,
        group=GROUP, sound=sound, max_groups=max_groups,
    )  # fmt: skip
