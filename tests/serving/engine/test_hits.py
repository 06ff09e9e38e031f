"""Answers over cached prefixes: exact ones are those of a cold run, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.engine.model import Model, decode_step, prefill_step
from serving.engine.requests import Request
from serving.engine.sampling import Sampler
from serving.engine.slots import SlotClass
from serving.prefix_cache import Arena, PrefixCache, ReplayMode, ReplayRequest
from tests.serving.engine.conftest import Answer, Lab, answer, greedy, prompt, run

Tokens = NDArray[np.int32]
Solo = Callable[[Request], Answer]
ALL = ReplayRequest(ReplayMode.RATIO, 1.0)


def conversation(model: Model, turns: list[Tokens], max_tokens: int) -> Answer:
    """The last answer of a conversation that never leaves its slot.

    What was decoded stays as decoded: T = 1 and T > 1 differ in the last bit.
    """
    slots = SlotClass(model.spec, 1024, 1)
    context, fed, made = np.zeros(0, np.int32), 0, Answer()
    for turn in turns:
        context = np.concatenate([context, turn])
        model.run(slots, 0, prefill_step(context[fed:-1], fed))
        fed, made = len(context) - 1, []
        sampler = Sampler(greedy(max_tokens), context, model.spec.vocab_size)
        while len(made) < max_tokens:
            logits, _ = model.run(slots, 0, decode_step([int(context[fed])], [fed]))
            made.append(sampler.choose(logits[0]))
            context = np.append(context, np.int32(made[-1][0]))
            fed += 1
    return made


def test_the_next_turn_goes_on_where_the_last_one_ended(lab: Lab, solo: Solo) -> None:
    engine = lab.engine(lab.cache())
    context, turns, cached = np.zeros(0, np.int32), list[Tokens](), 0
    for i in range(4):
        turns.append(prompt(70 - 20 * i, i))
        context = np.concatenate([context, turns[-1]])
        stream = engine.submit(Request(context, greedy(9)))
        made = answer(stream)
        assert made == conversation(lab.model, turns, 9)
        cold = solo(Request(context, greedy(9)))
        assert [t for t, _ in made] == [t for t, _ in cold]
        assert np.allclose([p for _, p in made], [p for _, p in cold], rtol=0, atol=1e-4)
        assert stream.usage.cached_tokens == stream.usage.prompt_tokens - (
            stream.usage.computed_tokens
        )
        assert stream.usage.cached_tokens == cached
        assert not stream.usage.derived
        context = np.concatenate([context, np.array([t for t, _ in made], np.int32)])
        cached = len(context) - 1  # the last token made was never fed


@pytest.mark.parametrize("shared", [1, 2, 31, 32, 33, 64, 65, 66, 100, 129])
@pytest.mark.parametrize("replay", [ReplayRequest(), ALL], ids=["exact", "r=L"])
def test_prompts_that_part_ways(lab: Lab, solo: Solo, shared: int, replay: ReplayRequest) -> None:
    """No state lies where they part: exact recomputes, r = L replays the whole hit."""
    engine = lab.engine(lab.cache(), chunk=64)
    run(engine, Request(prompt(140), greedy()))
    tokens = np.concatenate([prompt(140)[:shared], prompt(40, 5)])
    request = Request(tokens, greedy(), replay)
    stream = engine.submit(request)
    assert answer(stream) == solo(request)
    usage = stream.usage
    assert not usage.derived
    assert usage.miss_reason == "diverged"
    if replay is ALL:
        assert (usage.cached_tokens, usage.replayed_tokens) == (shared, shared)
        assert usage.computed_tokens == len(tokens)
    else:
        assert (usage.cached_tokens, usage.replay_source) == (0, "recompute")


def test_a_short_tail_is_derived_and_never_reaches_exact_requests(lab: Lab, solo: Solo) -> None:
    cache = lab.cache()
    engine = lab.engine(cache)
    run(engine, Request(prompt(120), greedy()))
    tokens = np.concatenate([prompt(120)[:90], prompt(40, 6)])
    tail = Request(tokens, greedy(), ReplayRequest(ReplayMode.TOKENS, 5))
    stream = engine.submit(tail)
    approximate = answer(stream)
    usage = stream.usage
    assert usage.derived
    assert (usage.cached_tokens, usage.replayed_tokens) == (90, 5)
    assert usage.computed_tokens == len(tokens) - 85
    exact = Request(tokens, greedy())
    want = solo(exact)
    assert [p for _, p in approximate] != [p for _, p in want]
    assert cache.stats()["blocks_derived"] > 0
    assert run(engine, exact) == want
    longer = Request(np.concatenate([tokens, prompt(9)]), greedy())
    assert run(engine, longer) == solo(longer)


def test_eight_identical_prompts_at_once(lab: Lab, solo: Solo) -> None:
    """One computes the prompt, seven wait for it; all answers are that of a cold run."""
    cache = lab.cache()
    engine = lab.engine(cache, max_batch=8, chunk=64)
    request = Request(prompt(200), greedy(15))
    streams = [engine.submit(request) for _ in range(8)]
    answers = [answer(s) for s in streams]
    assert answers == [solo(request)] * 8
    assert sorted(s.usage.cached_tokens for s in streams) == [0] + [199] * 7


def test_a_salt_and_use_cache_keep_prompts_apart(lab: Lab, solo: Solo) -> None:
    engine = lab.engine(lab.cache())
    request = Request(prompt(80), greedy(4), cache_salt="a")
    run(engine, request)
    for other, reason in (
        (replace(request, cache_salt="b"), "salt"),
        (replace(request, use_cache=False), "off"),
    ):
        stream = engine.submit(other)
        assert answer(stream) == solo(request)
        assert (stream.usage.cached_tokens, stream.usage.miss_reason) == (0, reason)


def test_a_cache_much_too_small_changes_no_answer(lab: Lab, solo: Solo) -> None:
    engine = lab.engine(lab.cache(kv_bytes=150_000, state_bytes=300_000))
    for i in range(12):
        request = Request(np.concatenate([prompt(60), prompt(40, i % 5)]), greedy(3), ALL)
        assert run(engine, request) == solo(request)


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


def short_read(*_: Any, **__: Any) -> int:
    return 40


FAULTS = [
    (PrefixCache, "match", fails),
    (PrefixCache, "reserve", fails),
    (PrefixCache, "publish", fails),
    (Arena, "read_blocks", fails),
    (Arena, "read_blocks", short_read),
    (Arena, "read_state", lambda *_: False),
    (Arena, "write_blocks", fails),
    (Arena, "write_state", fails),
]


@pytest.mark.parametrize(("owner", "name", "fault"), FAULTS, ids=lambda x: str(x)[:40])
def test_a_failing_cache_is_a_miss(
    lab: Lab, solo: Solo, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: Any
) -> None:
    engine = lab.engine(lab.cache())
    request = Request(prompt(100), greedy(5))
    want = solo(request)
    assert run(engine, request) == want  # fills the cache
    monkeypatch.setattr(owner, name, fault)
    other = Request(np.concatenate([prompt(100), prompt(20, 9)]), greedy(5))
    assert run(engine, request) == want
    assert run(engine, other) == solo(other)
    monkeypatch.undo()
    assert run(engine, request) == want
    assert run(engine, other) == solo(other)
