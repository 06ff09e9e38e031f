"""HybridSpec → ONNX graph. One builder; the lowering only changes how our ops are written.

B sequences, T tokens of this step, C slot capacity, N rows of logits wanted, i a layer:

    input                            shape               meaning
    input_ids, position_ids          [B, T] int64        tokens of this step, absolute positions
    seqlens                          [B] int32           tokens visible to the last query
    total_len                        int32               the longest of seqlens
    valid_len                        [B] int64           tokens of the step that are not padding
    kv_append                        [1] int64           T: append K/V; 0: replay, write nothing
    logit_rows                       [N] int64           rows of B*T whose logits are wanted
    rows_kept                        [1] int64           R: so many of the T tokens go on behind the
                                                         last layer with a state: T; 1 in a replay,
                                                         which ends there (``ort`` only)
    past_key_i, past_value_i         [B, Hk, C, dk]      slot of attention layer i; where dv < dk
                                                         the last columns of V are unused
    conv_state_i                     [B, W-1, channels]  last inputs of the convolution
    recurrent_state_i                [B, Hv, dk, dv]     fp32; zeros = start of a tail replay
    -> logits                        [N, V]
    -> present_{key,value,conv_state,recurrent_state}_i  may alias the inputs
    -> decay_sum_i                   [B, units]          summed log-decay of this step
    -> query_i                       [B, T or R, Hq*dk]  what attention layer i asks for: after
                                                         norm and RoPE (``ort`` lowering only)

A decode step over compressed slots brings more, in the ``ort`` lowering (what it all means is said
in plugins/compressed_sparse_attention/node.py). A run without these inputs is a dense one:

    epsilon, bound_factor            [B]                 of each sequence
    kv_rows_i                        [B, Hk] int32       rows in use, per head; for seqlens
    summaries_i                      [B, Hk, S, 3*dk] fp16
    stats_i                          [B, Hk, S, 2]
    host_key_i, host_value_i         [N]                 memory in which evicted rows are read
    host_rows_i                      [B, Hk, R] int32    where each of them starts
    host_first_i                     [B, Hk, S] int32    the first of each entry
    -> present_{summaries,stats}_i   may alias the inputs
    -> error_bound_i, mass_read_i    [B, Hq]
    -> rows_read_i                   [B, Hk] int32
    -> chosen_i                      [B, Hk, S] uint8

In the ``tensorrt`` lowering kv_append is int32 (not 0: append), there is no total_len, and K/V rows
lie in blocks of a pool:

    block_table                      [B, M] int32        row t lies in block block_table[b, t // R]
    key_pool_i, value_pool_i         [P, R, Hk, dk]      bf16 or fp16, P blocks of R rows
    -> present_{key,value}_pool_i    alias the inputs

Padding tokens (t >= valid_len) leave every state as it was; their K/V rows are written past the
end of the sequence, where the next step overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from build.half import HALF_DTYPES, Half, narrow
from build.mixers import MIXERS, StepInputs, rms_norm
from build.quantize import Blocks, Plain, external_alias, storage
from engine_configs.spec import Block, Branch, HybridSpec
from plugins.onnx_graph import DOMAIN, OPSET, ORT_DOMAIN, Nodes

IR_VERSION = 11
# Reads one canonical weight; the graph keeps only its name and shape where it is large.
WeightReader = Callable[[str], NDArray[Any]]


class GraphBuilder(Nodes):
    """Nodes plus weights: large ones go to ``external`` by name and are written as they come."""

    def __init__(
        self,
        spec: HybridSpec,
        read: WeightReader,
        external: Callable[..., Any],
        lowering: str,
        weights: Plain | Blocks,
    ) -> None:
        super().__init__(lowering, weights.half if isinstance(weights, Half) else TensorProto.FLOAT)
        self.spec, self.read, self.weights = spec, read, weights
        self._external = external
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.external_tensors: list[onnx.TensorProto] = []

    def input(self, name: str, shape: list[Any], kind: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, shape: list[Any], kind: int = TensorProto.FLOAT) -> str:
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def optional_input(self, name: str, shape: list[Any], kind: int = TensorProto.FLOAT) -> str:
        """An input that a run may leave out, then its symbolic dims are 0; layers may share it."""
        if name in self.constants:
            return name
        sizes = [0 if isinstance(d, str) else d for d in shape]
        self.constants[name] = helper.make_tensor(name, kind, sizes, b"", raw=True)
        return self.input(name, shape, kind)

    def small(self, path: str, make: Callable[[NDArray[Any]], NDArray[Any]] = lambda w: w) -> str:
        """A vector-sized weight, kept fp32 inside the model file."""
        return self.array(path, make(self.read(path)).astype(np.float32))

    def store(self, name: str, value: NDArray[Any]) -> str:
        """A large tensor in the weights file."""
        self.external_tensors.append(self._external(name, value))
        return name

    def stored(self, name: str) -> bool:
        return any(t.name == name for t in self.external_tensors)

    def alias(self, name: str, other: str, shape: tuple[int, ...]) -> str:
        """The stored bytes of ``name`` once more, under another name and shape."""
        tensor = next(t for t in self.external_tensors if t.name == name)
        self.external_tensors.append(external_alias(tensor, other, shape))
        return other

    def table(self, path: str) -> str:
        """A [rows, hidden] table as it is (embedding, output head); may be used twice."""
        return path if self.stored(path) else self.store(path, self.read(path))

    def linear(self, x: str, path: str, *, bias: bool = False) -> str:
        """``x @ W^T`` for the weight at ``path`` [out, in], plus the bias at ``path_bias``."""
        node = f"/{path.replace('.', '/')}"
        product = self.weights.linear(self, x, path, node, self.read(path))
        if not bias:
            return product
        return str(self.op("Add", [product, self.small(f"{path}_bias")], f"{node}/biased"))

    def experts(self, path: str, *, transpose: bool = False) -> str:
        """A stack of matrices [E, out, in], each as it is or as [in, out]."""
        name, stack = f"{path}.weight", self.read(path)
        stack = stack.transpose(0, 2, 1) if transpose else stack
        return self.store(name, narrow(stack, self.half))

    def matmul(self, x: str, stored: str, path: str) -> str:
        """``x @ stored`` in the precision of a stored weight; fp32 before and after."""
        if self.half == TensorProto.FLOAT:
            return str(self.op("MatMul", [x, stored], path))
        half = self.cast(x, self.half, f"{path}/half")
        product = self.op("MatMul", [half, stored], f"{path}/product")
        return self.cast(product, TensorProto.FLOAT, path)


def build_graph(
    spec: HybridSpec,
    read: WeightReader,
    external: Callable[..., Any],
    lowering: str = "ort",
    dtype: str = "fp32",
) -> onnx.ModelProto:
    """The whole model as one graph (see the module docstring for its inputs and outputs)."""
    weights = Half(dtype) if dtype in HALF_DTYPES else storage(dtype)
    g = GraphBuilder(spec, read, external, lowering, weights)
    step = _step_inputs(g)
    x = g.weights.embed(g, step.input_ids, "embed", "/embed")
    x = _scaled(g, x, spec.embedding_scale, "/embed/scale")
    step = replace(step, embedded=x)
    last_state = max((i for i, _ in spec.state_layers()), default=None)
    for i, blocks in enumerate(spec.layers):
        for block in blocks:
            x = _block(g, step, i, block, x)
        if i == last_state and lowering == "ort":
            x, step = _rows_kept(g, step, x)
    _logits(g, step, x)
    ours = {"ort": (ORT_DOMAIN, DOMAIN), "tensorrt": (DOMAIN,), "standard": ()}[lowering]
    domains = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(d, 1) for d in ours)]
    graph = helper.make_graph(
        g.nodes,
        spec.model_type,
        g.inputs,
        g.outputs,
        initializer=[*g.constants.values(), *g.external_tensors],
    )
    return helper.make_model(
        graph,
        opset_imports=domains,
        functions=list(g.functions.values()),
        ir_version=IR_VERSION,
        producer_name="hybrid-serve",
    )


def _step_inputs(g: GraphBuilder) -> StepInputs:
    int32, int64 = TensorProto.INT32, TensorProto.INT64
    ids = g.input("input_ids", ["B", "T"], int64)
    positions = g.input("position_ids", ["B", "T"], int64)
    seqlens = g.input("seqlens", ["B"], int32)
    paged = g.lowering == "tensorrt"
    total = "" if paged else g.input("total_len", [], int32)
    valid = g.input("valid_len", ["B"], int64)
    append = g.input("kv_append", [1], int32 if paged else int64)
    table = g.input("block_table", ["B", "M"], int32) if paged else ""
    rows = g.input("logit_rows", ["N"], int64)
    last = "" if paged else g.op("Sub", [seqlens, g.const(1, np.int32)], "/step/last_row")
    length = g.op("Shape", [ids], "/step/length", start=1, end=2)
    scalar = g.op("Squeeze", [length], "/step/length_scalar")
    index = g.op("Range", [g.const(0), scalar, g.const(1)], "/step/index")
    column = g.op("Unsqueeze", [valid, g.const([1])], "/step/valid_column")
    less = g.op("Less", [index, column], "/step/valid")
    mask2d = g.op("Cast", [less], "/step/valid_float", to=TensorProto.FLOAT)
    mask = g.op("Unsqueeze", [mask2d, g.const([2])], "/step/mask")
    return StepInputs(ids, positions, last, total, valid, append, rows, mask, seqlens, table)


def _rows_kept(g: GraphBuilder, step: StepInputs, x: str) -> tuple[str, StepInputs]:
    """What the layers behind the last state work on."""
    first = g.op("Neg", [g.input("rows_kept", [1], TensorProto.INT64)], "/step/first_kept")

    def last(value: str, path: str) -> str:
        return str(g.op("Slice", [value, first, g.const([2**31]), g.const([1])], path))

    kept = replace(
        step,
        tokens="R",
        position_ids=last(step.position_ids, "/step/kept_positions"),
        embedded=last(step.embedded, "/step/kept_embedded"),
    )
    return last(x, "/step/kept_rows"), kept


def _block(g: GraphBuilder, step: StepInputs, i: int, block: Block, x: str) -> str:
    path = f"layers.{i}.{block.name}"
    node = f"/{path.replace('.', '/')}"

    def run(branch: Branch, into: str) -> str:
        make = MIXERS[type(branch.mixer)]
        return make(g, step, i, f"layers.{i}.{branch.name}", branch.mixer, into)

    source = x
    if block.ahead:
        source = g.op("Add", [x, run(block.ahead, x)], f"{node}/with_{block.ahead.name}")
    normed = source
    if block.pre_norm:
        normed = rms_norm(g, source, f"{path}.pre_norm", block.pre_norm)
    h = run(Branch(block.name, block.mixer), normed)
    for branch in block.beside:
        h = g.op("Add", [h, run(branch, normed)], f"{node}/with_{branch.name}")
    if block.post_norm:
        h = rms_norm(g, h, f"{path}.post_norm", block.post_norm)
    h = _scaled(g, h, block.residual_scale, f"{node}/scale")
    skip = normed if block.skip == "normed" else x
    skip = _scaled(g, skip, block.skip_scale, f"{node}/skip_scale")
    return str(g.op("Add", [skip, h], f"{node}/residual"))


def _scaled(g: GraphBuilder, x: str, scale: float, path: str) -> str:
    return x if scale == 1.0 else str(g.op("Mul", [x, g.const(scale, np.float32)], path))


def _logits(g: GraphBuilder, step: StepInputs, x: str) -> None:
    spec = g.spec
    rows = g.reshape(x, [-1, spec.hidden_size], "/logits/rows")
    wanted = g.op("Gather", [rows, step.logit_rows], "/logits/wanted")
    h = rms_norm(g, wanted, "final_norm", spec.final_norm)
    head = "embed" if spec.tie_embeddings else "lm_head"
    logits = g.weights.head(g, h, head, "/lm_head")
    logits = _scaled(g, logits, spec.logit_scale, "/logits/scale")
    if spec.logit_softcap:
        logits = g.op("Tanh", [_scaled(g, logits, 1 / spec.logit_softcap, "/logits/uncapped")],
                      "/logits/tanh")  # fmt: skip
        logits = _scaled(g, logits, spec.logit_softcap, "/logits/capped")
    g.op("Identity", [logits], "/logits", outputs=["logits"])
    g.output("logits", ["N", spec.vocab_size])
