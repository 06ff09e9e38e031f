"""What many tests share: one converted hybrid-tiny, made once per run."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import hypothesis
import pytest

from build.pipeline import Options, Silent, convert
from engine_configs.names import find_model
from serving.engine.bundle import Bundle
from serving.engine.model import Model

# A loaded machine is no failure.
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.load_profile("here")


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    path = find_model("hybrid-tiny").checkpoint
    assert path is not None
    return path


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hybrid-tiny in the ``ort`` lowering, its parity measured. Shared: read only."""
    known = find_model("hybrid-tiny")
    output = tmp_path_factory.mktemp("artifacts") / "hybrid-tiny"
    convert(Options("hybrid-tiny", known.family(), known.checkpoint, output), Silent())
    return output


@pytest.fixture(scope="session")
def tiny_model(tiny_bundle: Path) -> Model:
    return Model(Bundle.open(tiny_bundle), threads=1)
