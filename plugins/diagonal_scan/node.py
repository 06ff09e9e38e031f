"""How ONNX sees ``hybrid::DiagonalScan``.

Inputs   x [B, T, D], dt [B, T, D] (>= 0), rate [D, N] (<= 0), b [B, T, N], c [B, T, N],
         past_state [B, D, N, 1] fp32
Outputs  y [B, T, D], present_state [B, D, N, 1] (may alias past_state)

Not the linear-state op with a head per channel, which it could be: that one wants the decays of
all tokens in memory at once, [B, T, D*N].
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from plugins.onnx_graph import DOMAIN, Nodes, function

NAME = "DiagonalScan"
_INPUTS = ["x", "dt", "rate", "b", "c", "past_state"]
_OUTPUTS = ["y", "present_state"]


def body() -> onnx.FunctionProto:
    """The op in ai.onnx, so that a stock runtime can run the file."""
    b = Nodes("standard")
    _scan(b, "scan", _INPUTS, _OUTPUTS)
    constants = [helper.make_node("Constant", [], [n], value=t) for n, t in b.constants.items()]
    return function(NAME, _INPUTS, _OUTPUTS, [*constants, *b.nodes])


def diagonal_scan(g: Nodes, path: str, inputs: list[str], present_state: str) -> str:
    """Add the op; returns y [B, T, D]."""
    outputs = [path, present_state]
    if g.lowering != "ort":  # TensorRT has no plugin for it: a loop
        _scan(g, path, inputs, outputs)
    else:
        g.functions[NAME] = body()
        g.op(NAME, inputs, path, outputs=outputs, domain=DOMAIN)
    return path


def _scan(g: Nodes, path: str, inputs: list[str], outputs: list[str]) -> None:
    """The recurrence of ``ref.py`` as a Scan over time."""
    x, dt, rate, b, c, past = inputs
    state = g.op("Squeeze", [past, g.const([3])], f"{path}/state")
    g.op(
        "Scan",
        [state, x, dt, b, c],
        f"{path}/scan",
        outputs=[f"{path}/last_state", outputs[0]],
        num_scan_inputs=4,
        scan_input_axes=[1] * 4,
        scan_output_axes=[1],
        body=_step(rate),
    )
    present = [f"{path}/last_state", g.const([3])]
    g.op("Unsqueeze", present, f"{path}/present", outputs=[outputs[1]])


def _step(rate: str) -> onnx.GraphProto:
    """One token. Loop value h [B, D, N]; scanned x, dt [B, D], b, c [B, N]; rate is seen from
    outside."""
    g = Nodes("standard")
    column = {n: g.op("Unsqueeze", [n, g.const([2])], f"{n}_column") for n in ("x", "dt", "c")}
    row = g.op("Unsqueeze", ["b", g.const([1])], "b_row")
    decay = g.op("Exp", [g.op("Mul", [column["dt"], rate], "log_decay")], "decay")
    kept = g.op("Mul", ["h", decay], "kept")
    g.op("Add", [kept, g.op("Mul", [column["x"], row], "pushed")], "h_next")
    read = g.op("MatMul", ["h_next", column["c"]], "read")
    g.op("Squeeze", [read, g.const([2])], "y")

    def info(name: str, *shape: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    scanned = [info("x", "B", "D"), info("dt", "B", "D"), info("b", "B", "N"), info("c", "B", "N")]
    return helper.make_graph(
        g.nodes,
        "step",
        [info("h", "B", "D", "N"), *scanned],
        [info("h_next", "B", "D", "N"), info("y", "B", "D")],
        initializer=list(g.constants.values()),
    )
