"""serving/engine/tensorrt/cuda.py: its calls exist in the real packages, and do what is meant in
stand-ins whose device memory is the host's."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import serving.engine.tensorrt.cuda as edge
from engine_configs.errors import BundleError, DeviceError
from plugins.tensorrt.build import HEADERS
from serving.engine import fixtures
from serving.engine.runner import open_runner
from tests.gpu.conftest import Make
from tests.gpu.fake import FakeDevice, FakeExecutor

SOURCE = Path(edge.__file__).read_text()
CUDA_NAMES = set(re.findall(r'_call\(\s*"(\w+)"', SOURCE) + re.findall(r"_cuda\.(\w+)", SOURCE))
TENSORRT_NAMES = {
    "": ("Logger", "get_plugin_registry", "Runtime"),
    "Runtime": ("deserialize_cuda_engine",),
    "ICudaEngine": ("create_execution_context",),
    "IExecutionContext": (
        "set_optimization_profile_async", "set_input_shape", "set_tensor_address",
        "execute_async_v3",
    ),
}  # fmt: skip


def outside(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run where the packages of the TensorRT target are installed."""
    preface = f"import sys; sys.path[:0] = [{str(HEADERS)!r}, {str(Path.cwd())!r}]\n"
    command = [sys.executable, "-c", preface + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_names_are_those_of_the_real_packages() -> None:
    assert len(CUDA_NAMES) > 12
    done = outside(
        "from cuda.bindings import runtime\n"
        "print(*(n for n in sys.argv[1:] if not hasattr(runtime, n)))",
        *sorted(CUDA_NAMES),
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done
    wanted = [f"{of}.{name}".strip(".") for of, names in TENSORRT_NAMES.items() for name in names]
    assert all(name.rsplit(".", 1)[-1] in SOURCE for name in wanted)
    done = outside(
        "import operator, tensorrt_lean\n"
        "for name in sys.argv[1:]:\n    operator.attrgetter(name)(tensorrt_lean)",
        *wanted,
    )
    assert done.returncode == 0, done.stderr


def test_the_real_package_without_a_driver_is_a_typed_error() -> None:
    done = outside(
        "from serving.engine.tensorrt.cuda import CudaDevice\n"
        "from engine_configs.errors import DeviceError\n"
        "try:\n    CudaDevice()\nexcept DeviceError as e:\n    print('refused:', e)\n"
        "else:\n    print('a device')"
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"refused: cuda: cudaStreamCreateWithFlags: \w+|a device", done.stdout)


class Cudart:
    """cuda.bindings.runtime: every call returns its status first."""

    cudaStreamNonBlocking = cudaHostAllocDefault = cudaHostRegisterDefault = 0
    cudaEventDisableTiming = 2
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)

    def __init__(self) -> None:
        self.device, self.streams = FakeDevice(), iter(("compute", "copy"))
        self.names: dict[int, Any] = {}
        self.fail = ""

    def __getattribute__(self, name: str) -> Any:
        if name != "fail" and name == self.fail:
            return lambda *_: (2,)
        return super().__getattribute__(name)

    def cudaGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, b"out of memory"

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        self.names[len(self.names) + 1] = next(self.streams)
        return 0, len(self.names)

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        return 0, self.device.allocate(size)

    cudaHostAlloc = lambda self, size, flags: self.cudaMalloc(size)  # noqa: E731

    def cudaFree(self, address: int) -> tuple[int]:
        self.device.free(address)
        return (0,)

    def cudaMemset(self, address: int, value: int, size: int) -> tuple[int]:
        ctypes.memset(address, value, size)
        return (0,)

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> tuple[int]:
        return self.cudaMemset(address, value, size)

    def cudaMemcpyAsync(self, to: int, of: int, size: int, kind: int, stream: int) -> tuple[int]:
        assert kind == 4
        self.device.copy(to, of, size, self.names[stream])
        return (0,)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> tuple[int]:
        return (0,)

    def cudaDeviceSynchronize(self) -> tuple[int]:
        return (0,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        self.device.synchronize(self.names[stream])
        return (0,)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[int, int]:
        return 0, self.device.event()

    def cudaEventRecord(self, event: int, stream: int) -> tuple[int]:
        self.device.record(event, self.names[stream])
        return (0,)


class Context:
    """IExecutionContext over the graph; keeps addresses and shapes as the real one does."""

    def __init__(self, executor: FakeExecutor) -> None:
        self.executor, self.profile = executor, -1
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return min(shape, default=0) >= 0

    def set_tensor_address(self, name: str, address: int) -> None:
        assert address
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == 1
        self.executor.enqueue(self.profile, self.shapes, self.addresses)
        return True


@pytest.fixture
def cudart(tree: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cudart:
    """Both packages replaced; engine and plugin library are there."""
    cuda = Cudart()
    bundle = tree("fp32")
    executor = FakeExecutor(bundle.model_file, cuda.device)
    engine = SimpleNamespace(create_execution_context=lambda: Context(executor))
    trt: Any = ModuleType("tensorrt")
    trt.Logger = type("Logger", (), {"WARNING": 1, "__init__": lambda self, level: None})
    trt.get_plugin_registry = lambda: SimpleNamespace(load_library=lambda path: None)
    loaded = {b"plan": engine}
    trt.Runtime = lambda logger: SimpleNamespace(deserialize_cuda_engine=loaded.get)
    packages = {"cuda.bindings.runtime": cuda, "tensorrt": trt}
    monkeypatch.setattr(edge, "package", packages.__getitem__)
    monkeypatch.setattr(edge, "_layer_events", lambda library: lambda *_: None)
    for name, content in ((edge.ENGINE, b"plan"), (edge.LIBRARY, b"")):
        (bundle.path / name).parent.mkdir(exist_ok=True)
        (bundle.path / name).write_bytes(content)
    return cuda


def test_the_edge_runs_the_recorded_turns(cudart: Cudart, tree: Make) -> None:
    bundle = tree("fp32")
    expected = fixtures.Recording.load(bundle.path / "fixtures.npz")
    found = fixtures.play(open_runner(bundle), expected.tokens, expected.turns)
    table = fixtures.errors(expected, found)
    assert max(row["max_abs_logit_error"] for row in table.values()) <= 1e-4


def test_failures_are_typed(cudart: Cudart, tree: Make) -> None:
    bundle = tree("fp32")
    cudart.fail = "cudaHostAlloc"
    with pytest.raises(DeviceError, match="cudaHostAlloc: out of memory"):
        open_runner(bundle)
    cudart.fail, cudart.streams = "", iter(("compute", "copy"))
    (bundle.path / edge.ENGINE).write_bytes(b"of another version")
    with pytest.raises(BundleError, match=r"another version.*build_engine\.py again"):
        open_runner(bundle)
    (bundle.path / edge.ENGINE).unlink()
    cudart.streams = iter(("compute", "copy"))
    with pytest.raises(BundleError, match=r"model\.engine is missing.*README\.md"):
        open_runner(bundle)
