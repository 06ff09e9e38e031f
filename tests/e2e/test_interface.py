"""What a client may send and what it gets, over every protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http

from build.tasks import make_samples, render
from serving.client import _tensor
from serving.engine.text import Text
from serving.interface import INPUTS, OUTPUTS
from tests.e2e.chain import Chain

PROMPT = "def main():"
COUNTS = ("prompt_tokens", "cached_tokens", "replayed_tokens", "computed_tokens")
# A value for every optional tensor, valid alone.
VALUES: dict[str, Any] = {
    "max_tokens": 3,
    "stream": False,
    "stop_words": ["zzz", "yyy"],
    "bad_words": ["e"],
    "end_id": 32,
    "top_k": 5,
    "top_p": 0.5,
    "temperature": 0.7,
    "min_tokens": 2,
    "min_length": 2,
    "repetition_penalty": 1.3,
    "seed": 2**63 - 1,
    "exclude_input_in_output": False,
    "return_log_probs": True,
    "cache_salt": "tenant",
    "replay_mode": "exact",
    "replay_ratio": 0.5,
    "replay_tokens": 2,
    "max_replay_error": 0.1,
    "kv_compression": "bounded",
    "kv_budget": 0.5,
    "kv_epsilon": 0.1,
    "deadline_ms": 30_000,
}


def test_text_input_alone_answers_what_the_trained_model_should(chain: Chain) -> None:
    sample = make_samples("needle", 300, 2, seed=5)[0]
    question = sample.questions[0]
    prompt = render(np.concatenate([sample.prefix, question.tokens]))
    answer = chain.generate(prompt)
    assert answer["text_output"].startswith(render(question.answer))
    assert answer["prompt_tokens"] == 300 + len(question.tokens)
    assert answer["computed_tokens"] == answer["prompt_tokens"]
    # max_tokens was not given: at most 16, or the end token
    assert (answer["finish_reason"], answer["generated_tokens"]) in [("length", 16), ("stop", 2)]


def test_every_tensor_is_tried() -> None:
    assert [t.name for t in INPUTS if t.name != "text_input"] == list(VALUES)


@pytest.mark.parametrize("name", VALUES)
def test_each_optional_tensor_alone(chain: Chain, name: str) -> None:
    answer = chain.generate(PROMPT, **{name: VALUES[name]})
    assert answer["finish_reason"] in ("length", "stop", "stop_word")
    made = {"max_tokens": 3}.get(name, 16)
    assert answer["generated_tokens"] == made or answer["finish_reason"] != "length"
    if name == "bad_words":
        assert "e" not in answer["text_output"]
    if name == "end_id":
        assert " " not in answer["text_output"]
    if name == "exclude_input_in_output":
        assert answer["text_output"].startswith(PROMPT)


def test_end_id_ends_the_answer_and_min_tokens_keeps_it_going(chain: Chain, text: Text) -> None:
    whole = chain.generate(PROMPT, max_tokens=12)["text_output"]
    end = text.encode(whole)[5]
    cut = chain.generate(PROMPT, max_tokens=12, end_id=end)
    assert cut["finish_reason"] == "stop"
    assert whole.startswith(cut["text_output"])
    assert len(cut["text_output"]) <= 5
    kept = chain.generate(PROMPT, max_tokens=12, end_id=end, min_tokens=12)
    assert (kept["finish_reason"], kept["generated_tokens"]) == ("length", 12)


def test_seed_decides_what_is_sampled(chain: Chain) -> None:
    def sampled(seed: int) -> str:
        answer = chain.generate(PROMPT, temperature=1.5, seed=seed, max_tokens=24)
        return str(answer["text_output"])

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(4)}) > 1


def test_stream_false_is_one_response(chain: Chain) -> None:
    assert len(list(chain.events(PROMPT, stream=False))) == 1
    with chain.client() as client:
        assert len(list(client.stream(PROMPT, stream=False))) == 1
        assert len(list(client.stream(PROMPT))) == 1, "stream is off unless asked for"


def test_streamed_text_joined_is_the_unstreamed_text(chain: Chain) -> None:
    # Sampled hot, so that bytes come that are no characters, and parts of characters.
    fields = {"max_tokens": 200, "min_tokens": 200, "temperature": 3.0, "seed": 11}
    fields["return_log_probs"] = True
    whole = chain.generate(PROMPT, **fields)
    parts = list(chain.events(PROMPT, **fields))
    assert len(parts) > 20
    assert "".join(p["text_output"] for p in parts) == whole["text_output"]
    assert "\ufffd" in whole["text_output"]
    log_probs = all_log_probs(parts)
    assert log_probs == pytest.approx(whole["output_log_probs"], rel=1e-4)
    assert len(log_probs) == whole["generated_tokens"] == parts[-1]["generated_tokens"] == 200
    assert all(p["text_output"] for p in parts[:-1]), "empty responses were sent"
    assert not any("finish_reason" in p for p in parts[:-1])


def all_log_probs(parts: list[dict[str, Any]]) -> list[float]:
    """Triton's JSON writes a tensor of one value as the value."""
    return [float(x) for p in parts for x in np.atleast_1d(p.get("output_log_probs", []))]


