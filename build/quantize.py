"""How large weights are stored: as they are, or in blocks of 4 or 8 bits.

Quantised: projections, embedding and output head. Kept fp32: norms, convolutions, decays and
their projections, routers, everything small, and every state at run time. Activations are
quantised per row inside the kernel, so a token's result does not depend on its chunk-mates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx
from numpy.typing import NDArray

from plugins.onnx_graph import ORT_DOMAIN, Nodes

if TYPE_CHECKING:
    from build.graph import GraphBuilder

Floats = NDArray[np.float32]
# (nodes, x [rows, in], expert number, node path) -> x @ W[expert]^T [rows, out]
ExpertLinear = Callable[[Nodes, str, str, str], str]
# Projections that set decays, gates of the recurrence and routing: small, and errors compound.
KEEP = ("a_proj", "b_proj", "a_a_proj", "a_b_proj", "dt_proj", "x_proj", "router", "shared_gate")
_SMALL = 4096
_BLOCK = 32
_ROWS = 4096  # quantised at a time, so that temporaries stay small
DTYPES = ("fp32", "int8", "int4")


@dataclass(frozen=True)
class Plain:
    """fp32, as ONNX's own operators read it."""

    name: str = "fp32"

    def linear(self, g: GraphBuilder, x: str, path: str, node: str, weight: Floats) -> str:
        """``x @ weight^T`` for weight [N, K]."""
        stored = g.store(f"{path}.weight", weight.T)
        return str(g.op("MatMul", [x, stored], node))

    def embed(self, g: GraphBuilder, ids: str, path: str, node: str) -> str:
        return str(g.op("Gather", [g.table(path), ids], node))

    def head(self, g: GraphBuilder, x: str, path: str, node: str) -> str:
        """Logits of rows [N, H] from a table [V, H], which the embedding may share."""
        return str(g.op("Gemm", [x, g.table(path)], node, transB=1))

    def experts(self, g: GraphBuilder, path: str) -> ExpertLinear:
        """One of the matrices of a stack [E, out, in], chosen at run time."""
        stack = g.experts(path, transpose=True)

        def linear(b: Nodes, x: str, expert: str, node: str) -> str:
            weight = b.op("Gather", [stack, expert], f"{node}/weight")
            return str(b.op("MatMul", [x, weight], node))

        return linear


