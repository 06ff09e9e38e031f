"""The convolution: ONNX forms and the CPU kernel against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from plugins.causal_conv.node import causal_conv as emit
from plugins.causal_conv.ref import causal_conv
from tests.plugins.running import FORMS, run_op

Array = NDArray[Any]


@dataclass(frozen=True)
class Shape:
    B: int
    T: int
    C: int
    width: int = 4
    valid: tuple[int, ...] = ()
    bias: bool = False
    silu: bool = False


SHAPES = [
    Shape(1, 1, 1),
    Shape(1, 1, 17, bias=True, silu=True),
    Shape(2, 2, 31, width=3, silu=True),
    Shape(3, 7, 33, valid=(0, 3, 7), bias=True),
    Shape(2, 1, 8, valid=(0, 1)),
    Shape(1, 129, 1040, silu=True),
    Shape(1, 5, 6, width=2, bias=True),
]


def inputs(s: Shape) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    x = {
        "x": rng.standard_normal((s.B, s.T, s.C)),
        "past": rng.standard_normal((s.B, s.width - 1, s.C)),
        "weight": rng.standard_normal((s.width, s.C)),
        "valid_len": np.array(s.valid or [s.T] * s.B),
    }
    if s.bias:
        x["bias"] = rng.standard_normal(s.C)
    return {n: a if n == "valid_len" else a.astype(np.float32) for n, a in x.items()}


def run(form: str, s: Shape, x: dict[str, Array]) -> list[Array]:
    names = [*x, *[""] * (not s.bias)]
    return run_op(
        form,
        x,
        {"present": "past"},
        lambda g: emit(g, "conv", names, "present", width=s.width, silu=s.silu),
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_form_is_the_reference(shape: Shape, form: str) -> None:
    x = inputs(shape)
    got, want = run(form, shape, x), causal_conv(**x, silu=shape.silu)
    np.testing.assert_allclose(got[0], want[0], rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(got[1], want[1].astype(np.float32))


@pytest.mark.parametrize("form", FORMS)
def test_cuts_change_no_bit(form: str) -> None:
    whole = Shape(1, 130, 48, bias=True, silu=True)
    x = inputs(whole)
    y, present = run(form, whole, x)
    rows, state = [], x["past"]
    for start, end in ((0, 1), (1, 2), (2, 67), (67, 130)):
        part = {**x, "x": x["x"][:, start:end], "past": state, "valid_len": np.array([end - start])}
        got, state = run(form, whole, part)
        rows.append(got)
    np.testing.assert_array_equal(np.concatenate(rows, axis=1), y)
    np.testing.assert_array_equal(state, present)
