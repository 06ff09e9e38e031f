"""Choosing tokens: against transformers, direct probabilities, and what the engine does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine_configs.errors import RequestError
from serving.engine.requests import Finish, Request, SamplingParams
from serving.engine.sampling import Sampler, log_prob, shortlist
from tests.serving.engine.conftest import Answer, Lab, greedy, prompt, run

Solo = Callable[[Request], Answer]
Tokens = NDArray[np.int32]
V = 60
NOTHING = np.zeros(0, np.int32)


def row(seed: int, scale: float = 2.0) -> NDArray[np.float32]:
    return (scale * np.random.default_rng(seed).standard_normal(V)).astype(np.float32)


def probabilities(logits: NDArray[np.float32], p: SamplingParams) -> NDArray[np.float64]:
    """As transformers has them."""
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    scores = TemperatureLogitsWarper(p.temperature)(None, scores)
    if p.top_k:
        scores = TopKLogitsWarper(p.top_k)(None, scores)
    if p.top_p < 1:
        scores = TopPLogitsWarper(p.top_p)(None, scores)
    return np.asarray(torch.softmax(scores[0], -1).numpy())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 2, 7, V - 1, V, 10**6]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
)
def test_the_shortlist_is_that_of_transformers(
    seed: int, scale: float, temperature: float, top_k: int, top_p: float
) -> None:
    p = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = row(seed, scale)
    kept, weights = shortlist(logits, p)
    got = np.zeros(V)
    got[kept] = weights / weights.sum()
    assert np.abs(got - probabilities(logits, p)).max() < 1e-9


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 20, "top_p": 0.8}, {"temperature": 2.0}],
    ids=str,
)
def test_tokens_come_as_often_as_they_should(options: dict[str, Any]) -> None:
    p = SamplingParams(**({"temperature": 1.0, "seed": 1} | options))
    logits, draws = row(3), 20_000
    sampler = Sampler(p, NOTHING, V)
    counts = np.bincount([sampler.choose(logits)[0] for _ in range(draws)], minlength=V)
    want = probabilities(logits, p)
    assert not counts[want == 0].any()
    sigma = np.sqrt(draws * want * (1 - want))
    assert (np.abs(counts - draws * want) <= 4.5 * sigma + 1e-9).all()


def test_ties_and_no_cut_at_all_keep_everything() -> None:
    flat = np.zeros(V, np.float32)
    kept, weights = shortlist(flat, SamplingParams(temperature=1.0, top_p=0.999))
    assert len(kept) == V
    assert (weights == 1).all()


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    for seed in range(20):
        sampler = Sampler(SamplingParams(temperature=temperature, seed=seed), NOTHING, V)
        assert sampler.choose(row(seed))[0] == row(seed).argmax()


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    sampler = Sampler(SamplingParams(temperature=50.0, top_k=1), NOTHING, V)
    assert all(sampler.choose(row(s))[0] == row(s).argmax() for s in range(20))


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    tokens = np.array([3, 3, 17, 40], np.int32)
    sampler = Sampler(SamplingParams(repetition_penalty=penalty, max_tokens=8), tokens, V)
    history = [int(t) for t in tokens]
    for seed in range(8):
        logits = row(seed)
        want = RepetitionPenaltyLogitsProcessor(penalty)(
            torch.tensor([history]), torch.from_numpy(logits.copy())[None]
        )
        before = logits.copy()
        token, _ = sampler.choose(logits)
        assert token == int(want[0].argmax())
        assert np.array_equal(logits, before), "the row of logits was written to"
        history.append(token)


def test_log_probs_are_those_of_the_raw_logits() -> None:
    logits = row(0, 30.0)
    want = torch.log_softmax(torch.from_numpy(logits.astype(np.float64)), -1).numpy()
    assert np.abs([log_prob(logits, t) for t in range(V)] - want).max() < 1e-9
    p = SamplingParams(temperature=2.0, top_k=3, seed=0, log_probs=True)
    token, got = Sampler(p, NOTHING, V).choose(logits)
    assert got == pytest.approx(want[token])


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_is_made_up_from_nothing(bad: float, temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, seed=0), NOTHING, V)
    with np.errstate(invalid="ignore"), pytest.raises((RequestError, ValueError)):
        sampler.choose(np.full(V, bad, np.float32))


# Through the engine ------------------------------------------------------------------------


@pytest.fixture
def base(solo: Solo) -> tuple[Tokens, list[int]]:
    """A prompt whose greedy answer varies, or the tests below would mean nothing."""
    for seed in range(100):
        made = [t for t, _ in solo(Request(prompt(40, seed), greedy(12)))]
        if len(set(made)) > 4 and made[0] != made[1] and made[3] != made[4]:
            return prompt(40, seed), made
    raise AssertionError("the model repeats itself")


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(
    lab: Lab, base: tuple[Tokens, list[int]]
) -> None:
    given_tokens, free = base
    at = next(i for i in range(1, 12) if free[i] not in free[:i])
    stream = lab.engine().submit(Request(given_tokens, greedy(12, stop_tokens=(free[at],))))
    *tokens, finish = list(stream)
    assert [e.token_id for e in tokens] == free[:at]  # type: ignore[union-attr]
    assert isinstance(finish, Finish)
    assert finish.reason == "stop"
    assert finish.usage.generated_tokens == at + 1


def test_min_tokens_holds_stop_tokens_back(lab: Lab, base: tuple[Tokens, list[int]]) -> None:
    given_tokens, free = base
    stops = (free[0], free[1])
    engine = lab.engine()
    sampling = greedy(12, stop_tokens=stops, min_tokens=5)
    made = [t for t, _ in run(engine, Request(given_tokens, sampling))]
    assert len(made) >= 5
    assert not set(made) & set(stops)
    assert run(engine, Request(given_tokens, greedy(12, stop_tokens=stops))) == []


def test_bad_tokens_never_appear(lab: Lab, base: tuple[Tokens, list[int]]) -> None:
    given_tokens, free = base
    single, pair = free[0], (free[3], free[4])
    sampling = greedy(12, bad_tokens=((single,), pair))
    made = [t for t, _ in run(lab.engine(), Request(given_tokens, sampling))]
    assert single not in made
    assert pair not in pairwise(made)


def test_length_is_why_a_full_answer_ends(lab: Lab) -> None:
    *tokens, finish = list(lab.engine().submit(Request(prompt(9), greedy(6))))
    assert isinstance(finish, Finish)
    assert (len(tokens), finish.reason) == (6, "length")


def test_an_impossible_request_ends_with_its_error(lab: Lab, solo: Solo) -> None:
    engine = lab.engine()
    everything = tuple((t,) for t in range(lab.model.spec.vocab_size))
    with pytest.raises(RequestError, match="no token can be chosen"):
        run(engine, Request(prompt(9), greedy(3, bad_tokens=everything)))
    good = Request(prompt(9), greedy(3))
    assert run(engine, good) == solo(good)
