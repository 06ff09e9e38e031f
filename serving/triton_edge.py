"""The few calls our models make of Triton's Python backend, in one place."""

from __future__ import annotations

import json
import uuid
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_DTYPES = {"INT64": np.int64, "FP32": np.float32, "BOOL": np.bool_, "UINT64": np.uint64}


def tensor(name: str, kind: str, values: Any) -> Any:
    """A one-dimensional tensor of one or many values; STRING takes str or bytes."""
    if kind != "STRING":
        return pb_utils.Tensor(name, np.atleast_1d(np.asarray(values, _DTYPES[kind])))
    items = values if isinstance(values, (list, tuple)) else [values]
    encoded = [v.encode() if isinstance(v, str) else v for v in items]
    return pb_utils.Tensor(name, np.array(encoded, dtype=object))


def array(source: Any, name: str) -> NDArray[Any] | None:
    """A tensor of a request or response as its own copy (views die with the request)."""
    if isinstance(source, pb_utils.InferenceRequest):
        found = pb_utils.get_input_tensor_by_name(source, name)
    else:
        found = pb_utils.get_output_tensor_by_name(source, name)
    return None if found is None else np.array(found.as_numpy())


def text(source: Any, name: str) -> str | None:
    values = array(source, name)
    return None if values is None or values.size == 0 else values.reshape(-1)[0].decode()


def infer(model: str, inputs: list[Any], outputs: list[str], *, decoupled: bool = False) -> Any:
    """A call to another model of this server; an iterator of responses when decoupled."""
    request = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=outputs, inputs=inputs
    )
    return request.exec(decoupled=True) if decoupled else request.exec()


def response(outputs: list[Any]) -> Any:
    return pb_utils.InferenceResponse(outputs)


def error_response(code: str, message: str) -> Any:
    error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
    return pb_utils.InferenceResponse(error=error)


def parameters(request: Any) -> dict[str, Any]:
    """Custom parameters of a request: what a client sent beside the tensors."""
    return dict(json.loads(request.parameters() or "{}"))


def internal_error(error: BaseException) -> str:
    """Logs the error under an incident number; returns what the client may see."""
    incident = uuid.uuid4().hex[:8]
    pb_utils.Logger.log_error(f"incident {incident}: {type(error).__name__}: {error}")
    return f"internal error (incident {incident} in the server's log)"


def log_warning(message: str) -> None:
    pb_utils.Logger.log_warn(message)


class Metrics:
    """Counters, gauges and histograms by name and labels; families live as long as this does."""

    def __init__(self) -> None:
        self._families: list[Any] = []

    def counter(self, name: str, description: str, labels: list[dict[str, str]]) -> list[Any]:
        return self._family(name, description, pb_utils.MetricFamily.COUNTER, labels)

    def gauge(self, name: str, description: str, labels: list[dict[str, str]]) -> list[Any]:
        return self._family(name, description, pb_utils.MetricFamily.GAUGE, labels)

    def histogram(self, name: str, description: str, buckets: list[float]) -> Any | None:
        """None on servers older than custom histograms."""
        kind = getattr(pb_utils.MetricFamily, "HISTOGRAM", None)
        if kind is None:
            return None
        family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        self._families.append(family)
        return family.Metric(labels={}, buckets=buckets)

    def _family(
        self, name: str, description: str, kind: Any, labels: list[dict[str, str]]
    ) -> list[Any]:
        family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        self._families.append(family)
        return [family.Metric(labels=label) for label in labels]
