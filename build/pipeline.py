"""The path of a conversion: spec → graph → parity → bundle. Read this first."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import onnx
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from build import parity
from build.bound_calibration import SEQUENCES, calibrate_bounds
from build.calibrate import (
    calibrate,
    import_bounds,
    import_calibration,
    measured,
    num_steps,
    tasks_of,
)
from build.checkpoint import Checkpoint, RandomWeights, Weights
from build.graph import build_graph
from build.remote import RemoteModel
from build.repository import write_repository
from build.reuse import Sources, earlier, link_files, measurements
from build.store import ExternalWeights, atomic_directory
from build.trials import CalibrationOptions
from engine_configs.families.weights import Family
from plugins.onnx_graph import OPSET
from serving.engine.bundle import FORMAT, Bundle
from serving.engine.model import Model
from serving.kv_compression.calibration import BoundCalibration
from serving.replay.calibration import UNCALIBRATED

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
# transformers needs 4 bytes a parameter beside ours.
PARITY_MAX_PARAMETERS = 2_000_000_000
FP32_LIMIT = 1e-4


class WeightSet(Protocol):
    shapes: dict[str, tuple[int, ...]]

    def read(self, weight: str) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Options:
    """One conversion. ``checkpoint`` None = seeded random weights."""

    name: str
    family: Family
    checkpoint: Path | None
    output: Path
    seed: int = 0
    lowering: str = "ort"
    dtype: str = "fp32"
    max_kl: float = 0.1
    calibration: CalibrationOptions | None = None
    import_calibration: Path | None = None
    calibrate_on: str = ""
    target: str = "onnx"


class Progress(Protocol):
    """Where a conversion tells how far it is."""

    def stage(self, name: str, steps: int) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """A stage of ``steps`` steps; the block calls what it is given once a step."""
        ...


def convert(options: Options, progress: Progress) -> Bundle:
    """Convert and check; ``options.output`` appears whole or not at all. What an earlier
    conversion into it still holds true is not done again.

    Raises CheckpointError, ConfigError, ParityError, ConversionError.
    """
    weights = weights_of(options)
    sources = Sources.of(options)
    old = earlier(options, sources)
    with atomic_directory(options.output) as scratch:
        digest = (
            link_files(old, scratch) if old else write_graph(options, weights, scratch, progress)
        )
        copy_tokenizer(options, scratch)
        write_repository(scratch, {})
        manifest = new_manifest(options, digest, scratch) | {"sources": sources.to_json()}
        write_manifest(manifest, scratch)
        found = measurements(old, sources)
        if found is None:
            found = check_parity(options, scratch, progress)
            found |= calibration_of(options, scratch, progress)
        write_manifest(manifest | found, scratch)
    return Bundle.open(options.output)


def weights_of(options: Options) -> WeightSet:
    if options.checkpoint:
        return Weights(options.family, Checkpoint(options.checkpoint))
    return RandomWeights(options.family, options.seed)


def write_graph(options: Options, weights: WeightSet, scratch: Path, progress: Progress) -> str:
    """Write model.onnx and its weights, one tensor in memory at a time; returns the digest."""
    data = ExternalWeights(scratch / "model.onnx.data")
    with progress.stage("graph and weights", len(weights.shapes)) as advance:

        def read(name: str) -> NDArray[Any]:
            advance()
            return weights.read(name)

        try:
            model = build_graph(
                options.family.spec, read, data.add, options.lowering, options.dtype
            )
        finally:
            data.close()
        onnx.save(model, scratch / "model.onnx")
    spec = json.dumps(options.family.spec.to_json(), sort_keys=True)
    return hashlib.sha256(f"{FORMAT}{spec}{data.digest()}".encode()).hexdigest()


def copy_tokenizer(options: Options, scratch: Path) -> None:
    """The checkpoint's; bytes as tokens where the weights are random and there is none."""
    if options.checkpoint is None:
        byte_tokenizer(options.family.spec.vocab_size).save(str(scratch / "tokenizer.json"))
        return
    for name in TOKENIZER_FILES:
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(options.checkpoint / name, scratch / name)


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Token = byte; what a model with a smaller vocabulary lacks is left out."""
    alphabet = sorted(ByteLevel.alphabet())[:vocab_size]
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def new_manifest(options: Options, digest: str, scratch: Path) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "name": options.name,
        "target": options.target,
        "digest": digest,
        "dtype": options.dtype,
        "lowering": options.lowering,
        "opset": OPSET,
        "weights": "checkpoint" if options.checkpoint else f"random({options.seed})",
        "spec": options.family.spec.to_json(),
        "files": {f.name: f.stat().st_size for f in sorted(scratch.iterdir()) if f.is_file()},
        "parity": {},
        "skipped": {},
    }


def write_manifest(manifest: dict[str, Any], scratch: Path) -> None:
    (scratch / "manifest.json").write_text(json.dumps(manifest, indent=1))


def check_parity(options: Options, scratch: Path, progress: Progress) -> dict[str, Any]:
    """Compare with transformers where that is possible; else say why not."""
    spec = options.family.spec
    if options.checkpoint is None:
        return {"skipped": {"parity": "random weights: there is no reference checkpoint"}}
    if spec.num_parameters() > PARITY_MAX_PARAMETERS:
        return {"skipped": {"parity": "the reference does not fit this machine's memory in fp32"}}
    with progress.stage("parity with transformers", 2) as advance:
        ids = parity.sample_ids(spec.vocab_size, scratch / "tokenizer.json")
        reference = parity.reference_logits(options.checkpoint, ids)
        advance()
        errors = parity.measure(Model(Bundle.open(scratch)), reference, ids)
        advance()
    if options.dtype == "fp32":
        parity.require(errors, "max_abs_logit_error", FP32_LIMIT)
    else:
        parity.require(errors, "logit_kl", options.max_kl)
    return {"parity": errors}


def calibration_of(options: Options, scratch: Path, progress: Progress) -> dict[str, Any]:
    """How prefixes may be replayed, and what the bound of compressed attention is worth: measured
    here, imported, or not known."""
    if path := options.import_calibration:
        return measured(import_calibration(path), import_bounds(path))
    wanted, spec = options.calibration, options.family.spec
    if wanted is None or options.checkpoint is None or not spec.state_layers():
        return measured(UNCALIBRATED, BoundCalibration())
    bundle = Bundle.open(scratch)
    model: Model | RemoteModel = Model(bundle)
    if options.calibrate_on:
        model = RemoteModel(options.calibrate_on, spec, bundle.manifest["digest"])
    tasks = tasks_of(bundle)
    with progress.stage("calibration of tail replay", num_steps(wanted)) as advance:
        found = calibrate(model, tasks, wanted, advance)
    if isinstance(model, RemoteModel):  # K/V and queries stay where it runs
        return measured(found, BoundCalibration())
    with progress.stage("calibration of K/V compression", SEQUENCES) as advance:
        return measured(found, calibrate_bounds(model, tasks, wanted, advance))


@contextlib.contextmanager
def silent_stage(name: str, steps: int) -> Iterator[Callable[[], None]]:
    """A stage that tells nobody."""
    yield lambda: None


class Silent:
    """Progress for tests and library use."""

    stage = staticmethod(silent_stage)
