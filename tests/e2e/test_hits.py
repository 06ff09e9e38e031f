"""What the cache gives: the same text, counted as it was made."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from build.tasks import make_samples, render
from tests.e2e.chain import Chain, wait_until

PREFIX = 700


def tokens(seed: int, length: int = PREFIX) -> str:
    return render(make_samples("needle", length, 1, seed=seed)[0].prefix)


def counts(answer: dict[str, Any]) -> tuple[int, int, int]:
    return answer["cached_tokens"], answer["replayed_tokens"], answer["computed_tokens"]


def test_same_prompt_twice_computes_one_token(chain: Chain) -> None:
    salt, prompt = chain.salt(), tokens(1)
    cold = chain.generate(prompt, cache_salt=salt, max_tokens=24, return_log_probs=True)
    hit = chain.generate(prompt, cache_salt=salt, max_tokens=24, return_log_probs=True)
    assert counts(cold) == (0, 0, PREFIX)
    assert counts(hit) == (PREFIX - 1, 0, 1)
    assert (hit["replay_source"], hit["miss_reason"]) == ("state", "none")
    assert hit["text_output"] == cold["text_output"]
    assert hit["output_log_probs"] == cold["output_log_probs"], "a hit is bit-equal"


@pytest.mark.parametrize(("mode", "ratio"), [({}, 0.05), ({"replay_mode": "ratio"}, 1.0)])
def test_shared_prefix_is_cached_and_its_tail_replayed(
    chain: Chain, mode: dict[str, str], ratio: float
) -> None:
    salt, shared = chain.salt(), 500
    head = tokens(2)[: len(render(make_samples("needle", PREFIX, 1, seed=2)[0].prefix[:shared]))]
    first = chain.generate(head + "A first question", cache_salt=salt)
    assert first["miss_reason"] == "salt", "others use the model, nobody this salt"
    other = chain.generate(head + "Something else", cache_salt=salt, replay_ratio=ratio, **mode)
    size = other["prompt_tokens"]
    replayed = math.ceil(ratio * shared)
    assert counts(other) == (shared, replayed, size - shared + replayed)
    assert (other["replay_source"], other["miss_reason"]) == ("tail", "diverged")
    if ratio == 1.0:  # replaying everything is exact
        cold = chain.generate(head + "Something else", cache_salt=chain.salt())
        assert other["text_output"] == cold["text_output"]


def test_replay_tokens_counts_tokens(chain: Chain) -> None:
    salt, head = chain.salt(), "x = 1\n" * 50
    chain.generate(head + "aaa", cache_salt=salt)
    answer = chain.generate(head + "b", cache_salt=salt, replay_tokens=17)
    assert counts(answer) == (300, 17, 18)


def test_exact_requests_take_no_approximation(chain: Chain) -> None:
    salt, head = chain.salt(), tokens(3)
    cold = chain.generate(head + "abc", cache_salt=chain.salt(), max_tokens=8)
    chain.generate(head + "xyz", cache_salt=salt)
    exact = chain.generate(head + "abc", cache_salt=salt, max_tokens=8)
    assert exact["replayed_tokens"] == 0
    assert exact["text_output"] == cold["text_output"]


def test_a_turn_continues_from_the_last(chain: Chain) -> None:
    salt, prompt = chain.salt(), tokens(4)
    first = chain.generate(prompt, cache_salt=salt, max_tokens=20)
    turn = prompt + first["text_output"] + " and then"
    # The turn is stored after its answer was sent.
    wait_until(lambda: not chain.held(), 5)
    second = chain.generate(turn, cache_salt=salt)
    assert second["cached_tokens"] == PREFIX + 19  # the last token sampled was never fed
    assert second["replay_source"] == "state"


def test_salts_share_nothing(chain: Chain) -> None:
    prompt = tokens(5)
    mine, yours = chain.salt(), chain.salt()
    chain.generate(prompt, cache_salt=mine)
    assert chain.generate(prompt, cache_salt=yours)["cached_tokens"] == 0
    assert chain.generate(prompt)["cached_tokens"] == 0
    assert chain.generate(prompt, cache_salt=mine)["cached_tokens"] == PREFIX - 1


def test_eight_equal_prompts_at_once_are_computed_once(chain: Chain) -> None:
    salt, prompt = chain.salt(), tokens(6, 2000)
    answers: list[dict[str, Any]] = []
    gate = threading.Barrier(8)

    def ask() -> None:
        gate.wait()
        answers.append(chain.generate(prompt, cache_salt=salt, max_tokens=16))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(answers) == 8
    assert len({a["text_output"] for a in answers}) == 1
    assert sorted(a["computed_tokens"] for a in answers) == [1] * 7 + [2000]
