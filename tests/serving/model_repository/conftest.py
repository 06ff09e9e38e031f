"""The three models on the fake server."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.model_repository import fake

sys.modules.setdefault("triton_python_backend_utils", fake.module())

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def clean_server() -> Iterator[None]:
    yield
    fake.Server.models.clear()
    fake.Server.log.clear()
    fake.MetricFamily.made.clear()


@pytest.fixture
def make(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """``make("llm", max_requests="2")``: a loaded model that answers on the fake server."""
    made: list[Any] = []

    def load(name: str, bundle: Path = tiny_bundle, **parameters: str) -> Any:
        module = importlib.import_module(f"serving.model_repository.{name}.model")
        monkeypatch.setattr(module, "bundle_path", lambda file: bundle)
        model = module.TritonPythonModel()
        model.initialize(fake.arguments(name, **parameters))
        fake.Server.models[name] = model.execute
        made.append(model)
        return model

    yield load
    for model in reversed(made):
        model.finalize()


def request(inputs: dict[str, Any], **parameters: Any) -> fake.InferenceRequest:
    """Python values as tensors of the type they look like."""
    tensors = []
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        if isinstance(values[0], str | bytes):
            values = [v.encode() if isinstance(v, str) else v for v in values]
            tensors.append(fake.Tensor(name, fake.np.array(values, dtype=object)))
        else:
            kind = {bool: "?", int: "i8", float: "f4"}[type(values[0])]
            tensors.append(fake.Tensor(name, fake.np.array(values, dtype=kind)))
    return fake.InferenceRequest(inputs=tensors, parameters=parameters)
