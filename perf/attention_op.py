"""One decode step of attention by itself, as a session of ONNX Runtime: what perf.decode times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from plugins.compressed_sparse_attention.node import Compression, compressed_sparse_attention
from plugins.onnx_graph import DOMAIN, OPSET, ORT_DOMAIN, Nodes
from serving.engine.native import register

Array = NDArray[Any]
DENSE = ("q", "k_new", "v_new", "past_k", "past_v", "seqlens", "total_len", "positions")
MORE = ("kv_rows", "summaries", "stats", "epsilon", "factor")
HOST = ("host_k", "host_v", "host_rows", "host_first")
IN_PLACE = ("past_k", "past_v", "summaries", "stats")
ANSWERS = ("error_bound", "mass_read", "rows_read", "chosen")
KINDS = {
    "seqlens": TensorProto.INT32,
    "total_len": TensorProto.INT32,
    "positions": TensorProto.INT64,
    "kv_rows": TensorProto.INT32,
    "host_rows": TensorProto.INT32,
    "host_first": TensorProto.INT32,
    "rows_read": TensorProto.INT32,
    "summaries": TensorProto.FLOAT16,
    "present_summaries": TensorProto.FLOAT16,
    "chosen": TensorProto.UINT8,
}


@dataclass(frozen=True)
class Sizes:
    """Of one sequence: Hq query heads, Hk K/V heads of dimension d."""

    Hq: int
    Hk: int
    d: int

    @property
    def scale(self) -> float:
        return float(self.d**-0.5)


@dataclass
class BoundStep:
    """A step ready to run, again and again: it appends the same row to the same slot."""

    run: Callable[[], None]
    answers: dict[str, Array]
    owned: dict[str, Array] = field(repr=False)  # what the runtime reads and writes


class AttentionOp:
    """The op alone: ``native`` with the CPU kernels, else as its body, GroupQueryAttention.

    Raises RuntimeError when the kernels are wanted and cannot be had.
    """

    def __init__(self, sizes: Sizes, threads: int, *, native: bool) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        if native and not register(options):
            raise RuntimeError("libhybrid_ops.so does not load: make native")
        self.sizes = sizes
        self._session = ort.InferenceSession(
            _model(sizes).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def dense(self, q: Array, slot_k: Array, slot_v: Array, row: tuple[Array, Array]) -> BoundStep:
        """q [Hq, d], slots [Hk, rows, d], ``row``: k and v [Hk, d], written as their last."""
        Hk, d = self.sizes.Hk, self.sizes.d
        none = {
            "kv_rows": np.zeros((0, Hk), np.int32),
            "summaries": np.zeros((0, Hk, 0, 3 * d), np.float16),
            "stats": np.zeros((0, Hk, 0, 2), np.float32),
            "epsilon": np.zeros(0, np.float32),
            "factor": np.zeros(0, np.float32),
        }
        return self._bind(self._inputs(q, slot_k, slot_v, row) | none | self._no_host())

    def sparse(
        self,
        q: Array,
        slot_k: Array,
        slot_v: Array,
        row: tuple[Array, Array],
        *,
        rows: Array,
        summaries: Array,
        stats: Array,
        epsilon: float,
        factor: float,
        host: dict[str, Array] | None = None,
    ) -> BoundStep:
        """As ``dense``, over the first ``rows`` [Hk] rows of each slot, with the entries
        summaries [Hk, S, 3*d] and stats [Hk, S, 2]; ``host``: the op's inputs of that name."""
        more = {
            "kv_rows": np.asarray(rows, np.int32)[None],
            "summaries": summaries[None],
            "stats": stats[None],
            "epsilon": np.array([epsilon], np.float32),
            "factor": np.array([factor], np.float32),
        }
        return self._bind(self._inputs(q, slot_k, slot_v, row) | more | (host or self._no_host()))

    def _no_host(self) -> dict[str, Array]:
        nothing = np.zeros((0, self.sizes.Hk, 0), np.int32)
        memory = dict.fromkeys(HOST[:2], np.zeros(0, np.float32))
        return memory | dict.fromkeys(HOST[2:], nothing)

    def _inputs(
        self, q: Array, slot_k: Array, slot_v: Array, row: tuple[Array, Array]
    ) -> dict[str, Array]:
        rows = slot_k.shape[1]
        return {
            "q": q.reshape(1, 1, -1),
            "k_new": row[0].reshape(1, 1, -1),
            "v_new": row[1].reshape(1, 1, -1),
            "past_k": slot_k[None],
            "past_v": slot_v[None],
            "seqlens": np.array([rows - 1], np.int32),
            "total_len": np.array(rows, np.int32),
            "positions": np.array([[rows - 1]]),
        }

    def _bind(self, inputs: dict[str, Array]) -> BoundStep:
        binding, sizes = self._session.io_binding(), self.sizes
        owned = {name: np.ascontiguousarray(value) for name, value in inputs.items()}
        answers = {
            "o": np.empty((1, 1, sizes.Hq * sizes.d), np.float32),
            "error_bound": np.empty((1, sizes.Hq), np.float32),
            "mass_read": np.empty((1, sizes.Hq), np.float32),
            "rows_read": np.empty((1, sizes.Hk), np.int32),
            "chosen": np.empty((1, sizes.Hk, owned["stats"].shape[2]), np.uint8),
        }

        def bind(to: Callable[..., None], name: str, x: Array) -> None:
            to(name, "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)

        for name, x in owned.items():
            bind(binding.bind_input, name, x)
        for name in IN_PLACE:
            bind(binding.bind_output, f"present_{name.removeprefix('past_')}", owned[name])
        for name, x in answers.items():
            bind(binding.bind_output, name, x)
        return BoundStep(lambda: self._session.run_with_iobinding(binding), answers, owned)


def _model(sizes: Sizes) -> onnx.ModelProto:
    g = Nodes("ort")
    presents = [f"present_{n.removeprefix('past_')}" for n in IN_PLACE]
    names = {n: n for n in (*MORE, *HOST, *presents[2:], *ANSWERS)}
    compressed_sparse_attention(
        g,
        "o",
        list(DENSE),
        (presents[0], presents[1]),
        num_heads=sizes.Hq,
        num_kv_heads=sizes.Hk,
        head_dim=sizes.d,
        scale=sizes.scale,
        compression=Compression(**names),
    )

    def info(names: tuple[str, ...]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(n, KINDS.get(n, TensorProto.FLOAT), None) for n in names
        ]

    graph = helper.make_graph(
        g.nodes,
        "step",
        info((*DENSE, *MORE, *HOST)),
        info(("o", *presents, *ANSWERS)),
        initializer=list(g.constants.values()),
    )
    domains = [helper.make_opsetid("", OPSET)]
    domains += [helper.make_opsetid(domain, 1) for domain in (ORT_DOMAIN, DOMAIN)]
    functions = list(g.functions.values())
    return helper.make_model(graph, opset_imports=domains, functions=functions, ir_version=11)
