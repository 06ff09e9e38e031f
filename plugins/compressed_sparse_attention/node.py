"""How ONNX sees ``hybrid::CompressedSparseAttention``.

Inputs   q [B, T, Hq*dk], k_new [B, T or 0, Hk*dk], v_new [B, T or 0, Hk*dv],
         past_k [B, Hk, C, dk], past_v [B, Hk, C, dv],
         seqlens [B] int32 (rows visible to the last query, less one), total_len int32 scalar
         (the longest of them), positions [B, T] int64,
         summaries [B, Hk, C/block, 2, dk] (per-channel min and max of each block's keys), budget
         int32 scalar (rows to read per head), epsilon fp32 scalar (error allowed);
         the last three are '' for dense attention
Outputs  o [B, T, Hq*dv], present_k, present_v (alias past_k, past_v),
         error_bound [B, T, Hq], kept [B, Hk]; the last two may be ''
Attributes  num_heads (Hq), kv_num_heads (Hk), scale, local_window_size (rows a query sees, its own
         included; -1: all)

With no new rows (replay) nothing is written and the queries stand at the last T positions.
"""

from __future__ import annotations

import onnx
from onnx import AttributeProto, helper

from engine_configs.errors import ConversionError
from plugins.onnx_graph import DOMAIN, ORT_DOMAIN, Nodes, function, pass_attributes

NAME = "CompressedSparseAttention"
_INPUTS = ["q", "k_new", "v_new", "past_k", "past_v", "seqlens", "total_len", "positions"]
_INPUTS += ["summaries", "budget", "epsilon"]
_OUTPUTS = ["o", "present_k", "present_v"]
_ATTRIBUTES = {
    "num_heads": AttributeProto.INT,
    "kv_num_heads": AttributeProto.INT,
    "scale": AttributeProto.FLOAT,
    "local_window_size": AttributeProto.INT,
}


def body() -> onnx.FunctionProto:
    """Dense attention: everything retained, everything read (ONNX Runtime's own kernel)."""
    node = helper.make_node("GroupQueryAttention", _INPUTS[:7], _OUTPUTS, domain=ORT_DOMAIN)
    pass_attributes(node, _ATTRIBUTES)
    return function(NAME, _INPUTS, _OUTPUTS, [node], list(_ATTRIBUTES))


def compressed_sparse_attention(
    g: Nodes,
    path: str,
    inputs: list[str],
    present: tuple[str, str],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int | None = None,
) -> str:
    """Add the op (dense); returns o [B, T, Hq*dv]. ``inputs`` are the first eight of the op.

    Raises ConversionError for head sizes that the body's kernel does not take.
    """
    if num_heads % num_kv_heads:
        raise ConversionError(
            f"{num_heads} heads cannot share {num_kv_heads} K/V heads", where=path
        )
    if g.lowering == "standard":
        sizes = (num_heads, num_kv_heads, head_dim)
        return _attention(g, path, inputs, present, sizes, scale, window)
    if head_dim % 8:
        raise ConversionError(
            f"head_dim is {head_dim}, ONNX Runtime's attention takes multiples of 8",
            where=path,
            fix="Use --lowering standard",
        )
    g.functions[NAME] = body()
    o, *_ = g.op(
        NAME,
        inputs,
        path,
        outputs=[path, *present],
        domain=DOMAIN,
        num_heads=num_heads,
        kv_num_heads=num_kv_heads,
        scale=scale,
        local_window_size=window or -1,
    )
    return str(o)


def _attention(
    g: Nodes,
    path: str,
    inputs: list[str],
    present: tuple[str, str],
    sizes: tuple[int, int, int],
    scale: float,
    window: int | None,
) -> str:
    """ai.onnx: scatter the new rows into the slot, then Attention under a position mask."""
    num_heads, num_kv_heads, head_dim = sizes
    q, k_new, v_new, past_k, past_v, _, _, positions = inputs
    first = g.op("Gather", [positions, g.const(0)], f"{path}/first", axis=1)
    for new, past, out, name in (
        (k_new, past_k, present[0], "k"),
        (v_new, past_v, present[1], "v"),
    ):
        split = g.reshape(new, [0, 0, num_kv_heads, head_dim], f"{path}/{name}/heads")
        rows = g.op("Transpose", [split], f"{path}/{name}/rows", perm=[0, 2, 1, 3])
        g.op("TensorScatter", [past, rows, first], f"{path}/{name}/append", outputs=[out], axis=-2)
    capacity = g.op("Shape", [past_k], f"{path}/capacity", start=2, end=3)
    last = g.op("Squeeze", [capacity], f"{path}/capacity_scalar")
    index = g.op("Range", [g.const(0), last, g.const(1)], f"{path}/index")
    query = g.op("Unsqueeze", [positions, g.const([1, 3])], f"{path}/query")
    mask = g.op("LessOrEqual", [index, query], f"{path}/mask")
    if window:
        oldest = g.op("Sub", [query, g.const(window)], f"{path}/before_window")
        inside = g.op("Greater", [index, oldest], f"{path}/inside_window")
        mask = g.op("And", [mask, inside], f"{path}/window_mask")
    split = g.reshape(q, [0, 0, num_heads, head_dim], f"{path}/q/heads")
    heads = g.op("Transpose", [split], f"{path}/q/rows", perm=[0, 2, 1, 3])
    o = g.op("Attention", [heads, *present, mask], path, scale=scale)
    back = g.op("Transpose", [o], f"{path}/o/back", perm=[0, 2, 1, 3])
    return g.reshape(back, [0, 0, -1], f"{path}/o")
