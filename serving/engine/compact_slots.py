"""Slots of sequences whose heads kept rows of their own choice: smaller, with summaries beside.

Per attention layer i, beside K/V and as the graph names them: kv_rows_i [rows, Hk] int32 (slot rows
in use, the step's own included), summaries_i [rows, Hk, S, 2*dk + dv] float16 and stats_i
[rows, Hk, S, 2]; entries of the slot's blocks come first, then those of evicted groups;
host_rows_i [rows, Hk, R] and host_first_i [rows, Hk, S] int32: where the rows of these lie in
host_key_i, host_value_i [N] (see ``plugins.compressed_sparse_attention.ref``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_configs.mixers import AttentionMixer
from engine_configs.spec import Attention, HybridSpec
from plugins.compressed_sparse_attention.ref import BLOCK
from serving.engine.slots import SlotClass
from serving.kv_compression.compact import CompactLayer
from serving.kv_compression.policy import GROUP
from serving.kv_compression.summaries import summarise

# Blocks at the end of a slot that are read anyhow and have no summary yet.
RECENT = 2
Floats = NDArray[np.float32]
Rows = NDArray[np.int64]


def can_compress(mixer: AttentionMixer) -> bool:
    """Rows may go where every query may look at all of them."""
    return isinstance(mixer, Attention) and mixer.window is None


class CompactSlots(SlotClass):
    """``longest``: tokens of the longest sequence that may be compacted into a slot."""

    def __init__(self, spec: HybridSpec, capacity: int, rows: int, longest: int) -> None:
        self.blocks, self.groups = -(-capacity // BLOCK), -(-longest // GROUP)
        self.summaries: dict[str, NDArray[Any]] = {}
        self.counts: dict[str, NDArray[np.int32]] = {}
        self.host: dict[str, NDArray[np.int32]] = {}
        self._memory: dict[str, Floats] = {}
        self.epsilon = np.zeros(rows, np.float32)
        self.factor = np.ones(rows, np.float32)
        entries = self.blocks + self.groups
        for i, m in spec.attention_layers():
            heads, width = m.num_kv_heads, 2 * m.head_dim + m.head_dim
            self.counts[f"kv_rows_{i}"] = np.zeros((rows, heads), np.int32)
            self.summaries[f"summaries_{i}"] = np.zeros((rows, heads, entries, width), np.float16)
            self.summaries[f"stats_{i}"] = np.zeros((rows, heads, entries, 2), np.float32)
            self.host[f"host_rows_{i}"] = np.zeros((rows, heads, longest), np.int32)
            self.host[f"host_first_{i}"] = np.full((rows, heads, entries), -1, np.int32)
            for name in ("key", "value"):
                self._memory[f"host_{name}_{i}"] = np.zeros(0, np.float32)
        super().__init__(spec, capacity, rows)

    def buffers(self) -> dict[str, Any]:
        return super().buffers() | self.summaries

    def inputs(self) -> dict[str, Any]:
        return self.counts | self.host | {"epsilon": self.epsilon, "bound_factor": self.factor}

    def memory(self) -> dict[str, Any]:
        return self._memory

    def read_from(self, memory: dict[str, Floats]) -> None:
        """Where evicted rows lie from now on; what lay elsewhere cannot be had any more."""
        self._memory = memory
        self.bindings.clear()
        for row in range(self.rows):
            self.lose_host(row)

    def lose_host(self, row: int) -> None:
        """What this sequence's steps ask for cannot be had."""
        for name, first in self.host.items():
            if name.startswith("host_first"):
                first[row] = -1

    def place(self, row: int, i: int, head: int, parts: list[Rows]) -> None:
        """Where the rows of a head's evicted groups start, group by group (empty: it is back)."""
        sizes = [len(part) for part in parts]
        rows = np.concatenate([*parts, np.zeros(0, np.int64)])
        first = self.host[f"host_first_{i}"][row, head, self.blocks :]
        first[:] = -1
        if rows.max(initial=0) <= np.iinfo(np.int32).max:
            self.host[f"host_rows_{i}"][row, head, : len(rows)] = rows
            first[: len(parts)] = np.cumsum([0, *sizes])[:-1]

    def outputs(self, batch: int) -> dict[str, Any]:
        """error_bound_i [B, Hq], rows_read_i [B, Hk], chosen_i [B, Hk, S] of a step."""
        made: dict[str, Any] = {}
        for i, m in self._attention:
            entries = self.summaries[f"stats_{i}"].shape[2]
            made[f"error_bound_{i}"] = np.empty((batch, m.num_heads), np.float32)
            made[f"rows_read_{i}"] = np.empty((batch, m.num_kv_heads), np.int32)
            made[f"chosen_{i}"] = np.empty((batch, m.num_kv_heads, entries), np.uint8)
        return made

    def _exchange(self, a: int, b: int) -> None:
        super()._exchange(a, b)
        for array in self.inputs().values():
            array[[a, b]] = array[[b, a]]

    def layer(self, row: int, i: int) -> tuple[Floats, Floats]:
        """Views k [Hk, C, dk], v [Hk, C, dv] of one layer."""
        return self.kv[f"past_key_{i}"][row], self.kv[f"past_value_{i}"][row]

    def take(self, row: int, i: int, made: CompactLayer) -> None:
        """Set a layer up as compacted; its rows are in the slot already."""
        used = made.summaries.shape[1]
        summaries, stats = (self.summaries[f"{name}_{i}"][row] for name in ("summaries", "stats"))
        summaries[:, :used], stats[:, :used] = made.summaries, made.stats
        stats[:, used:] = 0
        self.counts[f"kv_rows_{i}"][row] = made.rows()
        self.hold(row, np.array([made.rows().max()]))

    def grow(self, count: int) -> None:
        """The first ``count`` rows take a step: one more K/V row for every head."""
        for rows in self.counts.values():
            rows[:count] += 1

    def bring_back(
        self, row: int, i: int, head: int, entries: list[int], keys: Floats, values: Floats
    ) -> int:
        """Put evicted rows (keys [n, dk], values [n, dv]) behind the others of a head; their
        summaries at ``entries`` go, the blocks they fill are summarised. Returns where they are."""
        counts, stats = self.counts[f"kv_rows_{i}"][row], self.summaries[f"stats_{i}"][row, head]
        k, v = (a[head] for a in self.layer(row, i))
        start, end = int(counts[head]), int(counts[head]) + len(keys)
        k[start:end], v[start:end] = keys, values
        counts[head] = end
        stats[[self.blocks + e for e in entries]] = 0
        # The last blocks had no summary yet.
        first, full = max(0, start // BLOCK - RECENT), end // BLOCK
        if full > first:
            rows = slice(first * BLOCK, full * BLOCK)
            parts = (a[rows].reshape(full - first, BLOCK, -1) for a in (k, v))
            made, figures = summarise(*parts, sound=bool(self.factor[row] == 0))
            self.summaries[f"summaries_{i}"][row, head, first:full] = made
            stats[first:full] = figures
        return start

    def evict(self, row: int, i: int, head: int, blocks: Rows, entries: Rows) -> Rows:
        """Take whole blocks out of a head's slot: what follows moves up, their summaries go to the
        evicted ``entries``. Returns the old slot rows that are left, in their new order."""
        counts = self.counts[f"kv_rows_{i}"][row]
        count, full = int(counts[head]), int(counts[head]) // BLOCK
        gone = np.zeros(full, bool)
        gone[blocks] = True
        stay = np.flatnonzero(~gone)
        rows = np.concatenate(
            [(stay[:, None] * BLOCK + np.arange(BLOCK)).ravel(), np.arange(full * BLOCK, count)]
        )
        for array in self.layer(row, i):
            array[head, : len(rows)] = array[head, rows]
        for name in ("summaries", "stats"):
            held = self.summaries[f"{name}_{i}"][row, head]
            held[self.blocks + entries] = held[blocks]
            held[: len(stay)] = held[stay]
        counts[head] = len(rows)
        return np.asarray(rows)
