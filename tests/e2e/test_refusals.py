"""Wrong requests: each gets a message that names what is wrong, and the server goes on.

Where Triton itself refuses (it parses JSON and checks types before any model sees the request)
the messages are its own.
"""

from __future__ import annotations

import json
import re
import struct
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serving.interface import INPUTS
from tests.e2e.chain import Chain

GOOD = {"text_input": "def main():", "max_tokens": 4}
LEAK = re.compile(r"Traceback|File \"|\.py\b|(?<![\w.])/\w+/|site-packages|0x[0-9a-f]{6}")
DTYPES = {"STRING": "BYTES"}


@pytest.fixture(autouse=True)
def answers_as_before(chain: Chain) -> Any:
    """The server that refused goes on and is the same process."""
    expected, run = chain.generate(**GOOD)["text_output"], chain.server.run_id
    yield
    assert chain.generate(**GOOD)["text_output"] == expected
    assert chain.server.run_id == run


def check(message: str, *named: str) -> None:
    for word in named:
        assert word in message
    assert not LEAK.search(message), f"shows its inside: {message}"


# What our check refuses: field, value, and what the message says beside the field.
WRONG: list[tuple[str, Any, str]] = [
    ("text_input", "", "empty"),
    ("max_tokens", 0, "is 0, expected"),
    ("max_tokens", -5, "-5"),
    ("max_tokens", 99_999_999_999, "99999999999"),  # 2^31 < it: not cut to 32 bits
    ("max_tokens", 2**32 + 4, "4294967300"),  # 4 if it were
    ("max_tokens", 2**63 - 1, "9223372036854775807"),
    ("end_id", -1, "is -1, expected 0 to"),
    ("end_id", 100_000, "is 100000, expected 0 to"),
    ("top_k", -1, "-1"),
    ("top_p", 0.0, "0.0"),
    ("top_p", 1.5, "1.5"),
    ("temperature", -0.1, "-0.1"),
    ("temperature", 1e39, "inf"),
    ("temperature", float("nan"), "nan"),
    ("temperature", float("inf"), "inf"),
    ("min_tokens", 17, "17"),
    ("min_length", -2, "-2"),
    ("repetition_penalty", 0, "0.0"),
    ("seed", -1, "-1"),
    ("replay_mode", "fast", "'fast'"),
    ("replay_mode", "ratio", "needs replay_ratio"),
    ("replay_ratio", 0, "is 0, expected more"),
    ("replay_ratio", -1, "-1"),
    ("replay_ratio", 1.01, "1.01"),
    ("replay_tokens", 0, "is 0"),
    ("max_replay_error", -0.5, "-0.5"),
    ("deadline_ms", 0, "is 0"),
    ("deadline_ms", 2**62, str(2**62)),
    ("stop_words", ["x"] * 257, "257"),
]


@pytest.mark.parametrize(("name", "value", "says"), WRONG)
def test_wrong_value_is_named(chain: Chain, name: str, value: Any, says: str) -> None:
    body = json.dumps({"text_input": "x", name: value})
    for verb in ("generate", "generate_stream"):
        connection, response = chain.post(verb, body.encode())
        text = response.read().decode()
        connection.close()
        assert response.status == 400
        check(json.loads(text.removeprefix("data: "))["error"], name, says)


@pytest.mark.parametrize("name", ["temperatur", "max_token", "prompt"])
def test_misspelt_field_is_named(chain: Chain, name: str) -> None:
    status, answer = chain.reply({"text_input": "x", name: 1})
    assert status == 400
    check(answer["error"], f"'{name}'", "temperature", "max_tokens")
    assert chain.reply({"text_input": "x", name: [1, 2]})[1]["error"].count(name)


def test_missing_text_input(chain: Chain) -> None:
    status, answer = chain.reply({"max_tokens": 4})
    assert status == 400
    check(answer["error"], "text_input is missing")


# What Triton refuses by itself: these messages need not name the field.
@pytest.mark.parametrize(
    "value", ["2", 2.5, True, None, 2**63, -(2**63) - 1, [1, 2], [], {"a": 1}, 1e400]
)
@pytest.mark.parametrize("name", ["max_tokens", "seed"])
def test_wrong_json_type(chain: Chain, name: str, value: Any) -> None:
    status, answer = chain.reply({"text_input": "x", name: value})
    assert status in (400, 500)
    check(answer["error"])


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"nonsense", b'{"text_input": "x"', b'{"text_input": "\\ud800"}'],
)
def test_broken_json(chain: Chain, body: bytes) -> None:
    status, answer = chain.reply(body)
    assert status in (400, 500)
    check(answer["error"])


