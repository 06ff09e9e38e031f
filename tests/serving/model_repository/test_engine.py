"""The engine model and the cache model, with the real engine and cache below them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from engine_configs.errors import ConfigError
from tests.serving.model_repository.conftest import Make, request
from tests.serving.model_repository.fake import (
    InferenceResponse,
    MetricFamily,
    Sender,
    Server,
    TritonError,
)

SAMPLING = {"max_tokens": 4, "stop_tokens": [], "bad_tokens": []}


def args(name: str = "a", **sampling: Any) -> str:
    wanted = {"id": name, "sampling": {**SAMPLING, **sampling}, "replay": ["exact", 0.0]}
    return json.dumps({**wanted, "cache_salt": ""})


def start(model: Any, tokens: list[int], name: str = "a", **sampling: Any) -> Sender:
    asked = request({"tokens": tokens, "args": args(name, **sampling)})
    model.execute([asked])
    return asked.sender


def call_off(model: Any, op: str, *names: str) -> None:
    asked = request({"op": op, "args": json.dumps({"ids": names})})
    model.execute([asked])
    assert asked.sender.all() == []


def result(response: InferenceResponse) -> dict[str, Any]:
    return dict(json.loads(response.text("result")))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def outcome(name: str) -> float:
    return MetricFamily.made[f"hybrid_requests_total[{name}]"].value


@pytest.fixture
def engine(make: Make) -> Any:
    make("prefix_cache", kv_bytes=str(8 << 20), state_bytes=str(8 << 20))
    return make("engine", threads="1", max_seq_len="1000")


def test_first_response_comes_at_once_then_tokens_then_the_result(engine: Any) -> None:
    first, *rest = start(engine, [1, 2, 3], log_probs=True).all()
    assert first.outputs == {} or "token_ids" in first.outputs
    tokens = [t for r in [first, *rest] if "token_ids" in r.outputs
              for t in r.outputs["token_ids"].as_numpy().tolist()]  # fmt: skip
    probs = [p for r in [first, *rest] if "log_probs" in r.outputs
             for p in r.outputs["log_probs"].as_numpy().tolist()]  # fmt: skip
    assert len(tokens) == len(probs) == 4
    assert result(rest[-1])["reason"] == "length"
    assert result(rest[-1])["prompt_tokens"] == 3
    assert engine.open == {}


def test_second_time_hits_through_the_cache_model(engine: Any) -> None:
    prompt = list(range(1, 60))
    assert result(start(engine, prompt).all()[-1])["cached_tokens"] == 0
    wait_until(lambda: engine.engine.load()["running"] == 0)
    assert result(start(engine, prompt).all()[-1])["cached_tokens"] == len(prompt) - 1


def test_what_the_engine_refuses_is_data(engine: Any) -> None:
    last = start(engine, [1] * 2000).all()[-1]
    assert not last.has_error(), "an error response is lost on the way to a decoupled caller"
    assert result(last)["code"] == "INVALID_ARG"
    assert "2000" in result(last)["error"]
    assert result(start(engine, [10**6]).all()[-1])["code"] == "INVALID_ARG"
    assert outcome("refused") == 2
    assert engine.open == {}


@pytest.mark.parametrize(
    "inputs",
    [{}, {"args": "{"}, {"args": "{}", "tokens": [1]}, {"args": b"\xff", "tokens": [1]},
     {"op": "cancel", "args": "{}"}, {"tokens": [1], "args": args(top_p=7.0)}],
)  # fmt: skip
def test_malformed_calls_end_with_an_error_as_data(engine: Any, inputs: dict[str, Any]) -> None:
    asked = request(inputs)
    engine.execute([asked])
    (answer,) = asked.sender.all()
    message = result(answer)["error"]
    assert "Traceback" not in message
    assert ".py" not in message


def test_cancelled_and_stopped_are_counted_apart(engine: Any) -> None:
    for op, counted in (("cancel", "cancelled"), ("stop", "ok")):
        before = outcome(counted)
        sender = start(engine, [1, 2], name=op, max_tokens=900)
        call_off(engine, op, "never heard of", op)
        assert result(sender.all()[-1])["reason"] == "cancelled"
        wait_until(lambda c=counted, b=before: outcome(c) == b + 1)  # type: ignore[misc]


def test_fault_in_submit_ends_the_stream_once(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.engine, "submit", lambda *a: 1 / 0)
    last = start(engine, [1, 2]).all()[-1]
    assert result(last)["code"] == "INTERNAL"
    assert "ZeroDivisionError" not in result(last)["error"]
    assert any("ZeroDivisionError" in line for line in Server.log)


def test_caller_that_cannot_be_reached_is_cancelled(engine: Any) -> None:
    asked = request({"tokens": [1, 2], "args": args(max_tokens=900)})
    asked.sender.fail_sends = 1
    engine.execute([asked])
    assert result(asked.sender.all()[-1])["reason"] == "cancelled"
    assert engine.engine.load() == {"waiting": 0, "running": 0, "rows": 0}


def test_two_requests_of_one_name_both_end(engine: Any) -> None:
    senders = [start(engine, [1, 2], name="same") for _ in range(2)]
    assert [result(s.all()[-1])["reason"] for s in senders] == ["length"] * 2


def test_load_is_told_while_requests_go_on(engine: Any) -> None:
    rows = MetricFamily.made["hybrid_engine_load[rows]"]
    sender = start(engine, [1, 2], max_tokens=900)
    wait_until(lambda: rows.value == 1 or sender.final)
    sender.all()
    wait_until(lambda: rows.value == 0)


def test_finalize_ends_what_is_in_flight(engine: Any) -> None:
    sender = start(engine, [1, 2], max_tokens=900)
    engine.finalize()
    last = sender.all()[-1]
    assert result(last).get("code") == "CANCELLED" or result(last)["reason"] == "length"


def test_cache_gone_between_two_calls_is_a_miss(engine: Any) -> None:
    prompt = list(range(1, 60))
    expected = start(engine, prompt).all()
    wait_until(lambda: engine.engine.load()["running"] == 0)  # the turn is stored after the answer
    whole, calls = Server.models["prefix_cache"], []

    def dying(requests: list[Any]) -> list[Any]:
        calls.append(json.loads(requests[0].inputs["call"].as_numpy()[0])["op"])
        if calls == ["match"]:
            return list(whole(requests))
        return [InferenceResponse(error=TritonError("the stub died")) for _ in requests]

    Server.models["prefix_cache"] = dying
    answer = start(engine, prompt).all()

    def tokens(responses: list[InferenceResponse]) -> list[int]:
        found = [r.outputs["token_ids"].as_numpy() for r in responses if "token_ids" in r.outputs]
        return [int(t) for part in found for t in part]

    assert tokens(answer) == tokens(expected)
    assert result(answer[-1])["reason"] == "length"
    assert calls[0] == "match"


# prefix_cache ---------------------------------------------------------------------------------


@pytest.fixture
def cache(make: Make) -> Any:
    return make("prefix_cache", kv_bytes=str(8 << 20), state_bytes=str(8 << 20))


def test_errors_of_a_call_are_data(cache: Any) -> None:
    for call in ('{"op": "stat"}', "{", '{"op": "release"}', '{"op": "match", "key": {}}'):
        (answer,) = cache.execute([request({"call": call})])
        assert "error" in json.loads(answer.text("reply"))


def test_call_that_cannot_be_read_raises_nothing(cache: Any) -> None:
    good = request({"call": '{"op": "stats"}'})
    bad, answer = cache.execute([request({"call": b"\xff"}), good])
    assert bad.error().message().startswith("internal error (incident")
    assert json.loads(answer.text("reply"))["value"]["blocks_total"] > 0


def test_metrics_follow_the_cache_and_survive_a_fault(
    cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = MetricFamily.made["hybrid_cache_slots[blocks][free]"]
    wait_until(lambda: free.value > 0)
    monkeypatch.setattr(cache.cache, "stats", lambda: 1 / 0)
    wait_until(lambda: any("ZeroDivisionError" in line for line in Server.log))
    monkeypatch.undo()
    free.value = 0
    wait_until(lambda: free.value > 0)


def test_finalize_removes_the_arena(make: Make) -> None:
    model = make("prefix_cache", kv_bytes=str(8 << 20), state_bytes="0")
    path = model.cache.arena.path
    assert path.exists()
    model.finalize()
    assert not path.exists()


def test_bad_size_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="kv_bytes"):
        make("prefix_cache", kv_bytes="-1")
