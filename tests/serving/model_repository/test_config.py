"""What convert.py writes for the server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from build.repository import config_pbtxt
from serving.interface import INPUTS, OUTPUTS, Tensor

FAKE = Path(__file__).with_name("fake.py")
MODELS = ("llm", "engine", "prefix_cache")


def read(text: str) -> pb.ModelConfig:
    return text_format.Parse(text, pb.ModelConfig())


@pytest.mark.parametrize("name", MODELS)
def test_written_config_is_one_the_server_reads(tiny_bundle: Path, name: str) -> None:
    config = read((tiny_bundle / "model_repository" / name / "config.pbtxt").read_text())
    assert (config.name, config.backend, config.max_batch_size) == (name, "python", 0)
    assert config.model_transaction_policy.decoupled == (name != "prefix_cache")
    (group,) = config.instance_group
    assert (group.count, group.kind) == (1, pb.ModelInstanceGroup.KIND_CPU)
    assert all(i.optional for i in config.input)


def test_public_config_is_the_interface(tiny_bundle: Path) -> None:
    config = read((tiny_bundle / "model_repository" / "llm" / "config.pbtxt").read_text())
    for written, table in ((config.input, INPUTS), (config.output, OUTPUTS)):
        assert [(t.name, pb.DataType.Name(t.data_type), list(t.dims)) for t in written] == [
            (t.name, f"TYPE_{t.kind}", [-1 if t.many else 1]) for t in table
        ]


@pytest.mark.parametrize("value", ["7", 'a "quoted" one', "back\\slash", "two\nlines", "größe"])
def test_any_parameter_survives(value: str) -> None:
    text = config_pbtxt("m", (Tensor("a", "BOOL"),), (Tensor("b", "FP32"),), False, {"key": value})
    assert read(text).parameters["key"].string_value == value


@pytest.mark.parametrize("name", MODELS)
def test_model_runs_on_the_bundles_own_code(tiny_bundle: Path, tmp_path: Path, name: str) -> None:
    """Nothing of the project is on the path, and of two copies the bundle's wins."""
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "__init__.py").write_text("raise ImportError('the wrong copy')\n")
    file = tiny_bundle / "model_repository" / name / "1" / "model.py"
    code = (
        "import importlib.util, sys\n"
        "def load(name, path):\n"
        "    spec = importlib.util.spec_from_file_location(name, path)\n"
        "    module = sys.modules[name] = importlib.util.module_from_spec(spec)\n"
        "    spec.loader.exec_module(module)\n"
        "    return module\n"
        f"sys.modules['triton_python_backend_utils'] = load('fake', {str(FAKE)!r}).module()\n"
        f"load('model', {str(file)!r}).TritonPythonModel\n"
        "print(sys.modules['serving'].__file__)\n"
        "print([m for m in ('torch', 'transformers', 'onnx', 'build') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == [str(tiny_bundle / "python/serving/__init__.py"), "[]"]
