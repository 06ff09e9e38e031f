"""What ``hybrid::LinearStateReplay`` means, token by token, in numpy float64.

For each token t, with S the state [dk, dv] of one head, a = exp(log_decay_t), b = beta_t::

    linear       S += k v^T
    gated        S  = a S + k v^T
    delta        S += b k (v - S^T k)^T
    gated_delta  S  = a S;  S += b k (v - S^T k)^T
    o_t = scale * S^T q

(Yang et al., "Gated Delta Networks", arXiv 2412.06464, eq. 10; Dao & Gu, "Mamba-2", 2405.21060.)
A zero ``past_state`` and the last r tokens of a prefix is tail replay.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
RULES = ("linear", "gated", "delta", "gated_delta")


def linear_state_replay(
    q: Array,
    k: Array,
    v: Array,
    past_state: Array,
    log_decay: Array | None = None,
    beta: Array | None = None,
    *,
    update_rule: str,
    scale: float,
) -> tuple[Array, Array]:
    """Run the recurrence.

    q [B, T, Hq, dk], k [B, T, Hq, dk], v [B, T, Hv, dv], past_state [B, Hv, dk, dv],
    log_decay [B, T, Hv] or [B, T, Hv, dk] (per key channel), beta [B, T, Hv];
    value head h reads query/key head h // (Hv / Hq).
    Returns o [B, T, Hv, dv] and present_state [B, Hv, dk, dv].
    """
    if update_rule not in RULES:
        raise ValueError(f"update_rule is {update_rule!r}, expected one of {RULES}")
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    groups = v.shape[2] // q.shape[2]
    q, k = (np.repeat(x, groups, axis=2) for x in (q, k))
    state = np.array(past_state, np.float64)
    o = np.zeros(v.shape)
    for t in range(q.shape[1]):
        kt, vt = k[:, t], v[:, t]
        if "gated" in update_rule:
            assert log_decay is not None
            decay = np.exp(np.asarray(log_decay, np.float64)[:, t])
            state *= decay[..., None] if decay.ndim == 3 else decay[..., None, None]
        if "delta" in update_rule:
            assert beta is not None
            error = vt - np.einsum("bhkv,bhk->bhv", state, kt)
            vt = np.asarray(beta, np.float64)[:, t, :, None] * error
        state += np.einsum("bhk,bhv->bhkv", kt, vt)
        o[:, t] = scale * np.einsum("bhkv,bhk->bhv", state, q[:, t])
    return o, state
