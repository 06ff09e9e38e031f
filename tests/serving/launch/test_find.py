"""Which server is taken, and what is said when there is none that works."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from engine_configs.errors import LaunchError
from serving import tritonserver
from serving.tritonserver import PROJECT_ROOT, find_tritonserver


def make_server(home: Path) -> Path:
    binary = home / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True)
    (home / "backends").mkdir()
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    return binary


def test_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, container = make_server(tmp_path / "named"), make_server(tmp_path / "container")
    (tmp_path / "container" / "TRITON_VERSION").write_text("2.60.0\n")
    assert find_tritonserver({}).source == "wheel"
    monkeypatch.setattr(tritonserver, "CONTAINER_HOME", tmp_path / "container")
    found = find_tritonserver({})
    assert (found.binary, found.source, found.version) == (container, "container", "2.60.0")
    found = find_tritonserver({"TRITON_BIN": str(named)})
    assert (found.binary, found.source, found.version) == (named, "TRITON_BIN", None)
    assert found.backends == tmp_path / "named" / "backends"


def test_environment_keeps_what_was_there() -> None:
    added = find_tritonserver({"PATH": "/a", "PYTHONPATH": "/b"}).environment
    assert added["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/a"
    assert added["PYTHONPATH"] == f"{PROJECT_ROOT}{os.pathsep}/b"
    assert find_tritonserver({}).environment["PYTHONPATH"] == str(PROJECT_ROOT)


def test_named_server_must_be_executable(tmp_path: Path) -> None:
    binary = make_server(tmp_path)
    binary.chmod(0o644)
    for path in (binary, tmp_path, tmp_path / "missing"):
        with pytest.raises(LaunchError, match="TRITON_BIN"):
            find_tritonserver({"TRITON_BIN": str(path)})


def test_no_server_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "CONTAINER_HOME", tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match="make setup"):
        find_tritonserver({})


def test_numpy_2_is_refused_with_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.3.1")
    with pytest.raises(LaunchError, match=r"numpy 2\.3\.1"):
        find_tritonserver({})
    monkeypatch.setattr(tritonserver, "CONTAINER_HOME", tmp_path)
    make_server(tmp_path)
    assert find_tritonserver({}).source == "container"  # newer servers take numpy 2


def test_wheel_without_stub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_server(tmp_path / "pytriton" / "tritonserver")
    (tmp_path / "pytriton" / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location(
        "pytriton",
        tmp_path / "pytriton" / "__init__.py",
        submodule_search_locations=[str(tmp_path / "pytriton")],
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(LaunchError, match="stub"):
        find_tritonserver({})
