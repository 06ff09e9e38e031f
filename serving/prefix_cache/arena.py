"""The bulk data: blocks of K/V rows, full states and checkpoints in one memory-mapped file.

Any process may open the file by path and copy blocks in or out; which slot holds what is
known only to the index. Every slot has a generation word: odd while it is being written, even
when its data is complete. A reader compares it with the generation it was told, before and
after the copy, so a stale slot is a miss and never a wrong answer. A data sum per slot, taken
by the writer, finds damage that left the word alone.

File: magic (8 bytes), header length (uint64), header (JSON), words, sums, slots.
The word is stored after the data; that order is what x86-64 gives plain stores.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_configs.errors import CacheError, ConfigError
from serving.prefix_cache.contract import CacheConfig, Ids, Words

MAGIC = b"HYBRIDKV"
ALIGN = 64
SHARED_MEMORY = Path("/dev/shm")
# Verify and copy about this much at a time, so that the second pass finds the data in cache.
CHUNK_BYTES = 1 << 20
# Checkpoints beyond one per interval of the blocks, as branches have their own: a part, and some.
BRANCH_SHARE, BRANCH_LEAST = 8, 8

Array = NDArray[Any]


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True)
class ArraySpec:
    """One array inside a slot."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class ArenaLayout:
    """What one slot holds. Every block array is [H, block_size, d]; those of a full state and
    of a checkpoint (slow units and conv state) are free."""

    block_size: int
    block: tuple[ArraySpec, ...] = ()
    state: tuple[ArraySpec, ...] = ()
    checkpoint: tuple[ArraySpec, ...] = ()

    def __post_init__(self) -> None:
        for spec in self.block:
            if len(spec.shape) != 3 or spec.shape[1] != self.block_size:
                raise ConfigError(
                    f"block array {spec.name} has shape {spec.shape}",
                    where="arena",
                    fix=f"Make it [H, {self.block_size}, d].",
                )

    @classmethod
    def of_model(
        cls,
        block_size: int,
        kv: Sequence[tuple[int, int, int]],
        state: Sequence[ArraySpec] = (),
        checkpoint: Sequence[ArraySpec] = (),
        dtype: str = "float32",
    ) -> ArenaLayout:
        """kv: (Hk, dk, dv) of each attention layer; arrays come out as k.0, v.0, k.1, ..."""
        block = []
        for i, (heads, dk, dv) in enumerate(kv):
            block.append(ArraySpec(f"k.{i}", (heads, block_size, dk), dtype))
            block.append(ArraySpec(f"v.{i}", (heads, block_size, dv), dtype))
        return cls(block_size, tuple(block), tuple(state), tuple(checkpoint))

    @property
    def block_bytes(self) -> int:
        return slot_bytes(self.block)

    @property
    def state_bytes(self) -> int:
        return slot_bytes(self.state)

    @property
    def checkpoint_bytes(self) -> int:
        return slot_bytes(self.checkpoint)

    def dumps(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def loads(cls, data: dict[str, Any]) -> ArenaLayout:
        def specs(rows: list[dict[str, Any]]) -> tuple[ArraySpec, ...]:
            return tuple(ArraySpec(r["name"], tuple(r["shape"]), r["dtype"]) for r in rows)

        kinds = (specs(data[kind]) for kind in ("block", "state", "checkpoint"))
        return cls(data["block_size"], *kinds)


def slot_bytes(specs: Sequence[ArraySpec]) -> int:
    """From one slot to the next."""
    return sum(_padded(spec.nbytes) for spec in specs)


class Slots:
    """The slots of one kind: words [n], sums [n], and a strided view [n, *shape] per array."""

    def __init__(
        self, buffer: Any, offset: int, count: int, specs: tuple[ArraySpec, ...], checksum: bool
    ) -> None:
        self.specs, self.checksum = specs, checksum
        self.stride = slot_bytes(specs)
        self.words: Words = np.ndarray((count,), np.uint64, buffer, offset)
        self._sums: Words = np.ndarray((count,), np.uint64, buffer, offset + _padded(8 * count))
        data = offset + 2 * _padded(8 * count)
        self._raw: Words = np.ndarray((count, self.stride // 8), np.uint64, buffer, data)
        self.arrays: list[Array] = []
        for spec in specs:
            dtype = np.dtype(spec.dtype)
            inner = [dtype.itemsize * prod(spec.shape[k + 1 :]) for k in range(len(spec.shape))]
            shape = (count, *spec.shape)
            empty = count == 0  # numpy refuses a view past the end, also of nothing
            view: Array = (
                np.empty(shape, dtype)
                if empty
                else np.ndarray(shape, dtype, buffer, data, (self.stride, *inner))
            )
            self.arrays.append(view)
            data += _padded(spec.nbytes)

    @classmethod
    def nbytes(cls, count: int, stride: int) -> int:
        return 2 * _padded(8 * count) + count * stride

    def begin(self, ids: Ids, generations: Words) -> None:
        """Raises CacheError if the slots are no longer ours to write."""
        if (self.words[ids] != generations - np.uint64(1)).any():
            raise CacheError(
                "the reserved slots were taken back", where="arena", fix="Renew leases in time."
            )

    def finish(self, ids: Ids, generations: Words) -> None:
        if self.checksum:
            for run in self._runs(ids):
                self._sums[run] = self._raw[run].sum(axis=1, dtype=np.uint64)
        self.begin(ids, generations)
        self.words[ids] = generations

    def first_stale(self, ids: Ids, generations: Words) -> int:
        bad = self.words[ids] != generations
        return int(bad.argmax()) if bad.any() else len(ids)

    def first_damaged(self, run: slice) -> int:
        """Offset in the run of the first slot whose data does not give its sum; else its len."""
        if self.checksum:
            bad = self._raw[run].sum(axis=1, dtype=np.uint64) != self._sums[run]
            if bad.any():
                return int(bad.argmax())
        return int(run.stop - run.start)

    def write(self, slot: int, generation: int, arrays: Sequence[Array]) -> None:
        """Fill one slot. Raises CacheError if it is no longer ours to write."""
        ids, words = np.array([slot], np.int64), np.array([generation], np.uint64)
        self.begin(ids, words)
        for slots, array in zip(self.arrays, arrays, strict=True):
            np.copyto(slots[slot], array)
        self.finish(ids, words)

    def read(self, slot: int, generation: int, arrays: Sequence[Array]) -> bool:
        """Copy one slot out. False: stale or damaged, ``arrays`` undefined."""
        if int(self.words[slot]) != generation:
            return False
        sound = self.first_damaged(slice(slot, slot + 1)) == 1
        for slots, array in zip(self.arrays, arrays, strict=True):
            np.copyto(array, slots[slot])
        return sound and int(self.words[slot]) == generation

    def _runs(self, ids: Ids) -> Iterator[slice]:
        """Consecutive ids as slices of at most CHUNK_BYTES, in order."""
        if not len(ids):
            return
        most = max(1, CHUNK_BYTES // max(1, self.stride))
        cuts = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
        for low, high in pairwise(cuts):
            for at in range(low, high, most):
                first = int(ids[at])
                yield slice(first, first + min(most, high - at))


class Arena:
    """The mapped file. ``blocks``, ``states`` and ``checkpoints`` are its kinds of slots.

    counts: of slots of each kind, in that order.

    Copies run in the caller's process on the caller's arrays; nothing here locks.
    """

    def __init__(
        self, layout: ArenaLayout, counts: Sequence[int], checksum: bool, buffer: Any,
        offset: int, path: Path | None,
    ) -> None:  # fmt: skip
        self.layout, self.path, self._buffer = layout, path, buffer
        kinds = []
        for count, specs in zip(counts, _kinds(layout), strict=True):
            kinds.append(Slots(buffer, offset, count, specs, checksum))
            offset += Slots.nbytes(count, slot_bytes(specs))
        self.blocks, self.states, self.checkpoints = kinds

    # -- life ---------------------------------------------------------------------------

    @classmethod
    def of_config(cls, config: CacheConfig, layout: ArenaLayout) -> Arena:
        """In shared memory under ``config.name``, as many slots as the two budgets hold, and
        checkpoints for every ``config.checkpoint_interval`` tokens of its blocks."""
        if layout.block_size != config.block_size:
            raise ConfigError(
                f"block_size {config.block_size} but the layout has {layout.block_size}",
                where="cache",
            )
        num_blocks = config.kv_bytes // max(1, layout.block_bytes)
        num_states = config.state_bytes // layout.state_bytes if layout.state else 0
        if num_blocks == 0:
            raise ConfigError(
                f"kv_bytes = {config.kv_bytes} is less than one block ({layout.block_bytes})",
                where="cache",
                fix="Raise it.",
            )
        num_checkpoints = 0
        if layout.checkpoint and config.checkpoint_interval:
            num_checkpoints = num_blocks * config.block_size // config.checkpoint_interval
            num_checkpoints += num_checkpoints // BRANCH_SHARE + BRANCH_LEAST
        return cls.create(
            SHARED_MEMORY / config.name, layout, num_blocks, num_states, num_checkpoints,
            checksum=config.checksum,
        )  # fmt: skip

    @classmethod
    def create(
        cls, path: Path, layout: ArenaLayout, num_blocks: int, num_states: int,
        num_checkpoints: int = 0, *, checksum: bool = True,
    ) -> Arena:  # fmt: skip
        """A new file, replacing one left by a dead server. Its pages are allocated at once:
        running out of memory is a ConfigError here, not a bus error in a later write."""
        counts = [num_blocks, num_states, num_checkpoints]
        head = {"layout": layout.dumps(), "counts": counts, "sum": checksum}
        text = json.dumps(head).encode()
        offset = _padded(16 + len(text))
        size = offset + _slots_bytes(layout, counts)
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            buffer = mmap.mmap(fd, size)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ConfigError(
                f"cannot allocate {size} bytes: {error}", where=str(path), fix="Lower the budgets."
            ) from error
        finally:
            os.close(fd)
        buffer[: 16 + len(text)] = MAGIC + len(text).to_bytes(8, "little") + text
        return cls(layout, counts, checksum, buffer, offset, path)

    @classmethod
    def open(cls, path: Path) -> Arena:
        """Map an existing arena. Raises CacheError if the file is not one."""
        try:
            with path.open("r+b") as file:
                buffer = mmap.mmap(file.fileno(), 0)
            length = int.from_bytes(buffer[8:16], "little")
            if buffer[:8] != MAGIC:
                raise ValueError("wrong magic")
            head = json.loads(buffer[16 : 16 + length])
            layout = ArenaLayout.loads(head["layout"])
            return cls(layout, head["counts"], head["sum"], buffer, _padded(16 + length), path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CacheError(f"not an arena: {error}", where=str(path)) from error

    @classmethod
    def without_data(
        cls, block_size: int, num_blocks: int, num_states: int = 0, num_checkpoints: int = 0
    ) -> Arena:
        """Words only, in private memory: for metadata benchmarks and device-owned pages."""
        layout = ArenaLayout(block_size)
        counts = (num_blocks, num_states, num_checkpoints)
        return cls(layout, counts, False, bytearray(_slots_bytes(layout, counts) + 8), 0, None)

    def memory(self) -> Array:
        """Every byte of it, as it is mapped here."""
        return np.frombuffer(self._buffer, np.uint8)

    def unlink(self) -> None:
        """Remove the name; mappings of it stay valid until their processes end."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    # -- blocks -------------------------------------------------------------------------

    def write_blocks(
        self, ids: Ids, generations: Words, start: int, end: int, kv: Sequence[Array]
    ) -> None:
        """Fill reserved blocks with tokens [start // B * B, end) of ``kv``.

        ids, generations [n]: of a Reservation; kv: per block array of the layout [H, C, d],
        row = token. Raises CacheError if the reservation was taken back meanwhile.
        """
        self.blocks.begin(ids, generations)
        self._copy(ids, start // self.layout.block_size, end, kv, write=True)
        self.blocks.finish(ids, generations)

    def read_blocks(self, ids: Ids, generations: Words, length: int, kv: Sequence[Array]) -> int:
        """Copy tokens [0, length) into ``kv`` (as in write_blocks); returns how many are good.

        Less than ``length`` means a stale or damaged block; rows from there on are undefined.
        ids may cover more than ``length``.
        """
        size = self.layout.block_size
        ids, generations = ids[: -(-length // size)], generations[: -(-length // size)]
        good = self.blocks.first_stale(ids, generations)
        good = self._copy(ids[:good], 0, min(length, good * size), kv, write=False)
        good = min(good, self.blocks.first_stale(ids, generations))
        return min(length, good * size)

    def _copy(self, ids: Ids, first: int, end: int, kv: Sequence[Array], *, write: bool) -> int:
        """Block ``ids[i]`` <-> rows of block number ``first + i``; returns undamaged blocks."""
        size, done = self.layout.block_size, 0
        for run in self.blocks._runs(ids):
            count = run.stop - run.start
            sound = count if write else self.blocks.first_damaged(run)
            low = (first + done) * size
            whole = min(sound, (end - low) // size)
            rest = min(size, end - low - whole * size) if whole < sound else 0
            for slots, rows in zip(self.blocks.arrays, kv, strict=True):
                heads, _, dim = rows.shape
                if whole:
                    flat = rows[:, low : low + whole * size]
                    # a view: splitting the token axis [H, w*B, d] -> [H, w, B, d] never copies
                    theirs = flat.reshape(heads, whole, size, dim).transpose(1, 0, 2, 3)
                    ours = slots[run.start : run.start + whole]
                    np.copyto(ours, theirs) if write else np.copyto(theirs, ours)
                if rest:
                    tail = rows[:, low + whole * size : low + whole * size + rest]
                    ours = slots[run.start + whole, :, :rest]
                    np.copyto(ours, tail) if write else np.copyto(tail, ours)
            done += sound
            if sound < count:
                break
        return done

    # -- states and checkpoints ---------------------------------------------------------

    def write_state(self, slot: int, generation: int, arrays: Sequence[Array]) -> None:
        """arrays: in the order and shapes of ``layout.state``. Raises CacheError if lost."""
        self.states.write(slot, generation, arrays)

    def read_state(self, slot: int, generation: int, arrays: Sequence[Array]) -> bool:
        """False: stale or damaged, ``arrays`` undefined."""
        return self.states.read(slot, generation, arrays)

    def write_checkpoint(self, slot: int, generation: int, arrays: Sequence[Array]) -> None:
        """As write_state, for ``layout.checkpoint``."""
        self.checkpoints.write(slot, generation, arrays)

    def read_checkpoint(self, slot: int, generation: int, arrays: Sequence[Array]) -> bool:
        """As read_state, for ``layout.checkpoint``."""
        return self.checkpoints.read(slot, generation, arrays)


def _kinds(layout: ArenaLayout) -> tuple[tuple[ArraySpec, ...], ...]:
    return layout.block, layout.state, layout.checkpoint


def _slots_bytes(layout: ArenaLayout, counts: Sequence[int]) -> int:
    kinds = zip(counts, _kinds(layout), strict=True)
    return sum(Slots.nbytes(count, slot_bytes(specs)) for count, specs in kinds)
