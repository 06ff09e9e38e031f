"""The linear-state op: reference against independent formulas, ONNX forms against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import torch_recurrent_gated_delta_rule

from plugins.linear_state_replay.node import linear_state_replay as emit
from plugins.linear_state_replay.ref import RULES, linear_state_replay
from plugins.onnx_graph import Nodes
from tests.plugins.running import run_op

Array = NDArray[Any]


@dataclass(frozen=True)
class Shape:
    B: int
    T: int
    Hq: int
    Hv: int
    dk: int
    dv: int
    past: bool
    per_channel: bool = False
    padding: int = 0  # last tokens of the last sequence that must not count


SHAPES = [
    Shape(1, 1, 1, 1, 4, 4, past=False),
    Shape(1, 1, 2, 2, 8, 16, past=True),
    Shape(2, 7, 2, 2, 8, 8, past=False),
    Shape(2, 7, 2, 6, 8, 24, past=True),
    Shape(1, 129, 4, 4, 16, 32, past=True),
    Shape(3, 65, 1, 4, 16, 8, past=True),
    Shape(2, 33, 2, 2, 12, 20, past=True, per_channel=True),
    Shape(1, 1, 2, 4, 8, 8, past=True, per_channel=True),
    Shape(2, 11, 2, 4, 8, 8, past=True, padding=4),
]
CASES = [
    pytest.param(rule, s, id=f"{rule}-{i}")
    for rule in RULES
    for i, s in enumerate(SHAPES)
    if not s.per_channel or "gated" in rule
]


def inputs(rule: str, s: Shape, seed: int = 0) -> dict[str, Array]:
    """Keys of unit length, decays from nearly none to strong, beta in (0, 2)."""
    rng = np.random.default_rng(seed)
    x: dict[str, Array] = {
        "q": rng.standard_normal((s.B, s.T, s.Hq, s.dk)),
        "k": rng.standard_normal((s.B, s.T, s.Hq, s.dk)),
        "v": rng.standard_normal((s.B, s.T, s.Hv, s.dv)),
        "past_state": s.past * rng.standard_normal((s.B, s.Hv, s.dk, s.dv)),
    }
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    if "gated" in rule:
        size = (s.B, s.T, s.Hv, s.dk) if s.per_channel else (s.B, s.T, s.Hv)
        x["log_decay"] = -np.exp(rng.uniform(-8, 0.5, size))
    if "delta" in rule:
        x["beta"] = rng.uniform(0, 2, (s.B, s.T, s.Hv))
    if s.padding:  # as the graph does it: nothing decays, nothing is written
        for name, value in x.items():
            if name in ("log_decay", "beta") or (name == "k" and "delta" not in rule):
                value[-1, -s.padding :] = 0
    return {name: value.astype(np.float32) for name, value in x.items()}


def run_onnx(lowering: str, rule: str, s: Shape, x: dict[str, Array]) -> tuple[Array, Array]:
    feeds = {n: a if n == "past_state" else a.reshape(s.B, s.T, -1) for n, a in x.items()}

    def op(g: Nodes) -> str:
        names = [n if n in x else "" for n in ("q", "k", "v", "past_state", "log_decay", "beta")]
        return emit(
            g, "/op", names, "present", update_rule=rule, q_heads=s.Hq, v_heads=s.Hv,
            key_dim=s.dk, value_dim=s.dv, scale=s.dk**-0.5,
        )  # fmt: skip

    o, present = run_op(lowering, feeds, {"present": "past_state"}, op)
    return o.reshape(s.B, s.T, s.Hv, s.dv), present


@pytest.mark.parametrize("lowering", ["ort", "standard"])
@pytest.mark.parametrize(("rule", "s"), CASES)
def test_onnx_form_computes_the_reference(lowering: str, rule: str, s: Shape) -> None:
    x = inputs(rule, s)
    want_o, want_state = linear_state_replay(**x, update_rule=rule, scale=s.dk**-0.5)
    o, state = run_onnx(lowering, rule, s, x)
    size = max(1.0, np.abs(want_o).max(), np.abs(want_state).max())
    valid = np.ones((s.B, s.T), bool)
    valid[-1, s.T - s.padding :] = False
    assert np.abs(o - want_o)[valid].max() < 2e-6 * size
    assert np.abs(state - want_state).max() < 2e-6 * size


@pytest.mark.parametrize("lowering", ["ort", "standard"])
@pytest.mark.parametrize("rule", RULES)
def test_padding_leaves_every_bit_of_the_state(lowering: str, rule: str) -> None:
    padded = Shape(1, 9, 2, 2, 8, 8, past=True, padding=5)
    x = inputs(rule, padded)
    short = Shape(1, 4, 2, 2, 8, 8, past=True)
    cut = {n: a if n == "past_state" else a[:, :4] for n, a in x.items()}
    o, state = run_onnx(lowering, rule, padded, x)
    want_o, want_state = run_onnx(lowering, rule, short, cut)
    assert np.array_equal(state, want_state)
    assert np.array_equal(o[:, :4], want_o)


@pytest.mark.parametrize("rule", RULES)
def test_any_cut_gives_the_same_bits(rule: str) -> None:
    """A sequence run in two steps, the state carried over, is the sequence run in one."""
    whole = Shape(1, 70, 2, 4, 8, 16, past=True)
    x = inputs(rule, whole)
    o, state = run_onnx("ort", rule, whole, x)
    for cut in (2, 33, 64, 68):
        parts, carried = [], x["past_state"]
        for part in (slice(0, cut), slice(cut, 70)):
            step = {n: a if n == "past_state" else a[:, part] for n, a in x.items()}
            step["past_state"] = carried
            length = step["q"].shape[1]
            out, carried = run_onnx("ort", rule, Shape(1, length, 2, 4, 8, 16, True), step)
            parts.append(out)
        assert np.array_equal(np.concatenate(parts, 1), o)
        assert np.array_equal(carried, state)


def test_reference_is_the_gated_delta_rule_of_transformers() -> None:
    s = Shape(2, 37, 3, 3, 8, 16, past=True)
    x = inputs("gated_delta", s)
    t = {n: torch.from_numpy(a).float() for n, a in x.items()}
    o, state = torch_recurrent_gated_delta_rule(
        t["q"], t["k"], t["v"], t["log_decay"], t["beta"],
        initial_state=t["past_state"], output_final_state=True,
    )  # fmt: skip
    want_o, want_state = linear_state_replay(**x, update_rule="gated_delta", scale=8**-0.5)
    assert np.abs(o.numpy() - want_o).max() < 1e-5
    assert np.abs(state.numpy() - want_state).max() < 1e-5


@pytest.mark.parametrize("per_channel", [False, True])
def test_reference_without_delta_is_a_decayed_sum(per_channel: bool) -> None:
    """Gated linear attention, unrolled: o_t = Σ_s (q_t · Π_{u=s+1..t} α_u k_s) v_s."""
    s = Shape(1, 9, 1, 2, 4, 6, past=False, per_channel=per_channel)
    x = {n: a.astype(np.float64) for n, a in inputs("gated", s).items()}
    log_decay = x["log_decay"] if per_channel else x["log_decay"][..., None]
    o, _ = linear_state_replay(**x, update_rule="gated", scale=0.5)
    for h in range(s.Hv):
        for t in range(s.T):
            want = np.zeros(s.dv)
            for u in range(t + 1):
                alpha = np.exp(log_decay[0, u + 1 : t + 1, h].sum(axis=0))
                want += 0.5 * (x["q"][0, t, 0] * alpha) @ x["k"][0, u, 0] * x["v"][0, u, h]
            assert np.abs(o[0, t, h] - want).max() < 1e-12


def test_reference_delta_rule_is_a_product_of_householder_like_matrices() -> None:
    """S_t = (I - β k kᵀ) S_{t-1} + β k vᵀ, written with the matrix spelt out."""
    s = Shape(1, 12, 1, 1, 5, 3, past=True)
    x = {n: a.astype(np.float64) for n, a in inputs("delta", s).items()}
    _, state = linear_state_replay(**x, update_rule="delta", scale=1.0)
    want = x["past_state"][0, 0]
    for t in range(s.T):
        k, v, beta = x["k"][0, t, 0], x["v"][0, t, 0], x["beta"][0, t, 0]
        want = (np.eye(5) - beta * np.outer(k, k)) @ want + beta * np.outer(k, v)
    assert np.abs(state[0, 0] - want).max() < 1e-12


def test_reference_refuses_an_unknown_rule() -> None:
    x = inputs("linear", SHAPES[0])
    with pytest.raises(ValueError, match="'quadratic'"):
        linear_state_replay(**x, update_rule="quadratic", scale=1.0)
