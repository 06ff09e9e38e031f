"""16-bit weights for a GPU: matrix products in bf16 or fp16, everything between them in fp32.

Norms, gates, decays and the residual stream stay fp32: a runtime fuses them with the casts, and
their bytes are few beside the weights'. Recurrent states are fp32 everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from build.quantize import KEEP, Plain

if TYPE_CHECKING:
    from build.graph import GraphBuilder

_KINDS = {"bf16": TensorProto.BFLOAT16, "fp16": TensorProto.FLOAT16}
_NUMPY: dict[int, Any] = {
    TensorProto.BFLOAT16: ml_dtypes.bfloat16,
    TensorProto.FLOAT16: np.float16,
    TensorProto.FLOAT: np.float32,
}
HALF_DTYPES = tuple(_KINDS)


@dataclass(frozen=True)
class Half(Plain):
    """``name``: one of HALF_DTYPES."""

    @property
    def half(self) -> int:
        return int(_KINDS[self.name])

    def linear(
        self, g: GraphBuilder, x: str, path: str, node: str, weight: NDArray[np.float32]
    ) -> str:
        """``x @ weight^T``; what sets decays and routes stays fp32."""
        if path.rsplit(".", 1)[-1] in KEEP:
            return super().linear(g, x, path, node, weight)
        return g.matmul(x, g.store(f"{path}.weight", narrow(weight.T, self.half)), node)

    def embed(self, g: GraphBuilder, ids: str, path: str, node: str) -> str:
        rows = g.op("Gather", [self._table(g, path), ids], f"{node}/half")
        return g.cast(rows, TensorProto.FLOAT, node)

    def head(self, g: GraphBuilder, x: str, path: str, node: str) -> str:
        half = g.cast(x, self.half, f"{node}/half")
        logits = g.op("Gemm", [half, self._table(g, path)], f"{node}/product", transB=1)
        return g.cast(logits, TensorProto.FLOAT, node)

    def _table(self, g: GraphBuilder, path: str) -> str:
        return path if g.stored(path) else g.store(path, narrow(g.read(path), self.half))


def narrow(values: NDArray[Any], kind: int) -> NDArray[Any]:
    """Rounded to nearest to an ONNX type; what fp16 cannot hold becomes infinite."""
    return values.astype(_NUMPY[kind], copy=False)
