"""How each mixer of a spec becomes nodes: one function and one row of ``MIXERS`` per kind."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine_configs.spec import Attention, GatedDeltaNet, Mlp, Norm, Rope
from plugins.compressed_sparse_attention.node import compressed_sparse_attention
from plugins.linear_state_replay.node import linear_state_replay

if TYPE_CHECKING:
    from build.graph import GraphBuilder


@dataclass(frozen=True)
class StepInputs:
    """Names of the step's inputs and of what every layer derives from them."""

    input_ids: str
    position_ids: str  # [B, T]
    last_row: str  # [B] int32, seqlens - 1
    total_len: str
    valid_column: str  # [B, 1] int64
    kv_append: str  # [1]
    logit_rows: str
    mask: str  # [B, T, 1] fp32, 0 at padding


def rms_norm(g: GraphBuilder, x: str, path: str, norm: Norm) -> str:
    """RMS norm over the last axis of any x."""
    weight = g.small(path, lambda w: w + norm.offset)
    node = f"/{path.replace('.', '/')}"
    return str(g.op("RMSNormalization", [x, weight], node, axis=-1, epsilon=norm.eps))


def silu(g: GraphBuilder, x: str, path: str) -> str:
    gate = g.op("Sigmoid", [x], f"{path}/sigmoid")
    return str(g.op("Mul", [x, gate], path))


def attention(g: GraphBuilder, step: StepInputs, i: int, path: str, m: Attention, x: str) -> str:
    """Hidden [B, T, H] → [B, T, H]; the K/V rows of the step go into the slot unless replaying."""
    node = f"/{path.replace('.', '/')}"
    # Sliced before the projections: a replay pays nothing for keys and values it must not write.
    new = g.slice(x, 0, step.kv_append, 1, f"{node}/kv_rows")
    q = g.linear(x, f"{path}.q_proj")
    k = g.linear(new, f"{path}.k_proj")
    v = g.linear(new, f"{path}.v_proj")
    if m.qk_norm:
        q = _qk_norm(g, q, f"{path}.q_norm", m, m.num_heads)
        k = _qk_norm(g, k, f"{path}.k_norm", m, m.num_kv_heads)
    if m.rope:
        cos, sin = _rope_tables(g, step, m.rope)
        rows = [
            g.slice(t, 0, step.kv_append, 1, f"{node}/rope_rows/{n}")
            for t, n in ((cos, "cos"), (sin, "sin"))
        ]
        q = _rotate(g, q, [cos, sin], m, m.num_heads, f"{node}/q_rope")
        k = _rotate(g, k, rows, m, m.num_kv_heads, f"{node}/k_rope")
    slot = ["B", m.num_kv_heads, "C", m.head_dim]
    past = [g.input(f"past_{n}_{i}", slot) for n in ("key", "value")]
    present = (g.output(f"present_key_{i}", slot), g.output(f"present_value_{i}", slot))
    o = compressed_sparse_attention(
        g,
        node,
        [q, k, v, *past, step.last_row, step.total_len, step.position_ids],
        present,
        num_heads=m.num_heads,
        num_kv_heads=m.num_kv_heads,
        head_dim=m.head_dim,
        scale=m.scale,
    )
    return g.linear(o, f"{path}.o_proj")


def _qk_norm(g: GraphBuilder, x: str, path: str, m: Attention, heads: int) -> str:
    assert m.qk_norm is not None
    if m.qk_norm_over == "all":
        return rms_norm(g, x, path, m.qk_norm)
    node = f"/{path.replace('.', '/')}"
    split = g.reshape(x, [0, 0, heads, m.head_dim], f"{node}/heads")
    normed = rms_norm(g, split, path, m.qk_norm)
    return g.reshape(normed, [0, 0, heads * m.head_dim], f"{node}/flat")


def _rope_tables(g: GraphBuilder, step: StepInputs, rope: Rope) -> tuple[str, str]:
    """cos and sin [B, T, dim/2] of this step's positions, shared by all layers."""
    tag = f"/rope/{zlib.crc32(repr(rope).encode()):08x}"
    names = (f"{tag}/cos", f"{tag}/sin")
    if not any(n.name == names[0] for n in g.nodes):
        freq = g.array(f"rope.inv_freq{tag}", np.asarray(rope.inv_freq, np.float32)[None, None])
        position = g.op("Unsqueeze", [step.position_ids, g.const([2])], f"{tag}/column")
        position = g.op("Cast", [position], f"{tag}/position", to=1)
        angle = g.op("Mul", [position, freq], f"{tag}/angle")
        factor = g.const(rope.attention_factor, np.float32)
        for kind, name in (("Cos", names[0]), ("Sin", names[1])):
            g.op("Mul", [g.op(kind, [angle], f"{name}/raw"), factor], name)
    return names


def _rotate(g: GraphBuilder, x: str, tables: list[str], m: Attention, heads: int, path: str) -> str:
    assert m.rope is not None
    dim = 2 * len(m.rope.inv_freq)
    return str(
        g.op(
            "RotaryEmbedding",
            [x, *tables],
            path,
            num_heads=heads,
            rotary_embedding_dim=0 if dim == m.head_dim else dim,
        )
    )


def mlp(g: GraphBuilder, step: StepInputs, i: int, path: str, m: Mlp, x: str) -> str:
    node = f"/{path.replace('.', '/')}"
    gate = silu(g, g.linear(x, f"{path}.gate_proj"), f"{node}/silu")
    inner = g.op("Mul", [gate, g.linear(x, f"{path}.up_proj")], f"{node}/gated")
    return g.linear(inner, f"{path}.down_proj")


