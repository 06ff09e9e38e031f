"""The public text interface: its tensors in one table, and the request they make.

The table writes the server's config and checks every request; names follow NVIDIA's text
interface for TensorRT-LLM, then ours. Only ``text_input`` is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_configs.errors import RequestError
from serving.engine.requests import SamplingParams
from serving.prefix_cache.planner import ReplayMode, ReplayRequest

Array = NDArray[Any]


@dataclass(frozen=True)
class Tensor:
    """``kind`` is Triton's data type without TYPE_; ``many`` = any number of values, else one."""

    name: str
    kind: str
    many: bool = False


INPUTS = (
    Tensor("text_input", "STRING"),
    Tensor("max_tokens", "INT64"),
    Tensor("stream", "BOOL"),
    Tensor("stop_words", "STRING", many=True),
    Tensor("bad_words", "STRING", many=True),
    Tensor("end_id", "INT64"),
    Tensor("top_k", "INT64"),
    Tensor("top_p", "FP32"),
    Tensor("temperature", "FP32"),
    Tensor("min_tokens", "INT64"),
    Tensor("min_length", "INT64"),
    Tensor("repetition_penalty", "FP32"),
    Tensor("seed", "INT64"),
    Tensor("exclude_input_in_output", "BOOL"),
    Tensor("return_log_probs", "BOOL"),
    Tensor("cache_salt", "STRING"),
    Tensor("replay_mode", "STRING"),
    Tensor("replay_ratio", "FP32"),
    Tensor("replay_tokens", "INT64"),
    Tensor("deadline_ms", "INT64"),
)
OUTPUTS = (
    Tensor("text_output", "STRING"),
    Tensor("finish_reason", "STRING"),
    Tensor("output_log_probs", "FP32", many=True),
    Tensor("prompt_tokens", "INT64"),
    Tensor("generated_tokens", "INT64"),
    Tensor("cached_tokens", "INT64"),
    Tensor("replayed_tokens", "INT64"),
    Tensor("computed_tokens", "INT64"),
    Tensor("replay_error", "FP32"),
    Tensor("replay_source", "STRING"),
    Tensor("miss_reason", "STRING"),
)
KNOWN = {t.name: t for t in INPUTS}
MAX_DEADLINE_MS = 24 * 3600 * 1000


@dataclass(frozen=True)
class TextRequest:
    """One validated request. ``deadline`` in seconds from now, None = the server's default."""

    prompt: str
    sampling: SamplingParams
    replay: ReplayRequest
    cache_salt: str = ""
    stop_words: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    stream: bool = False
    echo: bool = False
    deadline: float | None = None


def parse(tensors: Mapping[str, Array | None]) -> TextRequest:
    """Tensors by name (None = absent) → request. Raises RequestError naming tensor and value."""
    values = {name: _value(KNOWN[name], array) for name, array in tensors.items()}
    values = {k: v for k, v in values.items() if v is not None}
    prompt = values.get("text_input")
    if prompt is None:
        raise RequestError("text_input is missing", fix="Send the prompt as one string")
    if not prompt:
        raise RequestError("text_input is empty", fix="Send at least one character")
    return TextRequest(
        prompt=prompt,
        sampling=_sampling(values),
        replay=_replay(values),
        cache_salt=values.get("cache_salt", ""),
        stop_words=tuple(w for w in values.get("stop_words", ()) if w),
        bad_words=tuple(w for w in values.get("bad_words", ()) if w),
        stream=values.get("stream", False),
        echo=not values.get("exclude_input_in_output", True),
        deadline=_deadline(values.get("deadline_ms")),
    )


def _value(tensor: Tensor, array: Array | None) -> Any:
    if array is None:
        return None
    flat = np.asarray(array).reshape(-1)
    if tensor.many:
        return [_one(tensor, v) for v in flat]
    if len(flat) == 0:
        return None
    if len(flat) > 1:
        raise RequestError(f"{tensor.name} holds {len(flat)} values, expected one")
    return _one(tensor, flat[0])


def _one(tensor: Tensor, value: Any) -> Any:
    if tensor.kind == "STRING":
        try:
            return value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError:
            raise RequestError(f"{tensor.name} is not valid UTF-8") from None
    if tensor.kind == "FP32":
        # Shortest decimal that is this fp32: 0.1 stays 0.1.
        number = float(str(np.float32(value)))
        if not math.isfinite(number):
            raise RequestError(f"{tensor.name} is {number}, expected a finite number")
        return number
    return bool(value) if tensor.kind == "BOOL" else int(value)


def _sampling(values: dict[str, Any]) -> SamplingParams:
    names = ("max_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")
    chosen = {name: values[name] for name in names if name in values}
    minimum = values.get("min_tokens", values.get("min_length", 0))
    if "end_id" in values:
        if values["end_id"] < 0:
            raise RequestError(f"end_id is {values['end_id']}, expected >= 0")
        chosen["stop_tokens"] = (values["end_id"],)
    log_probs = values.get("return_log_probs", False)
    return SamplingParams(min_tokens=minimum, log_probs=log_probs, **chosen)


def _replay(values: dict[str, Any]) -> ReplayRequest:
    amounts: dict[str, Callable[[], float | None]] = {
        "exact": lambda: 0.0,
        "ratio": lambda: values.get("replay_ratio"),
        "tokens": lambda: values.get("replay_tokens"),
    }
    implied = "ratio" if "replay_ratio" in values else "exact"
    implied = "tokens" if "replay_tokens" in values else implied
    mode = values.get("replay_mode", implied)
    if mode not in amounts:
        raise RequestError(f"replay_mode is {mode!r}, expected exact, ratio or tokens")
    amount = amounts[mode]()
    if amount is None:
        raise RequestError(f"replay_mode {mode} needs replay_{mode}")
    if amount < 0 or (mode == "ratio" and amount > 1):
        limit = "0 to 1" if mode == "ratio" else "0 or more"
        raise RequestError(f"replay_{mode} is {amount:g}, expected {limit}")
    return ReplayRequest(ReplayMode(mode), amount)


def _deadline(milliseconds: int | None) -> float | None:
    if milliseconds is None:
        return None
    if not 1 <= milliseconds <= MAX_DEADLINE_MS:
        raise RequestError(f"deadline_ms is {milliseconds}, expected 1 to {MAX_DEADLINE_MS}")
    return milliseconds / 1000