def test_invalid_utf8_by_http(chain: Chain) -> None:
    status, answer = chain.reply(b'{"text_input": "a\xff\xfeb"}')
    assert status == 400
    check(answer["error"], "text_input", "UTF-8")


def test_over_long_prompt_then_a_good_one(chain: Chain) -> None:
    for length in (8200, 300_000):
        status, answer = chain.reply({"text_input": "x" * length})
        assert status == 400
        check(answer["error"], f"prompt of {length} tokens", "8192")
        assert chain.generate(**GOOD)["generated_tokens"] == 4
    status, answer = chain.reply({"text_input": "x" * 8000, "max_tokens": 1000})
    check(answer["error"], "prompt of 8000 tokens + max_tokens 1000")


# gRPC, below any client library's checks.


def one(name: str, kind: str, value: Any) -> tuple[str, str, list[int], bytes]:
    if kind == "BYTES":
        return name, kind, [1], struct.pack("<I", len(value)) + value
    return name, kind, [1], np.array([value], {"INT64": "<i8", "FP32": "<f4"}[kind]).tobytes()


def raw(chain: Chain, *tensors: tuple[str, str, list[int], bytes]) -> str:
    """The error message of a request made by hand."""
    request = service_pb2.ModelInferRequest(model_name="llm")
    for name, kind, shape, data in tensors:
        request.inputs.add(name=name, datatype=kind, shape=shape)
        request.raw_input_contents.append(data)
    with grpc.insecure_channel(chain.server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        responses = stub.ModelStreamInfer(iter([request]), timeout=30)
        return str(next(iter(responses)).error_message)


PROMPT = one("text_input", "BYTES", b"x")


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (one("temperature", "FP32", np.nan), ["temperature is nan"]),
        (one("top_p", "FP32", -np.inf), ["top_p is -inf"]),
        (one("cache_salt", "BYTES", b"\xff\xfe"), ["cache_salt", "UTF-8"]),
        (one("stop_words", "BYTES", b"\xc3"), ["stop_words", "UTF-8"]),
        (one("max_tokens", "FP32", 4), ["max_tokens"]),
        (one("temperature", "INT64", 1), ["temperature"]),
        (("max_tokens", "INT64", [-1], b"\0" * 8), ["max_tokens"]),
        (("max_tokens", "INT64", [2], b"\0" * 16), ["max_tokens"]),
        (("max_tokens", "INT64", [1, 1], b"\0" * 8), ["max_tokens"]),
        (("max_tokens", "INT64", [0], b""), ["max_tokens"]),
        (("max_tokens", "INT64", [2**62], b"\0" * 8), ["max_tokens"]),
        (("max_tokens", "INT64", [1], b"\0" * 4), ["max_tokens"]),
        (("stop_words", "BYTES", [-1], PROMPT[3]), ["stop_words"]),
        (("stop_words", "BYTES", [2**62], PROMPT[3]), ["stop_words"]),
        (("stop_words", "BYTES", [2**63 - 1], PROMPT[3]), ["stop_words"]),
        (("stop_words", "BYTES", [2], PROMPT[3]), ["stop_words"]),
        (("stop_words", "BYTES", [1], b"\xff\xff\xff\xffx"), ["stop_words"]),
        (one("temperatur", "FP32", 1), ["temperatur"]),
    ],
)
def test_wrong_tensor_by_grpc(
    chain: Chain, tensor: tuple[str, str, list[int], bytes], named: list[str]
) -> None:
    check(raw(chain, PROMPT, tensor), *named)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (one("text_input", "BYTES", b"\xff"), "UTF-8"),
        (one("text_input", "BYTES", b""), "empty"),
        (("text_input", "BYTES", [0], b""), "text_input"),
        (one("text_input", "INT64", 1), "text_input"),
    ],
)
def test_wrong_prompt_by_grpc(
    chain: Chain, tensor: tuple[str, str, list[int], bytes], says: str
) -> None:
    check(raw(chain, tensor), "text_input", says)


def test_missing_prompt_by_grpc(chain: Chain) -> None:
    check(raw(chain, one("max_tokens", "INT64", 4)), "text_input is missing")


def test_every_tensor_of_a_wrong_type_by_grpc(chain: Chain) -> None:
    for t in INPUTS:
        kind = "FP32" if t.kind in ("INT64", "STRING", "BOOL") else "INT64"
        message = raw(chain, *([] if t.name == "text_input" else [PROMPT]), one(t.name, kind, 1))
        check(message, t.name)
