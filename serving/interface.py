"""The public text interface: its tensors in one table, and the request they make.

The table writes the server's config and checks every request; names follow NVIDIA's text
interface for TensorRT-LLM, then ours. Only ``text_input`` is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_configs.errors import RequestError
from serving.engine.requests import (
    EXACT_REPLAY,
    MAX_TOKENS_LIMIT,
    CompressionRequest,
    SamplingParams,
)
from serving.kv_compression.config import MODES
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
    Tensor("max_replay_error", "FP32"),
    Tensor("kv_compression", "STRING"),
    Tensor("kv_budget", "FP32"),
    Tensor("kv_epsilon", "FP32"),
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
    Tensor("replay_reason", "STRING"),
    Tensor("miss_reason", "STRING"),
    Tensor("kv_kept", "FP32"),
    Tensor("kv_error", "FP32"),
    Tensor("kv_expansions", "INT64"),
)
KNOWN = {t.name: t for t in INPUTS}
MAX_DEADLINE_MS = 24 * 3600 * 1000
MAX_WORDS = 256  # stop_words are looked for at every token


@dataclass(frozen=True)
class TextRequest:
    """One validated request. ``deadline`` in seconds from now, None = the server's default."""

    prompt: str
    sampling: SamplingParams
    replay: ReplayRequest
    compression: CompressionRequest = CompressionRequest()
    cache_salt: str = ""
    stop_words: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    stream: bool = False
    echo: bool = False
    deadline: float | None = None


def parse(
    tensors: Mapping[str, Array | None],
    vocab_size: int,
    default_replay: ReplayRequest = EXACT_REPLAY,
) -> TextRequest:
    """Tensors by name (None = absent) → request. Raises RequestError naming tensor and value.

    ``default_replay``: of a request that says nothing about replay.
    """
    values = {name: _value(KNOWN[name], array) for name, array in tensors.items()}
    values = {k: v for k, v in values.items() if v is not None}
    prompt = values.get("text_input")
    if prompt is None:
        raise RequestError("text_input is missing", fix="Send the prompt as one string")
    if not prompt:
        raise RequestError("text_input is empty", fix="Send at least one character")
    return TextRequest(
        prompt=prompt,
        sampling=_sampling(values, vocab_size),
        replay=_replay(values, default_replay),
        compression=_compression(values),
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
        if len(flat) > MAX_WORDS:
            raise RequestError(f"{tensor.name} holds {len(flat)} words, at most {MAX_WORDS}")
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


def _sampling(values: dict[str, Any], vocab_size: int) -> SamplingParams:
    names = ("max_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")
    chosen = {name: values[name] for name in names if name in values}
    if "end_id" in values:
        _within("end_id", values["end_id"], 0, vocab_size - 1)
        chosen["stop_tokens"] = (values["end_id"],)
    params = SamplingParams(log_probs=values.get("return_log_probs", False), **chosen)
    for name in ("min_length", "min_tokens"):  # two names for one thing; the second wins
        if name in values:
            _within(name, values[name], 0, params.max_tokens)
            params = replace(params, min_tokens=values[name])
    return params


def _replay(values: dict[str, Any], default: ReplayRequest) -> ReplayRequest:
    """What is given implies the mode. A value that the mode does not use is checked as well."""
    ratio, tokens = values.get("replay_ratio"), values.get("replay_tokens")
    error = values.get("max_replay_error")
    if ratio is not None and not 0 < ratio <= 1:
        raise RequestError(f"replay_ratio is {ratio:g}, expected more than 0, up to 1")
    if tokens is not None:
        _within("replay_tokens", tokens, 1, MAX_TOKENS_LIMIT)
    if error is not None and error < 0:
        raise RequestError(f"max_replay_error is {error:g}, expected 0 or more")
    amounts = {"bounded": error, "ratio": ratio, "tokens": tokens}
    given = [mode for mode, amount in amounts.items() if amount is not None]
    names = {"bounded": "max_replay_error", "ratio": "replay_ratio", "tokens": "replay_tokens"}
    if len(given) > 1 and "replay_mode" not in values:
        both = " and ".join(sorted(names[mode] for mode in given))
        raise RequestError(f"{both} are both given", fix="Send one of them")
    mode = values.get("replay_mode", given[0] if given else str(default.mode))
    if mode not in ("exact", *amounts):
        raise RequestError(f"replay_mode is {mode!r}, expected exact, bounded, ratio or tokens")
    amount = 0.0 if mode == "exact" else amounts[mode]
    if amount is None and mode == default.mode:
        amount = default.amount
    if amount is None:
        raise RequestError(f"replay_mode {mode} needs {names[mode]}")
    return ReplayRequest(ReplayMode(mode), amount)


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}, expected {low} to {high}")


def _compression(values: dict[str, Any]) -> CompressionRequest:
    """What is not given is the server's choice; a budget or epsilon alone asks for ``bounded``."""
    mode, budget, epsilon = (values.get(n) for n in ("kv_compression", "kv_budget", "kv_epsilon"))
    if mode is not None and mode not in MODES:
        raise RequestError(f"kv_compression is {mode!r}, expected one of {', '.join(MODES)}")
    for name, value in (("kv_budget", budget), ("kv_epsilon", epsilon)):
        if value is not None and not 0 < value <= 1:
            raise RequestError(f"{name} is {value:g}, expected more than 0, up to 1")
    if mode is None and (budget is not None or epsilon is not None):
        mode = "bounded"
    return CompressionRequest(mode, budget, epsilon)


def _deadline(milliseconds: int | None) -> float | None:
    if milliseconds is None:
        return None
    _within("deadline_ms", milliseconds, 1, MAX_DEADLINE_MS)
    return milliseconds / 1000
