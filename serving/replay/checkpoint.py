"""One checkpoint record: conv inputs, the slow units' states (quantised), every unit's norm.

No slow units = zero-start replay with the right conv state; all units in fp32 = a classic full
checkpoint; one code path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_configs.errors import ConfigError
from engine_configs.spec import HybridSpec
from serving.prefix_cache import ArraySpec
from serving.replay.calibration import Calibration

Array = NDArray[Any]
Record = list[Array]
DTYPES = ("int4", "int8", "fp16", "fp32")
_LEVELS = {"int4": 7, "int8": 127}


@dataclass(frozen=True)
class _Layer:
    """conv, recurrent: shapes of the states, () = none; slow [n]: restored units."""

    index: int
    conv: tuple[int, ...]
    recurrent: tuple[int, ...]
    units: int
    slow: NDArray[np.int64]


class CheckpointCodec:
    """States of one sequence ⇄ a record. ``slow``: units to keep, by layer."""

    def __init__(self, spec: HybridSpec, slow: Mapping[int, Sequence[int]], dtype: str) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"checkpoint dtype is {dtype!r}, expected one of {DTYPES}")
        self.dtype = dtype
        self._layers = [
            _Layer(i, m.conv_state(), m.recurrent_state(), m.units(),
                   np.array(sorted(slow.get(i, ())), np.int64))
            for i, m in spec.state_layers()
        ]  # fmt: skip

    @classmethod
    def of(cls, spec: HybridSpec, calibration: Calibration) -> CheckpointCodec:
        return cls(spec, {u.layer: u.slow for u in calibration.layers}, calibration.dtype)

    def layout(self) -> list[ArraySpec]:
        """Arrays of a record, in order."""
        specs = []
        for layer in self._layers:
            specs += self._layer_layout(layer)
        return specs

    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.layout())

    def encode(self, states: Mapping[str, Array]) -> Record:
        """``states``: one sequence's arrays by graph input name (``conv_state_3`` [W-1, C])."""
        record: Record = []
        for layer in self._layers:
            if layer.conv:
                conv = states[f"conv_state_{layer.index}"]
                record.append(conv.astype(self._conv_dtype()))
            if layer.recurrent:
                units = _by_unit(states[f"recurrent_state_{layer.index}"], layer)
                record.append(_norms(units).astype(np.float32))
                record += _quantise(units[layer.slow], self.dtype)
        return record

    def decode(self, record: Record, states: Mapping[str, Array]) -> None:
        """Write a record's conv and slow units into ``states``; fast units become zero."""
        parts = iter(record)
        for layer in self._layers:
            if layer.conv:
                states[f"conv_state_{layer.index}"][...] = next(parts)
            if layer.recurrent:
                next(parts)  # norms
                target = _by_unit(states[f"recurrent_state_{layer.index}"], layer)
                target[...] = 0
                shape = target[layer.slow].shape
                count = len(_quantised_layout(shape, self.dtype))
                target[layer.slow] = _dequantise([next(parts) for _ in range(count)], shape)

    def norms(self, record: Record) -> dict[int, NDArray[np.float32]]:
        """‖S_u‖ [units] of each layer with a recurrent state."""
        parts, found = iter(record), {}
        for layer in self._layers:
            if layer.conv:
                next(parts)
            if layer.recurrent:
                found[layer.index] = next(parts)
                shape = (len(layer.slow), *_unit_shape(layer))
                for _ in _quantised_layout(shape, self.dtype):
                    next(parts)
        return found

    def _conv_dtype(self) -> str:
        return "float32" if self.dtype == "fp32" else "float16"

    def _layer_layout(self, layer: _Layer) -> list[ArraySpec]:
        specs, i = [], layer.index
        if layer.conv:
            specs.append(ArraySpec(f"conv.{i}", layer.conv, self._conv_dtype()))
        if layer.recurrent:
            specs.append(ArraySpec(f"norm.{i}", (layer.units,), "float32"))
            shape = (len(layer.slow), *_unit_shape(layer))
            for name, part, dtype in _quantised_layout(shape, self.dtype):
                specs.append(ArraySpec(f"{name}.{i}", part, dtype))
        return specs


def _unit_shape(layer: _Layer) -> tuple[int, ...]:
    """A head is [dk, dv], a key channel [1, dv]."""
    heads, dk, dv = layer.recurrent
    return (heads * dk // layer.units, dv)


def _by_unit(state: Array, layer: _Layer) -> Array:
    """[Hv, dk, dv] → a view [units, rows, dv]."""
    return state.reshape(layer.units, *_unit_shape(layer))


def unit_norms(state: Array, units: int) -> NDArray[np.float32]:
    """‖S_u‖ [units] of one layer's state [Hv, dk, dv]."""
    return _norms(state.reshape(units, -1, state.shape[-1]))


def _norms(units: Array) -> NDArray[np.float32]:
    return np.asarray(np.sqrt((units * units).sum(axis=(1, 2))), np.float32)


def _quantised_layout(shape: tuple[int, ...], dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Arrays that hold slow units [n, rows, dv]: values, and a scale per row of dv."""
    if dtype in ("fp16", "fp32"):
        return [("slow", shape, "float16" if dtype == "fp16" else "float32")]
    packed = (*shape[:2], -(-shape[2] // 2)) if dtype == "int4" else shape
    return [("slow", packed, "uint8" if dtype == "int4" else "int8"),
            ("scale", (*shape[:2], 1), "float16")]  # fmt: skip


def _quantise(units: Array, dtype: str) -> Record:
    if dtype in ("fp16", "fp32"):
        return [units.astype(np.float16 if dtype == "fp16" else np.float32)]
    levels = _LEVELS[dtype]
    scale = np.abs(units).max(axis=2, keepdims=True, initial=0.0) / levels
    scale = scale.astype(np.float16)
    safe = np.where(scale > 0, scale, 1).astype(np.float32)
    values = np.clip(np.rint(units / safe), -levels, levels).astype(np.int8)
    if dtype == "int8":
        return [values, scale]
    if values.shape[2] % 2:
        values = np.concatenate([values, np.zeros((*values.shape[:2], 1), np.int8)], axis=2)
    nibbles = (values + 8).astype(np.uint8)
    return [nibbles[..., ::2] | (nibbles[..., 1::2] << 4), scale]


def _dequantise(parts: Record, shape: tuple[int, ...]) -> NDArray[np.float32]:
    values = parts[0]
    if values.dtype == np.uint8:
        pairs = np.stack([values & 15, values >> 4], axis=-1).astype(np.float32) - 8
        values = pairs.reshape(*values.shape[:2], 2 * values.shape[2])[..., : shape[2]]
    result = values.astype(np.float32)
    if len(parts) == 2:
        result *= parts[1].astype(np.float32)
    return result.reshape(shape)
