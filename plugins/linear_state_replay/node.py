"""How ONNX sees ``hybrid::LinearStateReplay``.

Inputs   q [B, T, Hq*dk], k [B, T, Hq*dk], v [B, T, Hv*dv], past_state [B, Hv, dk, dv] fp32,
         log_decay [B, T, Hv] or [B, T, Hv*dk] ('' unless gated), beta [B, T, Hv] ('' unless delta)
Outputs  o [B, T, Hv*dv], present_state [B, Hv, dk, dv] (may alias past_state)
Attributes  update_rule, q_num_heads (Hq), kv_num_heads (Hv), scale, chunk_size

As a TensorRT plugin: q, k, v and o in half precision, inputs that the rule does not need left out.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx import AttributeProto, TensorProto, helper

from plugins.onnx_graph import (
    DOMAIN,
    ORT_DOMAIN,
    Nodes,
    function,
    pass_attributes,
    standard_function,
)

NAME = "LinearStateReplay"
_INPUTS = ["q", "k", "v", "past_state", "log_decay", "beta"]
_OUTPUTS = ["o", "present_state"]
_ATTRIBUTES = {
    "update_rule": AttributeProto.STRING,
    "q_num_heads": AttributeProto.INT,
    "kv_num_heads": AttributeProto.INT,
    "scale": AttributeProto.FLOAT,
    "chunk_size": AttributeProto.INT,
}


def body() -> onnx.FunctionProto:
    """The op as ONNX Runtime's own kernel, so that a stock runtime can run the file."""
    node = helper.make_node("LinearAttention", _INPUTS, _OUTPUTS, domain=ORT_DOMAIN)
    pass_attributes(node, _ATTRIBUTES)
    return function(NAME, _INPUTS, _OUTPUTS, [node], list(_ATTRIBUTES))


def linear_state_replay(
    g: Nodes,
    path: str,
    inputs: list[str],
    present_state: str,
    *,
    update_rule: str,
    q_heads: int,
    v_heads: int,
    key_dim: int,
    value_dim: int,
    scale: float,
) -> str:
    """Add the op; returns o [B, T, Hv*dv]."""
    if g.lowering == "standard":
        return _scan(
            g, path, inputs, present_state, update_rule, q_heads, v_heads, key_dim, value_dim, scale
        )
    attributes = {
        "update_rule": update_rule,
        "q_num_heads": q_heads,
        "kv_num_heads": v_heads,
        "scale": scale,
        "chunk_size": 64,
    }
    if g.lowering == "tensorrt":
        sizes = (q_heads, v_heads, key_dim, value_dim)
        return _plugin(g, path, inputs, present_state, sizes, attributes)
    g.functions[NAME] = body()
    g.op(NAME, inputs, path, outputs=[path, present_state], domain=DOMAIN, **attributes)
    return path


def _plugin(
    g: Nodes,
    path: str,
    inputs: list[str],
    present_state: str,
    sizes: tuple[int, int, int, int],
    attributes: dict[str, Any],
) -> str:
    rule, scale, half = attributes["update_rule"], attributes["scale"], g.half

    def standard() -> onnx.FunctionProto:
        b = Nodes("standard")
        given = [n if i else "" for n, i in zip(_INPUTS, inputs, strict=True)]
        wide = [b.cast(n, TensorProto.FLOAT, f"{n}/fp32") for n in given[:3]]
        o = _scan(b, "scan", [*wide, *given[3:]], _OUTPUTS[1], rule, *sizes, scale)
        b.op("Cast", [o], "scan/o/half", outputs=_OUTPUTS[:1], to=half)
        return standard_function(NAME, [n for n in given if n], _OUTPUTS, b, list(_ATTRIBUTES))

    narrow = [g.cast(x, half, f"{path}/{n}/half") for x, n in zip(inputs[:3], "qkv", strict=True)]
    outputs = [f"{path}/o/half", present_state]
    g.plugin(NAME, [*narrow, *(x for x in inputs[3:] if x)], path, outputs, standard, **attributes)
    return g.cast(outputs[0], TensorProto.FLOAT, f"{path}/o/fp32")


