"""One run of the compiled graph over rows of a slot class, in place (ONNX Runtime, IOBinding)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from engine_configs.errors import BundleError
from serving.engine.bundle import Bundle
from serving.engine.native import register
from serving.engine.slots import SlotClass

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Step:
    """What one run does.

    tokens, positions [B, T]; total_lens [B]: tokens visible to each last query; append: write K/V
    (False = replay); valid_len [B]: tokens that are not padding (None: all);
    logit_rows [N]: rows of B*T whose logits are wanted.
    """

    tokens: Ints
    positions: Ints
    total_lens: Ints
    append: bool
    logit_rows: Ints
    valid_len: Ints | None = None


class Model:
    """The graph of a bundle. Raises BundleError when the runtime cannot load it.

    ``native``: our ops run as the library's kernels, not as their function bodies.
    """

    def __init__(self, bundle: Bundle, threads: int = 0) -> None:
        self.bundle, self.spec = bundle, bundle.spec
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.native = register(options, bundle.path)
        try:
            self._session = ort.InferenceSession(
                str(bundle.model_file), options, providers=["CPUExecutionProvider"]
            )
        except Exception as e:
            raise BundleError(
                f"the runtime cannot load it: {e}",
                where=str(bundle.model_file),
                fix="Convert the model again with convert.py",
            ) from None

        self._keeps_rows = "rows_kept" in {i.name for i in self._session.get_inputs()}

    def new_slots(self, capacity: int, rows: int) -> SlotClass:
        return SlotClass(self.spec, capacity, rows)

    def run(
        self,
        slots: SlotClass,
        row: int,
        step: Step,
        *,
        decay_sums: bool = False,
        queries: bool = False,
    ) -> tuple[Floats, dict[str, Floats]]:
        """Run B = len(step.tokens) rows from ``row`` on; K/V and states change in place.

        Returns logits [N, V] and, by name where asked for, ``decay_sum_i`` [B, units] of each
        layer with a state and ``query_i`` [B, T, Hq*dk] of each attention layer (padding included);
        and what ``slots.outputs`` names.
        """
        batch, length = step.tokens.shape
        bound = self._bound(slots, row, batch, decay_sums, queries)
        bound.feed("input_ids", step.tokens, np.int64)
        bound.feed("position_ids", step.positions, np.int64)
        bound.feed("seqlens", step.total_lens, np.int32)
        bound.feed("total_len", step.total_lens.max(), np.int32)
        valid = [length] * batch if step.valid_len is None else step.valid_len
        bound.feed("valid_len", valid, np.int64)
        bound.feed("kv_append", [length if step.append else 0], np.int64)
        bound.feed("logit_rows", step.logit_rows, np.int64)
        if self._keeps_rows:  # a replay is over with the last state it brings up to date
            whole = step.append or queries or len(step.logit_rows)
            bound.feed("rows_kept", [length if whole else 1], np.int64)
        binding = bound.binding
        logits = np.empty((len(step.logit_rows), self.spec.vocab_size), np.float32)
        _bind_array(binding.bind_output, "logits", logits)
        extra = self._decay_arrays(batch) if decay_sums else {}
        if queries:
            extra |= self._query_arrays(batch, length)
        extra |= slots.outputs(batch)
        for name, array in extra.items():
            _bind_array(binding.bind_output, name, array)
        if step.append:
            slots.hold(row, step.total_lens)
        self._session.run_with_iobinding(binding)
        return logits, extra

    def _decay_arrays(self, batch: int) -> dict[str, Floats]:
        layers = self.spec.state_layers()
        shapes = {f"decay_sum_{i}": (batch, m.units()) for i, m in layers if m.units()}
        return {name: np.empty(shape, np.float32) for name, shape in shapes.items()}

    def _query_arrays(self, batch: int, length: int) -> dict[str, Floats]:
        layers = self.spec.attention_layers()
        shapes = {f"query_{i}": (batch, length, m.num_heads * m.head_dim) for i, m in layers}
        return {name: np.empty(shape, np.float32) for name, shape in shapes.items()}

    def _bound(self, slots: SlotClass, row: int, batch: int, *outputs: bool) -> _Bound:
        """States and slots bound once per row range; the class owns the addresses it names."""
        key = (row, batch, *outputs)
        if key not in slots.bindings:
            binding = self._session.io_binding()
            for name, array in slots.buffers().items():
                rows = array[row : row + batch]
                _bind_array(binding.bind_input, name, rows)
                _bind_array(binding.bind_output, f"present_{name.removeprefix('past_')}", rows)
            for name, array in slots.inputs().items():
                _bind_array(binding.bind_input, name, array[row : row + batch])
            for name, array in slots.memory().items():
                _bind_array(binding.bind_input, name, array)
            slots.bindings[key] = _Bound(binding)
        bound: _Bound = slots.bindings[key]
        return bound


class _Bound:
    """A binding and the step inputs it points to, which are written in place from run to run."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding
        self._inputs: dict[str, NDArray[Any]] = {}

    def feed(self, name: str, value: Any, dtype: type) -> None:
        held = self._inputs.get(name)
        if held is not None and held.shape == np.shape(value):
            held[...] = value
            return
        held = self._inputs[name] = np.array(value, dtype)
        self.binding.bind_cpu_input(name, held)


def _bind_array(bind: Any, name: str, array: NDArray[Any]) -> None:
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def prefill_step(
    tokens: NDArray[np.integer[Any]], start: int, *, append: bool = True, logits: Sequence[int] = ()
) -> Step:
    """Tokens [T] of one sequence at positions start.. (B = 1).

    An odd number of appended tokens is padded to an even one: the attention kernel takes queries
    in blocks of an even size, and a block of one query differs in the last bit from a longer one.
    Only decode and the last prompt token may take the T = 1 path.
    """
    ids = np.asarray(tokens, np.int64)[None]
    valid = None
    if append and ids.shape[1] % 2:
        valid = np.array([ids.shape[1]], np.int64)
        ids = np.pad(ids, ((0, 0), (0, 1)), mode="edge")
    count = ids.shape[1]
    positions = np.arange(start, start + count, dtype=np.int64)[None]
    rows = np.asarray(logits, np.int64)
    return Step(ids, positions, np.array([start + count]), append, rows, valid)


def decode_step(tokens: Sequence[int], positions: Sequence[int]) -> Step:
    """One token of each of B sequences."""
    ids = np.asarray(tokens, np.int64)[:, None]
    at = np.asarray(positions, np.int64)
    return Step(ids, at[:, None], at + 1, True, np.arange(len(ids), dtype=np.int64))
