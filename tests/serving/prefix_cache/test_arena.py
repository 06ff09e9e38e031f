"""The mapped file: what is written is what any process reads, and damage never passes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_configs.errors import CacheError, ConfigError
from serving.prefix_cache import Arena, ArenaLayout, ArraySpec, CacheConfig
from serving.prefix_cache.pool import Pool

B = 8
# two layers of different head counts and dk != dv, as in MLA; odd sizes so that padding matters
LAYOUT = ArenaLayout.of_model(
    B, [(2, 3, 5), (1, 4, 4)], [ArraySpec("conv", (3, 7)), ArraySpec("rec", (2, 3, 5))],
    [ArraySpec("slow", (2, 13), "uint8"), ArraySpec("scale", (2,), "float16")],
)  # fmt: skip


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena.create(tmp_path / "arena", LAYOUT, 20, 3, 5)


def rows(length: int, seed: int = 0) -> list[np.ndarray]:
    """One [H, C, d] array per block array; C is longer than the tokens and NaN beyond them."""
    rng = np.random.default_rng(seed)
    out = []
    for heads, _, dim in (spec.shape for spec in LAYOUT.block):
        array = np.full((heads, 20 * B, dim), np.nan, np.float32)
        array[:, :length] = rng.standard_normal((heads, length, dim), np.float32)
        out.append(array)
    return out


def reserve(pool: Pool, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """These very ids, in this order, as the index would hand them out."""
    pool.allocate(pool.size)
    want = np.array(ids)
    return want, pool.issued[want]


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 5 * B, 5 * B + 3])
@pytest.mark.parametrize("order", ["run", "scattered"])
def test_round_trip(arena: Arena, length: int, order: str) -> None:
    ids = list(range(6)) if order == "run" else [7, 8, 3, 19, 0, 1]
    blocks, generations = reserve(Pool(arena.blocks.words), ids[: -(-length // B)])
    want, got = rows(length), rows(0)
    arena.write_blocks(blocks, generations, 0, length, want)
    assert arena.read_blocks(blocks, generations, length, got) == length
    for one, two in zip(want, got, strict=True):
        np.testing.assert_array_equal(one, two)  # also: nothing written beyond the length


@pytest.mark.parametrize("start", [0, 1, B, 2 * B + 3])
def test_a_later_part_is_written_from_its_first_block_on(arena: Arena, start: int) -> None:
    length = 4 * B + 2
    blocks, generations = reserve(Pool(arena.blocks.words), [4, 2, 3, 9, 10])
    first = start // B
    want, got = rows(length), rows(0)
    arena.write_blocks(blocks[:first], generations[:first], 0, first * B, want)
    arena.write_blocks(blocks[first:], generations[first:], start, length, want)
    assert arena.read_blocks(blocks, generations, length, got) == length
    for one, two in zip(want, got, strict=True):
        np.testing.assert_array_equal(one, two)


def test_slot_views_need_not_be_contiguous(arena: Arena) -> None:
    """A slot is one row of a batch buffer, its head axis may be strided."""
    blocks, generations = reserve(Pool(arena.blocks.words), [1, 2, 5])
    want = [array[:, ::2] for array in rows(6 * B)]
    arena.write_blocks(blocks, generations, 0, 3 * B, want)
    batch = [np.zeros((4, *array.shape), np.float32) for array in want]
    got = [array[2] for array in batch]
    assert arena.read_blocks(blocks, generations, 3 * B, got) == 3 * B
    for one, two in zip(want, got, strict=True):
        np.testing.assert_array_equal(one[:, : 3 * B], two[:, : 3 * B])


@pytest.mark.parametrize("bad", [0, 2, 4])
@pytest.mark.parametrize("what", ["stale", "being written", "damaged", "swapped"])
def test_bad_block_ends_what_is_good(arena: Arena, bad: int, what: str) -> None:
    blocks, generations = reserve(Pool(arena.blocks.words), [3, 4, 5, 6, 12])
    want = rows(5 * B)
    arena.write_blocks(blocks, generations, 0, 5 * B, want)
    if what == "stale":
        arena.blocks.words[blocks[bad]] += np.uint64(2)
    elif what == "being written":
        arena.blocks.words[blocks[bad]] -= np.uint64(1)
    elif what == "damaged":
        arena.blocks.arrays[3][blocks[bad], 0, B - 1, 3] += 1
    else:
        other = blocks[(bad + 1) % 5]
        arena.blocks.arrays[0][[blocks[bad], other]] = arena.blocks.arrays[0][[other, blocks[bad]]]
        bad = min(bad, (bad + 1) % 5)
    got = rows(0)
    assert arena.read_blocks(blocks, generations, 5 * B - 1, got) == bad * B
    for one, two in zip(want, got, strict=True):
        np.testing.assert_array_equal(one[:, : bad * B], two[:, : bad * B])


def test_overwritten_while_being_copied(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, generations = reserve(Pool(arena.blocks.words), [3, 4])
    arena.write_blocks(blocks, generations, 0, 2 * B, rows(2 * B))
    copy = Arena._copy

    def raced(self: Arena, *args: object, **kwargs: object) -> int:
        good = copy(self, *args, **kwargs)  # type: ignore[arg-type]
        self.blocks.words[4] += np.uint64(1)
        return good

    monkeypatch.setattr(Arena, "_copy", raced)
    assert arena.read_blocks(blocks, generations, 2 * B, rows(0)) == B


def test_states(arena: Arena) -> None:
    pool = Pool(arena.states.words)
    slot = int(pool.allocate(1)[0])
    rng = np.random.default_rng(0)
    want = [rng.standard_normal(spec.shape, np.float32) for spec in LAYOUT.state]
    arena.write_state(slot, 2, want)
    got = [np.full(spec.shape, np.nan, np.float32) for spec in LAYOUT.state]
    assert arena.read_state(slot, 2, got)
    for one, two in zip(want, got, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not arena.read_state(slot, 4, got)
    arena.states.arrays[1][slot, 1, 2, 3] = 0
    assert not arena.read_state(slot, 2, got)
    with pytest.raises(CacheError, match="taken back"):
        arena.write_state(slot, 2, want)


def test_checkpoints(arena: Arena) -> None:
    """Of their own types; open sees them too, and a state of that slot is another thing."""
    slot = int(Pool(arena.checkpoints.words).allocate(1)[0])
    rng = np.random.default_rng(0)
    want = [rng.integers(0, 99, spec.shape).astype(spec.dtype) for spec in LAYOUT.checkpoint]
    arena.write_checkpoint(slot, 2, want)
    assert arena.path is not None
    other = Arena.open(arena.path)
    assert other.layout == LAYOUT
    kinds = (other.blocks, other.states, other.checkpoints)
    assert [len(slots.words) for slots in kinds] == [20, 3, 5]
    got = [np.zeros(spec.shape, spec.dtype) for spec in LAYOUT.checkpoint]
    assert other.read_checkpoint(slot, 2, got)
    for one, two in zip(want, got, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not arena.states.words.any()
    assert not other.read_checkpoint(slot, 4, got)
    arena.checkpoints.arrays[0][slot, 1, 12] ^= np.uint8(1)
    assert not other.read_checkpoint(slot, 2, got)
    with pytest.raises(CacheError, match="taken back"):
        arena.write_checkpoint(slot, 2, want)


def test_another_process_reads_and_writes(arena: Arena) -> None:
    blocks, generations = reserve(Pool(arena.blocks.words), [2, 3, 7])
    want = rows(3 * B)
    arena.write_blocks(blocks[:2], generations[:2], 0, 2 * B, want)
    code = f"""
