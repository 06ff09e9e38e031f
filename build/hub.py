"""Weights published on a hub: the local cache first, then a download with its progress bars."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

from engine_configs.errors import ConversionError
from engine_configs.names import NamedModel

# Weights as safetensors only: pickles and remote code are never fetched.
PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]
CONNECT_SECONDS = 5.0


def find_checkpoint(model: NamedModel) -> Path | None:
    """The checkpoint directory of a published model; None when it cannot be had from here."""
    if not model.hub_id:
        return None
    try:
        return Path(snapshot_download(model.hub_id, allow_patterns=PATTERNS, local_files_only=True))
    except (OSError, ValueError):
        pass
    try:
        HfApi().model_info(model.hub_id, timeout=CONNECT_SECONDS)
    except Exception:  # whatever the HTTP client raises, the hub is out of reach
        return None
    try:
        return Path(snapshot_download(model.hub_id, allow_patterns=PATTERNS))
    except Exception as e:  # ditto; what is there already is not downloaded again
        raise ConversionError(
            f"the download of {model.hub_id} failed: {e}", fix="Run again to go on with it"
        ) from None
