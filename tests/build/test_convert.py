"""A conversion computes what transformers computes, in both lowerings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest

from build import parity, pipeline
from build.checkpoint import Weights
from build.pipeline import FP32_LIMIT, Options, Silent, convert
from engine_configs.errors import ConfigError, ConversionError, ParityError
from engine_configs.families import read_checkpoint_config
from engine_configs.names import find_model, known_models
from engine_configs.spec import from_json
from serving.engine.bundle import Bundle
from serving.engine.model import Model, prefill_step
from serving.engine.slots import SlotClass
from tests.random_models import save_olmo_hybrid

PATHS = {"prefill", "chunked", "decode", "replay"}


def convert_dir(checkpoint: Path, output: Path, lowering: str = "ort") -> Bundle:
    family = read_checkpoint_config(checkpoint)
    return convert(Options("small", family, checkpoint, output, lowering=lowering), Silent())


def errors(bundle: Bundle) -> dict[str, float]:
    return {k: v["max_abs_logit_error"] for k, v in bundle.manifest["parity"].items()}


def test_hybrid_tiny_agrees_with_transformers(tiny_bundle: Path) -> None:
    measured = errors(Bundle.open(tiny_bundle))
    assert set(measured) == PATHS
    assert all(0 < e <= 1e-4 for e in measured.values()), measured


def test_nodes_of_ours_are_those_of_the_spec(tiny_bundle: Path) -> None:
    model = onnx.load(tiny_bundle / "model.onnx", load_external_data=False)
    spec = Bundle.open(tiny_bundle).spec
    ours = [n.op_type for n in model.graph.node if n.domain == "hybrid"]
    convs = [m for _, m in spec.state_layers() if m.conv_state()]
    assert len(ours) == len(spec.layers) + len(convs)
    assert ours.count("CausalConv") == len(convs)
    assert ours.count("CompressedSparseAttention") == len(spec.attention_layers())
    assert {f.name for f in model.functions} == set(ours)


def test_a_stock_runtime_loads_the_bundle(tiny_bundle: Path) -> None:
    session = ort.InferenceSession(
        str(tiny_bundle / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    names = {i.name for i in session.get_inputs()}
    assert {"input_ids", "kv_append", "logit_rows", "past_key_2", "recurrent_state_0"} <= names


def test_standard_lowering_agrees_and_is_plain_onnx(
    tiny_model: Model, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    standard = convert_dir(tiny_checkpoint, tmp_path / "standard", "standard")
    graph = onnx.load(standard.model_file, load_external_data=False)
    assert {n.domain for n in graph.graph.node} == {""}
    assert not graph.functions
    assert {o.domain for o in graph.opset_import} == {""}
    assert max(errors(standard).values()) <= FP32_LIMIT
    ids = parity.sample_ids(standard.spec.vocab_size)
    slots = SlotClass(tiny_model.spec, len(ids) + 1, 1)
    logits, _ = tiny_model.run(slots, 0, prefill_step(ids, 0, logits=range(len(ids))))
    against_ort = parity.measure(Model(standard, 1), logits, ids)
    assert all(e["max_abs_logit_error"] <= 1e-4 for e in against_ort.values()), against_ort


@pytest.mark.parametrize("lowering", ["ort", "standard"])
@pytest.mark.parametrize("theta", [None, 10_000.0], ids=["nope", "rope"])
@pytest.mark.parametrize("head_dim", [8, 24])
def test_small_random_models_agree(
    tmp_path: Path, lowering: str, theta: float | None, head_dim: int
) -> None:
    rope = {"rope_type": "default", "rope_theta": theta}
    checkpoint = save_olmo_hybrid(tmp_path / "hf", rope_parameters=rope, head_dim=head_dim)
    bundle = convert_dir(checkpoint, tmp_path / "bundle", lowering)
    assert set(errors(bundle)) == PATHS
    assert max(errors(bundle).values()) <= FP32_LIMIT


def test_value_heads_may_outnumber_key_heads_and_shards_are_joined(tmp_path: Path) -> None:
    checkpoint = save_olmo_hybrid(
        tmp_path / "hf", shard="30KB", linear_num_value_heads=6, linear_allow_neg_eigval=False
    )
    assert len(list(checkpoint.glob("*.safetensors"))) > 3
    assert max(errors(convert_dir(checkpoint, tmp_path / "bundle")).values()) <= FP32_LIMIT


def test_parity_notices_one_wrong_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_olmo_hybrid(tmp_path / "hf")
    read = Weights.read

    def wrong(self: Weights, weight: str) -> Any:
        return read(self, weight) * (1.01 if weight == "layers.2.linear.dt_bias" else 1.0)

    monkeypatch.setattr(Weights, "read", wrong)
    with pytest.raises(ParityError, match=r"prefill .*decode .*replay"):
        convert_dir(checkpoint, tmp_path / "out" / "bundle")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_head_size_the_kernel_does_not_take_is_refused(tmp_path: Path) -> None:
    checkpoint = save_olmo_hybrid(tmp_path / "hf", head_dim=6)
    with pytest.raises(ConversionError, match=r"head_dim is 6.*--lowering standard"):
        convert_dir(checkpoint, tmp_path / "bundle")
    assert max(errors(convert_dir(checkpoint, tmp_path / "b", "standard")).values()) <= FP32_LIMIT


def test_random_weights_are_seeded_and_claim_nothing(tmp_path: Path) -> None:
    family = known_models()["hybrid-tiny"].family()

    def digest(seed: int, folder: str) -> str:
        bundle = convert(Options("r", family, None, tmp_path / folder, seed), Silent())
        assert bundle.manifest["parity"] == {}
        assert "random weights" in bundle.manifest["skipped"]["parity"]
        return bundle.digest

    assert digest(0, "a") == digest(0, "b") != digest(1, "c")
    Model(Bundle.open(tmp_path / "a"), 1)


def test_the_digest_follows_weights_and_spec(tmp_path: Path) -> None:
    one = convert_dir(save_olmo_hybrid(tmp_path / "1"), tmp_path / "b1").digest
    again = convert_dir(tmp_path / "1", tmp_path / "b1").digest
    other = convert_dir(save_olmo_hybrid(tmp_path / "2", seed=1), tmp_path / "b2").digest
    config = json.loads((tmp_path / "1" / "config.json").read_text())
    (tmp_path / "1" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    changed = convert_dir(tmp_path / "1", tmp_path / "b3").digest
    assert one == again
    assert len({one, other, changed}) == 3


@pytest.mark.parametrize("name", sorted(known_models()))
def test_a_spec_survives_the_manifest(name: str) -> None:
    spec = known_models()[name].family().spec
    data = json.loads(json.dumps(spec.to_json()))
    assert from_json(data, "manifest") == spec
    with pytest.raises(ConfigError, match=r"manifest: unknown key 'colour' \(value 3\)"):
        from_json(data | {"colour": 3}, "manifest")
    data["layers"][0][0]["mixer"]["wings"] = 2
    with pytest.raises(ConfigError, match=r"layers\[0\]\[0\].*unknown key 'wings'"):
        from_json(data, "manifest")
    del data["layers"]
    with pytest.raises(ConfigError, match="'layers' is missing"):
        from_json(data, "manifest")


def test_an_unchanged_checkpoint_is_not_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoint"
    save_olmo_hybrid(checkpoint)
    first = convert_dir(checkpoint, tmp_path / "bundle")
    weights = (first.path / "model.onnx.data").stat().st_ino
    with monkeypatch.context() as patched:
        for stage in ("write_graph", "check_parity", "calibration_of"):
            patched.setattr(pipeline, stage, lambda *a: pytest.fail("done again"))
        second = convert_dir(checkpoint, tmp_path / "bundle")
    assert (second.path / "model.onnx.data").stat().st_ino == weights
    assert second.manifest == first.manifest
    save_olmo_hybrid(checkpoint, seed=1)
    third = convert_dir(checkpoint, tmp_path / "bundle")
    assert third.digest != first.digest


def test_quantised_weights_are_close_or_refused(tmp_path: Path) -> None:
    known = find_model("hybrid-tiny")
    common = ("hybrid-tiny", known.family(), known.checkpoint, tmp_path / "bundle")
    bundle = convert(Options(*common, dtype="int8"), Silent())
    plain = sum(math.prod(s) for s in known.family().spec.weights().values()) * 4
    assert (bundle.path / "model.onnx.data").stat().st_size < plain / 2
    kl = {k: v["logit_kl"] for k, v in bundle.manifest["parity"].items()}
    assert all(0 < v < 0.1 for v in kl.values()), kl
    with pytest.raises(ParityError, match="logit_kl"):
        convert(Options(*common, dtype="int8", max_kl=min(kl.values()) / 2), Silent())
    assert Bundle.open(bundle.path).digest == bundle.digest
