"""Softmax attention over a K/V slot, plain and latent."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

from build.mixers.common import StepInputs, node_path, per_head, rms_norm
from engine_configs.mixers import AttentionMixer
from engine_configs.spec import Attention, LatentAttention, Rope
from plugins.compressed_sparse_attention.node import Compression, compressed_sparse_attention
from plugins.compressed_sparse_attention.paged import paged_attention
from serving.engine.profiles import BLOCK_TOKENS

if TYPE_CHECKING:
    from build.graph import GraphBuilder


def attention(g: GraphBuilder, step: StepInputs, i: int, path: str, m: Attention, x: str) -> str:
    """The K/V rows of the step go into the slot unless replaying."""
    node = node_path(path)
    new = _kv_rows(g, step, x, f"{node}/kv_rows")
    q = g.linear(x, f"{path}.q_proj")
    k = g.linear(new, f"{path}.k_proj")
    v = g.linear(new, f"{path}.v_proj")
    if m.qk_norm:
        q = _qk_norm(g, q, f"{path}.q_norm", m, m.num_heads)
        k = _qk_norm(g, k, f"{path}.k_norm", m, m.num_kv_heads)
    if m.rope:
        cos, sin = _rope_tables(g, step, m.rope)
        rows = [
            _kv_rows(g, step, t, f"{node}/rope_rows/{n}") for t, n in ((cos, "cos"), (sin, "sin"))
        ]
        q = _rotate(g, q, [cos, sin], m, m.num_heads, f"{node}/q_rope")
        k = _rotate(g, k, rows, m, m.num_kv_heads, f"{node}/k_rope")
    o = _attend(g, step, i, node, m, q, k, v)
    if m.gated:
        gate = g.op("Sigmoid", [g.linear(x, f"{path}.g_proj")], f"{node}/gate")
        o = g.op("Mul", [o, gate], f"{node}/gated")
    return g.linear(o, f"{path}.o_proj", bias=m.out_bias)


def latent_attention(
    g: GraphBuilder, step: StepInputs, i: int, path: str, m: LatentAttention, x: str
) -> str:
    """Absorbed form: K rows are ``[latent | shared]``; V rows too, of which the latent is used.

    q' = [k_b^T q_nope | q_shared], o = v_b (softmax(q' K) V) per head.
    """
    node = node_path(path)
    new = _kv_rows(g, step, x, f"{node}/kv_rows")
    sizes = g.const([m.kv_rank, m.shared_dim])
    joined = g.linear(new, f"{path}.kv_a_proj")
    latent, shared = g.op("Split", [joined, sizes], f"{node}/kv_split", outputs=2, axis=-1)
    latent = rms_norm(g, latent, f"{path}.kv_norm", m.norm)
    k = g.op("Concat", [latent, shared], f"{node}/k", axis=-1)

    q = g.linear(x, f"{path}.q_proj")
    q = g.reshape(q, [0, 0, m.num_heads, m.nope_dim + m.shared_dim], f"{node}/q_heads")
    sizes = g.const([m.nope_dim, m.shared_dim])
    nope, shared = g.op("Split", [q, sizes], f"{node}/q_split", outputs=2, axis=-1)
    absorbed = per_head(g, nope, g.experts(f"{path}.k_b"), f"{node}/k_b")
    q = g.op("Concat", [absorbed, shared], f"{node}/q", axis=-1)
    q = g.reshape(q, [0, 0, m.num_heads * m.head_dim], f"{node}/q_flat")

    o = _attend(g, step, i, node, m, q, k, k)
    o = g.reshape(o, [0, 0, m.num_heads, m.head_dim], f"{node}/o_heads")
    o = g.slice(o, 0, m.kv_rank, 3, f"{node}/o_latent")
    o = per_head(g, o, g.experts(f"{path}.v_b", transpose=True), f"{node}/v_b")
    o = g.reshape(o, [0, 0, m.num_heads * m.output_dim], f"{node}/o_flat")
    return g.linear(o, f"{path}.o_proj")


def _kv_rows(g: GraphBuilder, step: StepInputs, x: str, path: str) -> str:
    """The rows whose K/V is written, cut before the projections: a replay pays nothing for keys
    and values that it must not write. A plugin is told so instead."""
    return x if g.lowering == "tensorrt" else g.slice(x, 0, step.kv_append, 1, path)


def _attend(
    g: GraphBuilder,
    step: StepInputs,
    i: int,
    node: str,
    m: AttentionMixer,
    q: str,
    k: str,
    v: str,
) -> str:
    window = m.window if isinstance(m, Attention) else None
    if g.lowering == "tensorrt":
        pool = ["P", BLOCK_TOKENS, m.num_kv_heads, m.head_dim]
        past = [g.input(f"{n}_pool_{i}", pool, g.half) for n in ("key", "value")]
        key, value = (g.output(f"present_{name}", pool, g.half) for name in past)
        return paged_attention(
            g,
            node,
            [q, k, v, *past, step.block_table, step.seqlens, step.kv_append],
            (key, value),
            layer=i,
            num_heads=m.num_heads,
            num_kv_heads=m.num_kv_heads,
            head_dim=m.head_dim,
            scale=m.scale,
            window=window,
        )
    if g.lowering == "ort":  # a value that is there anyhow: it costs nothing unless asked for
        q = g.rename(q, g.output(f"query_{i}", ["B", step.tokens, m.num_heads * m.head_dim]))
    slot = ["B", m.num_kv_heads, "C", m.head_dim]
    past = [g.input(f"past_{n}_{i}", slot) for n in ("key", "value")]
    present = (g.output(f"present_key_{i}", slot), g.output(f"present_value_{i}", slot))
    return compressed_sparse_attention(
        g,
        node,
        [q, k, v, *past, step.last_row, step.total_len, step.position_ids],
        present,
        num_heads=m.num_heads,
        num_kv_heads=m.num_kv_heads,
        head_dim=m.head_dim,
        scale=m.scale,
        window=window,
        compression=_compression(g, i, m) if g.lowering == "ort" and not window else None,
    )


def _compression(g: GraphBuilder, i: int, m: AttentionMixer) -> Compression:
    """What a decode step over a compressed slot brings and gives; absent, the step is dense."""
    heads, entries = m.num_kv_heads, ["Bc", m.num_kv_heads, f"S_{i}"]
    half, int32 = TensorProto.FLOAT16, TensorProto.INT32
    summaries, stats = [*entries, 3 * m.head_dim], [*entries, 2]
    per_query = ["B", m.num_heads]
    return Compression(
        kv_rows=g.optional_input(f"kv_rows_{i}", ["Bc", heads], int32),
        summaries=g.optional_input(f"summaries_{i}", summaries, half),
        stats=g.optional_input(f"stats_{i}", stats),
        epsilon=g.optional_input("epsilon", ["Bc"]),
        factor=g.optional_input("bound_factor", ["Bc"]),
        host_k=g.optional_input(f"host_key_{i}", ["N"]),
        host_v=g.optional_input(f"host_value_{i}", ["N"]),
        host_rows=g.optional_input(f"host_rows_{i}", ["Bc", heads, "R"], int32),
        host_first=g.optional_input(f"host_first_{i}", entries, int32),
        present_summaries=g.output(f"present_summaries_{i}", summaries, half),
        present_stats=g.output(f"present_stats_{i}", stats),
        error_bound=g.output(f"error_bound_{i}", per_query),
        mass_read=g.output(f"mass_read_{i}", per_query),
        rows_read=g.output(f"rows_read_{i}", ["B", heads], int32),
        chosen=g.output(f"chosen_{i}", ["B", *entries[1:]], TensorProto.UINT8),
    )


def _qk_norm(g: GraphBuilder, x: str, path: str, m: Attention, heads: int) -> str:
    assert m.qk_norm is not None
    if m.qk_norm_over == "all":
        return rms_norm(g, x, path, m.qk_norm)
    node = node_path(path)
    split = g.reshape(x, [0, 0, heads, m.head_dim], f"{node}/heads")
    normed = rms_norm(g, split, path, m.qk_norm)
    return g.reshape(normed, [0, 0, heads * m.head_dim], f"{node}/flat")


def _rope_tables(g: GraphBuilder, step: StepInputs, rope: Rope) -> tuple[str, str]:
    """cos and sin [B, T, dim/2] of the positions at hand, shared by all layers that see them."""
    tag = f"/rope/{step.tokens}/{zlib.crc32(repr(rope).encode()):08x}"
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
