"""``convert.py --target tensorrt``: the tree, its graph, its scripts as far as no GPU is needed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from typer.testing import CliRunner

from build.pipeline import Options, Silent
from build.targets import TARGETS
from convert import app
from engine_configs.errors import ConversionError
from engine_configs.names import find_model
from serving.engine import fixtures
from serving.engine.bundle import Bundle
from serving.engine.profiles import BLOCK_TOKENS, MAX_BATCH, PROFILES
from tests.gpu.conftest import Make, open_fake

FILES = {"build_engine.py", "check_engine.py", "README.md", "fixtures.npz", "model.onnx"}


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """As the command makes it: bf16."""
    output = tmp_path_factory.mktemp("target") / "tree"
    arguments = ["--model", "hybrid-tiny", "--target", "tensorrt", "--no-calibrate"]
    result = CliRunner().invoke(app, [*arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "skipped engine: run build_engine.py" in result.output
    return Bundle.open(output)


def script(bundle: Bundle, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, bundle.path / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tree_is_whole(converted: Bundle) -> None:
    assert set(converted.manifest["files"]) >= FILES
    assert converted.manifest["dtype"] == "bf16"
    assert converted.manifest["target"] == "tensorrt"
    assert not (converted.path / "reference").exists()
    config = (converted.path / "model_repository" / "engine" / "config.pbtxt").read_text()
    assert "KIND_GPU" in config
    for other in ("llm", "prefix_cache"):
        text = (converted.path / "model_repository" / other / "config.pbtxt").read_text()
        assert "KIND_CPU" in text
    assert (converted.path / "python/serving/engine/tensorrt/cuda.py").is_file()
    engine = converted.manifest["engine"]
    assert [p["name"] for p in engine["profiles"]] == ["prefill", "replay", "decode"]
    assert engine["block_tokens"] == BLOCK_TOKENS
    linear = [i for i, m in converted.spec.state_layers() if m.recurrent_state()]
    assert engine["in_place"] == [f"recurrent_state_{i}" for i in linear]


def test_the_graph_is_sound_and_typed(converted: Bundle) -> None:
    """Checker and shape inference see through the function bodies."""
    onnx.checker.check_model(str(converted.model_file), full_check=True)
    model = onnx.load(converted.model_file, load_external_data=False)
    ours = [n for n in model.graph.node if n.domain == "hybrid"]
    spec = converted.spec
    assert len(ours) == len(spec.layers)
    layers = [
        next(a.i for a in n.attribute if a.name == "layer")
        for n in ours
        if "Attention" in n.op_type
    ]
    assert layers == [i for i, _ in spec.attention_layers()]
    assert all("" not in n.input for n in ours)  # TensorRT takes no absent input of a plugin
    assert {f.name for f in model.functions} == {n.op_type for n in ours}
    assert {o.domain for f in model.functions for o in f.opset_import} == {""}
    names = {n.name for n in model.graph.node}
    kinds = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    assert kinds["key_pool_2"] == TensorProto.BFLOAT16
    assert kinds["recurrent_state_0"] == TensorProto.FLOAT
    assert kinds["kv_append"] == kinds["block_table"] == TensorProto.INT32
    assert "/layers/2/attn" in names  # node paths are those of the other lowerings


def test_weights_are_rounded_once(converted: Bundle, tree: Make) -> None:
    def weights(bundle: Bundle) -> dict[str, Any]:
        model = onnx.load(bundle.model_file)
        return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}

    half, full = weights(converted), weights(tree("fp32"))
    stored = [n for n, w in half.items() if w.dtype == ml_dtypes.bfloat16]
    assert len(stored) > 20
    for name in stored:
        assert np.array_equal(half[name], full[name].astype(ml_dtypes.bfloat16)), name
    kept = [n for n in half if n.endswith((".a_proj.weight", ".b_proj.weight"))]
    assert kept
    assert all(half[n].dtype == np.float32 for n in kept)


def test_profiles_cover_every_input(converted: Bundle) -> None:
    build_engine = script(converted, "build_engine")
    graph = onnx.load(converted.model_file, load_external_data=False).graph
    declared = {
        i.name: tuple(d.dim_value or -1 for d in i.type.tensor_type.shape.dim) for i in graph.input
    }
    manifest = json.loads(converted.manifest_file.read_text())
    for profile, wanted in zip(manifest["engine"]["profiles"], PROFILES, strict=True):
        ranges = build_engine.shape_ranges(manifest, profile, declared)
        assert set(ranges) == set(declared)
        for name, (low, opt, high) in ranges.items():
            fixed = declared[name]
            assert len(low) == len(opt) == len(high) == len(fixed), name
            for declared_size, *sizes in zip(fixed, low, opt, high, strict=True):
                assert sizes == sorted(sizes), name
                assert declared_size in (-1, sizes[0]), name
        assert ranges["input_ids"][2] == (wanted.batch[2], wanted.tokens[2])
        assert ranges["recurrent_state_0"][2][0] == wanted.batch[2]
        assert np.prod(ranges["key_pool_2"][2]) < 2**31
        assert ranges["block_table"][2][1] * BLOCK_TOKENS >= manifest["engine"]["max_seq_len"]
    assert ranges["input_ids"][2] == (MAX_BATCH, 1)


def test_check_engine_tells_right_from_wrong(
    tree: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On the fake device; a recording of other logits is refused."""
    bundle = tree("fp32")
    check_engine = script(bundle, "check_engine")
    recording = bundle.path / "fixtures.npz"
    assert check_engine.check(open_fake(bundle)[0], recording, 1e-6)
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 1 + len(fixtures.Recording.load(recording).of_turn())
    assert all("100%" in row for row in rows[1:])
    right = fixtures.Recording.load(recording)
    wrong = fixtures.Recording(right.tokens, right.turns, np.roll(right.logits, 1, axis=1))
    wrong.save(tmp_path / "wrong.npz")
    assert not check_engine.check(open_fake(bundle)[0], tmp_path / "wrong.npz", 0.02)
    assert "too far" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["build_engine", "check_engine"])
def test_the_scripts_say_what_they_miss(converted: Bundle, name: str) -> None:
    file = converted.path / f"{name}.py"
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    missing = {"build_engine": "make plugins-tensorrt", "check_engine": "cuda-python"}
    expected = ("No module named 'tensorrt'", missing[name])
    assert any(text in done.stderr for text in expected), done.stderr


def test_a_mixture_of_experts_is_sent_elsewhere(tmp_path: Path) -> None:
    family = find_model("granite-4.0-h-tiny").family()
    options = Options("moe", family, None, tmp_path / "x", lowering="tensorrt", dtype="bf16",
                      target="tensorrt")  # fmt: skip
    with pytest.raises(ConversionError, match=r"layers\.0.*--target tensorrt-llm"):
        TARGETS["tensorrt"].convert(options, Silent())
    assert not (tmp_path / "x").exists()


def test_random_weights_have_fixtures_too(tmp_path: Path) -> None:
    family = find_model("hybrid-tiny").family()
    options = Options("r", family, None, tmp_path / "x", 3, "tensorrt", "fp32", target="tensorrt")
    bundle = TARGETS["tensorrt"].convert(options, Silent())
    assert bundle.manifest["reference"]["parity"] == {}
    expected = fixtures.Recording.load(bundle.path / "fixtures.npz")
    found = fixtures.play(open_fake(bundle)[0], expected.tokens, expected.turns)
    assert max(r["logit_kl"] for r in fixtures.errors(expected, found).values()) < 1e-8
