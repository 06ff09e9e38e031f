"""A bundle appears whole or not at all, and an older one survives whatever happens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor

from build import pipeline
from build.pipeline import Options, Silent, convert
from build.store import ExternalWeights, atomic_directory
from engine_configs.errors import BundleError, ConversionError
from engine_configs.names import find_model
from serving.engine.bundle import Bundle

ROOT = Path(__file__).parents[2]


@pytest.fixture
def target(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A place that holds an older bundle, made from something else."""
    shutil.copytree(tiny_bundle, tmp_path / "bundle")
    manifest = tmp_path / "bundle" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "sources": {}}))
    (tmp_path / "bundle" / "old").touch()
    return tmp_path / "bundle"


def options(target: Path) -> Options:
    known = find_model("hybrid-tiny")
    return Options("hybrid-tiny", known.family(), known.checkpoint, target)


def assert_only_the_old_one(target: Path) -> None:
    assert os.listdir(target.parent) == [target.name]
    assert (target / "old").exists()
    Bundle.open(target)


def raise_at(monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(pipeline, stage, fail)


@pytest.mark.parametrize(
    "stage", ["write_graph", "copy_tokenizer", "check_parity", "calibration_of"]
)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom")], ids=repr)
def test_a_conversion_that_stops_leaves_the_old_bundle(
    target: Path, monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException
) -> None:
    raise_at(monkeypatch, stage, error)
    with pytest.raises(type(error)):
        convert(options(target), Silent())
    assert_only_the_old_one(target)


@pytest.mark.parametrize("file", ["model.onnx.data", "model.onnx", "manifest.json"])
def test_a_full_disk(target: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """/dev/full answers every write with the error of a full disk."""
    write = pipeline.write_graph

    def onto_full_disk(o: Options, weights: Any, scratch: Path, progress: Any) -> str:
        (scratch / file).symlink_to("/dev/full")
        return write(o, weights, scratch, progress)

    monkeypatch.setattr(pipeline, "write_graph", onto_full_disk)
    with pytest.raises(ConversionError, match=r"the disk is full.*Free some space"):
        convert(options(target), Silent())
    assert_only_the_old_one(target)


def test_ctrl_c_on_the_command_line(target: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "convert.py"), "--model", "hybrid-tiny"]
    process = subprocess.Popen(
        [*command, "--output", str(target)], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    scratch = target.parent / f".{target.name}.partial-{process.pid}"
    while not (scratch / "model.onnx.data").exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "interrupted; nothing was written" in printed
    assert "Traceback" not in printed
    assert_only_the_old_one(target)


def test_a_new_bundle_replaces_the_old_one(target: Path) -> None:
    convert(options(target), Silent())
    assert os.listdir(target.parent) == [target.name]
    assert not (target / "old").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "input/output error")], ids=repr)
def test_the_old_bundle_returns_when_the_exchange_fails(
    target: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    rename = Path.rename

    def fail(self: Path, to: Path) -> Path:
        if ".partial-" in self.name:
            raise error
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    raised = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ConversionError
    with pytest.raises(raised), atomic_directory(target) as scratch:
        (scratch / "new").touch()
    assert_only_the_old_one(target)


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_what_killed_conversions_left_is_cleaned_up(target: Path) -> None:
    """Killed between the two renames: the bundle is back before the next conversion starts."""
    pid = dead_pid()
    target.rename(target.parent / f".bundle.old-{pid}")
    (target.parent / f".bundle.partial-{pid}").mkdir()
    with pytest.raises(RuntimeError), atomic_directory(target):
        raise RuntimeError
    assert_only_the_old_one(target)


def test_a_running_conversion_is_left_alone(target: Path) -> None:
    other = target.parent / f".bundle.partial-{os.getppid()}"
    other.mkdir()
    with atomic_directory(target) as scratch:
        (scratch / "manifest.json").touch()
    assert other.exists()


@pytest.mark.parametrize("place", ["directory", "file"])
def test_what_is_not_a_bundle_is_never_replaced(tmp_path: Path, place: str) -> None:
    target = tmp_path / "home"
    if place == "directory":
        target.mkdir()
        (target / "thesis.tex").touch()
    else:
        target.write_text("thesis")
    with pytest.raises(ConversionError, match="is not a bundle"):
        convert(options(target), Silent())
    assert os.listdir(tmp_path) == ["home"]
    assert target.is_file() or os.listdir(target) == ["thesis.tex"]


def test_a_place_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConversionError, match="file"):
        convert(options(tmp_path / "file" / "bundle"), Silent())


# Damaged bundles ---------------------------------------------------------------------------


def truncate(name: str) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - 1)


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def write(text: str) -> Callable[[Path], Any]:
    return lambda path: (path / "manifest.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate("model.onnx.data"), "model.onnx.data has .* bytes, expected"),
        (truncate("model.onnx"), "model.onnx has .* bytes, expected"),
        (remove("model.onnx.data"), "model.onnx.data is missing"),
        (remove("manifest.json"), "manifest.json is missing"),
        (truncate("manifest.json"), "damaged manifest"),
        (write("[]"), "damaged manifest"),
        (write("{}"), "format is None, expected"),
        (write('{"format": 1}'), "damaged manifest: KeyError"),
        (write('{"format": 1, "spec": {"wings": 2}, "files": {}}'), "unknown key 'wings'"),
        (write('{"format": 99}'), "format is 99, expected"),
        (shutil.rmtree, "manifest.json is missing"),
    ],
    ids=range(11),
)
def test_a_damaged_bundle_is_refused(
    target: Path, damage: Callable[[Path], Any], message: str
) -> None:
    damage(target)
    with pytest.raises(BundleError, match=message) as caught:
        Bundle.open(target)
    assert str(target) in str(caught.value)
    assert "convert.py" in str(caught.value)


def test_a_file_is_not_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match="not a bundle"):
        Bundle.open(tmp_path / "file")


def test_a_graph_the_runtime_cannot_load(target: Path) -> None:
    from serving.engine.model import Model

    size = (target / "model.onnx").stat().st_size
    (target / "model.onnx").write_bytes(b"\xff" * size)
    with pytest.raises(BundleError, match="the runtime cannot load it"):
        Model(Bundle.open(target), 1)


def test_equal_tensors_are_written_once(tmp_path: Path) -> None:
    weights = ExternalWeights(tmp_path / "data")
    shared = np.arange(1024, dtype=np.float32)
    tensors = [weights.add("a", shared), weights.add("b", shared + 1), weights.add("c", shared)]
    weights.close()
    offsets = [next(e.value for e in t.external_data if e.key == "offset") for t in tensors]
    assert offsets[0] == offsets[2] != offsets[1]
    assert (tmp_path / "data").stat().st_size == 2 * shared.nbytes
    for tensor, want in zip(tensors, (shared, shared + 1, shared), strict=True):
        load_external_data_for_tensor(tensor, str(tmp_path))
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), want)
