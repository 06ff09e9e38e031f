"""Attention over a window of the last rows: both ONNX forms against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from plugins.compressed_sparse_attention.node import compressed_sparse_attention as emit
from plugins.compressed_sparse_attention.ref import compressed_sparse_attention
from tests.plugins.running import run_op

Hq, Hk, D, C = 4, 2, 16, 96


@pytest.mark.parametrize("lowering", ["ort", "standard"])
@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize(
    ("T", "total", "window"), [(1, 60, 17), (40, 40, 8), (33, 90, 32), (5, 20, 64)]
)
def test_onnx_forms_are_the_reference(
    lowering: str, append: bool, T: int, total: int, window: int
) -> None:
    rng = np.random.default_rng(T)
    new = T if append else 0
    x = {
        "q": rng.standard_normal((1, T, Hq, D)),
        "k_new": rng.standard_normal((1, new, Hk, D)),
        "v_new": rng.standard_normal((1, new, Hk, D)),
        "past_k": rng.standard_normal((1, Hk, C, D)),
        "past_v": rng.standard_normal((1, Hk, C, D)),
    }
    want, *_ = compressed_sparse_attention(
        **x, total_lens=np.array([total]), scale=D**-0.5, window=window
    )
    everything, *_ = compressed_sparse_attention(**x, total_lens=np.array([total]), scale=D**-0.5)
    assert window >= total or np.abs(want - everything).max() > 1e-2
    feeds = {
        n: (
            a if n.startswith("past") else a.reshape(1, a.shape[1], -1 if a.size else Hk * D)
        ).astype(np.float32)
        for n, a in x.items()
    }
    feeds["seqlens"] = np.array([total - 1], np.int32)
    feeds["total_len"] = np.array(total, np.int32)
    feeds["positions"] = np.arange(total - T, total)[None]
    o, *_ = run_op(
        lowering,
        feeds,
        {"present_k": "past_k", "present_v": "past_v"},
        lambda g: emit(
            g,
            "/op",
            list(feeds),
            ("present_k", "present_v"),
            num_heads=Hq,
            num_kv_heads=Hk,
            head_dim=D,
            scale=D**-0.5,
            window=window,
        ),
    )
    assert np.abs(o.reshape(want.shape) - want).max() < 2e-6
