"""Mixers that carry a state: delta rules, Mamba-2, lightning attention, short convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from build.mixers.common import (
    StepInputs,
    activate,
    causal_conv,
    masked_dt,
    node_path,
    plain_rms_norm,
    precise_sigmoid,
    rms_norm,
    silu,
)
from engine_configs.mixer import MixerBase
from engine_configs.spec import GatedDeltaNet, Lightning, Mamba2, Norm, ShortConv
from plugins.linear_state_replay.node import linear_state_replay

if TYPE_CHECKING:
    from build.graph import GraphBuilder


def gated_delta_net(
    g: GraphBuilder, step: StepInputs, i: int, path: str, m: GatedDeltaNet, x: str
) -> str:
    """transformers' ``*GatedDeltaNet`` and ``KimiLinearDeltaAttention`` modules."""
    node = node_path(path)
    k_size, v_size = m.num_k_heads * m.key_dim, m.num_v_heads * m.value_dim
    parts = [g.linear(x, f"{path}.{n}_proj") for n in ("q", "k", "v")]
    mixed = g.op("Concat", parts, f"{node}/qkv", axis=-1)
    mixed = causal_conv(g, step, i, path, m.conv_width, m.conv_channels, mixed, silu=True)
    sizes = g.const([k_size, k_size, v_size])
    q, k, v = g.op("Split", [mixed, sizes], f"{node}/split", outputs=3, axis=-1)
    q, k = (
        _l2_norm(g, t, m.num_k_heads, m.key_dim, f"{node}/{n}_l2") for t, n in ((q, "q"), (k, "k"))
    )
    dt = masked_dt(g, step, path, _projected(g, x, f"{path}.a", m.decay_rank))
    repeats = m.units() // m.num_v_heads
    log_decay = _log_decay(g, i, path, dt, m.units(), repeats)
    beta = precise_sigmoid(g, g.linear(x, f"{path}.b_proj"), f"{node}/beta")
    scaled = g.op("Mul", [step.mask, g.const(m.beta_scale, np.float32)], f"{node}/beta_mask")
    beta = g.op("Mul", [beta, scaled], f"{node}/beta_masked")
    o = _replay(
        g, i, node, m, [q, k, v], log_decay, beta, q_heads=m.num_k_heads, scale=m.key_dim**-0.5
    )
    heads = g.reshape(o, [0, 0, m.num_v_heads, m.value_dim], f"{node}/o_heads")
    normed = rms_norm(g, heads, f"{path}.o_norm", Norm(m.norm_eps))
    flat = g.reshape(normed, [0, 0, v_size], f"{node}/o_flat")
    gate = activate(g, _projected(g, x, f"{path}.g", m.gate_rank), m.gate, f"{node}/gate")
    return g.linear(g.op("Mul", [flat, gate], f"{node}/o_gated"), f"{path}.o_proj")


def mamba2(g: GraphBuilder, step: StepInputs, i: int, path: str, m: Mamba2, x: str) -> str:
    """transformers' ``BambaMixer`` and its kin: q = C, k = B, v = dt x."""
    node = node_path(path)
    groups = m.num_groups * m.state_size
    sizes = g.const([m.inner, m.conv_channels, m.num_heads])
    joined = g.linear(x, f"{path}.in_proj")
    z, xbc, dt = g.op("Split", [joined, sizes], f"{node}/in_split", outputs=3, axis=-1)
    mixed = causal_conv(
        g, step, i, path, m.conv_width, m.conv_channels, xbc, bias=m.conv_bias, silu=True
    )
    sizes = g.const([m.inner, groups, groups])
    inner, b, c = g.op("Split", [mixed, sizes], f"{node}/split", outputs=3, axis=-1)
    dt = masked_dt(g, step, path, dt, m.dt_min, m.dt_max)
    log_decay = _log_decay(g, i, path, dt, m.num_heads, 1)
    heads = g.reshape(inner, [0, 0, m.num_heads, m.head_dim], f"{node}/x_heads")
    column = g.op("Unsqueeze", [dt, g.const([3])], f"{node}/dt_column")
    v = g.op("Mul", [heads, column], f"{node}/v_heads")
    v = g.reshape(v, [0, 0, m.inner], f"{node}/v")
    o = _replay(g, i, node, m, [c, b, v], log_decay, "", q_heads=m.num_groups, scale=1.0)
    skip = g.small(f"{path}.D", lambda d: np.repeat(d, m.head_dim))
    o = g.op("Add", [o, g.op("Mul", [inner, skip], f"{node}/skip")], f"{node}/o_skipped")
    return g.linear(_gated_norm(g, path, m, o, z), f"{path}.o_proj")


