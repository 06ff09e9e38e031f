"""All that is asked of a GPU and of TensorRT; ``cuda.py`` is the real one, tests bring another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

Array = NDArray[Any]
# Two queues of work: what runs layers, and what copies meanwhile.
Stream = Literal["compute", "copy"]
Event = int


class Device(Protocol):
    """Addresses are of device memory. Host arrays are contiguous; they stay untouched until the
    stream has come past the copy. Every method raises DeviceError where the device fails."""

    def allocate(self, nbytes: int) -> int:
        """Memory that is zero."""
        ...

    def free(self, address: int) -> None: ...

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A zeroed host array that copies run from and to at full speed."""
        ...

    def pin(self, memory: Array) -> None:
        """Make memory that is there already (the arena) such an array."""
        ...

    def upload(self, target: int, source: Array, stream: Stream) -> None: ...

    def download(self, target: Array, source: int, stream: Stream) -> None: ...

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None: ...

    def zero(self, target: int, nbytes: int, stream: Stream) -> None: ...

    def event(self) -> Event: ...

    def record(self, event: Event, stream: Stream) -> None: ...

    def synchronize(self, stream: Stream) -> None: ...


class Executor(Protocol):
    """One engine, and the plugins inside it."""

    def enqueue(
        self, profile: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]
    ) -> None:
        """Run on the compute stream; shapes of inputs, addresses of inputs and outputs."""
        ...

    def layer_ready(self, layer: int, event: Event | None) -> None:
        """Attention layer ``layer`` waits for the event before it reads its pages."""
        ...
