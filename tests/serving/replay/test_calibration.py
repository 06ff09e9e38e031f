"""The calibration record and its gates."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_configs.errors import ConfigError
from serving.prefix_cache.planner import CostModel, ReplayMode
from serving.replay.calibration import (
    UNCALIBRATED,
    Calibration,
    Gate,
    LayerUnits,
    Point,
    fit_gate,
    from_json,
)
from serving.replay.gate import Estimator
from serving.replay.policy import default_replay, policy_of

KNOWN = Calibration(
    status="measured", interval=256, min_tail=16, dtype="int8",
    layers=(LayerUnits(0, (1,), (1.0, 2.0), (0.25, 0.75)),),
    split=Gate((0.1, 0.2), (0.01, 0.02)),
    curve=(
        Point(0, 0, 0.05, 0.995, 0.03), Point(0, 0, 0.01, 0.9, 0.2), Point(1, 16, 0.0, 1, 0.004),
    ),
)  # fmt: skip


def test_json_round_trip() -> None:
    assert from_json(json.loads(json.dumps(KNOWN.to_json())), "here") == KNOWN
    assert from_json(UNCALIBRATED.to_json(), "here") == UNCALIBRATED
    with pytest.raises(ConfigError, match="intervall"):
        from_json({**KNOWN.to_json(), "intervall": 3}, "here")


def test_gate_steps() -> None:
    assert KNOWN.split.bound(0.05) == 0.01
    assert KNOWN.split.bound(0.1) == 0.01
    assert KNOWN.split.bound(0.15) == 0.02
    assert KNOWN.split.bound(0.25) == pytest.approx(0.02 * 1.25**2)
    assert KNOWN.split.bound(0.31) == float("inf")
    assert Gate().bound(0.0) == float("inf")


@given(st.integers(0, 2**32 - 1))
def test_a_fitted_gate_rises_and_covers_what_it_saw(seed: int) -> None:
    rng = np.random.default_rng(seed)
    estimates = rng.random(100)
    errors = estimates * rng.random(100)
    gate = fit_gate(list(zip(estimates.tolist(), errors.tolist(), strict=True)))
    assert list(gate.error) == sorted(gate.error)
    covered = [gate.bound(e) >= k for e, k in zip(estimates, errors, strict=True)]
    assert all(covered)


def test_fresh_errors_rarely_exceed_a_fitted_gate() -> None:
    rng = np.random.default_rng(0)

    def draw(count: int) -> list[tuple[float, float]]:
        estimates = rng.random(count)
        return list(zip(estimates.tolist(), (estimates * rng.random(count)).tolist(), strict=True))

    above = []
    for _ in range(50):
        gate = fit_gate(draw(200))
        above += [error > gate.bound(estimate) for estimate, error in draw(200)]
    assert np.mean(above) <= 0.05


def test_estimate_weighs_what_is_left_of_each_fast_unit() -> None:
    estimator = Estimator(KNOWN)
    decay = {0: np.log(np.array([0.5, 0.1], np.float32))}
    assert estimator.estimate(decay, None, split=False) == pytest.approx(0.25 * 0.5 + 0.75 * 0.1)
    assert estimator.estimate(decay, None, split=True) == pytest.approx(0.25 * 0.5)
    doubled = {0: np.array([2.0, 2.0], np.float32)}
    assert estimator.estimate(decay, doubled, split=True) == pytest.approx(0.25 * 0.5 * 2)


def test_policy_takes_only_tails_that_kept_the_answers() -> None:
    policy = policy_of(KNOWN, CostModel())
    assert policy.zero == ((0.05, 0.03),)
    assert (policy.min_tail, policy.split_error) == (16, 0.004)
    assert default_replay(KNOWN).mode is ReplayMode.BOUNDED
    assert default_replay(UNCALIBRATED).mode is ReplayMode.EXACT
