"""A real TensorRT builder takes our graphs: TensorRT-RTX, which builds with neither GPU nor driver.

Both lowerings that are made of ai.onnx in the end: ``standard``, and ``tensorrt`` in 16 bits with
the function bodies of its plugin nodes (there is no plugin registered here) and the profiles that
build_engine.py makes. In a subprocess: the builder may take the whole process down.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx
import pytest

from build.pipeline import Options, Silent, weights_of, write_graph
from build.tensorrt_tree import build_engine
from engine_configs.families import read_family
from engine_configs.families.config import ConfigReader
from engine_configs.mixer import MixerBase
from engine_configs.spec import GatedDeltaNet, Mamba2
from plugins.tensorrt.build import HEADERS
from serving.engine.profiles import BLOCK_TOKENS, PROFILES
from tests.families.cases import CASES, FULL, LINEAR
from tests.gpu.conftest import Make

# One linear layer and an attention. TensorRT-RTX 1.7.1 crashes in a network where a loop (Scan)
# comes after a TensorScatter, so the attention is last.
LAYERS = {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL]}
MODELS: dict[str, tuple[str, dict[str, Any], type[MixerBase]]] = {
    "gdn": ("olmo_hybrid_rope", {}, GatedDeltaNet),
    "mamba2": ("granite_dense_rope", {}, Mamba2),
    "kda": ("kimi_linear", {"mlp_layer_types": ["dense"] * 2}, GatedDeltaNet),
}
SIZES = {"B": (1, 1, 2), "T": (1, 16, 64), "N": (0, 1, 4)}
CAPACITY = 128  # TensorScatter wants it fixed
ARCHS = ("SM89", "SM120")

BUILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import tensorrt_rtx as trt

model, shapes, archs = sys.argv[2], json.loads(sys.argv[3]), sys.argv[4:]
logger = trt.Logger(trt.Logger.ERROR)
for arch in archs:
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(model):
        sys.exit("; ".join(parser.get_error(i).desc() for i in range(parser.num_errors)))
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True  # fp32 has no fused kernel
    config = builder.create_builder_config()
    for wanted in shapes:
        profile = builder.create_optimization_profile()
        for i in range(network.num_inputs):
            tensor = network.get_input(i)
            if tensor.is_shape_tensor:
                profile.set_shape_input(tensor.name, [1], [16], [64])
            else:
                profile.set_shape(tensor.name, *wanted[tensor.name])
        config.add_optimization_profile(profile)
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, arch), 0)
    plan = builder.build_serialized_network(network, config)
    print(json.dumps([arch, plan.nbytes, network.num_layers]), flush=True)
"""


def graph(name: str, lowering: str, dtype: str, folder: Path) -> tuple[Path, onnx.GraphProto, int]:
    """model.onnx of a tiny model, its graph, and the number of its weights."""
    case, changes, mixer = MODELS[name]
    config = CASES[case].config().to_dict() | LAYERS | changes
    family = read_family(ConfigReader(config, case))
    assert [type(m) for _, m in family.spec.state_layers()] == [mixer]
    if name == "kda":
        assert family.spec.state_layers()[0][1].decay_rank  # type: ignore[union-attr]
    options = Options(name, family, None, folder, lowering=lowering, dtype=dtype)
    write_graph(options, weights_of(options), folder, Silent())
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for value in [*model.graph.input, *model.graph.output]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "C":
                dim.dim_value = CAPACITY
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx", model.graph, family.spec.num_parameters()


def shapes(graph: onnx.GraphProto, lowering: str) -> list[Any]:
    """Per profile: (min, opt, max) of every input."""
    if lowering == "tensorrt":
        declared = {
            i.name: tuple(d.dim_value or -1 for d in i.type.tensor_type.shape.dim)
            for i in graph.input
        }
        manifest = {"engine": {"max_seq_len": 4096, "block_tokens": BLOCK_TOKENS}}
        return [build_engine.shape_ranges(manifest, asdict(p), declared) for p in PROFILES]
    found = {}
    for value in graph.input:
        dims = value.type.tensor_type.shape.dim
        ranges = [SIZES[d.dim_param] if d.dim_param else (d.dim_value,) * 3 for d in dims]
        found[value.name] = [[r[k] for r in ranges] for k in range(3)]
    return [found]


