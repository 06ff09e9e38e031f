"""The traces are what they claim to be, and the study's steps are the op's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from build.bounded_steps import RECENT, Entries
from perf.traces import EPSILON, FACTORS, baselines, history, our_layer, row, run_trace
from perf.traces_data import (
    ANCHORS,
    EVERY,
    HEADS,
    KV_HEADS,
    SCALE,
    STEPS,
    TEMPERATURES,
    Trace,
    make_trace,
)
from perf.traces_latency import host_of
from perf.traces_steps import TraceTruth, bounded, evict
from plugins.compressed_sparse_attention.ref import Host, sparse_decode_attention

T = 2048


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace("mixed", T, seed=3)


def anchors_of(trace: Trace) -> np.ndarray:
    return trace.asked[trace.asked >= 0]


@pytest.mark.parametrize("length", [T, 4096])
@pytest.mark.parametrize("regime", list(TEMPERATURES))
def test_a_trace_has_what_the_study_asks_for(regime: str, length: int) -> None:
    trace = make_trace(regime, length, seed=1)
    anchors = anchors_of(trace)
    assert trace.prompt_len <= 0.1 * length
    assert len(set(anchors)) == ANCHORS
    assert (anchors < trace.prompt_len).sum() == ANCHORS // 2
    assert trace.look_alikes.sum() >= 11 * ANCHORS  # ten decoys for each
    assert trace.look_alikes.sum() <= max(0.02 * length, 11 * ANCHORS)
    np.testing.assert_array_equal(trace.history_at, np.arange(EVERY - 1, length, EVERY))
    low, high = TEMPERATURES[regime]
    assert ((trace.temperatures >= low) & (trace.temperatures <= high)).all()
    again = make_trace(regime, length, seed=1)
    np.testing.assert_array_equal(trace.keys, again.keys)
    np.testing.assert_array_equal(trace.queries, again.queries)


def test_nothing_tells_an_anchor_from_its_decoys_before_it_is_asked_for() -> None:
    """What a policy sees of both, over many traces: ranks of anchors among look-alikes are those of
    any of them (mean 1/2 within four standard errors)."""
    ranks = {"norm": [], "sum": [], "peak": [], "rms": [], "distinct": [], "value": []}
    for seed in range(24):
        trace = make_trace("mixed", T, seed)
        stats = history(trace)
        alike = np.flatnonzero(trace.look_alikes)
        seen = {
            "norm": np.linalg.norm(stats.keys, axis=2),
            "sum": stats.attention_sum,
            "peak": stats.attention_peak,
            "rms": stats.recent_rms,
            "distinct": stats.distinctiveness,
            "value": np.linalg.norm(stats.values, axis=2),
        }
        for name, values in seen.items():
            for h in range(KV_HEADS):
                for anchor in anchors_of(trace):
                    # Attention in sum grows with age: compare with look-alikes of the same part.
                    part = alike[(alike < trace.prompt_len) == (anchor < trace.prompt_len)]
                    others = values[h, part[part != anchor]]
                    ranks[name].append((others < values[h, anchor]).mean())
    for name, found in ranks.items():
        assert abs(np.mean(found) - 0.5) < 4 / np.sqrt(12 * len(found)), name


def test_an_asked_anchor_is_what_a_peaky_head_looks_at() -> None:
    trace = make_trace("peaky", T, seed=5)
    truth = TraceTruth(trace)
    p = truth.p / truth.total[..., None]
    asked = np.flatnonzero(trace.asked >= 0)
    mass = [truth.by_step(p[..., trace.asked[s]])[s] for s in asked]
    quiet = [truth.by_step(p[..., a])[trace.asked < 0].mean() for a in anchors_of(trace)]
    assert np.mean(mass) > 0.5
    assert np.mean(quiet) < 0.01


@pytest.mark.parametrize("sound", [False, True])
def test_steps_are_those_of_the_ops_reference(trace: Trace, sound: bool) -> None:
    if sound:  # so flat and alike that box bounds hold without every row
        values = 1 + 0.1 * trace.values
        trace = dataclasses.replace(trace, queries=trace.queries / 30, values=values)
    truth, factor = TraceTruth(trace), 1.2
    layer, (k, v) = our_layer(history(trace), sound=sound)
    epsilon = 0.3 if sound else 0.01
    entries = [Entries(truth, layer, h, sound) for h in range(KV_HEADS)]
    outcome = bounded(truth, layer, entries, epsilon, factor)
    partly = fetched = 0
    host = Host(*host_of(trace, layer).values())
    for s in range(STEPS):
        step = sparse_decode_attention(
            trace.queries[s][None], k[None], v[None], layer.rows()[None], layer.summaries[None],
            layer.stats[None], scale=SCALE, epsilon=epsilon, factor=factor, recent=RECENT,
            sound=sound, host=host,
        )  # fmt: skip
        group = HEADS // KV_HEADS
        for h in range(KV_HEADS):
            heads = slice(h * group, (h + 1) * group)
            dense = truth.output.reshape(KV_HEADS, STEPS, group, -1)[h, s]
            error = np.linalg.norm(step.o[0, heads] - dense, axis=1) / np.linalg.norm(dense, axis=1)
            np.testing.assert_allclose(outcome.error[s, heads], error, atol=2e-4)
            np.testing.assert_allclose(
                outcome.bound[s, heads], step.error_bound[0, heads], rtol=0.05, atol=1e-3
            )
            np.testing.assert_allclose(outcome.rows[s, heads] * T, step.rows_read[0, h])
            partly += int(step.rows_read[0, h] < T)
            fetched += int(step.chosen[0, h, layer.blocks :].any())
    assert partly >= 5
    assert sound or fetched >= 5


def test_what_is_fetched_makes_the_bound_hold(trace: Trace) -> None:
    truth = TraceTruth(trace)
    layer, _ = our_layer(history(trace))
    entries = [Entries(truth, layer, h, False) for h in range(KV_HEADS)]
    loose, tight = (bounded(truth, layer, entries, e, 1.0) for e in (0.2, 0.002))
    for outcome, epsilon in ((loose, 0.2), (tight, 0.002)):
        assert (outcome.bound <= epsilon + 1e-6).all()
    assert tight.fetched.sum() > loose.fetched.sum()
    assert (tight.stage >= 2).mean() > (loose.stage >= 2).mean()
    assert tight.error.mean() < loose.error.mean()
    assert (tight.read + tight.estimated <= 1 + 1e-4).all()


def test_sound_bounds_hold(trace: Trace) -> None:
    truth = TraceTruth(trace)
    layer, _ = our_layer(history(trace))
    box = [Entries(truth, layer, h, True) for h in range(KV_HEADS)]
    for epsilon in (EPSILON, 5.0, 100.0):
        outcome = bounded(truth, layer, box, epsilon, 1.0)
        assert (outcome.error <= outcome.bound + 1e-4).all()


def test_eviction_is_attention_over_the_kept_rows(trace: Trace) -> None:
    truth = TraceTruth(trace)
    everything = evict(truth, np.ones((KV_HEADS, T), bool))
    assert everything.error.max() < 1e-5
    assert everything.recalled.all()
    for name, kept in baselines(history(trace), 0).items():
        outcome = evict(truth, kept)
        assert (kept.sum(1) == int(0.345 * T)).all(), name
        score = np.where(kept[0], truth.queries[0] @ trace.keys[0].T, -np.inf)
        p = np.exp(score - score.max(1, keepdims=True))
        o = p @ trace.values[0] / p.sum(1, keepdims=True)
        error = np.linalg.norm(o - truth.output[0], axis=1) / truth.size[0]
        got = outcome.error[:, : HEADS // KV_HEADS].ravel()
        np.testing.assert_allclose(got, error, rtol=1e-3, atol=1e-4)


def test_a_line_of_the_table() -> None:
    """Two small traces end to end: shares add up and stages part all head steps."""
    done = [run_trace(("mixed", T, seed, (FACTORS[4],), True)) for seed in range(2)]
    line = row("mixed", "ours", [o[FACTORS[4]] for o, _ in done], 0.2)
    assert line.head_steps == 2 * STEPS * HEADS
    assert sum(line.stages) == pytest.approx(1)
    assert line.low <= line.violations <= line.high
    assert line.mass_read + line.mass_estimated <= 1 + 1e-6
    assert 0.6 < line.bytes_saved < 0.7
    assert line.with_summaries < line.further
