"""Evicted rows where they lie: in blocks of the prefix cache, which a step reads in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from serving.prefix_cache.arena import Arena
from serving.prefix_cache.contract import Match

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]
# Floats; the op counts where a row starts in these.
UNIT = 8


class HostCopy:
    """The K/V of pinned prompts in one arena, by absolute position; ``layers``: the attention
    layers, in the order of its arrays."""

    def __init__(self, arena: Arena, layers: Sequence[int]) -> None:
        self.arena = arena
        kv = arena.blocks.arrays
        self._kv = {i: (kv[2 * n], kv[2 * n + 1]) for n, i in enumerate(layers)}

    def memory(self) -> dict[str, Floats]:
        """host_key_i, host_value_i [N] as the graph takes them: the mapped file from the layer's
        array in the first block to that in the last."""
        found = {}
        for i, arrays in self._kv.items():
            for name, blocks in zip(("key", "value"), arrays, strict=True):
                size = ((len(blocks) - 1) * blocks.strides[0] + blocks[0].nbytes) // blocks.itemsize
                flat = np.lib.stride_tricks.as_strided(blocks, (size,), (blocks.itemsize,))
                found[f"host_{name}_{i}"] = flat
        return found

    def addresses(self, match: Match, i: int, head: int, positions: Positions) -> Positions:
        """Where the rows of layer i start in its two memories."""
        blocks, (block, row) = self._kv[i][0], divmod(positions, self.arena.layout.block_size)
        at = match.blocks[block] * blocks.strides[0] + head * blocks.strides[1]
        return np.asarray((at + row * blocks.strides[2]) // (UNIT * blocks.itemsize), np.int64)

    def rows(self, match: Match, i: int, head: int, positions: Positions) -> tuple[Floats, Floats]:
        """Copies k [n, dk], v [n, dv]."""
        block, row = divmod(positions, self.arena.layout.block_size)
        keys, values = self._kv[i]
        at = match.blocks[block]
        return keys[at, head, row], values[at, head, row]

    def holds(self, match: Match) -> bool:
        """False: the cache took blocks of the prompt back, its lease was not renewed in time."""
        blocks = self.arena.blocks
        return blocks.first_stale(match.blocks, match.generations) == len(match.blocks)
