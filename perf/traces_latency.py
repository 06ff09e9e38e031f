"""Time of one attention layer's decode steps: the op's CPU kernel, dense and bounded, on one trace.

A model of one ``hybrid::CompressedSparseAttention`` node in ONNX Runtime, its slots and summaries
bound in place; a step covers attention, selection, the new row and its summary, and where evicted
rows are asked for, their copy from host memory and the second run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from perf.traces_data import DIM, HEADS, KV_HEADS, SCALE, STEPS, Trace
from perf.traces_steps import PATIENCE
from plugins.compressed_sparse_attention.node import Compression, compressed_sparse_attention
from plugins.onnx_graph import DOMAIN, OPSET, ORT_DOMAIN, Nodes
from serving.engine.native import register
from serving.kv_compression.compact import CompactLayer, release, restore

_DENSE = ["q", "k_new", "v_new", "past_k", "past_v", "seqlens", "total_len", "positions"]
_MORE = ["kv_rows", "summaries", "stats", "epsilon", "factor"]
_OUT = ["o", "present_k", "present_v", "present_summaries", "present_stats", "error_bound"]
_OUT += ["mass_read", "rows_read", "chosen"]
_INT = {"seqlens": TensorProto.INT32, "total_len": TensorProto.INT32, "kv_rows": TensorProto.INT32}
_KINDS = _INT | {
    "positions": TensorProto.INT64,
    "summaries": TensorProto.FLOAT16,
    "present_summaries": TensorProto.FLOAT16,
    "rows_read": TensorProto.INT32,
    "chosen": TensorProto.UINT8,
}
_IN_PLACE = {"present_k": "past_k", "present_v": "past_v"}
_IN_PLACE |= {"present_summaries": "summaries", "present_stats": "stats"}
REPEATS = 5
# Share of all rows that a step may fetch; one that asks for more is dense, on the host's copy.
DENSE_AT = 0.1


@dataclass(frozen=True)
class Times:
    """Seconds of the median run, summed over the steps of a trace; selection: of steps that read
    only what every step reads; first_run: bounded steps before anything is fetched."""

    dense: float
    bounded: float
    selection: float
    first_run: float


def session(threads: int = 1) -> ort.InferenceSession | None:
    """The op alone; None where the kernels were not built."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    if not register(options):
        return None
    g = Nodes("ort")
    names = {n: n for n in [*_MORE, *_OUT[3:]]}
    compressed_sparse_attention(
        g, "o", _DENSE, ("present_k", "present_v"),
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=SCALE,
        compression=Compression(**names),
    )  # fmt: skip

    def info(name: str) -> Any:
        return helper.make_tensor_value_info(name, _KINDS.get(name, TensorProto.FLOAT), None)

    inputs, outputs = [info(n) for n in [*_DENSE, *_MORE]], [info(n) for n in _OUT]
    graph = helper.make_graph(g.nodes, "op", inputs, outputs, list(g.constants.values()))
    opsets = [helper.make_opsetid("", OPSET)]
    opsets += [helper.make_opsetid(d, 1) for d in (ORT_DOMAIN, DOMAIN)]
    functions = list(g.functions.values())
    model = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=11)
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


