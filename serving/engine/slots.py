"""Where sequences keep their K/V and states: one batch buffer per capacity class.

A class owns arrays [rows, ...] for every past_* and *_state_* input of the graph. Sequences that
decode are its first rows, kept dense by swapping, so one decode run covers ``[0, num_active)``
and never advances the state of an idle neighbour. Memory of untouched rows is never paged in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine_configs.spec import HybridSpec
from serving.prefix_cache.arena import Arena
from serving.prefix_cache.contract import Ids, Words

Array = NDArray[np.float32]


class RowsOf(Protocol):
    """An array [rows, ...] of which the caller sees one row at a time, in host memory."""

    def __getitem__(self, row: int, /) -> Any: ...


class Slots(ABC):
    """``rows`` slots that hold up to ``capacity`` tokens each, wherever their memory is."""

    # Every state by the name of the graph input it feeds.
    states: Mapping[str, RowsOf]

    def __init__(self, capacity: int, rows: int) -> None:
        self.capacity, self.rows = capacity, rows
        self._owner: list[object | None] = [None] * rows
        # K/V rows in use per slot: what has to move when slots are exchanged.
        self.lengths = np.zeros(rows, np.int64)
        self.num_active = 0

    @abstractmethod
    def zero_states(self, row: int) -> None: ...

    @abstractmethod
    def load(self, row: int, arena: Arena, ids: Ids, generations: Words, length: int) -> int:
        """Bring the K/V of tokens [0, length) from arena blocks; returns how many are good.

        They may be on their way when this returns: see ``confirm``.
        """

    @abstractmethod
    def store(
        self, row: int, arena: Arena, ids: Ids, generations: Words, start: int, end: int
    ) -> None:
        """Fill reserved arena blocks with the K/V of tokens [start // block size, end).

        Raises CacheError if the reservation was taken back meanwhile.
        """

    @abstractmethod
    def clear(self) -> None:
        """Zero all K/V, so that rows which were never written may be read."""

    def confirm(self, row: int) -> bool:
        """False: what was loaded into the slot turned out to be stale, nor is what was computed
        from it good."""
        return True

    @abstractmethod
    def _exchange(self, a: int, b: int) -> None:
        """Exchange the contents of two rows; a free row's contents need not survive."""

    def free_rows(self) -> int:
        return self._owner.count(None)

    def allocate(self, owner: object) -> int:
        """The last free row, its states zero; ``free_rows`` must not be 0."""
        row = max(i for i, o in enumerate(self._owner) if o is None)
        self._owner[row] = owner
        self.lengths[row] = 0
        self.zero_states(row)
        return row

    def row_of(self, owner: object) -> int:
        return self._owner.index(owner)

    def owners(self) -> list[object]:
        """Owners of the active rows, in row order."""
        return self._owner[: self.num_active]

    def activate(self, owner: object) -> None:
        """Let ``owner`` take part in decode runs."""
        self._swap(self.row_of(owner), self.num_active)
        self.num_active += 1

    def release(self, owner: object) -> None:
        """Give the row back; the last active row moves into a hole."""
        row = self.row_of(owner)
        self._owner[row] = None
        if row < self.num_active:
            self.num_active -= 1
            self._swap(self.num_active, row)

    def close(self) -> None:
        """Give everything back; the slots are not used again."""
        self._owner, self.num_active = [None] * self.rows, 0

    def hold(self, row: int, total_lens: NDArray[np.int64]) -> None:
        """Rows from ``row`` on hold at least this many tokens each from now on."""
        part = self.lengths[row : row + len(total_lens)]
        np.maximum(part, total_lens, out=part)

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self._exchange(a, b)
        self._owner[a], self._owner[b] = self._owner[b], self._owner[a]
        self.lengths[[a, b]] = self.lengths[[b, a]]


class SlotClass(Slots):
    """Slots in host memory, contiguous per row: what ONNX Runtime reads and writes in place."""

    states: dict[str, Array]

    def __init__(self, spec: HybridSpec, capacity: int, rows: int) -> None:
        super().__init__(capacity, rows)
        self.kv: dict[str, Array] = {}
        self.states = {}
        self._attention = spec.attention_layers()
        for i, m in self._attention:
            for name in ("key", "value"):
                shape = (rows, m.num_kv_heads, capacity, m.head_dim)
                self.kv[f"past_{name}_{i}"] = np.empty(shape, np.float32)
        for i, mixer in spec.state_layers():
            if conv := mixer.conv_state():
                self.states[f"conv_state_{i}"] = np.zeros((rows, *conv), np.float32)
            if recurrent := mixer.recurrent_state():
                self.states[f"recurrent_state_{i}"] = np.zeros((rows, *recurrent), np.float32)
        self.row_bytes = sum(a[0].nbytes for a in self.buffers().values())
        # The runtime's bindings to rows of these buffers; they must not outlive them.
        self.bindings: dict[tuple[int, ...], Any] = {}

    def buffers(self) -> dict[str, Array]:
        """Every array [rows, ...] that a run changes, by the name of the graph input it feeds."""
        return self.kv | self.states

    def inputs(self) -> dict[str, Any]:
        """Those that it only reads."""
        return {}

    def memory(self) -> dict[str, Any]:
        """Arrays that it reads whole, whichever rows it is about."""
        return {}

    def kv_rows(self, row: int) -> list[Array]:
        """Views [Hk, C, dk or dv] of a slot's K, V, K, ...: the columns that are used."""
        dims = [d for _, m in self._attention for d in (m.head_dim, m.value_dim)]
        return [a[row, ..., :d] for a, d in zip(self.kv.values(), dims, strict=True)]

    def outputs(self, batch: int) -> dict[str, Any]:
        """What a run over ``batch`` rows of these slots says beside its logits, to be filled in."""
        return {}

    def load(self, row: int, arena: Arena, ids: Ids, generations: Words, length: int) -> int:
        good = arena.read_blocks(ids, generations, length, self.kv_rows(row))
        self.hold(row, np.array([length]))
        return good

    def store(
        self, row: int, arena: Arena, ids: Ids, generations: Words, start: int, end: int
    ) -> None:
        arena.write_blocks(ids, generations, start, end, self.kv_rows(row))

    def clear(self) -> None:
        for array in self.kv.values():
            array[:] = 0

    def zero_states(self, row: int) -> None:
        for array in self.states.values():
            array[row] = 0

    def _exchange(self, a: int, b: int) -> None:
        both = self._owner[a] is not None and self._owner[b] is not None
        source, target = (a, b) if self._owner[a] is not None else (b, a)
        length = int(max(self.lengths[source], self.lengths[target] if both else 0))
        for name, array in self.buffers().items():
            part = (slice(None), slice(length)) if name in self.kv else ...
            kept = array[target][part].copy() if both else None
            array[target][part] = array[source][part]
            if kept is not None:
                array[source][part] = kept


def class_capacities(max_tokens: int) -> list[int]:
    """1K, 4K, 16K, … and the longest sequence served."""
    steps = [1024 * 4**i for i in range(16)]
    return [c for c in steps if c < max_tokens] + [max_tokens]
