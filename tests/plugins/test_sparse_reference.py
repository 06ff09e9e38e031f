"""The meaning of a bounded decode step: what it promises, judged by plain attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from plugins.compressed_sparse_attention.ref import (
    BLOCK,
    SparseStep,
    compressed_sparse_attention,
    sparse_decode_attention,
    summarise,
)

Array = NDArray[Any]
B, HQ, HK, DK, DV, C, GROUPS, GROUP = 2, 4, 2, 16, 24, 300, 3, 20
SCALE = 0.25


class Case:
    """Slots with NaN behind their rows, and evicted groups that only the truth knows."""

    def __init__(self, seed: int, sound: bool, peak: float = 1.0) -> None:
        rng = np.random.default_rng(seed)
        self.sound = sound
        self.rows = rng.integers(1, C + 1, (B, HK))
        blocks = -(-C // BLOCK)
        self.k = np.full((B, HK, C, DK), np.nan)
        self.v = np.full((B, HK, C, DV), np.nan)
        shape = (B, HK, blocks + GROUPS)
        self.summaries = np.full((*shape, 2 * DK + DV), np.nan, np.float16)
        self.stats = np.full((*shape, 2), np.nan, np.float32)
        self.gone_k = rng.standard_normal((B, HK, GROUPS, GROUP, DK)) * 0.5
        self.gone_v = rng.standard_normal((B, HK, GROUPS, GROUP, DV)) + 1
        self.q = rng.standard_normal((B, HQ, DK)) * 2 * peak
        for b, h in np.ndindex(B, HK):
            n = self.rows[b, h]
            crowd = np.repeat(rng.standard_normal((blocks, DK)), BLOCK, 0)[:n]
            self.k[b, h, :n] = crowd + 0.2 * rng.standard_normal((n, DK))
            self.v[b, h, :n] = rng.standard_normal((n, DV)) + 1
            for j in range(n // BLOCK):
                at = slice(j * BLOCK, (j + 1) * BLOCK)
                self._describe((b, h, j), self.k[b, h, at], self.v[b, h, at])
            for e in range(GROUPS):
                self._describe((b, h, blocks + e), self.gone_k[b, h, e], self.gone_v[b, h, e])

    def _describe(self, at: tuple[int, ...], k: Array, v: Array) -> None:
        self.summaries[at], self.stats[at] = summarise(k, v, sound=self.sound)

    def step(self, epsilon: float, **options: Any) -> SparseStep:
        return sparse_decode_attention(
            self.q, self.k, self.v, self.rows, self.summaries, self.stats,
            scale=SCALE, epsilon=epsilon, sound=self.sound, **options,
        )  # fmt: skip

    def truth(self) -> Array:
        """o [B, Hq, dv] over slot and evicted rows."""
        o = np.zeros((B, HQ, DV))
        for b, g in np.ndindex(B, HQ):
            h = g * HK // HQ
            n = self.rows[b, h]
            k = np.concatenate([self.k[b, h, :n], self.gone_k[b, h].reshape(-1, DK)])
            v = np.concatenate([self.v[b, h, :n], self.gone_v[b, h].reshape(-1, DV)])
            p = np.exp(k @ self.q[b, g] * SCALE)
            o[b, g] = p @ v / p.sum()
        return o

    def error(self, step: SparseStep) -> Array:
        truth = self.truth()
        return np.linalg.norm(step.o - truth, axis=2) / np.linalg.norm(truth, axis=2)


@pytest.mark.parametrize("seed", range(8))
def test_sound_bounds_are_never_broken(seed: int) -> None:
    case = Case(seed, sound=True, peak=0.05)
    finite = 0
    for epsilon in (0.0, 0.05, 0.3, 1.0):
        step = case.step(epsilon)
        assert (case.error(step) <= step.error_bound + 1e-9).all()
        finite += np.isfinite(step.error_bound).sum()
        fetched = step.chosen[:, :, -GROUPS:].any(2)
        held = step.error_bound <= epsilon + 1e-9
        assert (held | np.repeat(fetched, HQ // HK, 1)).all()
    assert finite


@pytest.mark.parametrize("seed", range(8))
def test_calibrated_estimates_are_of_the_errors_size(seed: int) -> None:
    case = Case(seed, sound=False)
    step = case.step(0.5)
    error = case.error(step)
    assert (error <= 4 * step.error_bound + 1e-6).all()
    assert (step.error_bound <= 0.5).all() | step.chosen[:, :, -GROUPS:].any()
    np.testing.assert_array_less(0, step.mass_read)
    tighter = case.step(0.02)
    assert (tighter.rows_read >= step.rows_read).all()
    assert case.error(tighter).mean() <= error.mean() + 1e-9
    factored = case.step(0.02, factor=3.0)
    assert (factored.rows_read >= tighter.rows_read).all()


def test_nothing_allowed_reads_everything_and_equals_dense() -> None:
    case = Case(5, sound=False)
    case.stats[:, :, -GROUPS:, 0] = 0  # no evicted rows
    step = case.step(0.0)
    np.testing.assert_array_equal(step.rows_read, case.rows)
    assert not step.error_bound.any()
    np.testing.assert_allclose(step.mass_read, 1)
    for b in range(B):
        for h in range(HK):
            n = case.rows[b, h]
            heads = slice(h * HQ // HK, (h + 1) * HQ // HK)
            none = np.zeros((1, 0, 1, DK))
            o, *_ = compressed_sparse_attention(
                case.q[b, heads][None, None], none, np.zeros((1, 0, 1, DV)),
                case.k[b, h][None, None], case.v[b, h][None, None], np.array([n]), scale=SCALE,
            )  # fmt: skip
            np.testing.assert_allclose(step.o[b, heads], o[0, 0])


def test_pinned_and_recent_blocks_are_always_read() -> None:
    case = Case(3, sound=False)
    case.rows[:] = C
    for b, h, j in np.ndindex(B, HK, C // BLOCK):
        at = slice(j * BLOCK, (j + 1) * BLOCK)
        case.k[b, h, at] = case.v[b, h, at] = 1 + j
        case._describe((b, h, j), case.k[b, h, at], case.v[b, h, at])
    case.k[:, :, C // BLOCK * BLOCK :] = case.v[:, :, C // BLOCK * BLOCK :] = 0
    case.stats[:, :, 1, 1] = np.inf
    step = case.step(1e9)
    blocks = -(-C // BLOCK)
    chosen = np.zeros(blocks + GROUPS)
    chosen[[1, blocks - 2, blocks - 1]] = 1
    assert (step.chosen == chosen).all()
    assert (step.rows_read == 2 * BLOCK + C % BLOCK).all()


def test_heads_of_a_group_read_what_any_of_them_needs() -> None:
    case = Case(2, sound=False)
    alone = []
    for keep in range(HQ // HK):
        one = Case(2, sound=False)
        one.q = case.q.reshape(B, HK, -1, DK)[:, :, [keep]].reshape(B, HK, DK)
        alone.append(one.step(0.05).chosen)
    assert (case.step(0.05).chosen >= np.maximum.reduce(alone)).all()