FULL_ONLY = pytest.mark.full


@pytest.mark.parametrize(
    ("name", "lowering", "dtype"),
    [
        ("gdn", "standard", "fp32"),
        ("mamba2", "standard", "fp32"),
        ("kda", "standard", "fp32"),
        pytest.param("gdn", "tensorrt", "bf16", marks=FULL_ONLY),
        pytest.param("mamba2", "tensorrt", "bf16", marks=FULL_ONLY),
        pytest.param("kda", "tensorrt", "fp16", marks=FULL_ONLY),
    ],
)
def test_networks_are_built(name: str, lowering: str, dtype: str, tmp_path: Path) -> None:
    model, found, parameters = graph(name, lowering, dtype, tmp_path)
    domains = {node.domain for node in found.node}
    assert domains == ({""} if lowering == "standard" else {"", "hybrid"})
    archs = ARCHS if lowering == "standard" else ARCHS[:1]
    arguments = [str(HEADERS), str(model), json.dumps(shapes(found, lowering)), *archs]
    done = subprocess.run(
        [sys.executable, "-c", BUILD, *arguments],
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    built = [json.loads(line) for line in done.stdout.splitlines()]
    assert [arch for arch, _, _ in built] == list(archs)
    for _, size, layers in built:
        assert size > parameters * (4 if dtype == "fp32" else 2) / 2  # weights are in it
        assert layers > 200


# build_engine.py as it is, but for what the function bodies need instead of plugins, a target GPU
# (the machine has none) and a pool that the bodies can copy.
RUN_SCRIPT = """
import importlib.util, sys
sys.path.insert(0, sys.argv[1])
import tensorrt_rtx as trt

class Builder(trt.Builder):
    def create_builder_config(self):
        config = super().create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM89, 0)
        return config

    def build_serialized_network(self, network, config):
        for i in range(network.num_layers):
            layer = network.get_layer(i)
            if layer.type == trt.LayerType.ATTENTION_INPUT:
                layer.__class__ = trt.IAttentionInputLayer
                layer.attention.decomposable = True
        return super().build_serialized_network(network, config)

trt.Builder = Builder
sys.modules["tensorrt"] = trt
spec = importlib.util.spec_from_file_location("build_engine", sys.argv[2])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
script.MOST_VALUES = 1 << 20
del sys.argv[1:3]
script.main()
"""

NO_PLUGINS = """
#include <cstdint>
extern "C" void* const* getCreators(int32_t& count) { count = 0; return nullptr; }
extern "C" void setLoggerFinder(void*) {}
"""


def test_build_engine_runs(tree: Make, tmp_path: Path) -> None:
    """The script, on a real builder, from the tree of hybrid-tiny in bf16."""
    folder = tmp_path / "tree"
    shutil.copytree(tree("bf16").path, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["engine"]["max_seq_len"] = 4096
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "none.cpp").write_text(NO_PLUGINS)
    library = tmp_path / "none.so"
    command = ["g++", "-shared", "-fPIC", str(tmp_path / "none.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    arguments = [str(HEADERS), str(folder / "build_engine.py"), "--plugins", str(library)]
    done = subprocess.run(
        [sys.executable, "-c", RUN_SCRIPT, *arguments],
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "model.engine: " in done.stdout
    weights = (folder / "model.onnx.data").stat().st_size
    assert (folder / "engine" / "model.engine").stat().st_size > weights
    assert (folder / "timing.cache").stat().st_size > 0


def test_what_cannot_be_parsed_is_told(tmp_path: Path) -> None:
    """The check is not blind: a broken graph fails it."""
    model, found, _ = graph("gdn", "standard", "fp32", tmp_path)
    proto = onnx.load(model, load_external_data=False)
    proto.graph.node[-3].op_type = "NoSuchOp"
    onnx.save(proto, model)
    arguments = [str(HEADERS), str(model), json.dumps(shapes(found, "standard")), "SM89"]
    done = subprocess.run(
        [sys.executable, "-c", BUILD, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "Plugin not found" in done.stderr
