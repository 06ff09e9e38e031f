"""How ONNX sees ``hybrid::CompressedSparseAttention``.

Inputs   q [B, T, Hq*dk], k_new [B, T or 0, Hk*dk], v_new [B, T or 0, Hk*dv],
         past_k [B, Hk, C, dk], past_v [B, Hk, C, dv],
         seqlens [B] int32 (rows visible to the last query, less one), total_len int32 scalar
         (the longest of them), positions [B, T] int64
Outputs  o [B, T, Hq*dv], present_k, present_v (may alias past_k, past_v)
Attributes  num_heads (Hq), kv_num_heads (Hk), scale, local_window_size (rows a query sees, its own
         included; -1: all)

With no new rows (replay) nothing is written and the queries stand at the last T positions.

Overload ``compressed`` has nine more inputs and six more outputs (``Compression``):

Inputs   kv_rows [B, Hk] int32: rows of each slot that count, this step's included. They replace
         seqlens and total_len, and need not be the same for all heads; the new row is written as
         the last of them,
         summaries [B, Hk, S, 2*dk + dv] fp16, stats [B, Hk, S, 2] fp32: see ref.py; S >= C / 32,
         epsilon [B] fp32: relative error of o allowed to each sequence; 0: all rows are read, the
         summaries are not (bit-equal to a dense step over as many rows),
         factor [B] fp32: of the calibrated bound; 0: the summaries are of the sound kind,
         host_k, host_v [N] fp32, host_rows [B, Hk, R] int32, host_first [B, Hk, S] int32: memory
         from which evicted rows are read where they are asked for, see ``Host`` of ref.py; N = 0:
         there is none
Outputs  present_summaries, present_stats (may alias). When this step's row is the first of a block,
         the entry of the block that is now third from the end is written: it is the one that from
         now on may be left unread,
         error_bound, mass_read [B, Hq] fp32, rows_read [B, Hk] int32, chosen [B, Hk, S] uint8: see
         ``SparseStep`` of ref.py

All nine of zero size (B = S = 0): a dense step, of any T. Else T is 1. A compressed step runs in
the CPU kernel alone; the body is dense attention over seqlens, whatever they say.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import onnx
from onnx import AttributeProto, TensorProto, helper

from engine_configs.errors import ConversionError
from plugins.onnx_graph import DOMAIN, ORT_DOMAIN, Nodes, function, pass_attributes

NAME = "CompressedSparseAttention"
_INPUTS = ["q", "k_new", "v_new", "past_k", "past_v", "seqlens", "total_len", "positions"]
_OUTPUTS = ["o", "present_k", "present_v"]
_MORE_INPUTS = ["kv_rows", "summaries", "stats", "epsilon", "factor"]
_MORE_INPUTS += ["host_k", "host_v", "host_rows", "host_first"]
_MORE_OUTPUTS = ["present_summaries", "present_stats", "error_bound", "mass_read", "rows_read"]
_MORE_OUTPUTS += ["chosen"]
_ATTRIBUTES = {
    "num_heads": AttributeProto.INT,
    "kv_num_heads": AttributeProto.INT,
    "scale": AttributeProto.FLOAT,
    "local_window_size": AttributeProto.INT,
}


@dataclass(frozen=True)
class Compression:
    """Names of the values that the overload ``compressed`` has more."""

    kv_rows: str
    summaries: str
    stats: str
    epsilon: str
    factor: str
    host_k: str
    host_v: str
    host_rows: str
    host_first: str
    present_summaries: str
    present_stats: str
    error_bound: str
    mass_read: str
    rows_read: str
    chosen: str


def body(compressed: bool = False) -> onnx.FunctionProto:
    """Dense attention: everything retained, everything read (ONNX Runtime's own kernel)."""
    node = helper.make_node("GroupQueryAttention", _INPUTS[:7], _OUTPUTS, domain=ORT_DOMAIN)
    pass_attributes(node, _ATTRIBUTES)
    if not compressed:
        return function(NAME, _INPUTS, _OUTPUTS, [node], list(_ATTRIBUTES))
    inputs, outputs = [*_INPUTS, *_MORE_INPUTS], [*_OUTPUTS, *_MORE_OUTPUTS]
    made = function(NAME, inputs, outputs, [node, *_all_was_read()], list(_ATTRIBUTES))
    made.overload = "compressed"
    return made


def _all_was_read() -> list[onnx.NodeProto]:
    """The six further outputs of a dense step."""
    b = Nodes("standard")
    b.op("Identity", ["summaries"], "summaries_out", outputs=["present_summaries"])
    b.op("Identity", ["stats"], "stats_out", outputs=["present_stats"])
    batch = b.op("Shape", ["q"], "batch", end=1)
    heads = {}
    for name in ("num_heads", "kv_num_heads"):
        scalar = b.op("Constant", [], f"{name}_scalar")
        attribute = b.nodes[-1].attribute.add()
        attribute.name, attribute.ref_attr_name = "value_int", name
        attribute.type = AttributeProto.INT
        heads[name] = b.op("Reshape", [scalar, b.const([1])], name)
    queries = b.op("Concat", [batch, heads["num_heads"]], "queries", axis=0)
    per_head = b.op("Concat", [batch, heads["kv_num_heads"]], "per_head", axis=0)
    for name, value in (("error_bound", 0.0), ("mass_read", 1.0)):
        fill = helper.make_tensor("fill", TensorProto.FLOAT, [1], [value])
        b.op("ConstantOfShape", [queries], name, outputs=[name], value=fill)
    rows = b.op("Add", ["seqlens", b.const(1, "int32")], "rows")
    column = b.op("Unsqueeze", [rows, b.const([1])], "rows_column")
    b.op("Expand", [column, per_head], "rows_read", outputs=["rows_read"])
    entries = b.op("Shape", ["stats"], "entries", start=2, end=3)
    shape = b.op("Concat", [per_head, entries], "entries_shape", axis=0)
    none = helper.make_tensor("none", TensorProto.UINT8, [1], [0])
    b.op("ConstantOfShape", [shape], "chosen", outputs=["chosen"], value=none)
    constants = [helper.make_node("Constant", [], [n], value=t) for n, t in b.constants.items()]
    return [*constants, *b.nodes]


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
    compression: Compression | None = None,
) -> str:
    """Add the op; returns o [B, T, Hq*dv]. ``inputs`` are the first eight of the op; the lowering
    ``standard`` knows no compression.

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
    outputs = [path, *present]
    if compression:
        more = asdict(compression)
        inputs = [*inputs, *(more[n] for n in _MORE_INPUTS)]
        outputs += [more[n] for n in _MORE_OUTPUTS]
    made = body(compression is not None)
    g.functions[f"{NAME}.{made.overload}"] = made
    g.op(
        NAME,
        inputs,
        path,
        outputs=outputs,
        domain=DOMAIN,
        num_heads=num_heads,
        kv_num_heads=num_kv_heads,
        scale=scale,
        local_window_size=window or -1,
    )
    g.nodes[-1].overload = made.overload
    return path


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
