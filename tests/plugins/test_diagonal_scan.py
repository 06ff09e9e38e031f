"""The diagonal op: reference against a closed form, ONNX forms against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from plugins.diagonal_scan.node import diagonal_scan as emit
from plugins.diagonal_scan.ref import diagonal_scan
from tests.plugins.running import run_op

Array = NDArray[Any]
# B, T, D, N; N = 1 is the RG-LRU.
SHAPES = [(1, 1, 1, 1), (2, 7, 5, 1), (1, 129, 24, 16), (3, 65, 7, 3), (2, 1, 33, 16)]


def inputs(shape: tuple[int, int, int, int], seed: int = 0) -> dict[str, Array]:
    B, T, D, N = shape
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((B, T, D)),
        "dt": np.exp(rng.uniform(-6, 0, (B, T, D))),
        "rate": -np.exp(rng.uniform(-4, 1, (D, N))),
        "b": rng.standard_normal((B, T, N)),
        "c": rng.standard_normal((B, T, N)),
        "past": rng.standard_normal((B, D, N, 1)),
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_the_sum_over_the_past(shape: tuple[int, int, int, int]) -> None:
    """h_t = exp(rate * sum dt) h_0 + sum_s exp(rate * sum_{s+1..t} dt) x_s b_s."""
    i = inputs(shape)
    y, present = diagonal_scan(*i.values())
    elapsed = np.cumsum(i["dt"], axis=1)[..., None] * i["rate"]  # [B, T, D, N]
    pushed = i["x"][..., None] * i["b"][:, :, None] * np.exp(elapsed[:, -1:] - elapsed)
    want = np.exp(elapsed[:, -1]) * i["past"][..., 0] + pushed.sum(axis=1)
    np.testing.assert_allclose(present[..., 0], want, rtol=1e-9, atol=1e-12)
    last = np.einsum("bdn,bn->bd", want, i["c"][:, -1])
    np.testing.assert_allclose(y[:, -1], last, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lowering", ["ort", "standard"])
@pytest.mark.parametrize("shape", SHAPES)
def test_onnx_forms_are_the_reference(shape: tuple[int, int, int, int], lowering: str) -> None:
    feeds = {name: a.astype(np.float32) for name, a in inputs(shape).items()}
    got = run_op(
        lowering, feeds, {"present": "past"}, lambda g: emit(g, "scan", list(feeds), "present")
    )
    for have, want in zip(got, diagonal_scan(*feeds.values()), strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-5)
