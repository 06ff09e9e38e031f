"""How TensorRT sees ``hybrid::CompressedSparseAttention``: K/V rows in blocks of a pool.

Inputs   q [B, T, Hq*d], k_new, v_new [B, T, Hk*d] half precision, key_pool, value_pool
         [P, R, Hk, d] half precision (P blocks of R rows), block_table [B, M] int32 (row t of
         sequence b lies in block block_table[b, t // R]), seqlens [B] int32 (tokens visible to the
         last query, its own included), kv_append [1] int32 (0: replay, nothing is written)
Outputs  o [B, T, Hq*d] half precision, the two pools (in place of the inputs)
Attributes  num_heads (Hq), kv_num_heads (Hk), scale, local_window_size (-1: all), layer (whose
         events order the step against copies of K/V)

The switch is a tensor, so that one engine serves prefill, replay and decode; the projections of K
and V of replayed tokens are computed and dropped.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from plugins.compressed_sparse_attention.node import NAME
from plugins.onnx_graph import Nodes, standard_function

INPUTS = ["q", "k_new", "v_new", "key_pool", "value_pool", "block_table", "seqlens", "kv_append"]
OUTPUTS = ["o", "present_key_pool", "present_value_pool"]
ATTRIBUTES = ["num_heads", "kv_num_heads", "scale", "local_window_size", "layer"]


def paged_attention(
    g: Nodes,
    path: str,
    inputs: list[str],
    present: tuple[str, str],
    *,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int | None,
) -> str:
    """Add the plugin; returns o [B, T, Hq*d] fp32. ``inputs`` as above, q, k and v in fp32."""
    half = g.half

    def standard() -> onnx.FunctionProto:
        b = Nodes("standard", half)
        _body(b, num_heads, num_kv_heads, head_dim, scale, window)
        return standard_function(NAME, INPUTS, OUTPUTS, b, ATTRIBUTES)

    narrow = [g.cast(x, half, f"{path}/{n}/half") for x, n in zip(inputs[:3], "qkv", strict=True)]
    g.plugin(
        NAME,
        [*narrow, *inputs[3:]],
        path,
        [f"{path}/o/half", *present],
        standard,
        num_heads=num_heads,
        kv_num_heads=num_kv_heads,
        scale=scale,
        local_window_size=window or -1,
        layer=layer,
    )
    return g.cast(f"{path}/o/half", TensorProto.FLOAT, f"{path}/o/fp32")


def _body(
    b: Nodes, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, window: int | None
) -> None:
    """Scatter the new rows, gather each sequence's rows, attend under a position mask."""
    rows_per_block = b.op("Shape", ["key_pool"], "rows_per_block", start=1, end=2)
    tokens = b.op("Squeeze", [b.op("Shape", ["q"], "length", start=1, end=2)], "tokens")
    total = b.op("Unsqueeze", [b.cast("seqlens", TensorProto.INT64, "total"), b.const([1])], "end")
    first = b.op("Sub", [total, tokens], "first")
    steps = b.op("Range", [b.const(0), tokens, b.const(1)], "steps")
    positions = b.op("Add", [first, steps], "positions")  # [B, T]

    table = b.cast("block_table", TensorProto.INT64, "table")
    block = b.op("Div", [positions, rows_per_block], "block")
    held = b.op("GatherElements", [table, block], "held", axis=1)
    place = b.op("Mod", [positions, rows_per_block], "place")
    pairs = [b.op("Unsqueeze", [x, b.const([2])], f"{x}_column") for x in (held, place)]
    row = b.op("Concat", pairs, "row", axis=2)  # [B, T, 2]
    append = b.op("Greater", ["kv_append", b.const([0], np.int32)], "append")

    def cache(new: str, pool: str, present: str) -> str:
        rows = b.reshape(new, [0, 0, num_kv_heads, head_dim], f"{new}/rows")
        written = b.op("ScatterND", [pool, row, rows], f"{pool}/written")
        b.op("Where", [append, written, pool], present, outputs=[present])
        blocks = b.op("Gather", [present, table], f"{pool}/blocks")  # [B, M, R, Hk, d]
        wide = b.cast(blocks, TensorProto.FLOAT, f"{pool}/fp32")
        merged = b.reshape(wide, [0, -1, num_kv_heads, head_dim], f"{pool}/merged")
        return str(b.op("Transpose", [merged], f"{pool}/heads", perm=[0, 2, 1, 3]))

    keys, values = cache("k_new", "key_pool", OUTPUTS[1]), cache("v_new", "value_pool", OUTPUTS[2])
    size = b.op("Squeeze", [b.op("Shape", [keys], "capacity", start=2, end=3)], "rows")
    index = b.op("Range", [b.const(0), size, b.const(1)], "index")
    query = b.op("Unsqueeze", [positions, b.const([1, 3])], "query")
    mask = b.op("LessOrEqual", [index, query], "mask")
    if window:
        inside = b.op("Greater", [index, b.op("Sub", [query, b.const(window)], "oldest")], "inside")
        mask = b.op("And", [mask, inside], "window_mask")
    q = b.reshape(b.cast("q", TensorProto.FLOAT, "q/fp32"), [0, 0, num_heads, head_dim], "q/split")
    heads = b.op("Transpose", [q], "q/heads", perm=[0, 2, 1, 3])
    o = b.op("Attention", [heads, keys, values, mask], "attend", scale=scale)
    back = b.op("Transpose", [o], "o/back", perm=[0, 2, 1, 3])
    flat = b.reshape(back, [0, 0, -1], "o/flat")
    b.op("Cast", [flat], "o", outputs=["o"], to=b.half)
