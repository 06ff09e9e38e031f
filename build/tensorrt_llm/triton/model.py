"""TensorRT-LLM's llmapi model for Triton, with hybrid_trtllm loaded first.

The stock model.py comes with NVIDIA's container (``TRTLLM_LLMAPI_MODEL`` names its folder). It has
no argument for packages of one's own, so this one loads ours before the engine starts, and lets
the paths in model.yaml be relative to it, so that the tree can move.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parents[2] / "python"
STOCK = Path(os.environ.get("TRTLLM_LLMAPI_MODEL", "/app/all_models/llmapi/tensorrt_llm/1"))


def _stock() -> Any:
    file = STOCK / "model.py"
    if not file.is_file():
        raise FileNotFoundError(
            f"{file}: TensorRT-LLM's llmapi model is not there. Set TRTLLM_LLMAPI_MODEL to the "
            "folder that has its model.py and helpers.py"
        )
    sys.path.insert(0, str(STOCK))  # it imports its helpers by name
    spec = importlib.util.spec_from_file_location("trtllm_llmapi_model", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stock = _stock()
_read = stock.get_model_config


def get_model_config(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The stock function; ``model`` is relative to this folder."""
    config: dict[str, Any] = _read(*args, **kwargs)
    if "model" in config:
        config["model"] = str((HERE / config["model"]).resolve())
    return config


stock.get_model_config = get_model_config


class TritonPythonModel(stock.TritonPythonModel):  # type: ignore[name-defined, misc]
    def initialize(self, args: dict[str, str]) -> None:
        """One process runs everything: a worker of its own would not have loaded the package."""
        os.environ.setdefault("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
        sys.path.insert(0, str(PYTHON))
        importlib.import_module("hybrid_trtllm")  # checks and patches TensorRT-LLM, or raises

        super().initialize(args)
