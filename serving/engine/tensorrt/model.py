"""One run of a TensorRT engine over rows of a slot class: ``serving.engine.model.Model`` on a GPU.

The order of a run: states and tables to the device, the engine, states that it did not update in
place to their rows, logits to the host. K/V that is arriving is waited for layer by layer, inside
the engine. Nothing of this file is specific to CUDA: see ``device.py``.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_configs.errors import RequestError
from serving.engine.bundle import Bundle
from serving.engine.model import Step
from serving.engine.profiles import limits
from serving.engine.tensorrt.device import Device, Executor
from serving.engine.tensorrt.layout import EngineLayout
from serving.engine.tensorrt.slots import DeviceSlots, KvMemory

Floats = NDArray[np.float32]


class TensorRTModel:
    """The engine of a bundle. Raises BundleError when the bundle is none of this target."""

    def __init__(self, bundle: Bundle, device: Device, executor: Executor) -> None:
        self.bundle, self.spec = bundle, bundle.spec
        self.layout = EngineLayout.of(bundle)
        self._device, self._executor = device, executor
        self._memory = KvMemory(device, self.layout)
        batch, tokens, rows = limits(self.layout.profiles)
        self._inputs = _Inputs(device, batch * tokens)
        self._outputs = _Outputs(device, self._output_shapes(batch, rows))
        self._scratch = {
            s.name: device.allocate(batch * s.nbytes) for s in self.layout.states if not s.in_place
        }

    @classmethod
    def open(cls, bundle: Bundle) -> TensorRTModel:
        """On this machine's GPU. Raises BundleError, DeviceError."""
        from serving.engine.tensorrt.cuda import CudaDevice, CudaExecutor

        device = CudaDevice()
        return cls(bundle, device, CudaExecutor(bundle, device))

    def new_slots(self, capacity: int, rows: int) -> DeviceSlots:
        """Before the first run: what the pools hold is settled then."""
        return DeviceSlots(self._memory, capacity, rows)

    def run(
        self,
        slots: DeviceSlots,
        row: int,
        step: Step,
        *,
        decay_sums: bool = False,
        queries: bool = False,
    ) -> tuple[Floats, dict[str, Floats]]:
        """As ``Model.run``; ``queries`` are not given by this engine (RequestError)."""
        if queries:
            raise RequestError("queries are not an output of the TensorRT engine")
        tokens, positions, totals, rows = _trimmed(step)
        batch, length = tokens.shape
        number = self.layout.profile(batch, length, len(rows), step.append)
        if step.append:
            for i in range(batch):
                slots.make_room(row + i, int(totals[i]) - length, int(totals[i]))
            slots.hold(row, totals)
        slots.take_back(range(row, row + batch))
        shapes, addresses = self._inputs.feed(
            {
                "input_ids": tokens,
                "position_ids": positions,
                "seqlens": totals.astype(np.int32),
                "valid_len": np.full(batch, length, np.int64),
                "kv_append": np.array([step.append], np.int32),
                "block_table": slots.table[row : row + batch],
                "logit_rows": rows,
            }
        )
        self._bind_memory(slots, row, batch, shapes, addresses)
        addresses |= self._outputs.addresses
        for layer, event in self._memory.ready.items():
            self._executor.layer_ready(layer, event if self._memory.arriving else None)
        self._executor.enqueue(number, shapes, addresses)
        for name, address in self._scratch.items():
            state = slots.states[name]
            self._device.copy(state.at(row), address, batch * state.state.nbytes, "compute")
        wanted = {"logits": len(rows)} | dict.fromkeys(self._decays() if decay_sums else (), batch)
        found = self._outputs.fetch(wanted)
        self._memory.arriving = False
        return found.pop("logits"), found

    def _bind_memory(
        self,
        slots: DeviceSlots,
        row: int,
        batch: int,
        shapes: dict[str, tuple[int, ...]],
        addresses: dict[str, int],
    ) -> None:
        """Pools and states; outputs lie where the inputs do, or in scratch memory."""
        count = self._memory.pages.count
        for pool in self.layout.pools:
            shapes[pool.name] = (count, *pool.shape)
            addresses[pool.name] = addresses[f"present_{pool.name}"] = self._memory.address(pool)
        for name, rows in slots.states.items():
            shapes[name] = (batch, *rows.state.shape)
            addresses[name] = rows.at(row)
            addresses[f"present_{name}"] = self._scratch.get(name, rows.at(row))

    def _decays(self) -> list[str]:
        return [f"decay_sum_{i}" for i, m in self.spec.state_layers() if m.units()]

    def _output_shapes(self, batch: int, rows: int) -> dict[str, tuple[int, ...]]:
        units = {f"decay_sum_{i}": (batch, m.units()) for i, m in self.spec.state_layers()}
        sums = {name: shape for name, shape in units.items() if shape[1]}
        return {"logits": (max(1, rows), self.spec.vocab_size), **sums}


def _trimmed(step: Step) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """tokens, positions, totals, logit rows without padding, which is for CPU kernels alone."""
    tokens, positions, totals = step.tokens, step.positions, np.asarray(step.total_lens)
    if step.valid_len is not None:
        if len(tokens) != 1:
            raise RequestError("padded steps of several sequences are not run")
        count = int(step.valid_len[0])
        totals = totals - (tokens.shape[1] - count)
        tokens, positions = tokens[:, :count], positions[:, :count]
    return tokens, positions, totals, np.asarray(step.logit_rows, np.int64)


class _Inputs:
    """Small inputs: written to pinned memory, then copied to fixed places on the device."""

    def __init__(self, device: Device, values: int) -> None:
        self._device, self._values = device, values
        self._places: dict[str, tuple[NDArray[Any], int]] = {}

    def feed(
        self, inputs: dict[str, NDArray[Any]]
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
        """Shapes and addresses by name."""
        shapes, addresses = {}, {}
        for name, value in inputs.items():
            host, address = self._place(name, value)
            host[: value.size] = value.ravel()
            self._device.upload(address, host[: max(1, value.size)], "compute")
            shapes[name], addresses[name] = value.shape, address
        return shapes, addresses

    def _place(self, name: str, value: NDArray[Any]) -> tuple[NDArray[Any], int]:
        place = self._places.get(name)
        if place is None or len(place[0]) < value.size:
            if place is not None:
                self._device.free(place[1])
            host = self._device.pinned((max(self._values, value.size),), value.dtype)
            place = self._places[name] = (host, self._device.allocate(host.nbytes))
        return place


class _Outputs:
    """fp32 outputs that the host may want: places on the device, pinned memory to fetch them to."""

    def __init__(self, device: Device, shapes: dict[str, tuple[int, ...]]) -> None:
        self._device = device
        self._host = {name: device.pinned(shape, np.float32) for name, shape in shapes.items()}
        self.addresses = {n: device.allocate(4 * prod(shape)) for n, shape in shapes.items()}

    def fetch(self, wanted: dict[str, int]) -> dict[str, Floats]:
        """The first rows of each, once the compute stream is done."""
        for name, rows in wanted.items():
            if rows:
                target = self._host[name][:rows]
                self._device.download(target, self.addresses[name], "compute")
        self._device.synchronize("compute")
        return {name: self._host[name][:rows].copy() for name, rows in wanted.items()}
