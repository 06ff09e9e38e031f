"""Policies and what they see."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from serving.kv_compression.history import AttentionHistory, Stats
from serving.kv_compression.retention import (
    H2O,
    KeepEnds,
    RandomKeepPrompt,
    ReasoningAware,
    Retention,
    SlidingWindow,
    SnapKV,
    keep_top,
    outstanding,
)

HK, HQ, T, D = 2, 4, 300, 16
SCALE = D**-0.5
POLICIES = [SlidingWindow(), H2O(), SnapKV(), RandomKeepPrompt(), ReasoningAware()]


def queries_and_rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, HK, T, D)).astype(np.float32)
    return rng.standard_normal((T, HQ, D)).astype(np.float32) * 2, keys, values


def stats_of(chunks: list[int], every: int = 1) -> Stats:
    """As if the queries came in chunks that end at these positions."""
    queries, keys, values = queries_and_rows()
    history = AttentionHistory(HK, T, SCALE, recent=8)
    start = 0
    for end in chunks:
        at = np.arange(start, end, every)
        history.observe(queries[at], at, keys)
        start = end
    return history.stats(keys, values, prompt_len=30)


def test_history_is_the_softmax_of_all_queries() -> None:
    queries, keys, _ = queries_and_rows()
    total, peak = np.zeros((HK, T)), np.zeros((HK, T))
    recent = []
    for t in range(T):
        for g in range(HQ):
            h = g * HK // HQ
            score = keys[h, : t + 1] @ queries[t, g] * SCALE
            p = np.zeros(T)
            p[: t + 1] = np.exp(score - score.max()) / np.exp(score - score.max()).sum()
            total[h] += p
            peak[h] = np.maximum(peak[h], p)
            if t >= T - 8:
                recent.append((h, p))
    stats = stats_of([T])
    np.testing.assert_allclose(stats.attention_sum, total, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(stats.attention_peak, peak, rtol=1e-4, atol=1e-7)
    for h in range(HK):
        mine = np.array([p for head, p in recent if head == h])
        np.testing.assert_allclose(stats.recent_mean[h], mine.mean(0), rtol=1e-4, atol=1e-7)
        rms = np.sqrt((mine**2).mean(0))
        np.testing.assert_allclose(stats.recent_rms[h], rms, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(
        stats.query_mean,
        queries.reshape(T, HK, -1, D).mean((0, 2)) * SCALE,
        rtol=1e-4,
        atol=1e-6,
    )


def test_history_does_not_depend_on_chunks() -> None:
    whole, parts = stats_of([T]), stats_of([7, 64, 65, 200, T])
    for field in dataclasses.fields(Stats):
        a, b = getattr(whole, field.name), getattr(parts, field.name)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=field.name)


def test_of_many_queries_512_are_weighed_whatever_the_chunks() -> None:
    rng = np.random.default_rng(0)
    length = 1500
    keys = rng.standard_normal((HK, length, D)).astype(np.float32)
    queries = rng.standard_normal((length, HQ, D)).astype(np.float32)
    found = []
    for size in (length, 7):
        history = AttentionHistory(HK, length, SCALE, recent=8)
        for a in range(0, length, size):
            history.observe(queries[a : a + size], np.arange(length)[a : a + size], keys)
        found.append(history.stats(keys, keys, 0))
    np.testing.assert_allclose(found[0].attention_sum.sum(1), 512 * HQ / HK, rtol=1e-4)
    np.testing.assert_allclose(found[0].attention_sum, found[1].attention_sum, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(found[0].queries, found[1].queries)
    assert found[0].recent_queries == 4 * HQ // HK


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_policies_score_every_row_and_repeat_themselves(policy: Retention) -> None:
    stats = stats_of([T])
    before = {f.name: np.copy(getattr(stats, f.name)) for f in dataclasses.fields(Stats)}
    scores = policy.scores(stats)
    assert scores.shape == (HK, T)
    assert np.isfinite(scores).all()
    np.testing.assert_array_equal(scores, policy.scores(stats))
    for name, value in before.items():
        np.testing.assert_array_equal(getattr(stats, name), value, err_msg=name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.other = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_ends_come_first_and_the_count_is_kept(policy: Retention) -> None:
    kept = keep_top(KeepEnds(policy, sinks=4, recent=20).scores(stats_of([T])), 50)
    assert (kept.sum(1) == 50).all()
    assert kept[:, :4].all()
    assert kept[:, -20:].all()
    assert not keep_top(KeepEnds(policy).scores(stats_of([T])), 0).any()


def test_what_each_policy_keeps() -> None:
    stats = stats_of([T])
    assert keep_top(SlidingWindow().scores(stats), 40)[:, -40:].all()
    assert keep_top(RandomKeepPrompt(1).scores(stats), 60)[:, :30].all()
    others = [keep_top(RandomKeepPrompt(s).scores(stats), 60) for s in (1, 2)]
    assert (others[0] != others[1]).any()
    heavy = np.zeros_like(stats.attention_sum)
    heavy[:, 77] = 9.0
    assert keep_top(H2O().scores(dataclasses.replace(stats, attention_sum=heavy)), 1)[:, 77].all()
    late = np.zeros_like(heavy)
    late[:, 100] = 1.0
    kept = keep_top(SnapKV(pool=7).scores(dataclasses.replace(stats, recent_mean=late)), 7)
    assert kept[:, 97:104].all()


def test_quiet_outliers_and_what_every_query_wants_are_outstanding() -> None:
    """A row in nobody's direction has no attention, and one of a crowd has it."""
    rng = np.random.default_rng(1)
    themes = rng.standard_normal((4, D)).astype(np.float32) * 4
    keys = np.repeat(themes[rng.integers(4, size=T)][None], HK, 0)
    keys += 0.3 * rng.standard_normal(keys.shape).astype(np.float32)
    odd, wanted = 140, 200
    queries = themes[rng.integers(4, size=(T, HQ))]
    common = queries.mean((0, 1))
    keys[:, odd] = np.linalg.svd(np.vstack([themes, common]))[2][-1] * np.linalg.norm(themes[0])
    keys[:, wanted] += 20 * common / np.linalg.norm(common)
    history = AttentionHistory(HK, T, SCALE)
    history.observe(queries, np.arange(T), keys)
    stats = history.stats(keys, keys, 0)
    assert stats.attention_sum[:, odd].max() < np.median(stats.attention_sum)
    found = outstanding(stats, distinct=0.01, heavy=0.004)
    assert found[:, [odd, wanted]].all()
    assert (found.sum(1) == int(0.01 * T) + int(0.004 * T)).all()
    assert keep_top(ReasoningAware(distinct=0.01, heavy=0.004).scores(stats), 8)[:, odd].all()
    assert not keep_top(H2O().scores(stats), T // 2)[:, odd].any()
