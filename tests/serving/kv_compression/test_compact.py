"""Compaction, against a copy that remembers every row by its position."""

from __future__ import annotations

import numpy as np
import pytest

from plugins.compressed_sparse_attention.ref import BLOCK
from plugins.compressed_sparse_attention.ref import summarise as summarise_one
from serving.kv_compression.bounds import calibrated_factor, entry_bytes, rows_within
from serving.kv_compression.compact import CompactLayer, compact
from serving.kv_compression.grouping import clusters, similar_groups
from serving.kv_compression.history import AttentionHistory, Stats
from serving.kv_compression.summaries import summarise

HK, HQ, T, D = 2, 4, 1003, 16
RECENT, GROUP = 40, 48


def stats_of(seed: int = 0) -> Stats:
    rng = np.random.default_rng(seed)
    themes = rng.standard_normal((6, D)).astype(np.float32) * 3
    keys = themes[rng.integers(6, size=(HK, T))] + rng.standard_normal((HK, T, D), np.float32)
    values = rng.standard_normal((HK, T, D), np.float32)
    history = AttentionHistory(HK, T, D**-0.5, recent=8)
    history.observe(rng.standard_normal((60, HQ, D), np.float32), np.arange(T - 60, T), keys)
    return history.stats(keys, values, 0)


def compacted(
    rows: int = 330, sound: bool = False, max_groups: int | None = None
) -> tuple[Stats, CompactLayer, np.ndarray, np.ndarray]:
    stats = stats_of()
    rng = np.random.default_rng(3)
    pinned = np.zeros((HK, T), bool)
    pinned[0, rng.permutation(900)[:37]] = True
    pinned[:, :4] = True
    k, v = np.full((2, HK, 700, D), np.nan, np.float32)
    layer = compact(
        stats, rng.random((HK, T)), pinned, rows, k, v,
        group=GROUP, recent=RECENT, sound=sound, max_groups=max_groups,
    )  # fmt: skip
    for h in range(HK):
        always = np.flatnonzero(np.isinf(layer.stats[h, : layer.blocks, 1]))
        first = layer.positions[h][: (len(always)) * BLOCK]
        assert set(np.flatnonzero(pinned[h])) <= set(first)
        assert (always == np.arange(len(always))).all()
    return stats, layer, k, v


