"""The bundle of a named model, converted on first use."""

from __future__ import annotations

from pathlib import Path

from build.hub import find_checkpoint
from build.pipeline import Options, Silent, convert
from engine_configs.errors import BundleError
from engine_configs.names import find_model
from serving.engine.bundle import Bundle

ARTIFACTS = Path(__file__).resolve().parent.parent / "artifacts"


def bundle_of(name: str, artifacts: Path = ARTIFACTS) -> Bundle:
    """``artifacts/<name>``; converted (again) where it is missing or older than its weights.

    Raises UnsupportedModelError, CheckpointError, ParityError.
    """
    model, target = find_model(name), artifacts / name
    try:
        bundle = Bundle.open(target)
    except BundleError:
        bundle = None
    weights = model.checkpoint / "model.safetensors" if model.checkpoint else None
    stale = weights and bundle and weights.stat().st_mtime > bundle.model_file.stat().st_mtime
    if bundle is not None and not stale:
        return bundle
    checkpoint = model.checkpoint or find_checkpoint(model)
    if checkpoint is None:
        raise BundleError(
            f"no bundle of {name} and no weights to make it",
            where=str(target),
            fix=f"Run convert.py --model {name} --random-weights 0",
        )
    return convert(Options(name, model.family(), checkpoint, target), Silent())
