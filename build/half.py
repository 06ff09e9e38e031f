"""16-bit weights for a GPU: matrix products in bf16 or fp16, everything between them in fp32."""

from __future__ import annotations

HALF_DTYPES = ("bf16", "fp16")