def lightning(g: GraphBuilder, step: StepInputs, i: int, path: str, m: Lightning, x: str) -> str:
    """transformers' ``MiniMaxLightningAttention``: the decay depends on the head alone."""
    node = node_path(path)
    q, k, v = (
        silu(g, g.linear(x, f"{path}.{n}_proj"), f"{node}/{n}_silu") for n in ("q", "k", "v")
    )
    v = g.op("Mul", [v, step.mask], f"{node}/v_masked")
    rates = g.array(f"{path}.log_decay", np.asarray(m.log_decay, np.float32))
    decay = g.op("Mul", [rates, step.mask], f"{node}/log_decay")
    decay = _with_sum(g, i, decay, m.num_heads, f"{node}/log_decay")
    o = _replay(g, i, node, m, [q, k, v], decay, "", q_heads=m.num_heads, scale=1.0)
    o = rms_norm(g, o, f"{path}.o_norm", m.norm)
    gate = g.op("Sigmoid", [g.linear(x, f"{path}.g_proj")], f"{node}/gate")
    return g.linear(g.op("Mul", [o, gate], f"{node}/o_gated"), f"{path}.o_proj")


def short_conv(g: GraphBuilder, step: StepInputs, i: int, path: str, m: ShortConv, x: str) -> str:
    """transformers' ``Lfm2ShortConv``."""
    node = node_path(path)
    joined = g.linear(x, f"{path}.in_proj")
    sizes = g.const([m.channels] * 3)
    b, c, inner = g.op("Split", [joined, sizes], f"{node}/split", outputs=3, axis=-1)
    gated = g.op("Mul", [b, inner], f"{node}/gated")
    conv = causal_conv(g, step, i, path, m.conv_width, m.channels, gated)
    return g.linear(g.op("Mul", [c, conv], f"{node}/o"), f"{path}.o_proj")


def _replay(
    g: GraphBuilder,
    i: int,
    node: str,
    m: MixerBase,
    qkv: list[str],
    log_decay: str,
    beta: str,
    *,
    q_heads: int,
    scale: float,
) -> str:
    heads, key_dim, value_dim = m.recurrent_state()
    shape = ["B", heads, key_dim, value_dim]
    return linear_state_replay(
        g,
        node,
        [*qkv, g.input(f"recurrent_state_{i}", shape), log_decay, beta],
        g.output(f"present_recurrent_state_{i}", shape),
        update_rule="gated_delta" if beta else "gated",
        q_heads=q_heads,
        v_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=scale,
    )


def _projected(g: GraphBuilder, x: str, path: str, rank: int) -> str:
    """x through ``path``_proj, or through its two low-rank factors."""
    if not rank:
        return g.linear(x, f"{path}_proj")
    return g.linear(g.linear(x, f"{path}_a_proj"), f"{path}_b_proj")


def _log_decay(g: GraphBuilder, i: int, path: str, dt: str, units: int, repeats: int) -> str:
    """``-exp(A_log) * dt`` [B, T, units]; A_log is per head, dt per head or per key channel."""
    node = f"{node_path(path)}/log_decay"
    rate = g.small(f"{path}.A_log", lambda a: np.repeat(-np.exp(a.astype(np.float64)), repeats))
    return _with_sum(g, i, g.op("Mul", [dt, rate], node), units, node)


def _with_sum(g: GraphBuilder, i: int, log_decay: str, units: int, node: str) -> str:
    total = g.output(f"decay_sum_{i}", ["B", units])
    g.op("ReduceSum", [log_decay, g.const([1])], f"{node}/sum", outputs=[total], keepdims=0)
    return log_decay


def _gated_norm(g: GraphBuilder, path: str, m: Mamba2, o: str, z: str) -> str:
    """Gate by silu(z) and norm each of the G groups of channels, in the order the model has."""
    node = node_path(path)
    gate = silu(g, z, f"{node}/gate")
    if m.norm is None:
        return str(g.op("Mul", [o, gate], f"{node}/o_gated"))
    if not m.norm_before_gate:
        o = g.op("Mul", [o, gate], f"{node}/o_gated")
    size = m.inner // m.num_groups
    grouped = g.reshape(o, [0, 0, m.num_groups, size], f"{node}/o_groups")
    normed = plain_rms_norm(g, grouped, size, m.norm.eps, f"{node}/o_norm/groups")
    flat = g.reshape(normed, [0, 0, m.inner], f"{node}/o_norm/flat")
    o = g.op("Mul", [flat, g.small(f"{path}.o_norm")], f"{node}/o_norm")
    return str(g.op("Mul", [o, gate], f"{node}/o_gated")) if m.norm_before_gate else o


def _l2_norm(g: GraphBuilder, x: str, heads: int, dim: int, path: str) -> str:
    """``x / sqrt(sum x² + 1e-6)`` per head, as the RMS norm it is up to a factor sqrt(dim)."""
    split = g.reshape(x, [0, 0, heads, dim], f"{path}/heads")
    normed = plain_rms_norm(g, split, dim, 1e-6 / dim, path, scale=dim**-0.5)
    return g.reshape(normed, [0, 0, heads * dim], f"{path}/flat")