@dataclass(frozen=True)
class Blocks:
    """``bits`` bits a value, one fp32 scale for 32 of them (com.microsoft::MatMulNBits)."""

    bits: int

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def linear(self, g: GraphBuilder, x: str, path: str, node: str, weight: Floats) -> str:
        kept = path.rsplit(".", 1)[-1] in KEEP
        if kept or weight.size < _SMALL or min(weight.shape) < _BLOCK:
            return Plain().linear(g, x, path, node, weight)
        packed, scales = self._store(g, path, weight)
        return self._matmul(g, x, node, packed, scales, weight.shape)

    def embed(self, g: GraphBuilder, ids: str, path: str, node: str) -> str:
        weight = g.read(path)
        if weight.shape[1] % _BLOCK:
            return str(g.op("Gather", [g.store(path, weight), ids], node))
        packed, scales = self._store(g, path, weight)
        flat = g.alias(packed, f"{path}.rows", (weight.shape[0], weight.shape[1] * self.bits // 8))
        return str(
            g.op(
                "GatherBlockQuantized", [flat, ids, scales], node, domain=ORT_DOMAIN,
                bits=self.bits, block_size=_BLOCK, gather_axis=0, quantize_axis=1,
            )
        )  # fmt: skip

    def head(self, g: GraphBuilder, x: str, path: str, node: str) -> str:
        shape = g.spec.weights()[path]
        if shape[1] % _BLOCK:
            return Plain().head(g, x, path, node)
        names = (f"{path}.packed", f"{path}.scales")
        if not g.stored(names[0]):  # else shared with the embedding
            self._store(g, path, g.read(path))
        return self._matmul(g, x, node, *names, shape)

    def experts(self, g: GraphBuilder, path: str) -> ExpertLinear:
        """The chosen expert is dequantised when it runs, over all rows that chose it."""
        count, rows, width = g.spec.weights()[path]
        if width % _BLOCK:
            return Plain().experts(g, path)
        packed, scales = quantise(g.read(path).reshape(-1, width), self.bits)
        stack = g.store(f"{path}.packed", packed.reshape(count, -1))
        scale = g.store(f"{path}.scales", scales.reshape(count, -1))

        def linear(b: Nodes, x: str, expert: str, node: str) -> str:
            flat = b.op(
                "GatherBlockQuantized", [stack, expert, scale], f"{node}/values",
                domain=ORT_DOMAIN, bits=self.bits, block_size=_BLOCK, gather_axis=0,
                quantize_axis=1,
            )  # fmt: skip
            weight = b.reshape(flat, [rows, width], f"{node}/weight")
            return str(b.op("Gemm", [x, weight], node, transB=1))

        return linear

    def _store(self, g: GraphBuilder, path: str, weight: Floats) -> tuple[str, str]:
        packed, scales = quantise(weight, self.bits)
        return g.store(f"{path}.packed", packed), g.store(f"{path}.scales", scales)

    def _matmul(
        self, g: GraphBuilder, x: str, node: str, packed: str, scales: str, shape: tuple[int, ...]
    ) -> str:
        return str(
            g.op(
                "MatMulNBits", [x, packed, scales], node, domain=ORT_DOMAIN, N=shape[0],
                K=shape[1], bits=self.bits, block_size=_BLOCK, accuracy_level=4,
            )
        )  # fmt: skip


def storage(dtype: str) -> Plain | Blocks:
    """By name, one of ``DTYPES``."""
    return Plain() if dtype == "fp32" else Blocks(int(dtype.removeprefix("int")))


def quantise(weight: Floats, bits: int) -> tuple[NDArray[np.uint8], Floats]:
    """[N, K] → packed [N, blocks, 32 * bits / 8] and scales [N, blocks].

    The value of largest magnitude in a block becomes the lowest level, as in llama.cpp's Q4_0.
    """
    parts = [_quantise_rows(rows, bits) for rows in _row_chunks(weight)]
    packed, scales = zip(*parts, strict=True)
    return np.concatenate(packed), np.concatenate(scales)


def quantise_speed(bits: int) -> float:
    """Weights per second on one core of this machine."""
    weight = np.random.default_rng(0).standard_normal((2048, 4096), np.float32)
    started = time.perf_counter()
    quantise(weight, bits)
    return weight.size / (time.perf_counter() - started)


def _row_chunks(weight: Floats) -> Iterator[Floats]:
    for low in range(0, len(weight), _ROWS):
        yield weight[low : low + _ROWS]


def _quantise_rows(rows: Floats, bits: int) -> tuple[NDArray[np.uint8], Floats]:
    count, width = rows.shape
    blocks = -(-width // _BLOCK)
    padded = np.zeros((count, blocks * _BLOCK), np.float32)
    padded[:, :width] = rows
    values = padded.reshape(count, blocks, _BLOCK)
    at = np.abs(values).argmax(axis=2)[..., None]
    largest = np.take_along_axis(values, at, axis=2)
    middle = 1 << (bits - 1)
    scales = largest / -middle
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales != 0)
    values *= inverse
    np.rint(values, out=values)
    values += middle
    levels = np.clip(values, 0, 2 * middle - 1).astype(np.uint8)
    packed = levels[..., ::2] | (levels[..., 1::2] << 4) if bits == 4 else levels
    return packed.astype(np.uint8), scales[..., 0].astype(np.float32)


def dequantise(packed: NDArray[np.uint8], scales: Floats, bits: int, width: int) -> Floats:
    """What the kernels read back, [N, K]."""
    pairs = np.stack([packed & 15, packed >> 4], axis=-1) if bits == 4 else packed
    levels = pairs.reshape(*packed.shape[:2], _BLOCK)
    values = (levels.astype(np.float32) - (1 << (bits - 1))) * scales[..., None]
    return np.asarray(values.reshape(len(packed), -1)[:, :width])


def external_alias(tensor: onnx.TensorProto, name: str, shape: tuple[int, ...]) -> onnx.TensorProto:
    """The same bytes of the weights file under another name and shape."""
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    copy.name = name
    del copy.dims[:]
    copy.dims.extend(shape)
    return copy
