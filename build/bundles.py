"""The bundle of a named model, converted on first use."""

from __future__ import annotations

from pathlib import Path

from build.hub import find_checkpoint
from build.pipeline import Options, Silent, convert
from build.trials import CalibrationOptions
from engine_configs.errors import BundleError
from engine_configs.names import find_model
from serving.engine.bundle import Bundle

ARTIFACTS = Path(__file__).resolve().parent.parent / "artifacts"


def bundle_of(name: str, artifacts: Path = ARTIFACTS) -> Bundle:
    """``artifacts/<name>``, made or brought up to date: what has not changed is not done again.

    Raises UnsupportedModelError, CheckpointError, ParityError.
    """
    model, target = find_model(name), artifacts / name
    checkpoint = model.checkpoint or find_checkpoint(model)
    if checkpoint is None:
        raise BundleError(
            f"no weights of {name} to convert",
            where=str(target),
            fix=f"Run convert.py --model {name} --random-weights 0",
        )
    options = Options(name, model.family(), checkpoint, target, calibration=CalibrationOptions())
    return convert(options, Silent())
