"""The TensorRT target: the graph with plugin nodes, the scripts that build an engine of it on the
machine with the GPU and check it there, answers recorded here to check it against.

    model.onnx, model.onnx.data   the graph (lowering ``tensorrt``) and its weights
    manifest.json                 as of every bundle; ``engine``: profiles, blocks, what is in place
    fixtures.npz                  logits of the CPU bundle in fp32
    build_engine.py               writes engine/model.engine          } on the
    check_engine.py               plays the fixtures on that engine   } GPU machine
    plugins/                      the plugin library, where it was built
    model_repository/, python/    for Triton
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import onnx

from build import parity
from build.pipeline import (
    PARITY_MAX_PARAMETERS,
    Options,
    Progress,
    WeightSet,
    calibration_of,
    convert,
    write_graph,
)
from build.repository import write_repository
from engine_configs.errors import ConversionError
from engine_configs.spec import HybridSpec, Moe
from plugins.linear_state_replay.node import NAME as LINEAR_STATE_REPLAY
from serving.engine import fixtures
from serving.engine.bundle import Bundle
from serving.engine.model import Model
from serving.engine.profiles import BLOCK_TOKENS, PROFILES

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(__file__).with_name("tensorrt_tree")
LIBRARY = ROOT / "artifacts" / "tensorrt" / "libhybrid_tensorrt.so"
MAX_SEQ_LEN = 131072  # what the engine's block tables hold at most


def write(options: Options, weights: WeightSet, folder: Path, progress: Progress) -> dict[str, Any]:
    """Fill ``folder``; returns what the manifest says of it. Raises ConversionError for models
    that this lowering has no form of."""
    spec = options.family.spec
    require_served(spec)
    digest = write_graph(options, weights, folder, progress)
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    found = reference(options, folder, progress)
    for name in ("build_engine.py", "check_engine.py", "README.md"):
        shutil.copyfile(SCRIPTS / name, folder / name)
    (folder / "plugins").mkdir()
    if LIBRARY.is_file():
        shutil.copyfile(LIBRARY, folder / "plugins" / LIBRARY.name)
    else:
        why = f"not built: run make plugins-tensorrt, copy {LIBRARY.name} into plugins/"
        found["skipped"]["plugin library"] = why
    found["skipped"]["parity"] = "of the engine: check_engine.py measures it"
    found["skipped"]["engine"] = "run build_engine.py in this folder, on the machine with the GPU"
    write_repository(folder, {}, engine_kind="KIND_GPU")
    engine = {
        "profiles": [asdict(p) for p in PROFILES],
        "block_tokens": BLOCK_TOKENS,
        "max_seq_len": min(spec.max_position, MAX_SEQ_LEN),
        "in_place": updated_in_place(graph),
    }
    return {"digest": digest, "engine": engine, **found}


def require_served(spec: HybridSpec) -> None:
    for i, mixer in spec.mixers():
        if isinstance(mixer, Moe):
            raise ConversionError(
                "experts are chosen in a loop that TensorRT has no form of",
                where=f"layers.{i}",
                fix="Use --target tensorrt-llm",
            )


def updated_in_place(graph: onnx.GraphProto) -> list[str]:
    """State inputs whose output a plugin writes where the input lies; the other states have an
    output of their own."""
    nodes = [n for n in graph.node if n.op_type == LINEAR_STATE_REPLAY]
    return [n.output[1].removeprefix("present_") for n in nodes]


def reference(options: Options, folder: Path, progress: Progress) -> dict[str, Any]:
    """The CPU bundle in fp32, for as long as it takes to measure and record it: parity with
    transformers, calibration, fixtures."""
    spec = options.family.spec
    if spec.num_parameters() > PARITY_MAX_PARAMETERS:
        why = "the reference does not fit this machine's memory in fp32"
        uncalibrated = replace(options, calibration=None)
        calibration = calibration_of(uncalibrated, folder, progress)
        return {"skipped": {"fixtures": why}, **calibration}
    cpu = folder / "reference"
    bundle = convert(
        replace(options, target="onnx", lowering="ort", dtype="fp32", output=cpu), progress
    )
    record(bundle).save(folder / "fixtures.npz")
    shutil.rmtree(cpu)
    found = {key: bundle.manifest[key] for key in ("skipped", "calibration")}
    return found | {"reference": {"dtype": "fp32", "parity": bundle.manifest["parity"]}}


def record(bundle: Bundle) -> fixtures.Recording:
    """The fixtures' turns on a CPU bundle."""
    ids = parity.sample_ids(bundle.spec.vocab_size, bundle.path / "tokenizer.json")
    return fixtures.play(Model(bundle, threads=1), ids[: fixtures.TOKENS])
