"""The real device: CUDA through cuda-python, TensorRT through its Python API. Imported late, so
that nothing else needs either. Not run on the machines that test this project: see README."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine_configs.errors import BundleError, DeviceError
from serving.engine.bundle import Bundle
from serving.engine.tensorrt.device import Array, Event, Stream

ENGINE = "engine/model.engine"
LIBRARY = "plugins/libhybrid_tensorrt.so"
PACKAGES = {"cuda.bindings.runtime": "cuda-python", "tensorrt": "tensorrt"}


def package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise DeviceError(
            f"{PACKAGES[name]} is not installed: {e}",
            where="tensorrt",
            fix=f"pip install {PACKAGES[name]} on the GPU machine",
        ) from None


class CudaDevice:
    """The current device; see ``device.Device``."""

    def __init__(self) -> None:
        self._cuda = package("cuda.bindings.runtime")
        self._streams: dict[Stream, Any] = {
            name: self._call("cudaStreamCreateWithFlags", self._cuda.cudaStreamNonBlocking)
            for name in ("compute", "copy")
        }
        self._keep: list[Any] = []

    def _call(self, name: str, *arguments: Any) -> Any:
        """One CUDA call; what it returns besides its status."""
        status, *values = getattr(self._cuda, name)(*arguments)
        if int(status):
            text = self._cuda.cudaGetErrorString(status)[1]
            raise DeviceError(f"{name}: {text.decode()}", where="cuda")
        return values[0] if values else None

    def stream(self, name: Stream) -> int:
        return int(self._streams[name])

    def allocate(self, nbytes: int) -> int:
        address = int(self._call("cudaMalloc", max(1, nbytes)))
        self._call("cudaMemset", address, 0, max(1, nbytes))
        self._call("cudaDeviceSynchronize")  # our streams do not wait for the default one
        return address

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> Array:
        nbytes = max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        address = int(self._call("cudaHostAlloc", nbytes, self._cuda.cudaHostAllocDefault))
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        ctypes.memset(address, 0, nbytes)
        count = int(np.prod(shape))
        return np.frombuffer(memoryview(memory), dtype, count).reshape(shape)

    def pin(self, memory: Array) -> None:
        flags = self._cuda.cudaHostRegisterDefault
        self._call("cudaHostRegister", memory.ctypes.data, memory.nbytes, flags)
        self._keep.append(memory)

    def upload(self, target: int, source: Array, stream: Stream) -> None:
        self._copy(target, source.ctypes.data, source.nbytes, stream)

    def download(self, target: Array, source: int, stream: Stream) -> None:
        self._copy(target.ctypes.data, source, target.nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        self._copy(target, source, nbytes, stream)

    def _copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDefault
        self._call("cudaMemcpyAsync", target, source, nbytes, kind, self._streams[stream])

    def zero(self, target: int, nbytes: int, stream: Stream) -> None:
        self._call("cudaMemsetAsync", target, 0, nbytes, self._streams[stream])

    def event(self) -> Event:
        flags = self._cuda.cudaEventDisableTiming
        return int(self._call("cudaEventCreateWithFlags", flags))

    def record(self, event: Event, stream: Stream) -> None:
        self._call("cudaEventRecord", event, self._streams[stream])

    def synchronize(self, stream: Stream) -> None:
        self._call("cudaStreamSynchronize", self._streams[stream])


class CudaExecutor:
    """The serialized engine and the plugin library beside it; a context per profile."""

    def __init__(self, bundle: Bundle, device: CudaDevice) -> None:
        self._stream = device.stream("compute")
        engine_file, library = (bundle.path / name for name in (ENGINE, LIBRARY))
        for file in (engine_file, library):
            if not file.is_file():
                raise BundleError(
                    f"{file.relative_to(bundle.path)} is missing",
                    where=str(bundle.path),
                    fix="README.md there says how to make it on the machine with the GPU",
                )
        trt = package("tensorrt")
        self._logger = trt.Logger(trt.Logger.WARNING)
        trt.get_plugin_registry().load_library(str(library))
        self._events = _layer_events(library)
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(engine_file.read_bytes())
        if self._engine is None:
            raise BundleError(
                "TensorRT cannot load it: made by another version or for another GPU",
                where=str(engine_file),
                fix="Run build_engine.py again on this machine",
            )
        self._contexts: dict[int, Any] = {}

    def enqueue(
        self, profile: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]
    ) -> None:
        context = self._context(profile)
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise DeviceError(f"input {name} does not take {shape}", where="tensorrt")
        for name, address in addresses.items():
            context.set_tensor_address(name, address)
        if not context.execute_async_v3(self._stream):
            raise DeviceError("the engine did not run; its log says why", where="tensorrt")

    def layer_ready(self, layer: int, event: Event | None) -> None:
        self._events(layer, event or None, None)

    def _context(self, profile: int) -> Any:
        if profile not in self._contexts:
            context = self._engine.create_execution_context()
            context.set_optimization_profile_async(profile, self._stream)
            self._contexts[profile] = context
        return self._contexts[profile]


def _layer_events(library: Path) -> Any:
    """The library's own entry point (plugins/tensorrt/library.cpp)."""
    function = ctypes.CDLL(str(library)).hybrid_layer_events
    function.argtypes = [ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = None
    return function
