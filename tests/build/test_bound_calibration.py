"""The factor of a model's bound: what is measured, what it promises, and who uses it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from build import bound_calibration
from build.bound_calibration import EPSILONS, FACTORS, calibrate_bounds
from build.calibrate import import_bounds, tasks_of
from build.trials import CalibrationOptions
from engine_configs.errors import ConfigError
from serving.engine.bundle import Bundle
from serving.engine.engine import UNKNOWN_FACTOR, Engine, EngineConfig
from serving.engine.model import Model
from serving.engine.prefix import Prefixes, make_cache
from serving.kv_compression.calibration import BoundCalibration, from_json
from serving.prefix_cache import CacheConfig


@pytest.fixture(scope="module")
def found(tiny_model: Model) -> BoundCalibration:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound_calibration, "SEQUENCES", 10)
        return calibrate_bounds(
            tiny_model, tasks_of(tiny_model.bundle), CalibrationOptions(seconds=600)
        )


def test_a_larger_factor_is_violated_less(found: BoundCalibration) -> None:
    assert (found.sequences, found.epsilons, found.factors) == (10, EPSILONS, FACTORS)
    assert all(b <= a + 0.05 for a, b in zip(found.violations, found.violations[1:], strict=False))
    assert found.violations[0] > 10 * found.violations[-1]
    assert found.factor(0.05) is None, "ten sequences cannot promise one in twenty"
    loose, tight = found.factor(0.4), found.factor(0.12)
    assert loose is not None
    assert tight is not None
    assert loose < tight


def test_it_holds_for_other_sequences(found: BoundCalibration, tiny_model: Model) -> None:
    """In expectation: with as many fresh ones, twice the promise would be a bug."""
    alpha = 0.2
    factor = found.factor(alpha)
    assert factor is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound_calibration, "SEQUENCES", 10)
        fresh = calibrate_bounds(
            tiny_model, tasks_of(tiny_model.bundle), CalibrationOptions(seconds=600, seed=99)
        )
    assert fresh.violations[FACTORS.index(factor)] / fresh.sequences <= 2 * alpha


def test_the_engine_takes_the_factor_of_its_model(
    found: BoundCalibration, tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tiny_model.bundle, CacheConfig(name="test-bounds", kv_bytes=8 << 20))

    def factor(**config: float) -> float:
        with Engine(
            tiny_model, EngineConfig(max_seq_len=2048, **config), Prefixes(tiny_model.bundle, cache)
        ) as engine:
            assert engine._compression is not None
            return engine._compression.factor

    try:
        assert factor() == UNKNOWN_FACTOR
        monkeypatch.setitem(tiny_model.bundle.manifest, "bound_calibration", found.to_json())
        assert factor(kv_alpha=0.4) == found.factor(0.4)
        assert factor(kv_alpha=0.12) == found.factor(0.12)
        assert factor(kv_alpha=0.12, kv_factor=1.5) == 1.5
    finally:
        cache.arena.unlink()


def test_it_travels_with_the_bundle(
    found: BoundCalibration, tiny_model: Model, tmp_path: Path
) -> None:
    assert from_json(json.loads(json.dumps(found.to_json())), "here") == found
    manifest = tiny_model.bundle.manifest | {"bound_calibration": found.to_json()}
    assert Bundle(tmp_path, tiny_model.spec, manifest).bounds == found
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps(manifest))
    assert import_bounds(file) == found
    with pytest.raises(ConfigError, match="fators"):
        from_json({"fators": [1.0]}, "here")


def test_the_promise_is_conformal() -> None:
    known = BoundCalibration(99, (0.1,), (1.0, 2.0), (5.0, 4.0))
    assert known.factor(0.05) == 2.0
    assert known.factor(0.06) == 1.0
    assert replace(known, violations=(5.0, 4.1)).factor(0.05) is None
