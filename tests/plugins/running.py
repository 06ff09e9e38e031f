"""Runs one op of ours in ONNX Runtime: in either lowering, or as a kernel of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from plugins.onnx_graph import DOMAIN, OPSET, ORT_DOMAIN, Nodes
from serving.engine.native import library

Array = NDArray[Any]
# The kernels, one form per instruction set, and every way to run an op.
NATIVE = ("avx2", "avx512")
FORMS = ("ort", "standard", *NATIVE)
_KINDS = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.int32): TensorProto.INT32,
}


def run_op(
    form: str, feeds: dict[str, Array], present: dict[str, str], emit: Callable[[Nodes], str]
) -> list[Array]:
    """Run the op in ``form``, one of FORMS.

    Returns the value ``emit`` returns, then the ``present`` outputs, each written over the input it
    names (a copy of it), as the engine runs the ops."""
    g = Nodes("standard" if form == "standard" else "ort")
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
    if g.lowering == "ort":
        domains += [helper.make_opsetid(d, 1) for d in (ORT_DOMAIN, DOMAIN)]
    else:
        assert all(n.domain == "" for n in g.nodes)
    model = helper.make_model(
        graph, opset_imports=domains, functions=list(g.functions.values()), ir_version=11
    )
    session = session_of(model, form)
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


def session_of(model: onnx.ModelProto, form: str, threads: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    with pytest.MonkeyPatch.context() as patch:
        if form in NATIVE:
            patch.setenv("HYBRID_OPS_FORM", form)
            built = library()
            if built is None:
                pytest.skip("the CPU kernels were not built")
            try:
                options.register_custom_ops_library(str(built))
            except Exception as e:
                if "this machine has no" not in str(e):
                    raise
                pytest.skip(str(e))
        return ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