import sys, numpy as np
from pathlib import Path
from serving.prefix_cache import Arena
arena = Arena.open(Path(sys.argv[1]))
ids, gens = np.array([2, 3]), np.array([2, 2], np.uint64)
slot = [np.zeros((s.shape[0], {3 * B}, s.shape[2]), np.float32) for s in arena.layout.block]
assert arena.read_blocks(ids, gens, {2 * B}, slot) == {2 * B}
for array in slot:
    array[:, {2 * B}:] = array[:, :{B}] + 1
arena.write_blocks(np.array([7]), np.array([2], np.uint64), {2 * B}, {3 * B}, slot)
"""
    assert arena.path is not None
    subprocess.run([sys.executable, "-c", code, str(arena.path)], check=True, timeout=60)
    got = rows(0)
    assert arena.read_blocks(blocks, generations, 3 * B, got) == 3 * B
    for one, two in zip(want, got, strict=True):
        np.testing.assert_array_equal(two[:, 2 * B : 3 * B], one[:, :B] + 1)


def test_not_an_arena(tmp_path: Path) -> None:
    path = tmp_path / "other"
    for content in (b"x" * 4096, b"HYBRIDKV" + (5).to_bytes(8, "little") + b"{nope", b""):
        path.write_bytes(content)
        with pytest.raises(CacheError, match="not an arena"):
            Arena.open(path)
    with pytest.raises(CacheError, match="not an arena"):
        Arena.open(tmp_path / "missing")


def test_layout_errors_and_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.prefix_cache.arena.SHARED_MEMORY", tmp_path)
    with pytest.raises(ConfigError, match=r"Make it \[H, 8, d\]"):
        ArenaLayout(B, (ArraySpec("k", (2, 9, 3)),))
    config = CacheConfig(name="kv", kv_bytes=10_000, state_bytes=1000, block_size=B)
    arena = Arena.of_config(config, LAYOUT)
    assert len(arena.blocks.words) == 10_000 // LAYOUT.block_bytes
    assert len(arena.states.words) == 1000 // LAYOUT.state_bytes
    assert len(arena.checkpoints.words) == 0
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o600
    arena.unlink()
    assert not (tmp_path / "kv").exists()
    several = replace(config, checkpoint_interval=3 * B, kv_bytes=30 * LAYOUT.block_bytes)
    arena = Arena.of_config(several, LAYOUT)
    assert (len(arena.blocks.words), len(arena.checkpoints.words)) == (30, 10 + 1 + 8)
    bare = ArenaLayout.of_model(B, [(2, 3, 5)])
    assert len(Arena.of_config(several, bare).checkpoints.words) == 0
    arena.unlink()
    with pytest.raises(ConfigError, match="less than one block"):
        Arena.of_config(CacheConfig(name="kv", kv_bytes=10, block_size=B), LAYOUT)
    with pytest.raises(ConfigError, match="block_size 32"):
        Arena.of_config(CacheConfig(name="kv"), LAYOUT)
    with pytest.raises(ConfigError, match="Lower the budgets"):
        Arena.create(tmp_path / "kv", LAYOUT, 1 << 50, 0)
    assert not (tmp_path / "kv").exists()
    with pytest.raises(ConfigError, match="lease_seconds"):
        CacheConfig(lease_seconds=0)
    with pytest.raises(ConfigError, match="checkpoint_interval"):
        CacheConfig(checkpoint_interval=-1)


def test_without_checksum_the_words_still_guard(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "arena", LAYOUT, 4, 0, checksum=False)
    blocks, generations = reserve(Pool(arena.blocks.words), [0, 1])
    arena.write_blocks(blocks, generations, 0, 2 * B, rows(2 * B))
    assert arena.read_blocks(blocks, generations, 2 * B, rows(0)) == 2 * B
    arena.blocks.words[1] += np.uint64(2)
    assert arena.read_blocks(blocks, generations, 2 * B, rows(0)) == B
