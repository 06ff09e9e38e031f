"""What ``hybrid::CausalConv`` means, in numpy float64: a depthwise causal convolution.

    y_t = bias + sum_w weight[w] * row_{t - (W-1) + w},  through y * sigmoid(y) where ``silu``

with the W-1 inputs before this step as rows -(W-1) .. -1. The state that is handed on holds the
inputs up to the last token that is not padding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def causal_conv(
    x: Array,
    past: Array,
    weight: Array,
    valid_len: NDArray[np.int64],
    bias: Array | None = None,
    *,
    silu: bool = False,
) -> tuple[Array, Array]:
    """x [B, T, C], past [B, W-1, C], weight [W, C], valid_len [B] (<= T), bias [C].

    Returns y [B, T, C] and present [B, W-1, C].
    """
    joined = np.concatenate([past, x], axis=1, dtype=np.float64)
    T, before = x.shape[1], past.shape[1]
    y = sum(joined[:, w : w + T] * weight[w].astype(np.float64) for w in range(before + 1))
    if bias is not None:
        y = y + bias
    if silu:
        y = y / (1 + np.exp(-y))
    present = [rows[n : n + before] for rows, n in zip(joined, valid_len, strict=True)]
    return np.asarray(y), np.stack(present)
