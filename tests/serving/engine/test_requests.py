"""What the engine refuses, and that it goes on serving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine_configs.errors import ConfigError, OverloadedError, PromptTooLongError, RequestError
from serving.engine.engine import EngineConfig
from serving.engine.requests import Request, SamplingParams
from tests.serving.engine.conftest import Answer, Lab, Stepper, answer, greedy, prompt, run

Solo = Callable[[Request], Answer]
NAN, INF = float("nan"), float("inf")

BAD_FIELDS: list[tuple[str, Any]] = [
    ("max_tokens", 99999999999),
    ("max_tokens", 10**400),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2.5),
    ("max_tokens", "16"),
    ("max_tokens", True),
    ("max_tokens", None),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", INF),
    ("temperature", "hot"),
    ("top_k", -1),
    ("top_k", 1 << 40),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", -0.5),
    ("top_p", 1.01),
    ("top_p", NAN),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", INF),
    ("seed", -1),
    ("seed", 1 << 63),
    ("seed", 1.0),
]


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS, ids=lambda x: str(x)[:20])
def test_a_bad_field_is_named_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert f"{name} is {value!r}, expected" in str(caught.value)


def test_values_at_the_edges_are_taken() -> None:
    SamplingParams(
        max_tokens=1 << 20, min_tokens=1 << 20, temperature=0, top_k=1 << 31, top_p=1,
        repetition_penalty=100, seed=(1 << 63) - 1,
    )  # fmt: skip


EMPTY = np.zeros(0, np.int32)
TOO_LONG = 2049


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (Request(EMPTY, greedy()), RequestError, "the prompt is empty"),
        (Request(np.array([-1], np.int32), greedy()), RequestError, "outside 0 to 393"),
        (Request(np.array([5, 394], np.int32), greedy()), RequestError, "outside 0 to 393"),
        (Request(prompt(3), greedy(stop_tokens=(394,))), RequestError, "stop_tokens"),
        (Request(prompt(3), greedy(stop_tokens=(-1,))), RequestError, "stop_tokens"),
        (Request(prompt(3), greedy(bad_tokens=((1, 999),))), RequestError, "bad_tokens"),
        (Request(prompt(TOO_LONG), greedy(1)), PromptTooLongError, "2049 tokens.*exceeds 2048"),
        (Request(prompt(5000), greedy(1)), PromptTooLongError, "5000 tokens"),
        (Request(prompt(40), greedy(2010)), PromptTooLongError, r"40 tokens \+ max_tokens 2010"),
    ],
    ids=range(9),
)
def test_a_bad_request_is_refused_and_the_next_one_answered(
    lab: Lab, solo: Solo, request_: Request, error: type[Exception], message: str
) -> None:
    engine = lab.engine()
    with pytest.raises(error, match=message):
        engine.submit(request_)
    good = Request(prompt(20), greedy(3))
    assert run(engine, good) == solo(good)


def test_the_longest_sequence_fits(lab: Lab) -> None:
    """The last token made is never fed, so max_seq_len + 1 tokens in all are possible."""
    engine = lab.engine(max_seq_len=1100)
    assert len(run(engine, Request(prompt(1100), greedy(1)))) == 1
    assert len(run(engine, Request(prompt(1090), greedy(11)))) == 11
    assert len(run(engine, Request(prompt(1023), greedy(1)))) == 1
    with pytest.raises(PromptTooLongError):
        engine.submit(Request(prompt(1090), greedy(12)))


def test_the_model_may_limit_the_length_more_than_the_config(lab: Lab) -> None:
    assert lab.engine(max_seq_len=1 << 20, max_batch=1).max_seq_len == lab.model.spec.max_position


def test_overload_is_refused_and_passes(lab: Lab, solo: Solo) -> None:
    stepper = Stepper(lab.model)
    engine = lab.engine(model=stepper, max_batch=1, max_seq_len=512, max_waiting=2)
    request = Request(prompt(10), greedy(3))
    streams = [engine.submit(request)]
    stepper.next()  # it has the only slot now
    streams += [engine.submit(request) for _ in range(2)]
    assert engine.load() == {"waiting": 2, "running": 1, "rows": 1}
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        engine.submit(request)
    stepper.open()
    assert [answer(s) for s in streams] == [solo(request)] * 3
    assert run(engine, request) == solo(request)


def test_a_closed_engine_takes_nothing(lab: Lab) -> None:
    engine = lab.engine()
    engine.close()
    with pytest.raises(OverloadedError, match="shutting down"):
        engine.submit(Request(prompt(3), greedy()))


@pytest.mark.parametrize(
    ("name", "value"), [("max_batch", 0), ("chunk", 0), ("chunk", 7), ("max_waiting", -1)]
)
def test_a_bad_engine_size_is_named(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} = {value}"):
        EngineConfig(**{name: value})


def test_usage_adds_up(lab: Lab) -> None:
    engine = lab.engine()
    stream = engine.submit(Request(prompt(33), greedy(5)))
    assert len(answer(stream)) == 5
    usage = stream.usage
    assert (usage.prompt_tokens, usage.computed_tokens, usage.generated_tokens) == (33, 33, 5)
    assert 0 <= usage.queue_seconds <= usage.first_token_seconds < 10
    assert set(usage.to_dict()) >= {"cached_tokens", "replayed_tokens", "miss_reason"}
