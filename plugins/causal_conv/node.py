"""How ONNX sees ``hybrid::CausalConv``.

Inputs   x [B, T, C], past [B, W-1, C], weight [W, C], valid_len [B] int64 (tokens that are not
         padding), bias [C] ('' for none)
Outputs  y [B, T, C], present [B, W-1, C] (may alias past)
Attributes  silu (1: y is passed through y * sigmoid(y))

Every row of y is the same sum in the same order whatever T is, so a token's result does not depend
on how the sequence was cut (ONNX's Conv does). The body is W shifted products; it depends on W, on
silu and on whether there is a bias, which the node's ``overload`` names.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from plugins.onnx_graph import DOMAIN, Nodes, function

NAME = "CausalConv"
_INPUTS = ["x", "past", "weight", "valid_len", "bias"]
_OUTPUTS = ["y", "present"]


def body(width: int, silu: bool, bias: bool) -> onnx.FunctionProto:
    """The op in ai.onnx, so that a stock runtime can run the file."""
    b = Nodes("standard")
    inputs = _INPUTS if bias else [*_INPUTS[:-1], ""]
    _shifted_products(b, "conv", inputs, _OUTPUTS, width, silu)
    constants = [helper.make_node("Constant", [], [n], value=t) for n, t in b.constants.items()]
    made = function(NAME, _INPUTS, _OUTPUTS, [*constants, *b.nodes], ["silu"])
    made.overload = _overload(width, silu, bias)
    return made


def causal_conv(
    g: Nodes, path: str, inputs: list[str], present: str, *, width: int, silu: bool = False
) -> str:
    """Add the op; returns y [B, T, C]. ``inputs`` are the five of the op, bias may be ''."""
    if g.lowering != "ort":  # TensorRT has no plugin for it
        _shifted_products(g, path, inputs, [path, present], width, silu)
        return path
    bias = bool(inputs[4])
    overload = _overload(width, silu, bias)
    g.functions[f"{NAME}.{overload}"] = body(width, silu, bias)
    g.op(NAME, inputs, path, outputs=[path, present], domain=DOMAIN, silu=int(silu))
    g.nodes[-1].overload = overload
    return path


def _overload(width: int, silu: bool, bias: bool) -> str:
    return f"width_{width}" + "_silu" * silu + "_bias" * bias


def _shifted_products(
    g: Nodes, path: str, inputs: list[str], outputs: list[str], width: int, silu: bool
) -> None:
    x, past, weight, valid_len, total = inputs
    joined = g.op("Concat", [past, x], f"{path}/joined", axis=1)
    for tap in range(width):
        end = tap - width + 1 or np.iinfo(np.int64).max
        rows = g.slice(joined, tap, end, 1, f"{path}/rows_{tap}")
        row = g.op("Gather", [weight, g.const(tap)], f"{path}/weight_{tap}", axis=0)
        last = tap == width - 1 and not silu
        name = outputs[0] if last and not total else f"{path}/tap_{tap}"
        product = g.op("Mul", [rows, row], f"{path}/tap_{tap}", outputs=[name])
        if total:
            name = outputs[0] if last else f"{path}/sum_{tap}"
            total = g.op("Add", [total, product], f"{path}/sum_{tap}", outputs=[name])
        else:
            total = product
    if silu:
        gate = g.op("Sigmoid", [total], f"{path}/sigmoid")
        g.op("Mul", [total, gate], f"{path}/silu", outputs=[outputs[0]])
    # The state after the last token that is not padding: rows valid_len .. valid_len + W-2.
    column = g.op("Unsqueeze", [valid_len, g.const([1])], f"{path}/valid_column")
    kept = g.op("Add", [column, g.const([list(range(width - 1))])], f"{path}/keep")
    index = g.op("Unsqueeze", [kept, g.const([2])], f"{path}/keep_index")
    g.op("GatherND", [joined, index], f"{path}/state", outputs=[outputs[1]], batch_dims=1)
