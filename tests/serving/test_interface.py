"""Tensors to requests: every field's good and bad values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine_configs.errors import RequestError
from serving.engine.requests import CompressionRequest
from serving.interface import INPUTS, KNOWN, MAX_WORDS, TextRequest, parse
from serving.prefix_cache.planner import ReplayMode, ReplayRequest

VOCAB = 300
DTYPES = {"STRING": object, "INT64": np.int64, "FP32": np.float32, "BOOL": np.bool_}


def request(**fields: Any) -> TextRequest:
    """As the server hands them over: arrays by name, None where nothing was sent."""
    tensors: dict[str, Any] = {t.name: None for t in INPUTS}
    for name, value in {"text_input": "hi", **fields}.items():
        values = value if isinstance(value, list) else [value]
        values = [v.encode() if isinstance(v, str) else v for v in values]
        tensors[name] = np.array(values, dtype=DTYPES[KNOWN[name].kind])
    return parse(tensors, VOCAB)


def test_what_is_absent_has_its_default() -> None:
    r = request()
    assert (r.prompt, r.stream, r.echo, r.deadline, r.cache_salt) == ("hi", False, False, None, "")
    assert (r.sampling.max_tokens, r.sampling.temperature) == (16, 0.0)
    assert (r.sampling.stop_tokens, r.stop_words, r.bad_words) == ((), (), ())
    assert r.replay == ReplayRequest(ReplayMode.EXACT, 0.0)


@pytest.mark.parametrize(
    ("fields", "path", "expected"),
    [
        ({"text_input": "Größe 漢 🙂"}, "prompt", "Größe 漢 🙂"),
        ({"max_tokens": 1}, "sampling.max_tokens", 1),
        ({"stream": True}, "stream", True),
        ({"stop_words": ["a", "", "bc"]}, "stop_words", ("a", "bc")),
        ({"bad_words": ["a"] * MAX_WORDS}, "bad_words", ("a",) * MAX_WORDS),
        ({"end_id": VOCAB - 1}, "sampling.stop_tokens", (VOCAB - 1,)),
        ({"top_k": 0}, "sampling.top_k", 0),
        ({"top_p": 0.1}, "sampling.top_p", 0.1),  # not 0.10000000149
        ({"temperature": 1.3}, "sampling.temperature", 1.3),
        ({"min_tokens": 16}, "sampling.min_tokens", 16),
        ({"min_length": 3}, "sampling.min_tokens", 3),
        ({"min_length": 3, "min_tokens": 5}, "sampling.min_tokens", 5),
        ({"repetition_penalty": 1.1}, "sampling.repetition_penalty", 1.1),
        ({"seed": 2**63 - 1}, "sampling.seed", 2**63 - 1),
        ({"exclude_input_in_output": False}, "echo", True),
        ({"return_log_probs": True}, "sampling.log_probs", True),
        ({"cache_salt": "tenant"}, "cache_salt", "tenant"),
        ({"deadline_ms": 1500}, "deadline", 1.5),
        ({"replay_ratio": 1.0}, "replay", ReplayRequest(ReplayMode.RATIO, 1.0)),
        ({"replay_tokens": 7}, "replay", ReplayRequest(ReplayMode.TOKENS, 7)),
        ({"max_replay_error": 0.5}, "replay", ReplayRequest(ReplayMode.BOUNDED, 0.5)),
        ({"replay_mode": "exact", "replay_ratio": 0.5}, "replay", ReplayRequest()),
        (
            {"replay_mode": "ratio", "replay_ratio": 0.05, "replay_tokens": 9},
            "replay",
            ReplayRequest(ReplayMode.RATIO, 0.05),
        ),
        ({}, "compression", CompressionRequest()),
        ({"kv_budget": 0.5}, "compression", CompressionRequest("bounded", 0.5)),
        ({"kv_compression": "off", "kv_epsilon": 0.1}, "compression.mode", "off"),
    ],
)
def test_good_values(fields: dict[str, Any], path: str, expected: Any) -> None:
    value: Any = request(**fields)
    for part in path.split("."):
        value = getattr(value, part)
    assert value == expected
    assert type(value) is type(expected)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"text_input": []}, "text_input is missing"),
        ({"text_input": ""}, "text_input is empty"),
        ({"text_input": ["a", "b"]}, "text_input holds 2 values"),
        ({"text_input": b"\xff"}, "text_input is not valid UTF-8"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 2**40}, "max_tokens is 1099511627776"),
        ({"max_tokens": [1, 2]}, "max_tokens holds 2 values"),
        ({"stop_words": ["a", b"\xc3"]}, "stop_words is not valid UTF-8"),
        ({"stop_words": ["a"] * (MAX_WORDS + 1)}, f"stop_words holds {MAX_WORDS + 1}"),
        ({"bad_words": ["a"] * (MAX_WORDS + 1)}, f"bad_words holds {MAX_WORDS + 1}"),
        ({"end_id": -1}, "end_id is -1, expected 0 to 299"),
        ({"end_id": VOCAB}, "end_id is 300, expected 0 to 299"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": NAN}, "top_p is nan"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": INF}, "temperature is inf"),
        ({"min_tokens": 17}, "min_tokens is 17, expected 0 to 16"),
        ({"min_length": -1}, "min_length is -1"),
        ({"min_length": -1, "min_tokens": 2}, "min_length is -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"seed": -1}, "seed is -1"),
        ({"cache_salt": b"\xff"}, "cache_salt is not valid UTF-8"),
        ({"deadline_ms": 0}, "deadline_ms is 0"),
        ({"deadline_ms": 2**62}, f"deadline_ms is {2**62}"),
        ({"replay_mode": "fast"}, "replay_mode is 'fast'"),
        ({"replay_mode": "ratio"}, "needs replay_ratio"),
        ({"replay_mode": "tokens", "replay_ratio": 0.5}, "needs replay_tokens"),
        ({"replay_ratio": 0.0}, "replay_ratio is 0"),
        ({"replay_ratio": 1.5}, "replay_ratio is 1.5"),
        ({"replay_ratio": NAN}, "replay_ratio is nan"),
        ({"replay_tokens": 0}, "replay_tokens is 0"),
        ({"replay_mode": "exact", "replay_tokens": -3}, "replay_tokens is -3"),
        ({"replay_ratio": 0.5, "replay_tokens": 3}, "replay_ratio and replay_tokens"),
        ({"max_replay_error": -0.1}, "max_replay_error is -0.1"),
        ({"kv_compression": "some"}, "kv_compression is 'some', expected one of off, bounded"),
        ({"kv_budget": 0.0}, "kv_budget is 0"),
        ({"kv_budget": 1.5}, "kv_budget is 1.5"),
        ({"kv_epsilon": NAN}, "kv_epsilon is nan"),
    ],
)
def test_bad_values_are_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        request(**fields)
    assert says in str(caught.value)


def test_every_input_has_a_bad_value_above() -> None:
    """But for those of which every value is good."""
    marks = test_bad_values_are_named.pytestmark[0].args[1]  # type: ignore[attr-defined]
    tried = {name for fields, _ in marks for name in fields}
    free = {"stream", "exclude_input_in_output", "return_log_probs"}
    assert tried | free == set(KNOWN)


def test_default_replay_is_the_models_unless_the_request_says_otherwise() -> None:
    tensors = {"text_input": np.array([b"x"], dtype=object)}
    default = ReplayRequest(ReplayMode.BOUNDED, 0.2)
    assert parse(tensors, VOCAB, default).replay == default
    exact = {**tensors, "replay_mode": np.array([b"exact"], dtype=object)}
    assert parse(exact, VOCAB, default).replay.mode is ReplayMode.EXACT
