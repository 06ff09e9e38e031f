"""Mixers that keep nothing: gated and plain MLPs, mixtures of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper

from build.mixers.common import StepInputs, activate, node_path
from build.quantize import ExpertLinear
from engine_configs.spec import Mlp, Moe
from plugins.onnx_graph import Nodes

if TYPE_CHECKING:
    from build.graph import GraphBuilder


def mlp(g: GraphBuilder, step: StepInputs, i: int, path: str, m: Mlp, x: str) -> str:
    node = node_path(path)
    inner = g.linear(x, f"{path}.up_proj", bias=m.bias)
    if m.gated:
        gate = g.linear(x, f"{path}.gate_proj", bias=m.bias)
        gate = activate(g, gate, m.activation, f"{node}/act")
        inner = g.op("Mul", [gate, inner], f"{node}/gated")
    else:
        inner = activate(g, inner, m.activation, f"{node}/act")
    return g.linear(inner, f"{path}.down_proj", bias=m.bias)


def moe(g: GraphBuilder, step: StepInputs, i: int, path: str, m: Moe, x: str) -> str:
    """Every expert that some token chose runs once, over the tokens that chose it.

    ai.onnx only, a Loop over those experts. com.microsoft::MoE would be faster, but its result for
    a token depends in the last bit on which tokens share the step; here a token's row is the same
    in any company (see ``_expert_step``), and its experts are added in the order of their number.
    """
    node = node_path(path)
    rows = g.op("Reshape", [x, g.const([-1, g.spec.hidden_size])], f"{node}/rows")
    chosen, weights = _route(g, path, m, rows)
    flat = g.reshape(chosen, [-1], f"{node}/chosen_flat")
    active = g.op("Unique", [flat], f"{node}/active", sorted=1)
    count = g.op("Size", [active], f"{node}/active_count")
    zeros = g.op("Mul", [rows, g.const(0.0, np.float32)], f"{node}/zeros")
    body = _expert_step(
        g,
        m,
        node,
        rows=rows,
        chosen=chosen,
        weights=weights,
        active=active,
        in_proj=g.weights.experts(g, f"{path}.experts.in_proj"),
        down_proj=g.weights.experts(g, f"{path}.experts.down_proj"),
    )
    total = g.op("Loop", [count, "", zeros], f"{node}/experts", body=body)
    if m.shared:
        shared = mlp(g, step, i, f"{path}.shared", m.shared, rows)
        if m.shared_gate:
            gate = g.linear(rows, f"{path}.shared_gate")
            gate = g.op("Sigmoid", [gate], f"{node}/shared_gate/sigmoid")
            shared = g.op("Mul", [shared, gate], f"{node}/shared_gated")
        total = g.op("Add", [total, shared], f"{node}/with_shared")
    return str(g.op("Reshape", [total, g.op("Shape", [x], f"{node}/shape")], node))


def _route(g: GraphBuilder, path: str, m: Moe, rows: str) -> tuple[str, str]:
    """Chosen experts [N, top_k] and their weights [N, top_k] for rows [N, hidden]."""
    node = f"{node_path(path)}/route"
    logits = g.linear(rows, f"{path}.router")
    if m.scoring == "softmax":
        scores = g.op("Softmax", [logits], f"{node}/scores", axis=-1)
    else:
        scores = g.op("Sigmoid", [logits], f"{node}/scores")
    ranked = scores
    if m.correction:
        ranked = g.op("Add", [scores, g.small(f"{path}.correction")], f"{node}/corrected")
    if m.num_groups > 1:
        ranked = _best_groups(g, m, ranked, node)
    _, chosen = g.op("TopK", [ranked, g.const([m.top_k])], f"{node}/top", outputs=2, axis=-1)
    weights = g.op("GatherElements", [scores, chosen], f"{node}/weights", axis=-1)
    if m.normalize:
        total = g.op("ReduceSum", [weights, g.const([-1])], f"{node}/total", keepdims=1)
        weights = g.op("Div", [weights, total], f"{node}/normalized")
    if m.scale != 1.0:
        weights = g.op("Mul", [weights, g.const(m.scale, np.float32)], f"{node}/scaled")
    return chosen, weights


def _best_groups(g: GraphBuilder, m: Moe, ranked: str, node: str) -> str:
    """-inf for the experts outside the groups with the highest sum of their best two."""
    size = m.num_experts // m.num_groups
    split = g.reshape(ranked, [-1, m.num_groups, size], f"{node}/groups")
    best, _ = g.op("TopK", [split, g.const([2])], f"{node}/group_best", outputs=2, axis=-1)
    score = g.op("ReduceSum", [best, g.const([-1])], f"{node}/group_score", keepdims=0)
    top = [score, g.const([m.top_groups])]
    _, groups = g.op("TopK", top, f"{node}/group_top", outputs=2, axis=-1)
    column = g.op("Unsqueeze", [groups, g.const([2])], f"{node}/group_column")
    index = g.const(np.arange(m.num_groups)[None, None])
    hits = g.op("Equal", [column, index], f"{node}/group_hits")
    hits = g.op("Cast", [hits], f"{node}/group_count", to=TensorProto.INT64)
    kept = g.op("ReduceMax", [hits, g.const([1])], f"{node}/group_kept", keepdims=0)
    kept = g.op("Cast", [kept], f"{node}/group_mask", to=TensorProto.BOOL)
    kept = g.op("Unsqueeze", [kept, g.const([2])], f"{node}/group_mask_column")
    masked = g.op("Where", [kept, split, g.const(-np.inf, np.float32)], f"{node}/group_masked")
    return g.reshape(masked, [-1, m.num_experts], f"{node}/group_flat")


def _expert_step(
    g: GraphBuilder,
    m: Moe,
    node: str,
    *,
    rows: str,
    chosen: str,
    weights: str,
    active: str,
    in_proj: ExpertLinear,
    down_proj: ExpertLinear,
) -> onnx.GraphProto:
    """One expert over its tokens: Loop body (turn, go on, sum [N, H]) → (go on, sum [N, H]).

    A row of zeros joins the tokens, so that a lone token runs through the same matrix kernel as
    many do: that kernel gives each row the same bits whatever the number of rows.
    """
    b = Nodes("standard")
    b.constants = g.constants  # seen from the outer graph
    here = f"{node}/expert"
    expert = b.op("Gather", [active, "turn"], f"{here}/number")
    hits = b.op("NonZero", [b.op("Equal", [chosen, expert], f"{here}/hits")], f"{here}/hit_index")
    pairs = b.op("Transpose", [hits], f"{here}/pairs", perm=[1, 0])
    token = b.slice(pairs, 0, 1, 1, f"{here}/token")
    picked = b.op("GatherND", [rows, token], f"{here}/rows")
    zero = b.const(np.zeros((1, g.spec.hidden_size)), np.float32)
    padded = b.op("Concat", [picked, zero], f"{here}/padded", axis=0)
    inner = in_proj(b, padded, expert, f"{here}/in_proj")
    if m.gated:
        sizes = b.const([m.intermediate, m.intermediate])
        gate, up = b.op("Split", [inner, sizes], f"{here}/split", outputs=2, axis=-1)
        inner = b.op("Mul", [activate(b, gate, m.activation, f"{here}/act"), up], f"{here}/gated")
    else:
        inner = activate(b, inner, m.activation, f"{here}/act")
    out = b.slice(down_proj(b, inner, expert, f"{here}/down_proj"), 0, -1, 0, f"{here}/out_rows")
    share = b.op("Unsqueeze", [b.op("GatherND", [weights, pairs], f"{here}/share"), b.const([1])],
                 f"{here}/share_column")  # fmt: skip
    scaled = b.op("Mul", [out, share], f"{here}/scaled")
    b.op("ScatterND", ["sum", token, scaled], f"{here}/add", outputs=["sum_next"], reduction="add")
    b.op("Identity", ["go_on"], f"{here}/go_on", outputs=["go_on_next"])
    info = helper.make_tensor_value_info
    shape = ("N", g.spec.hidden_size)
    return helper.make_graph(
        b.nodes,
        f"{node}/expert",
        [
            info("turn", TensorProto.INT64, ()),
            info("go_on", TensorProto.BOOL, ()),
            info("sum", TensorProto.FLOAT, shape),
        ],
        [info("go_on_next", TensorProto.BOOL, ()), info("sum_next", TensorProto.FLOAT, shape)],
    )
