"""Time of one attention layer's decode steps: the op's CPU kernel, dense and bounded, on one trace.

A step covers attention, selection, the new row and its summary, and evicted rows, read where they
lie in the host copy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from perf.attention_op import AttentionOp, BoundStep, Sizes
from perf.traces_data import DIM, HEADS, KV_HEADS, STEPS, Trace
from serving.kv_compression.compact import CompactLayer

REPEATS = 5


@dataclass(frozen=True)
class Times:
    """Seconds of the median run, summed over the steps of a trace; selection: of steps that read
    only what every step reads."""

    dense: float
    bounded: float
    selection: float


def attention_op() -> AttentionOp | None:
    """On one thread; None where the kernels were not built."""
    try:
        return AttentionOp(Sizes(HEADS, KV_HEADS, DIM), 1, native=True)
    except RuntimeError:
        return None


def measure(
    op: AttentionOp, trace: Trace, layer: CompactLayer, slots: Any, epsilon: float, factor: float
) -> Times:
    """All steps of a trace, one after the other, the median of several passes; slots k, v
    [Hk, C, d], with room for a row of each. factor 0: sound bounds."""
    row = (trace.keys[:, -1], trace.values[:, -1])
    whole = [
        np.concatenate([a, np.repeat(a[:, -1:], STEPS, 1)], 1) for a in (trace.keys, trace.values)
    ]
    dense = op.dense(trace.queries[0], *whole, row)
    bounded, selection = (
        op.sparse(
            trace.queries[0],
            *slots,
            row,
            rows=layer.rows(),
            summaries=layer.summaries,
            stats=layer.stats,
            epsilon=allowed,
            factor=factor,
            host=host_of(trace, layer),
        )
        for allowed in (epsilon, 1e9)
    )
    times = np.zeros((REPEATS, STEPS, 3))
    for repeat in times:
        for s, q in enumerate(trace.queries):
            rows = trace.keys.shape[1] + s
            dense.owned["seqlens"][:], dense.owned["total_len"][...] = rows, rows + 1
            for step in (bounded, selection):
                step.owned["kv_rows"][0] = layer.rows() + 1 + s
            repeat[s] = [_timed(step, q) for step in (dense, bounded, selection)]
    return Times(*np.median(times, axis=0).sum(0).tolist())


def host_of(trace: Trace, layer: CompactLayer) -> dict[str, Any]:
    """As the op takes them: the trace's own rows, and where those of the evicted groups are."""
    size = max(sum(len(g) for g in groups) for groups in layer.groups)
    rows = np.zeros((1, KV_HEADS, size), np.int32)
    first = np.full((1, *layer.stats.shape[:2]), -1, np.int32)
    for h, groups in enumerate(layer.groups):
        at = 0
        for e, g in enumerate(groups, layer.blocks):
            first[0, h, e] = at
            rows[0, h, at : at + len(g)] = (h * trace.keys.shape[1] + g) * (DIM // 8)
            at += len(g)
    memory = {"host_k": trace.keys.reshape(-1), "host_v": trace.values.reshape(-1)}
    return memory | {"host_rows": rows, "host_first": first}


def _timed(step: BoundStep, q: Any) -> float:
    step.owned["q"][0, 0] = q.reshape(-1)
    start = time.perf_counter()
    step.run()
    return time.perf_counter() - start
