"""A list of ONNX nodes that grows: the little that the ops and the graph builder share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 24
DOMAIN = "hybrid"
ORT_DOMAIN = "com.microsoft"


class Nodes:
    """Emits nodes named by path; a value carries the name of the node that makes it.

    ``lowering`` decides how our own ops are written: ``ort`` as nodes of domain ``hybrid`` with a
    FunctionProto body, ``tensorrt`` as nodes that are TensorRT plugins, with a body in ai.onnx for
    whoever has no plugin, ``standard`` as plain ai.onnx nodes. ``half``: what plugins read.
    """

    def __init__(self, lowering: str, half: int = TensorProto.FLOAT) -> None:
        self.lowering, self.half = lowering, half
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.functions: dict[str, onnx.FunctionProto] = {}

    def op(
        self,
        op_type: str,
        inputs: Sequence[str],
        path: str,
        *,
        outputs: Sequence[str] | int = 1,
        domain: str = "",
        **attributes: Any,
    ) -> Any:
        """Add one node; returns its output name (a tuple where there are several)."""
        if isinstance(outputs, int):
            outputs = [path] if outputs == 1 else [f"{path}:{i}" for i in range(outputs)]
        self.nodes.append(
            helper.make_node(
                op_type, list(inputs), list(outputs), name=path, domain=domain, **attributes
            )
        )
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        """A small constant, shared by value."""
        array = np.asarray(value, dtype)
        name = f"const.{array.dtype.name}.{'x'.join(map(str, array.shape))}.{array.tobytes().hex()}"
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def with_constants(self) -> list[onnx.NodeProto]:
        """The nodes after Constant nodes for what ``const`` made: for bodies, which keep their
        constants inside."""
        made = [helper.make_node("Constant", [], [n], value=t) for n, t in self.constants.items()]
        return [*made, *self.nodes]

    def array(self, name: str, value: NDArray[Any]) -> str:
        """A named constant kept inside the model file (norms and other small weights)."""
        self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def rename(self, value: str, name: str) -> str:
        """Another name for a value that no node reads yet."""
        outputs = next(n.output for n in reversed(self.nodes) if value in n.output)
        outputs[list(outputs).index(value)] = name
        return name

    def cast(self, x: str, kind: int, path: str) -> str:
        return str(self.op("Cast", [x], path, to=kind))

    def plugin(
        self,
        op_type: str,
        inputs: Sequence[str],
        path: str,
        outputs: Sequence[str],
        body: Callable[[], onnx.FunctionProto],
        **attributes: Any,
    ) -> None:
        """A node that TensorRT takes for the plugin of this name. ``body`` depends on attributes:
        those of the first node make the function, those that differ an overload of it."""
        attributes |= {"plugin_namespace": DOMAIN, "plugin_version": "1"}
        made = body()
        same = (f for f in self.functions.values() if f.node == made.node)
        known = next(same, None) or self._overload(made)
        self.op(op_type, inputs, path, outputs=outputs, domain=DOMAIN, **attributes)
        self.nodes[-1].overload = known.overload

    def _overload(self, made: onnx.FunctionProto) -> onnx.FunctionProto:
        count = sum(f.name == made.name for f in self.functions.values())
        made.overload = str(count + 1) if count else ""
        self.functions[f"{made.name}.{made.overload}"] = made
        return made

    def slice(self, x: str, start: Any, end: Any, axis: int, path: str) -> str:
        """``x[start:end]`` along ``axis``; bounds are ints or names of [1] int64 values."""
        bounds = [b if isinstance(b, str) else self.const([b]) for b in (start, end)]
        return str(self.op("Slice", [x, *bounds, self.const([axis])], path))

    def reshape(self, x: str, shape: Sequence[int], path: str) -> str:
        return str(self.op("Reshape", [x, self.const(list(shape))], path))


def function(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    nodes: Sequence[onnx.NodeProto],
    attributes: Sequence[str] = (),
) -> onnx.FunctionProto:
    """The body of one of our ops, in the op sets a graph of ours imports."""
    return helper.make_function(
        DOMAIN,
        name,
        list(inputs),
        list(outputs),
        list(nodes),
        [helper.make_opsetid("", OPSET), helper.make_opsetid(ORT_DOMAIN, 1)],
        attributes=list(attributes),
    )


def standard_function(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    body: Nodes,
    attributes: Sequence[str] = (),
) -> onnx.FunctionProto:
    """A body in ai.onnx alone, its constants inside; a plugin's node has two more attributes."""
    return helper.make_function(
        DOMAIN,
        name,
        list(inputs),
        list(outputs),
        body.with_constants(),
        [helper.make_opsetid("", OPSET)],
        attributes=[*attributes, "plugin_namespace", "plugin_version"],
    )


def pass_attributes(node: onnx.NodeProto, kinds: Mapping[str, Any]) -> onnx.NodeProto:
    """Give a body node the attributes of the function it stands in."""
    for name, kind in kinds.items():
        attribute = node.attribute.add()
        attribute.name, attribute.ref_attr_name = name, name
        attribute.type = kind
    return node