def _scan(
    g: Nodes,
    path: str,
    inputs: list[str],
    present_state: str,
    rule: str,
    q_heads: int,
    v_heads: int,
    key_dim: int,
    value_dim: int,
    scale: float,
) -> str:
    """The recurrence of ``ref.py`` as an ai.onnx Scan over time."""
    q, k, v, past, log_decay, beta = inputs

    def heads(x: str, n: int, d: int, name: str) -> str:
        x4 = g.reshape(x, [0, 0, n, d], f"{path}/{name}/heads")
        if n < v_heads:  # each q/k head serves Hv / Hq value heads
            wide = g.op("Unsqueeze", [x4, g.const([3])], f"{path}/{name}/wide")
            tiled = g.op("Tile", [wide, g.const([1, 1, 1, v_heads // n, 1])], f"{path}/{name}/tile")
            x4 = g.reshape(tiled, [0, 0, v_heads, d], f"{path}/{name}/repeat")
        return str(g.op("Transpose", [x4], f"{path}/{name}/time", perm=[1, 0, 2, 3]))

    scans = [heads(q, q_heads, key_dim, "q"), heads(k, q_heads, key_dim, "k")]
    scans.append(heads(v, v_heads, value_dim, "v"))
    if "gated" in rule:
        decay = g.op("Exp", [log_decay], f"{path}/decay")
        scans.append(heads(decay, v_heads, -1, "decay"))
    if "delta" in rule:
        scans.append(heads(beta, v_heads, 1, "beta"))
    outputs = [present_state, f"{path}/o/time"]
    g.op(
        "Scan",
        [past, *scans],
        path,
        outputs=outputs,
        num_scan_inputs=len(scans),
        body=_step(g, rule, scale),
    )
    back = g.op("Transpose", [outputs[1]], f"{path}/o/back", perm=[1, 0, 2, 3])
    return g.reshape(back, [0, 0, v_heads * value_dim], f"{path}/o")


def _step(g: Nodes, rule: str, scale: float) -> onnx.GraphProto:
    """One token. Loop value S [B, Hv, dk, dv]; scanned q, k, v [, decay, beta] [B, Hv, d]."""
    b = Nodes("standard")
    b.constants = g.constants  # outside: TensorRT loses initializers of a graph in a function
    state, names = "S", ["q", "k", "v"]
    column = {n: b.op("Unsqueeze", [n, b.const([3])], f"{n}_col") for n in ("q", "k")}
    if "gated" in rule:
        names.append("decay")
        column["decay"] = b.op("Unsqueeze", ["decay", b.const([3])], "decay_col")
        state = b.op("Mul", [state, column["decay"]], "decayed")

    def read(s: str, col: str, path: str) -> str:
        product = b.op("Mul", [s, col], f"{path}_product")
        return str(b.op("ReduceSum", [product, b.const([2])], path, keepdims=0))

    value = "v"
    if "delta" in rule:
        names.append("beta")
        error = b.op("Sub", ["v", read(state, column["k"], "predicted")], "error")
        value = b.op("Mul", [error, "beta"], "update")
    row = b.op("Unsqueeze", [value, b.const([2])], "row")
    outer = b.op("Mul", [column["k"], row], "outer")
    b.op("Add", [state, outer], "S_next")
    o = read("S_next", column["q"], "read")
    b.op("Mul", [o, b.const(scale, "float32")], "o")
    info = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", "H", f"d_{n}"]) for n in names
    ]
    state_info = helper.make_tensor_value_info("S", TensorProto.FLOAT, ["B", "H", "dk", "dv"])
    return helper.make_graph(
        b.nodes,
        "step",
        [state_info, *info],
        [
            helper.make_tensor_value_info("S_next", TensorProto.FLOAT, ["B", "H", "dk", "dv"]),
            helper.make_tensor_value_info("o", TensorProto.FLOAT, ["B", "H", "dv"]),
        ],
    )