def test_stop_words_end_the_answer_across_tokens(chain: Chain) -> None:
    whole = chain.generate(PROMPT, max_tokens=40)["text_output"]
    word = whole[17:22]  # the tokens are bytes: it takes five of them
    expected = whole[: whole.index(word)]
    for _ in range(3):  # how far the engine gets before it hears of it must not show
        answer = chain.generate(PROMPT, max_tokens=4000, stop_words=["never there", word])
        assert answer["finish_reason"] == "stop_word"
        assert answer["text_output"] == expected
        assert answer["generated_tokens"] == len(expected) + len(word)
    streamed = list(chain.events(PROMPT, max_tokens=40, stop_words=word, return_log_probs=True))
    assert "".join(p["text_output"] for p in streamed) == expected
    assert len(all_log_probs(streamed)) == len(expected) + len(word)


def test_echo_comes_first(chain: Chain) -> None:
    plain = chain.generate(PROMPT)["text_output"]
    echoed = chain.generate(PROMPT, exclude_input_in_output=False)["text_output"]
    assert echoed == PROMPT + plain
    parts = [e["text_output"] for e in chain.events(PROMPT, exclude_input_in_output=False)]
    assert parts[0].startswith(PROMPT)
    assert "".join(parts) == PROMPT + plain


def test_log_probs_are_those_of_the_tokens(chain: Chain) -> None:
    answer = chain.generate(PROMPT, max_tokens=8, return_log_probs=True)
    assert len(answer["output_log_probs"]) == 8
    assert all(x <= 0 for x in answer["output_log_probs"])
    assert "output_log_probs" not in chain.generate(PROMPT, max_tokens=8)


def test_all_protocols_give_one_answer(chain: Chain) -> None:
    fields = {"max_tokens": 12, "cache_salt": chain.salt()}
    expected = chain.generate(PROMPT, **fields)
    streamed = list(chain.events(PROMPT, **fields))
    assert "".join(e["text_output"] for e in streamed) == expected["text_output"]
    with chain.client() as client:
        ours = client.generate(PROMPT, **fields)
    assert ours["text_output"] == expected["text_output"]
    assert ours["cached_tokens"] == ours["prompt_tokens"] - 1
    assert asyncio.run(through_aio(chain, fields)) == expected["text_output"]


async def through_aio(chain: Chain, fields: dict[str, Any]) -> str:
    """tritonclient.grpc.aio, as its users write it."""
    inputs = [_tensor(n, v) for n, v in {"text_input": PROMPT, **fields, "stream": True}.items()]

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "llm", "inputs": inputs}

    pieces = []
    async with tritonclient.grpc.aio.InferenceServerClient(chain.server.grpc_url) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None
            pieces.append(result.as_numpy("text_output")[0].decode())
    return "".join(pieces)


def test_http_client_sees_the_interface_and_is_told_where_to_stream(chain: Chain) -> None:
    client = tritonclient.http.InferenceServerClient(chain.server.http_address)
    described = client.get_model_metadata("llm")
    assert [t["name"] for t in described["inputs"]] == [t.name for t in INPUTS]
    assert [t["name"] for t in described["outputs"]] == [t.name for t in OUTPUTS]
    prompt = tritonclient.http.InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([PROMPT.encode()], dtype=object))
    with pytest.raises(tritonclient.http.InferenceServerException, match="decoupled"):
        client.infer("llm", [prompt])
    client.close()


def test_only_the_asked_outputs_are_sent_by_grpc(chain: Chain) -> None:
    inputs = [_tensor("text_input", PROMPT)]
    answers: list[Any] = []
    client = tritonclient.grpc.InferenceServerClient(chain.server.grpc_url)
    client.start_stream(lambda result, error: answers.append(error or result))
    outputs = [tritonclient.grpc.InferRequestedOutput("text_output")]
    client.async_stream_infer("llm", inputs, outputs=outputs, request_id="mine")
    client.stop_stream()
    response = answers[0].get_response()
    assert response.id == "mine"
    assert [t.name for t in response.outputs] == ["text_output"]
    client.close()


def test_text_of_any_script_survives(chain: Chain) -> None:
    prompt = 'Größe → 漢字 🙂 "\\n\t\u0000'
    assert chain.generate(prompt, exclude_input_in_output=False)["text_output"].startswith(prompt)
    raw = json.dumps({"text_input": prompt, "exclude_input_in_output": False}, ensure_ascii=False)
    status, answer = chain.reply(raw.encode())
    assert status == 200
    assert answer["text_output"].startswith(prompt)
