"""The public model over an engine that does what a test says."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_configs.errors import BundleError, ConfigError
from tests.serving.model_repository.conftest import Make, request
from tests.serving.model_repository.fake import (
    FINAL,
    InferenceRequest,
    InferenceResponse,
    Sender,
    Server,
    Tensor,
    TritonError,
)

USAGE = {"prompt_tokens": 3, "generated_tokens": 2, "cached_tokens": 0, "miss_reason": "cold"}


class Engine:
    """Keeps the senders of open requests; notes what was called off."""

    def __init__(self) -> None:
        self.opened: list[tuple[dict[str, Any], Sender]] = []
        self.called_off: list[tuple[str, list[str]]] = []
        self.arrived = threading.Semaphore(0)
        self.deaf = 0  # calls that come before the engine knows the request
        Server.models["engine"] = self.execute

    def execute(self, requests: list[InferenceRequest]) -> None:
        for r in requests:
            args = json.loads(r.inputs["args"].as_numpy()[0])
            if "op" not in r.inputs:
                self.opened.append((args, r.sender))
                self.arrived.release()
                continue
            self.called_off.append((r.inputs["op"].as_numpy()[0].decode(), args["ids"]))
            self.deaf -= 1
            if self.deaf < 0:
                for known, sender in self.opened:
                    if known["id"] in args["ids"] and not sender.final:
                        self.end(sender, reason="cancelled")
            r.sender.send(flags=FINAL)

    def wait(self) -> Sender:
        assert self.arrived.acquire(timeout=5), "no request came"
        return self.opened[-1][1]

    @staticmethod
    def tokens(sender: Sender, text: str) -> None:
        sender.send(InferenceResponse([Tensor("token_ids", np.array(list(text.encode())))]))

    @staticmethod
    def end(sender: Sender, **result: Any) -> None:
        data = json.dumps({**USAGE, **result}).encode()
        sender.send(InferenceResponse([Tensor("result", np.array([data], dtype=object))]), FINAL)


def ask(model: Any, **inputs: Any) -> Sender:
    asked = request({"text_input": "abc", **inputs})
    model.execute([asked])
    return asked.sender


def only_error(sender: Sender) -> TritonError:
    answers = sender.all()
    assert len(answers) == 1
    error = answers[0].error()
    assert error is not None
    return error


def test_tokens_become_text_in_one_or_many_responses(make: Make) -> None:
    model, engine = make("llm"), Engine()
    for stream, expected in ((False, ["hello"]), (True, ["he", "llo", ""])):
        client = ask(model, stream=stream)
        sender = engine.wait()
        for part in ("he", "llo"):
            engine.tokens(sender, part)
        engine.end(sender, reason="length")
        answers = client.all()
        assert [a.text("text_output") for a in answers] == expected
        assert answers[-1].text("finish_reason") == "length"
        assert answers[-1].outputs["generated_tokens"].as_numpy().tolist() == [2]


@pytest.mark.parametrize(
    ("code", "says", "message"),
    [
        ("INVALID_ARG", "prompt too long", "prompt too long"),
        ("UNAVAILABLE", "9 wait already", "overloaded: 9 wait already"),
        ("INTERNAL", "internal error (incident 12)", "internal error (incident 12)"),
    ],
)
def test_engine_error_keeps_code_and_message(
    make: Make, code: str, says: str, message: str
) -> None:
    model, engine = make("llm"), Engine()
    client = ask(model)
    engine.end(engine.wait(), error=says, code=code)
    error = only_error(client)
    assert (error.code, error.message()) == (getattr(TritonError, code), message)
    assert engine.called_off == [], "the engine has ended it itself"


def test_engine_that_died_is_an_error(make: Make) -> None:
    model, engine = make("llm"), Engine()
    client = ask(model)
    engine.wait().send(InferenceResponse(error=TritonError("stub at /opt/x.py died")), FINAL)
    error = only_error(client)
    assert (error.code, error.message()) == (TritonError.INTERNAL, "the engine is not available")


def test_cancel_is_repeated_until_the_engine_knows_the_request(make: Make) -> None:
    model, engine = make("llm"), Engine()
    engine.deaf = 3
    client = ask(model)
    engine.wait()
    client.cancelled = True
    assert only_error(client).code == TritonError.CANCELLED
    assert len(engine.called_off) >= 4
    assert {op for op, _ in engine.called_off} == {"cancel"}


def test_one_call_cancels_all_who_left(make: Make) -> None:
    model, engine = make("llm"), Engine()
    clients = [ask(model) for _ in range(8)]
    for _ in clients:
        engine.wait()
    for client in clients:
        client.cancelled = True
    for client in clients:
        assert only_error(client).code == TritonError.CANCELLED
    assert max(len(ids) for _, ids in engine.called_off) > 1


def test_deadline_of_the_request_and_of_the_model(make: Make) -> None:
    for default, inputs in (("600000", {"deadline_ms": 60}), ("60", {})):
        model, engine = make("llm", deadline_ms=default), Engine()
        started = time.monotonic()
        client = ask(model, **inputs)
        engine.wait()
        error = only_error(client)
        assert (error.code, error.message()) == (TritonError.CANCELLED, "deadline exceeded")
        assert 0.06 <= time.monotonic() - started < 2


def test_stop_word_stops_the_engine_and_the_rest_does_not_count(make: Make) -> None:
    model, engine = make("llm"), Engine()
    client = ask(model, stop_words=["STOP"])
    sender = engine.wait()
    engine.tokens(sender, "one STOP two")
    (answer,) = client.all()
    assert answer.text("text_output") == "one "
    assert answer.text("finish_reason") == "stop_word"
    assert answer.outputs["generated_tokens"].as_numpy().tolist() == [len("one STOP")]
    assert [op for op, _ in engine.called_off] == ["stop"]


def test_stop_word_in_the_last_tokens_needs_no_stop(make: Make) -> None:
    model, engine = make("llm"), Engine()
    client = ask(model, stop_words=["STOP"], stream=True)
    sender = engine.wait()
    engine.tokens(sender, "a ST")
    engine.tokens(sender, "ART")
    engine.end(sender, reason="length")
    assert "".join(a.text("text_output") for a in client.all()) == "a START"
    assert engine.called_off == []


def test_unknown_field_is_refused_by_name(make: Make) -> None:
    model = make("llm")
    asked = request({"text_input": "abc"}, temperatur=1.0)
    model.execute([asked])
    error = only_error(asked.sender)
    assert error.code == TritonError.INVALID_ARG
    assert "'temperatur'" in error.message()


def test_the_servers_own_parameters_are_none_of_ours(make: Make) -> None:
    model, engine = make("llm"), Engine()
    asked = request({"text_input": "abc"}, triton_enable_empty_final_response=True)
    model.execute([asked])
    engine.end(engine.wait(), reason="length")
    assert not asked.sender.all()[0].has_error()


def test_one_more_than_the_limit_is_refused_and_room_returns(make: Make) -> None:
    model, engine = make("llm", max_requests="1"), Engine()
    first = ask(model)
    sender = engine.wait()
    error = only_error(ask(model))
    assert error.code == TritonError.UNAVAILABLE
    assert error.message().startswith("overloaded: 1 ")
    engine.end(sender, reason="length")
    first.all()
    deadline = time.monotonic() + 5
    while model.running and time.monotonic() < deadline:
        time.sleep(0.01)
    ask(model)
    engine.wait()
    engine.end(engine.opened[-1][1], reason="length")


def test_a_fault_of_ours_shows_nothing_and_frees_the_engine(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine = make("llm"), Engine()
    monkeypatch.setattr(model.text, "decode", lambda tokens: 1 / 0)
    client = ask(model)
    engine.tokens(engine.wait(), "x")
    error = only_error(client)
    assert error.code == TritonError.INTERNAL
    assert error.message().startswith("internal error (incident")
    assert "ZeroDivisionError" in Server.log[-1]
    assert [op for op, _ in engine.called_off] == ["cancel"]
    assert model.running == {}


def test_bundle_that_cannot_be_read(make: Make, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="not a bundle"):
        make("llm", bundle=tmp_path)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [({"max_request": "1"}, "max_request"), ({"max_requests": "many"}, "'many'"),
     ({"max_requests": "0"}, "max_requests = 0"), ({"deadline_ms": "-1"}, "deadline_ms = -1")],
)  # fmt: skip
def test_bad_parameter_is_named(make: Make, parameters: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make("llm", **parameters)


def test_finished_iterators_outlive_the_servers_own_reference(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.model_repository.llm.model.RETIRE_SECONDS", 0.3)
    model, engine = make("llm"), Engine()
    for ending in ({"reason": "length"}, {"error": "no", "code": "INTERNAL"}):
        client = ask(model)
        engine.end(engine.wait(), **ending)
        client.all()
        assert len(model.retired) == 1
        deadline = time.monotonic() + 5
        while model.retired and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not model.retired
