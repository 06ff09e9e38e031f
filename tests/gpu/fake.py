"""A device made of host memory, and an executor that runs the graph on the CPU: everything but
CUDA and TensorRT themselves is the real code."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from serving.engine.tensorrt.device import Stream

Array = NDArray[Any]
_TYPES: dict[int, Any] = {
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.BFLOAT16: ml_dtypes.bfloat16,
    TensorProto.INT32: np.int32,
    TensorProto.INT64: np.int64,
}


class FakeDevice:
    """Addresses are real addresses. ``copies`` of the copy stream wait until somebody waits for
    them, as late as a real device may be."""

    def __init__(self) -> None:
        self.memory: dict[int, Array] = {}
        self.pinned_arena: list[Array] = []
        self.uploads: list[tuple[int, int]] = []
        self._queue: list[tuple[int, int, int]] = []
        self._marks: dict[int, int] = {}
        self._done = 0

    def allocate(self, nbytes: int) -> int:
        memory = np.zeros(max(1, nbytes), np.uint8)
        self.memory[memory.ctypes.data] = memory
        return memory.ctypes.data

    def free(self, address: int) -> None:
        del self.memory[address]

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.zeros(shape, dtype)

    def pin(self, memory: Array) -> None:
        self.pinned_arena.append(memory)

    def upload(self, target: int, source: Array, stream: Stream) -> None:
        assert source.flags["C_CONTIGUOUS"]
        self.uploads.append((target, source.nbytes))
        self._move(target, source.ctypes.data, source.nbytes, stream)

    def download(self, target: Array, source: int, stream: Stream) -> None:
        assert target.flags["C_CONTIGUOUS"]
        self._move(target.ctypes.data, source, target.nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        self._move(target, source, nbytes, stream)

    def _move(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        self._owned(target, source, nbytes)
        if stream == "copy":
            self._queue.append((target, source, nbytes))
        else:
            ctypes.memmove(target, source, nbytes)

    def _owned(self, target: int, source: int, nbytes: int) -> None:
        """At least one side is device memory, and inside what was allocated."""
        inside = [
            base <= at and at + nbytes <= base + len(m)
            for base, m in self.memory.items()
            for at in (target, source)
        ]
        assert any(inside), "a copy outside of device memory"

    def zero(self, target: int, nbytes: int, stream: Stream) -> None:
        ctypes.memset(target, 0, nbytes)

    def event(self) -> int:
        self._marks[len(self._marks) + 1] = 0
        return len(self._marks)

    def record(self, event: int, stream: Stream) -> None:
        assert stream == "copy"
        self._marks[event] = self._done + len(self._queue)

    def wait(self, event: int) -> None:
        """As the plugin does on its stream."""
        self._run_to(self._marks[event])

    def synchronize(self, stream: Stream) -> None:
        if stream == "copy":
            self._run_to(self._done + len(self._queue))

    def _run_to(self, mark: int) -> None:
        while self._done < mark:
            ctypes.memmove(*self._queue.pop(0))
            self._done += 1


class FakeExecutor:
    """The graph with the plugins' function bodies: in ONNX Runtime, or in ONNX's own evaluator
    where it is bf16, which the former does not know on a CPU.

    Outputs are written where they are bound; those that alias inputs must be bound to their place.
    """

    def __init__(self, model: Path, device: FakeDevice) -> None:
        graph = onnx.load(model, load_external_data=False).graph
        self._inputs = {i.name: _TYPES[i.type.tensor_type.elem_type] for i in graph.input}
        self._outputs = [o.name for o in graph.output]
        self._model: Any
        if ml_dtypes.bfloat16 in self._inputs.values():
            self._model = ReferenceEvaluator(str(model))
        else:
            options = ort.SessionOptions()
            options.intra_op_num_threads, options.log_severity_level = 1, 3
            self._model = ort.InferenceSession(str(model), options)
        self._device = device
        self.runs: list[int] = []
        self.waited: list[int] = []
        self._events: dict[int, int | None] = {}

    def layer_ready(self, layer: int, event: int | None) -> None:
        self._events[layer] = event

    def enqueue(
        self, profile: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]
    ) -> None:
        self.runs.append(profile)
        for layer, event in self._events.items():
            if event is not None:
                self.waited.append(layer)
                self._device.wait(event)
        inputs = {
            name: _array(addresses[name], shapes[name], dtype).copy()
            for name, dtype in self._inputs.items()
        }
        assert set(shapes) == set(inputs)
        with np.errstate(invalid="ignore", over="ignore"):
            found = self._model.run(self._outputs, inputs)
        for name, value in zip(self._outputs, found, strict=True):
            if "_pool_" in name:
                assert addresses[name] == addresses[name.removeprefix("present_")]
            _array(addresses[name], value.shape, value.dtype)[...] = value


def _array(address: int, shape: tuple[int, ...], dtype: Any) -> Array:
    count = int(np.prod(shape))
    nbytes = max(1, count * np.dtype(dtype).itemsize)
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memory, dtype, count).reshape(shape)
