"""The bundle of a named model, converted on first use."""

from __future__ import annotations

from pathlib import Path

from build.calibrate import CalibrationOptions
from build.hub import find_checkpoint
from build.pipeline import Options, Silent, convert
from engine_configs.errors import BundleError
from engine_configs.names import NamedModel, find_model
from serving.engine.bundle import Bundle

ROOT = Path(__file__).resolve().parent.parent
ARTIFACTS = ROOT / "artifacts"
PACKAGES = ("build", "engine_configs", "plugins", "serving")


def bundle_of(name: str, artifacts: Path = ARTIFACTS) -> Bundle:
    """``artifacts/<name>``; converted (again) where it is missing or older than its sources.

    Raises UnsupportedModelError, CheckpointError, ParityError.
    """
    model, target = find_model(name), artifacts / name
    try:
        bundle = Bundle.open(target)
    except BundleError:
        bundle = None
    if bundle is not None and bundle.manifest_file.stat().st_mtime > _newest_source(model):
        return bundle
    checkpoint = model.checkpoint or find_checkpoint(model)
    if checkpoint is None:
        raise BundleError(
            f"no bundle of {name} and no weights to make it",
            where=str(target),
            fix=f"Run convert.py --model {name} --random-weights 0",
        )
    options = Options(name, model.family(), checkpoint, target, calibration=CalibrationOptions())
    return convert(options, Silent())


def _newest_source(model: NamedModel) -> float:
    """When the weights or the code that converts and serves them last changed."""
    code = [f for package in PACKAGES for f in (ROOT / package).rglob("*.py")]
    weights = list(model.checkpoint.glob("*")) if model.checkpoint else []
    return max(f.stat().st_mtime for f in [*code, *weights])
