"""Slots whose memory is on the device: pages of K/V by block table, one buffer per state.

A state row that the host asks for is downloaded and is the host's until the next run of that row,
which uploads it again; rows that nobody asks for never travel. K/V travels in whole pages, each the
bytes of one arena block, in the order the device has them: only this engine reads such blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine_configs.errors import BundleError, ConfigError
from serving.engine.slots import Slots
from serving.engine.tensorrt.device import Array, Device, Event
from serving.engine.tensorrt.layout import EngineLayout, Pool, State
from serving.engine.tensorrt.pages import PagePool
from serving.prefix_cache.arena import Arena
from serving.prefix_cache.contract import Ids, Words

ALIGNMENT = 256  # of every address that TensorRT is given
# Pages beyond what full slots need: blocks that were read once and may be asked for again.
IDLE_SHARE = 0.25


class KvMemory:
    """The pools of all layers, shared by all slot classes; allocated when first used."""

    def __init__(self, device: Device, layout: EngineLayout) -> None:
        self.device, self.layout = device, layout
        self.ready: dict[int, Event] = {p.layer: device.event() for p in layout.pools}
        self.arriving = False  # copies are on their way: layers must wait for their event
        self._reserved = 1
        self._pages: PagePool | None = None
        self._base: dict[str, int] = {}
        self._pinned: set[int] = set()

    def reserve(self, pages: int) -> None:
        """Room for slots that may all be full. Once there are pools, only what they have left.

        Raises OverloadedError.
        """
        if self._pages is not None and self._pages.held():
            self._pages.require(pages)
            return
        self._reserved += pages
        for address in self._base.values():
            self.device.free(address)
        self._pages, self._base = None, {}

    @property
    def pages(self) -> PagePool:
        if self._pages is None:
            self._pages = PagePool(self._reserved + int(IDLE_SHARE * self._reserved))
            for pool in self.layout.pools:
                size = self._pages.count * self.layout.page_bytes(pool)
                self._base[pool.name] = self.device.allocate(size)
        return self._pages

    def address(self, pool: Pool, page: int = 0) -> int:
        assert self.pages
        return self._base[pool.name] + page * self.layout.page_bytes(pool)

    def pin(self, arena: Arena) -> None:
        """Raises ConfigError when its blocks are not our pages."""
        if id(arena) in self._pinned:
            return
        ours = [(self.layout.block_tokens, self.layout.page_bytes(p)) for p in self.layout.pools]
        theirs = [(arena.layout.block_size, s.nbytes) for s in arena.layout.block]
        if ours != theirs:
            raise ConfigError(
                f"its blocks have (rows, bytes) {theirs[:1]}, the engine's pages {ours[:1]}",
                where="arena",
                fix=f"Set block_size to {self.layout.block_tokens}",
            )
        self.device.pin(arena.memory())
        self._pinned.add(id(arena))

    def copy_page(self, source: int, target: int) -> None:
        for pool in self.layout.pools:
            size = self.layout.page_bytes(pool)
            places = self.address(pool, target), self.address(pool, source)
            self.device.copy(*places, size, "compute")


@dataclass(frozen=True)
class _Arriving:
    """Blocks on their way to a row: page of each, and whether it may be named once it is there."""

    arena: Arena
    ids: Ids
    generations: Words
    fresh: list[tuple[int, int, bool]]  # (place in ids, page, whole)


class StateRows:
    """One state of all rows, seen row by row from the host."""

    def __init__(self, slots: DeviceSlots, state: State) -> None:
        self._slots = slots
        device = slots.memory.device
        self.address = device.allocate(slots.rows * state.nbytes)
        self.host = device.pinned((slots.rows, *state.shape), np.float32)
        self.state = state

    def at(self, row: int) -> int:
        return self.address + row * self.state.nbytes

    def __getitem__(self, row: int, /) -> Array:
        self._slots.fetch(row)
        view: Array = self.host[row]
        return view


class DeviceSlots(Slots):
    """Rows of one capacity class."""

    states: dict[str, StateRows]

    def __init__(self, memory: KvMemory, capacity: int, rows: int) -> None:
        super().__init__(capacity, rows)
        self.memory, layout = memory, memory.layout
        self._size = layout.block_tokens
        self.max_blocks = -(-capacity // self._size)
        memory.reserve(rows * self.max_blocks)
        self.table = np.zeros((rows, self.max_blocks), np.int32)
        for state in layout.states:
            if state.nbytes % ALIGNMENT and rows > 1:
                raise BundleError(
                    f"{state.name} takes {state.nbytes} bytes a row, TensorRT wants multiples of "
                    f"{ALIGNMENT}",
                    where="engine",
                    fix="Set max_batch to 1",
                )
        self.states = {s.name: StateRows(self, s) for s in layout.states}
        self._held: list[list[int]] = [[] for _ in range(rows)]
        self._on_host: set[int] = set()
        self._arriving: dict[int, _Arriving] = {}
        self._spare = memory.device.allocate(max((s.nbytes for s in layout.states), default=0))

    # -- states -------------------------------------------------------------------------

    def fetch(self, row: int) -> None:
        """Let the host have the row's states, to read or to write."""
        if row in self._on_host:
            return
        for rows in self.states.values():
            self.memory.device.download(rows.host[row], rows.at(row), "compute")
        self.memory.device.synchronize("compute")
        self._on_host.add(row)

    def take_back(self, rows: Iterable[int]) -> None:
        """States that the host has go back to the device."""
        for row in self._on_host.intersection(rows):
            for state in self.states.values():
                self.memory.device.upload(state.at(row), state.host[row], "compute")
            self._on_host.discard(row)

    def zero_states(self, row: int) -> None:
        for rows in self.states.values():
            self.memory.device.zero(rows.at(row), rows.state.nbytes, "compute")
        self._on_host.discard(row)

    # -- pages --------------------------------------------------------------------------

    def make_room(self, row: int, start: int, total: int) -> None:
        """Pages for tokens [start, total), which will be written."""
        held, pages = self._held[row], self.memory.pages
        for number in range(start // self._size, min(len(held), -(-total // self._size))):
            self._own(row, number)
        while len(held) * self._size < total:
            held.append(pages.take())
        self.table[row, : len(held)] = held

    def _own(self, row: int, number: int) -> None:
        """A page that others may read is not written: the row gets its copy."""
        pages, page = self.memory.pages, self._held[row][number]
        if pages.is_private(page):
            return
        copy = pages.take()
        self.memory.copy_page(page, copy)
        pages.drop(page)
        self._held[row][number] = copy

    def clear(self) -> None:
        """Pools start as zeros."""

    def release(self, owner: object) -> None:
        self._drop(self.row_of(owner))
        super().release(owner)

    def close(self) -> None:
        for row in range(self.rows):
            self._drop(row)
        super().close()

    def _drop(self, row: int) -> None:
        if row in self._arriving:
            self.memory.device.synchronize("copy")
            del self._arriving[row]
        for page in self._held[row]:
            self.memory.pages.drop(page)
        self._held[row] = []
        self.table[row] = 0

    def load(self, row: int, arena: Arena, ids: Ids, generations: Words, length: int) -> int:
        """Pages that are here already are shared; the others start to arrive, layer by layer."""
        memory, size = self.memory, self._size
        memory.pin(arena)
        count = -(-length // size)
        ids, generations = ids[:count], generations[:count]
        good = min(length, arena.blocks.first_stale(ids, generations) * size)
        if good < length:
            return good
        self._drop(row)
        fresh: list[tuple[int, int, bool]] = []
        for i, key in enumerate(zip(ids.tolist(), generations.tolist(), strict=True)):
            whole = (i + 1) * size <= length
            page = memory.pages.share(key) if whole else None
            if page is None:
                page = memory.pages.take()
                fresh.append((i, page, whole))
            self._held[row].append(page)
        self.table[row, :count] = self._held[row]
        device = memory.device
        for pool, blocks in zip(memory.layout.pools, arena.blocks.arrays, strict=True):
            for i, page, _ in fresh:
                device.upload(memory.address(pool, page), blocks[ids[i]], "copy")
            device.record(memory.ready[pool.layer], "copy")  # K, then V and K
        memory.arriving = memory.arriving or bool(fresh)
        self._arriving[row] = _Arriving(arena, ids, generations, fresh)
        self.hold(row, np.array([length]))
        return length

    def confirm(self, row: int) -> bool:
        """All has arrived, and nothing was written over it meanwhile."""
        arriving = self._arriving.pop(row, None)
        if arriving is None:
            return True
        self.memory.device.synchronize("copy")
        blocks, ids = arriving.arena.blocks, arriving.ids
        sound = all(
            blocks.first_damaged(slice(ids[i], ids[i] + 1)) == 1 for i, _, _ in arriving.fresh
        )
        if not sound or blocks.first_stale(ids, arriving.generations) < len(ids):
            self._drop(row)
            return False
        for i, page, whole in arriving.fresh:
            if whole:
                key = (int(ids[i]), int(arriving.generations[i]))
                self.memory.pages.name(page, key)
        return True

    def store(
        self, row: int, arena: Arena, ids: Ids, generations: Words, start: int, end: int
    ) -> None:
        memory, first = self.memory, start // self._size
        memory.pin(arena)
        arena.blocks.begin(ids, generations)
        held = self._held[row][first : first + len(ids)]
        for pool, blocks in zip(memory.layout.pools, arena.blocks.arrays, strict=True):
            for slot, page in zip(ids.tolist(), held, strict=True):
                memory.device.download(blocks[slot], memory.address(pool, page), "copy")
        memory.device.synchronize("copy")
        arena.blocks.finish(ids, generations)
        for i, page in enumerate(held):
            if (first + i + 1) * self._size <= end:
                memory.pages.name(page, (int(ids[i]), int(generations[i])))

    def _exchange(self, a: int, b: int) -> None:
        self.take_back((a, b))
        device = self.memory.device
        for rows in self.states.values():
            size = rows.state.nbytes
            device.copy(self._spare, rows.at(a), size, "compute")
            device.copy(rows.at(a), rows.at(b), size, "compute")
            device.copy(rows.at(b), self._spare, size, "compute")
        self.table[[a, b]] = self.table[[b, a]]
        self._held[a], self._held[b] = self._held[b], self._held[a]
        moved: dict[int, Any] = {a: self._arriving.pop(b, None), b: self._arriving.pop(a, None)}
        self._arriving |= {row: arriving for row, arriving in moved.items() if arriving}
