"""Runs one op of ours, in either lowering, in stock ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from plugins.onnx_graph import DOMAIN, OPSET, ORT_DOMAIN, Nodes

Array = NDArray[Any]
_KINDS = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.int32): TensorProto.INT32,
}


def run_op(
    lowering: str, feeds: dict[str, Array], present: dict[str, str], emit: Callable[[Nodes], str]
) -> list[Array]:
    """The value ``emit`` returns, then the ``present`` outputs, each written over the input it
    names (a copy of it), as the engine runs the ops."""
    g = Nodes(lowering)
    first = emit(g)
    names = [first, *present]
    graph = helper.make_graph(
        g.nodes,
        "op",
        [
            helper.make_tensor_value_info(n, _KINDS[x.dtype], [None] * x.ndim)
            for n, x in feeds.items()
        ],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names],
        initializer=list(g.constants.values()),
    )
    domains = [helper.make_opsetid("", OPSET)]
    if lowering == "ort":
        domains += [helper.make_opsetid(d, 1) for d in (ORT_DOMAIN, DOMAIN)]
    else:
        assert all(n.domain == "" for n in g.nodes)
    model = helper.make_model(
        graph, opset_imports=domains, functions=list(g.functions.values()), ir_version=11
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding, owned = session.io_binding(), {n: np.array(x) for n, x in feeds.items()}
    for name, x in owned.items():
        binding.bind_input(name, "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)
    for name, source in present.items():
        x = owned[source]
        binding.bind_output(name, "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)
    binding.bind_output(first, "cpu")
    session.run_with_iobinding(binding)
    o: Array = binding.copy_outputs_to_cpu()[-1]
    return [o, *(owned[source] for source in present.values())]
