"""What ``hybrid::DiagonalScan`` means, token by token, in numpy float64.

For each token t, with h the state [D, N]::

    h[d, n] = exp(dt_t[d] * rate[d, n]) * h[d, n] + x_t[d] * b_t[n]
    y_t[d]  = sum_n c_t[n] * h[d, n]

Mamba-1 (Gu & Dao, arXiv 2312.00752, eq. 2) with x = dt * u, b = B, c = C; RG-LRU (Griffin, arXiv
2402.19427, eq. 4) with N = 1, rate = -1, dt = -log a, b = c = 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def diagonal_scan(
    x: Array, dt: Array, rate: Array, b: Array, c: Array, past_state: Array
) -> tuple[Array, Array]:
    """Run the recurrence.

    x, dt [B, T, D] (dt >= 0), rate [D, N] (<= 0), b, c [B, T, N], past_state [B, D, N, 1].
    Returns y [B, T, D] and present_state [B, D, N, 1].
    """
    x, dt, rate, b, c = (np.asarray(a, np.float64) for a in (x, dt, rate, b, c))
    state = np.array(past_state[..., 0], np.float64)
    y = np.zeros(x.shape)
    for t in range(x.shape[1]):
        state *= np.exp(dt[:, t, :, None] * rate)
        state += x[:, t, :, None] * b[:, t, None]
        y[:, t] = np.einsum("bdn,bn->bd", state, c[:, t])
    return y, state[..., None]
