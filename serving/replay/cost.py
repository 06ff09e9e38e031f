"""What running tokens costs on this machine, measured when a model is loaded."""

from __future__ import annotations

import time

import numpy as np

from serving.engine.model import prefill_step
from serving.engine.runner import Runner
from serving.engine.slots import Slots
from serving.prefix_cache.planner import CostModel

_TOKENS = 64
_CONTEXT = 1024
# A model this slow spends its time on weights, not on attention; do not keep the start waiting.
_SLOW_SECONDS = 1.0
_COPY_BYTES = 8 << 20


def measure_cost(model: Runner) -> CostModel:
    """Time two short runs, one after an empty and one after a long context, and a copy."""
    slots = model.new_slots(_CONTEXT + _TOKENS, 1)
    slots.clear()
    _run(model, slots, 0, 2)
    near = _run(model, slots, 0, _TOKENS)
    far = near if near > _SLOW_SECONDS else _run(model, slots, _CONTEXT, _TOKENS)
    attended = max(0.0, far - near) / (_TOKENS * _CONTEXT)
    slots.close()
    buffer = np.zeros(_COPY_BYTES, np.uint8)
    started = time.perf_counter()
    buffer.copy()
    copy = (time.perf_counter() - started) / _COPY_BYTES
    return CostModel(near / _TOKENS, attended, copy * model.spec.kv_bytes_per_token())


def _run(model: Runner, slots: Slots, start: int, count: int) -> float:
    step = prefill_step(np.zeros(count, np.int64), start)
    started = time.perf_counter()
    model.run(slots, 0, step)
    return time.perf_counter() - started
