"""Compressed K/V through the server: the same answers from fewer bytes, and counted."""

from __future__ import annotations

import pytest

from build.tasks import make_samples, render
from tests.e2e.chain import Chain, wait_until

PREFIX = 3000
FREED = "hybrid_kv_freed_bytes_total"
EXPANSIONS = [f'hybrid_kv_expansions_total{{kind="{kind}"}}' for kind in ("fetched", "dense")]
HELD, READ = (f'hybrid_kv_rows_total{{kind="{kind}"}}' for kind in ("held", "read"))


def test_a_needle_is_found_in_compressed_rows(chain: Chain) -> None:
    before, salt = chain.settled_metrics(), chain.salt()
    asked = 0
    for question, answer in make_samples("needle", PREFIX, 1, seed=12)[0].prompts():
        prompt, count = render(question), len(answer)
        dense = chain.generate(prompt, cache_salt=salt, max_tokens=count)
        bounded = chain.generate(prompt, cache_salt=salt, max_tokens=count, kv_budget=0.345)
        assert dense["text_output"] == bounded["text_output"] == render(answer)
        assert (dense["kv_kept"], dense["kv_error"]) == (1.0, 0.0)
        assert bounded["kv_kept"] <= 0.35
        asked += 1
    assert asked == 8
    wait_until(lambda: chain.metrics()[FREED] > before[FREED], 5)
    after = chain.settled_metrics()
    moved = {name: after[name] - before[name] for name in (FREED, HELD, READ)}
    dense_bytes = asked * PREFIX * 2 * 2 * 2 * 32 * 4  # two layers, K and V, two heads of 32 fp32
    assert moved[FREED] == pytest.approx(0.655 * dense_bytes, rel=0.05)
    assert 0 < moved[READ] < moved[HELD]


def test_a_bound_too_tight_brings_rows_back(chain: Chain) -> None:
    def expansions() -> float:
        return sum(chain.metrics()[name] for name in EXPANSIONS)

    before = expansions()
    prompt = render(make_samples("text", PREFIX, 1, seed=3)[0].prefix)
    dense = chain.generate(prompt, cache_salt=chain.salt(), max_tokens=12)
    tight = chain.generate(prompt, cache_salt=chain.salt(), max_tokens=12, kv_epsilon=1e-6)
    assert tight["text_output"] == dense["text_output"]
    assert tight["kv_error"] <= 1e-6
    assert tight["kv_expansions"] > 0
    wait_until(lambda: expansions() == before + tight["kv_expansions"], 5)
