"""Blocks of 4 and 8 bits: what the kernels read is what was meant."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from build.quantize import dequantise, quantise

DOMAIN = "com.microsoft"


def run(bits: int, packed: np.ndarray, scales: np.ndarray, x: np.ndarray) -> tuple:
    rows, width = len(packed), x.shape[1]
    nodes = [
        helper.make_node("MatMulNBits", ["x", "packed", "scales"], ["y"], domain=DOMAIN,
                         N=rows, K=width, bits=bits, block_size=32, accuracy_level=1),
        helper.make_node("GatherBlockQuantized", ["flat", "ids", "scales"], ["e"], domain=DOMAIN,
                         bits=bits, block_size=32, gather_axis=0, quantize_axis=1),
    ]  # fmt: skip
    constants = {"packed": packed, "scales": scales, "flat": packed.reshape(rows, -1)}
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", width]),
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["I"]),
        ],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("y", "e")],
        [numpy_helper.from_array(a, n) for n, a in constants.items()],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return tuple(session.run(None, {"x": x, "ids": np.arange(rows)}))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(33, 64), (70, 96)])
def test_the_runtime_reads_what_was_written(bits: int, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(bits)
    weight = rng.standard_normal(shape, np.float32)
    weight[3] = 0
    packed, scales = quantise(weight, bits)
    back = dequantise(packed, scales, bits, shape[1])
    step = np.abs(weight).reshape(shape[0], -1, 32).max(2).repeat(32, 1) / (1 << (bits - 1))
    # The opposite end of the range is one level short.
    assert (np.abs(back - weight) <= step * 1.001).all()
    x = rng.standard_normal((5, shape[1]), np.float32)
    product, embedded = run(bits, packed, scales, x)
    np.testing.assert_array_equal(embedded, back)
    np.testing.assert_allclose(product, x @ back.T, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_values_on_the_grid_come_back_exactly(bits: int) -> None:
    levels = np.arange(-(1 << (bits - 1)), 1 << (bits - 1), dtype=np.float32)
    weight = np.resize(levels, (40, 256 if bits == 8 else 32)).astype(np.float32) * 0.25
    if bits == 8:  # every block needs its extreme value to have that scale
        weight[:, ::32] = -128 * 0.25
    packed, scales = quantise(weight, bits)
    np.testing.assert_array_equal(dequantise(packed, scales, bits, weight.shape[1]), weight)