def check(stats: Stats, layer: CompactLayer, k: np.ndarray, v: np.ndarray) -> None:
    """Every row is in the slot or in one group; slots hold the rows they say; entries describe
    their rows."""
    for h in range(HK):
        held = layer.positions[h]
        gone = np.concatenate([*layer.groups[h], np.zeros(0, np.int64)])
        assert sorted([*held, *gone]) == list(range(T))
        old = held < T
        np.testing.assert_array_equal(k[h, : len(held)][old], stats.keys[h, held[old]])
        np.testing.assert_array_equal(v[h, : len(held)][old], stats.values[h, held[old]])
        for e, rows in enumerate(layer.groups[h]):
            count = layer.stats[h, layer.blocks + e, 0]
            assert count == len(rows)
            if len(rows):
                entry, figures = summarise_one(stats.keys[h, rows], stats.values[h, rows])
                got = layer.summaries[h, layer.blocks + e]
                np.testing.assert_allclose(got, entry, rtol=2e-3, atol=2e-3)
                assert layer.stats[h, layer.blocks + e, 1] >= figures[1] * 0.999
        for j in range(len(held) // BLOCK):
            at = slice(j * BLOCK, (j + 1) * BLOCK)
            entry, _ = summarise_one(k[h, at], v[h, at])
            np.testing.assert_allclose(layer.summaries[h, j], entry, rtol=2e-3, atol=2e-3)
            assert layer.stats[h, j, 0] == BLOCK


def test_every_row_is_somewhere_and_the_newest_come_last() -> None:
    stats, layer, k, v = compacted()
    check(stats, layer, k, v)
    assert (layer.rows() <= 330).all()
    assert (layer.rows() > 330 - 2 * BLOCK).all()
    assert np.isnan(k[0, layer.rows()[0] :]).all()
    for h in range(HK):
        np.testing.assert_array_equal(layer.positions[h][-RECENT:], np.arange(T - RECENT, T))
        assert max(map(len, layer.groups[h])) <= GROUP
    used = sum(len(g) for g in layer.groups) + sum(layer.rows() // BLOCK)
    assert layer.summary_bytes() == used * entry_bytes(D, D)


@pytest.mark.parametrize(("length", "rows"), [(1, 1), (20, 20), (40, 10), (75, 70), (200, 500)])
def test_short_sequences(length: int, rows: int) -> None:
    """Shorter than what is recent, than a block, than what may stay."""
    rng = np.random.default_rng(length)
    keys, values = rng.standard_normal((2, HK, length, D)).astype(np.float32)
    history = AttentionHistory(HK, length, 1.0)
    history.observe(rng.standard_normal((length, HQ, D), np.float32), np.arange(length), keys)
    stats = history.stats(keys, values, 0)
    k, v = np.zeros((2, HK, 256, D), np.float32)
    pinned = np.zeros((HK, length), bool)
    layer = compact(stats, rng.random((HK, length)), pinned, rows, k, v, recent=RECENT)
    for h in range(HK):
        gone = np.concatenate([*layer.groups[h], np.zeros(0, np.int64)])
        assert sorted([*layer.positions[h], *gone]) == list(range(length))
        assert len(layer.positions[h]) <= max(rows, RECENT)
    if rows > length:
        assert not any(layer.groups[h] for h in range(HK))


def test_groups_merge_to_fit() -> None:
    stats, layer, k, v = compacted(max_groups=9)
    assert all(len(g) <= 9 for g in layer.groups)
    check(stats, layer, k, v)


def test_what_cannot_be_changes_nothing() -> None:
    stats, layer, k, v = compacted()
    with pytest.raises(ValueError, match="do not fit"):
        compact(stats, np.zeros((HK, T)), np.zeros((HK, T), bool), 330, k[:, :300], v[:, :300])
    check(stats, layer, k, v)


@pytest.mark.parametrize("sound", [False, True])
@pytest.mark.parametrize("n", [1, 7, 32])
def test_summaries_are_those_of_the_reference(n: int, sound: bool) -> None:
    rng = np.random.default_rng(n)
    k, v = rng.standard_normal((2, 5, n, D)).astype(np.float32) * 3
    entries, figures = summarise(k, v, sound=sound)
    for e in range(5):
        entry, stats = summarise_one(k[e], v[e], sound=sound)
        np.testing.assert_allclose(entries[e], entry, rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(figures[e], stats, rtol=1e-3, atol=1e-3)
    if sound:  # boxes and radii hold every row
        centre, half, mean = np.split(entries.astype(np.float64), 3, axis=1)
        assert (np.abs(k - centre[:, None]) <= half[:, None]).all()
        assert (np.linalg.norm(v - mean[:, None], axis=2) <= figures[:, 1:]).all()


@pytest.mark.parametrize("rows", [1, 32, 33, 500])
def test_groups_part_all_rows(rows: int) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, 5)).astype(np.float32)
    for size, step in ((32, 0), (48, 4)):
        groups = similar_groups(x, size, step=step)
        np.testing.assert_array_equal(np.sort(np.concatenate(groups)), np.arange(rows))
        assert max(map(len, groups)) <= size
        if not step:
            assert all(len(g) == size for g in groups[:-1])
    assert clusters(x).shape == (rows,)


def test_groups_are_of_similar_rows() -> None:
    """Crowds far apart end up in groups of their own."""
    rng = np.random.default_rng(0)
    crowd = rng.permutation(np.repeat(np.arange(4), 64))
    x = (np.eye(4)[crowd] * 50 + rng.standard_normal((256, 4))).astype(np.float32)
    for g in similar_groups(x, 32):
        assert len(set(crowd[g])) == 1
    label = clusters(x)
    assert len({(a, b) for a, b in zip(crowd, label, strict=True)}) == 4


def test_rows_within_a_budget() -> None:
    for budget in (0.1, 0.345, 0.9):
        rows = rows_within(budget, 4096, 64, 64, 64)
        entries = -(-rows // BLOCK) + -(-(4096 - rows) // 64)
        used = rows * 512 + entries * entry_bytes(64, 64)
        assert used <= budget * 4096 * 512
        assert used > (budget - 0.01) * 4096 * 512
    assert rows_within(0.001, 100, 64, 64, 64) == 0


def test_the_factor_is_the_smallest_that_keeps_alpha() -> None:
    """On exchangeable sequences the share of violations stays below alpha, with the finite-sample
    correction; a handful of sequences can promise nothing."""
    rng = np.random.default_rng(0)
    ratio = rng.lognormal(0, 0.5, (4000, 64)) * rng.lognormal(0, 0.5, (4000, 1))
    factors = np.geomspace(0.5, 20, 80).tolist()

    def losses(rows: np.ndarray, factor: float) -> np.ndarray:
        return (rows > factor).mean(1)

    shares = []
    for i in range(20):
        mine, rest = ratio[i * 200 : i * 200 + 100], ratio[i * 200 + 100 : (i + 1) * 200]
        factor = calibrated_factor(lambda f, mine=mine: losses(mine, f), factors, 0.05)
        assert (losses(mine, factor).sum() + 1) / 101 <= 0.05
        smaller = max(f for f in factors if f < factor)
        assert (losses(mine, smaller).sum() + 1) / 101 > 0.05
        shares.append(losses(rest, factor).mean())
    assert np.mean(shares) <= 0.05
    assert calibrated_factor(lambda f: np.zeros(5), factors, 0.05) == float("inf")