def causal_conv(
    g: GraphBuilder, step: StepInputs, i: int, path: str, width: int, channels: int, x: str
) -> str:
    """Depthwise causal convolution of x [B, T, channels] that carries its last W-1 inputs.

    Written as W shifted products: every output row is the same sum in the same order whatever T
    is, so a token's result does not depend on how the sequence was cut (ONNX's Conv does).
    """
    node = f"/{path.replace('.', '/')}/conv"
    shape = ["B", width - 1, channels]
    past = g.input(f"conv_state_{i}", shape)
    joined = g.op("Concat", [past, x], f"{node}/joined", axis=1)
    weights = g.read(f"{path}.conv").astype(np.float32)
    total = ""
    for tap in range(width):
        end = tap - width + 1 or np.iinfo(np.int64).max
        rows = g.slice(joined, tap, end, 1, f"{node}/rows_{tap}")
        weight = g.array(f"{path}.conv.{tap}", weights[:, tap])
        product = g.op("Mul", [rows, weight], f"{node}/tap_{tap}")
        total = g.op("Add", [total, product], f"{node}/sum_{tap}") if total else product
    # The state after the last token that is not padding: rows valid_len .. valid_len + W-2.
    rows = g.op("Add", [step.valid_column, g.const([list(range(width - 1))])], f"{node}/keep")
    index = g.op("Unsqueeze", [rows, g.const([2])], f"{node}/keep_index")
    present = g.output(f"present_conv_state_{i}", shape)
    g.op("GatherND", [joined, index], f"{node}/state", outputs=[present], batch_dims=1)
    return total


def gated_delta_net(
    g: GraphBuilder, step: StepInputs, i: int, path: str, m: GatedDeltaNet, x: str
) -> str:
    """Hidden [B, T, H] → [B, T, H]; transformers' ``*GatedDeltaNet`` modules."""
    node = f"/{path.replace('.', '/')}"
    k_size, v_size = m.num_k_heads * m.key_dim, m.num_v_heads * m.value_dim
    parts = [g.linear(x, f"{path}.{n}_proj") for n in ("q", "k", "v")]
    mixed = g.op("Concat", parts, f"{node}/qkv", axis=-1)
    conv = causal_conv(g, step, i, path, m.conv_width, m.conv_channels, mixed)
    mixed = silu(g, conv, f"{node}/conv/silu")
    sizes = g.const([k_size, k_size, v_size])
    q, k, v = g.op("Split", [mixed, sizes], f"{node}/split", outputs=3, axis=-1)
    q, k = (
        _l2_norm(g, t, m.num_k_heads, m.key_dim, f"{node}/{n}_l2") for t, n in ((q, "q"), (k, "k"))
    )
    log_decay = _log_decay(g, step, i, path, x, m.units())
    beta = g.op("Sigmoid", [g.linear(x, f"{path}.b_proj")], f"{node}/beta")
    scaled = g.op("Mul", [step.mask, g.const(m.beta_scale, np.float32)], f"{node}/beta_mask")
    beta = g.op("Mul", [beta, scaled], f"{node}/beta_masked")
    shape = ["B", *m.recurrent_state()]
    o = linear_state_replay(
        g,
        node,
        [q, k, v, g.input(f"recurrent_state_{i}", shape), log_decay, beta],
        g.output(f"present_recurrent_state_{i}", shape),
        update_rule="gated_delta",
        q_heads=m.num_k_heads,
        v_heads=m.num_v_heads,
        key_dim=m.key_dim,
        value_dim=m.value_dim,
        scale=m.key_dim**-0.5,
    )
    heads = g.reshape(o, [0, 0, m.num_v_heads, m.value_dim], f"{node}/o_heads")
    normed = rms_norm(g, heads, f"{path}.o_norm", Norm(m.norm_eps))
    flat = g.reshape(normed, [0, 0, v_size], f"{node}/o_flat")
    gate = silu(g, g.linear(x, f"{path}.g_proj"), f"{node}/gate")
    return g.linear(g.op("Mul", [flat, gate], f"{node}/o_gated"), f"{path}.o_proj")


def _log_decay(g: GraphBuilder, step: StepInputs, i: int, path: str, x: str, units: int) -> str:
    """``-exp(A_log) * softplus(a + dt_bias)`` [B, T, units], 0 at padding; its sum is an output."""
    node = f"/{path.replace('.', '/')}/log_decay"
    biased = g.op("Add", [g.linear(x, f"{path}.a_proj"), g.small(f"{path}.dt_bias")], f"{node}/dt")
    soft = g.op("Softplus", [biased], f"{node}/softplus")
    rate = g.small(f"{path}.A_log", lambda a: -np.exp(a.astype(np.float64)))
    masked = g.op("Mul", [rate, step.mask], f"{node}/rate")
    decay = g.op("Mul", [soft, masked], node)
    total = g.output(f"decay_sum_{i}", ["B", units])
    g.op("ReduceSum", [decay, g.const([1])], f"{node}/sum", outputs=[total], keepdims=0)
    return str(decay)


def _l2_norm(g: GraphBuilder, x: str, heads: int, dim: int, path: str) -> str:
    """``x / sqrt(sum x² + 1e-6)`` per head, as the RMS norm it is up to a factor sqrt(dim)."""
    split = g.reshape(x, [0, 0, heads, dim], f"{path}/heads")
    weight = g.const(np.full(dim, dim**-0.5), np.float32)
    normed = g.op("RMSNormalization", [split, weight], path, axis=-1, epsilon=1e-6 / dim)
    return g.reshape(normed, [0, 0, heads * dim], f"{path}/flat")


MIXERS: dict[type, Callable[..., Any]] = {
    Attention: attention,
    GatedDeltaNet: gated_delta_net,
    Mlp: mlp,
}