class Op:
    """One sequence's slot, bound once; ``run`` is a step."""

    def __init__(self, model: ort.InferenceSession, k: Any, v: Any, layer: CompactLayer | None):
        """k, v [Hk, C, d]: slots, written in place; layer: None for dense steps."""
        self._binding, self._model = model.io_binding(), model
        bounded = layer is not None
        shape = (1, KV_HEADS) if bounded else (0, KV_HEADS)
        entries = layer.summaries if layer else np.zeros((KV_HEADS, 0, 3 * DIM), np.float16)
        stats = layer.stats if layer else np.zeros((KV_HEADS, 0, 2), np.float32)
        size = 1 if bounded else 0
        some = slice(0, size)
        self.held: dict[str, Any] = {
            "q": np.zeros((1, 1, HEADS * DIM), np.float32),
            "k_new": np.zeros((1, 1, KV_HEADS * DIM), np.float32),
            "v_new": np.zeros((1, 1, KV_HEADS * DIM), np.float32),
            "past_k": k[None],
            "past_v": v[None],
            "seqlens": np.zeros(1, np.int32),
            "total_len": np.zeros((), np.int32),
            "positions": np.zeros((1, 1), np.int64),
            "kv_rows": np.zeros(shape, np.int32),
            "summaries": entries[None][some],
            "stats": stats[None][some],
            "epsilon": np.zeros(size, np.float32),
            "factor": np.ones(size, np.float32),
            "o": np.zeros((1, 1, HEADS * DIM), np.float32),
            "error_bound": np.zeros((1, HEADS), np.float32),
            "mass_read": np.zeros((1, HEADS), np.float32),
            "rows_read": np.zeros((1, KV_HEADS), np.int32),
            "chosen": np.zeros((1, KV_HEADS, entries.shape[1]), np.uint8),
        }
        for name in [*_DENSE, *_MORE]:
            self._bind(self._binding.bind_input, name, self.held[name])
        for name in _OUT:
            self._bind(self._binding.bind_output, name, self.held[_IN_PLACE.get(name, name)])

    def _bind(self, bind: Any, name: str, array: Any) -> None:
        bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def run(self, q: Any, rows: Any, epsilon: float = 0.0, factor: float = 1.0) -> float:
        """Seconds of one step; q [Hq, d], rows [Hk]: in the slot, the step's own included."""
        self.held["q"][0, 0] = q.reshape(-1)
        self.held["seqlens"][:] = max(rows) - 1
        self.held["total_len"][...] = max(rows)
        self.held["positions"][:] = max(rows) - 1
        if self.held["kv_rows"].size:
            self.held["kv_rows"][0] = rows
            self.held["epsilon"][:], self.held["factor"][:] = epsilon, factor
        start = time.perf_counter()
        self._model.run_with_iobinding(self._binding)
        return time.perf_counter() - start


def measure(
    model: ort.InferenceSession,
    trace: Trace,
    layer: CompactLayer,
    slots: Any,
    epsilon: float,
    factor: float,
) -> Times:
    """All steps of a trace, the median of several passes; the slots (k, v [Hk, C, d]) need room for
    what comes back and end as they were. factor 0: sound bounds."""
    length = trace.keys.shape[1]
    whole = [np.concatenate([a, a[:, -1:]], axis=1) for a in (trace.keys, trace.values)]
    dense = Op(model, *whole, None)
    op = Op(model, *slots, layer)
    rows = layer.rows() + 1
    times = np.zeros((REPEATS, STEPS, 4))
    for repeat in times:
        back: list[tuple[int, int, dict[int, Any]]] = []
        for s, q in enumerate(trace.queries):
            repeat[s, 0] = dense.run(q, [length + 1] * KV_HEADS)
            repeat[s, 1] = repeat[s, 3] = op.run(q, layer.rows() + 1, epsilon, factor)
            start = time.perf_counter()
            new = _fetch(op, trace, layer, slots, s)
            repeat[s, 1] += time.perf_counter() - start
            if new is None:
                repeat[s, 1] += dense.run(q, [length + 1] * KV_HEADS)
            elif new:
                repeat[s, 1] += op.run(q, layer.rows() + 1, epsilon, factor)
            start = time.perf_counter()
            back = _let_go(layer, slots, back + (new or []), s)
            repeat[s, 1] += time.perf_counter() - start
            repeat[s, 2] = op.run(q, rows, 1e9, factor)
        _let_go(layer, slots, back, 2 * STEPS)
    return Times(*np.median(times, axis=0).sum(0).tolist())


def _fetch(op: Op, trace: Trace, layer: CompactLayer, slots: Any, step: int) -> list[Any] | None:
    """Bring back what the step asked for: (step, head, groups by number). None, and nothing is
    brought, where that is so much that the step had better read the host's rows, all of them."""
    if not op.held["chosen"][0, :, layer.blocks :].any():
        return []
    asked = [layer.evicted(h, op.held["chosen"][0, h]) for h in range(KV_HEADS)]
    rows = sum(len(layer.groups[h][e]) for h, wanted in enumerate(asked) for e in wanted)
    if rows > DENSE_AT * trace.keys.shape[1] * KV_HEADS:
        return None
    back = []
    for h, wanted in enumerate(asked):
        if wanted:
            back.append((step, h, {e: layer.groups[h][e] for e in wanted}))
            restore(layer, h, wanted, trace.keys, trace.values, *slots)
    return back


def _let_go(layer: CompactLayer, slots: Any, back: list[Any], step: int) -> list[Any]:
    """Release what came back more than PATIENCE steps ago, the last first; returns the others."""
    for at, h, groups in reversed(back):
        if at + PATIENCE < step:
            release(layer, h, groups, *slots)
    return [b for b in back if b[0] + PATIENCE >= step]
