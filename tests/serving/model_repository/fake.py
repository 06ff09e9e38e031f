"""A fake of the server's Python API: what the models use of it, strict where the server crashes.

Install ``module()`` as ``triton_python_backend_utils``; ``Server.models`` answers calls between
models. Responses of decoupled models arrive through a queue, as they do in the server.
"""

from __future__ import annotations

import json
import queue
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FINAL = 1


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        assert isinstance(array, np.ndarray)
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, EXISTS, CANCELLED = range(
        8
    )

    def __init__(self, text: str, code: int = INTERNAL) -> None:
        self._text, self.code = text, code

    def message(self) -> str:
        return self._text


class InferenceResponse:
    def __init__(
        self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None
    ) -> None:
        self.outputs = {t.name(): t for t in output_tensors or []}
        self._error = error

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def text(self, name: str) -> str:
        return str(self.outputs[name].as_numpy()[0].decode())


class Sender:
    """Ends the test's process' patience where the real one would end the server's life."""

    def __init__(self) -> None:
        self.responses: queue.Queue[InferenceResponse] = queue.Queue()
        self.cancelled = self.final = False
        self.misuse: list[str] = []
        self.fail_sends = 0

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.final:
            self.misuse.append("sent after the final response")
        if self.fail_sends:
            self.fail_sends -= 1
            raise RuntimeError("cannot send")
        self.final = bool(flags & FINAL)
        if response is not None:
            self.responses.put(response)
        if self.final:
            self.responses.put(None)  # type: ignore[arg-type]

    def is_cancelled(self) -> bool:
        if self.final:
            self.misuse.append("asked after the final response")
        return self.cancelled

    def __iter__(self) -> Iterator[InferenceResponse]:
        while (response := self.responses.get(timeout=20)) is not None:
            yield response

    def all(self) -> list[InferenceResponse]:
        answers = list(self)
        assert self.misuse == []
        return answers


class InferenceRequest:
    def __init__(
        self,
        *,
        inputs: list[Tensor],
        model_name: str = "",
        requested_output_names: list[str] | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        self.inputs = {t.name(): t for t in inputs}
        self.model_name, self._parameters = model_name, parameters
        self.sender = Sender()

    def parameters(self) -> str:
        return json.dumps(self._parameters) if self._parameters else ""

    def get_response_sender(self) -> Sender:
        return self.sender

    def exec(self, decoupled: bool = False) -> Any:
        answers = Server.models[self.model_name]([self])
        if not decoupled:
            return answers[0]
        return iter(self.sender)


Execute = Callable[[list[InferenceRequest]], Any]


class Server:
    """The models that requests between models reach."""

    models: dict[str, Execute] = {}  # noqa: RUF012
    log: list[str] = []  # noqa: RUF012


@dataclass
class Metric:
    value: float = 0.0
    observed: list[float] = field(default_factory=list)

    def increment(self, by: float) -> None:
        assert by >= 0
        self.value += by

    def set(self, value: float) -> None:
        self.value = value

    def observe(self, value: float) -> None:
        self.observed.append(value)


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = range(3)
    made: dict[str, Metric] = {}  # noqa: RUF012

    def __init__(self, name: str, description: str, kind: int) -> None:
        self._name = name

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Metric:
        key = self._name + "".join(f"[{v}]" for v in labels.values())
        return self.made.setdefault(key, Metric())


class Logger:
    log_error = log_warn = log_info = staticmethod(Server.log.append)


def module() -> types.ModuleType:
    made = types.ModuleType("triton_python_backend_utils")
    for item in (
        Tensor, TritonError, InferenceResponse, InferenceRequest, MetricFamily, Logger,
    ):  # fmt: skip
        setattr(made, item.__name__, item)
    made.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL  # type: ignore[attr-defined]
    made.get_input_tensor_by_name = lambda r, name: r.inputs.get(name)  # type: ignore[attr-defined]
    made.get_output_tensor_by_name = lambda r, name: r.outputs.get(name)  # type: ignore[attr-defined]
    return made


def arguments(model: str, **parameters: str) -> dict[str, str]:
    """What the server passes to ``initialize``."""
    values = {k: {"string_value": v} for k, v in parameters.items()}
    return {"model_config": json.dumps({"name": model, "parameters": values})}
