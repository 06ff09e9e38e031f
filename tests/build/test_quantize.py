"""Blocks of 4 and 8 bits: what the kernels read is what was meant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from build.checkpoint import Checkpoint, Weights
from build.graph import WeightReader, build_graph
from build.quantize import Blocks, Plain, dequantise, quantise
from engine_configs.families import read_checkpoint_config
from serving.engine.model import Model, prefill_step
from serving.engine.slots import SlotClass

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


@dataclass(frozen=True)
class ExpertsOnly(Plain):
    """Quantised experts, the rest fp32."""

    bits: int = 4
    experts = Blocks.experts


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_run_as_quantised(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GraniteMoeHybridConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        layer_types=["mamba", "attention"], num_attention_heads=4, num_key_value_heads=2,
        mamba_n_heads=8, mamba_d_head=16, mamba_d_state=24, num_local_experts=5,
        num_experts_per_tok=2, shared_intermediate_size=32, initializer_range=0.1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    GraniteMoeHybridForCausalLM(config).save_pretrained(tmp_path)
    family = read_checkpoint_config(tmp_path)
    weights = Weights(family, Checkpoint(tmp_path))

    def rounded(name: str) -> np.ndarray:
        weight = weights.read(name)
        if ".experts." not in name:
            return weight
        rows = weight.reshape(-1, weight.shape[-1])
        return dequantise(*quantise(rows, bits), bits, rows.shape[1]).reshape(weight.shape)

    def logits(read: WeightReader) -> np.ndarray:
        model = build_graph(family.spec, read, lambda n, v: numpy_helper.from_array(v, n))
        bundle = SimpleNamespace(spec=family.spec, model_file=tmp_path / "model.onnx")
        onnx.save(model, bundle.model_file)
        step = prefill_step(np.arange(3, 40), 0, logits=range(37))
        return Model(bundle, threads=1).run(SlotClass(family.spec, 64, 1), 0, step)[0]

    want, plain = logits(rounded), logits(weights.read)
    monkeypatch.setattr("build.graph.storage", lambda dtype: ExpertsOnly(bits=bits))
    got = logits(weights.read)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(got - plain).max() > 1e-3
