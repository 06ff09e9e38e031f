"""Checkpoint records: what comes back, in every dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_configs.errors import ConfigError
from engine_configs.spec import HybridSpec
from serving.engine.model import Model
from serving.replay.checkpoint import DTYPES, CheckpointCodec, unit_norms

# Half a step of the coarsest level, relative to the largest value of a row.
ERROR = {"int4": 0.5 / 7, "int8": 0.5 / 127, "fp16": 2**-11, "fp32": 0.0}


def states_of(spec: HybridSpec, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    states = {}
    for i, m in spec.state_layers():
        states[f"conv_state_{i}"] = rng.standard_normal(m.conv_state()).astype(np.float32)
        states[f"recurrent_state_{i}"] = rng.standard_normal(m.recurrent_state()).astype(np.float32)
    return states


@given(seed=st.integers(0, 99), dtype=st.sampled_from(DTYPES), data=st.data())
def test_slow_units_return_and_fast_ones_are_zero(
    tiny_model: Model, seed: int, dtype: str, data: st.DataObject
) -> None:
    spec = tiny_model.spec
    slow = {
        i: sorted(data.draw(st.sets(st.integers(0, m.units() - 1)), label=f"layer {i}"))
        for i, m in spec.state_layers()
    }
    codec = CheckpointCodec(spec, slow, dtype)
    states = states_of(spec, seed)
    record = codec.encode(states)
    assert [(a.shape, str(a.dtype)) for a in record] == [(s.shape, s.dtype) for s in codec.layout()]
    assert sum(a.nbytes for a in record) == codec.nbytes()
    found = {name: np.full_like(array, np.nan) for name, array in states.items()}
    codec.decode(record, found)
    for i, m in spec.state_layers():
        units = found[f"recurrent_state_{i}"].reshape(m.units(), -1, m.recurrent_state()[2])
        want = states[f"recurrent_state_{i}"].reshape(units.shape)
        fast = [u for u in range(m.units()) if u not in slow[i]]
        assert not units[fast].any()
        # The scale itself is fp16, and so is everything in fp16.
        limit = np.abs(want).max(axis=2, keepdims=True) * (ERROR[dtype] * (1 + 2**-9) + 2**-10)
        limit = limit if dtype != "fp32" else 0
        assert (np.abs(units - want)[slow[i]] <= np.broadcast_to(limit, want.shape)[slow[i]]).all()
        conv = found[f"conv_state_{i}"] - states[f"conv_state_{i}"]
        assert np.abs(conv).max() <= (0 if dtype == "fp32" else 4 * 2**-11)
        norms = codec.norms(record)[i]
        np.testing.assert_allclose(norms, unit_norms(states[f"recurrent_state_{i}"], m.units()))


def test_an_unknown_dtype_is_named(tiny_model: Model) -> None:
    with pytest.raises(ConfigError, match="int3"):
        CheckpointCodec(tiny_model.spec, {}, "int3")
