"""Where the library of CPU kernels is looked for, and what happens without it."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from build.repository import write_repository
from serving.engine import native
from serving.engine.bundle import Bundle
from serving.engine.model import Model, decode_step, prefill_step
from serving.engine.slots import SlotClass

BUILD = native.ROOT / "plugins/native/build.sh"


@pytest.fixture
def built() -> Path:
    path = native.library()
    if path is None:
        pytest.skip("the CPU kernels were not built")
    return path


def test_a_bundle_takes_the_library_along(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_repository(tmp_path, {})
    copy = tmp_path / native.LIBRARY
    assert copy.read_bytes() == built.read_bytes()
    monkeypatch.setattr(native, "ROOT", tmp_path / "nowhere")  # as where no checkout is
    assert native.library(tmp_path) == copy
    assert native.library() is None
    assert native.register(ort.SessionOptions(), tmp_path)


@pytest.mark.parametrize("state", ["absent", "damaged"])
def test_without_it_the_bodies_run_and_the_log_says_so(
    state: str, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The answers are those of the kernels but for rounding."""
    bundle = Bundle.open(tiny_bundle)
    ids = np.arange(3, 40)

    def logits(model: Model) -> np.ndarray:
        slots = SlotClass(bundle.spec, 64, 1)
        model.run(slots, 0, prefill_step(ids, 0))
        return model.run(slots, 0, decode_step([5], [len(ids)]))[0]

    with_kernels = logits(Model(bundle, threads=1))
    other = tmp_path / "libhybrid_ops.so"
    if state == "damaged":
        other.write_bytes(b"no library")
    monkeypatch.setenv("HYBRID_OPS_LIBRARY", str(other))
    with caplog.at_level(logging.WARNING):
        model = Model(bundle, threads=1)
    assert not model.native
    assert "slower bodies run" in caplog.text
    np.testing.assert_allclose(logits(model), with_kernels, rtol=1e-4, atol=1e-4)


def test_building_without_a_compiler_is_no_failure(tmp_path: Path) -> None:
    """From a copy of the sources: this checkout's library stays as it is."""
    copy = tmp_path / "plugins"
    for source in BUILD.parents[1].glob("*/*"):
        if source.suffix in (".cc", ".h", ".sh"):
            target = copy / source.parent.name / source.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    command = ["bash", str(copy / "native/build.sh")]
    done = subprocess.run(
        command, env={"PATH": "/usr/bin:/bin", "CXX": "no-such-compiler"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "no C++ compiler" in done.stdout
    assert not list(tmp_path.rglob("*.so"))
