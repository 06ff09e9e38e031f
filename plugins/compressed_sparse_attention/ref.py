"""What ``hybrid::CompressedSparseAttention`` means, in numpy float64.

Queries at the last T of ``total_len`` positions attend causally to the rows of a KV slot. A step
either appends its own K/V rows to the slot first, or (replay) brings none and reads the cached
ones. Dense attention is the case in which every row is retained and selected.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Ints = NDArray[Any]


def compressed_sparse_attention(
    q: Array,
    k_new: Array,
    v_new: Array,
    past_k: Array,
    past_v: Array,
    total_lens: Ints,
    selected: NDArray[np.bool_] | None = None,
    *,
    scale: float,
    window: int | None = None,
) -> tuple[Array, Array, Array, Array, Ints]:
    """Attend over the selected rows; report what the rest would have weighed.

    q [B, T, Hq, dk], k_new [B, T or 0, Hk, dk], v_new [B, T or 0, Hk, dv],
    past_k [B, Hk, C, dk], past_v [B, Hk, C, dv], total_lens [B]: rows visible to the last query,
    selected [B, Hk, C]: rows read exactly (None: all); window: rows a query sees, its own included.
    Returns o [B, T, Hq, dv], present_k, present_v (slots with the new rows written),
    error_bound [B, T, Hq] (attention mass dropped, 0 when dense), kept [B, Hk] (rows read).
    """
    q = np.asarray(q, np.float64)
    B, T, Hq, _ = q.shape
    Hk, C = past_k.shape[1], past_k.shape[2]
    present_k, present_v = np.array(past_k, np.float64), np.array(past_v, np.float64)
    o = np.zeros((B, T, Hq, past_v.shape[-1]))
    dropped = np.zeros((B, T, Hq))
    kept = np.zeros((B, Hk), np.int64)
    for b, total in enumerate(total_lens):
        start = int(total) - T
        if k_new.shape[1]:
            present_k[b, :, start:total] = np.moveaxis(k_new[b], 0, 1)
            present_v[b, :, start:total] = np.moveaxis(v_new[b], 0, 1)
        for h in range(Hk):
            rows = np.arange(C) < total if selected is None else selected[b, h][:C].copy()
            rows &= np.arange(C) < total
            kept[b, h] = rows.sum()
            for t in range(T):
                n = start + t + 1
                seen = slice(0 if window is None else max(0, n - window), n)
                keys, values, use = present_k[b, h, seen], present_v[b, h, seen], rows[seen]
                for g in range(h * Hq // Hk, (h + 1) * Hq // Hk):
                    score = keys @ q[b, t, g] * scale
                    p = np.exp(score - score.max())
                    mass = p[use].sum()
                    o[b, t, g] = p[use] @ values[use] / mass
                    dropped[b, t, g] = 1.0 - mass / p.sum()
    return o, present_k, present_v, dropped, kept
