"""/metrics after known requests."""

from __future__ import annotations

from serving.engine.metrics import OUTCOMES, SOURCES, TOKENS
from serving.prefix_cache.contract import MissReason
from tests.e2e.chain import Chain, wait_until

LOOKUPS = 'hybrid_cache_lookups_total{{miss_reason="{}"}}'


def grown(chain: Chain, before: dict[str, float]) -> dict[str, float]:
    """What moved, but for times; counters of the cache are up to half a second late."""
    wait_until(lambda: not chain.held(), 5)
    after = chain.metrics()
    moved = {k: after[k] - before.get(k, 0) for k in after}
    return {k: v for k, v in moved.items() if v and not ("_bucket" in k or "_sum" in k)}


def test_names_are_there_from_the_start(chain: Chain) -> None:
    names = set(chain.metrics())
    expected = {f'hybrid_requests_total{{outcome="{o}"}}' for o in OUTCOMES}
    expected |= {f'hybrid_tokens_total{{kind="{k}"}}' for k in TOKENS}
    expected |= {f'hybrid_replay_source_total{{source="{s}"}}' for s in SOURCES}
    expected |= {LOOKUPS.format(r) for r in MissReason}
    expected |= {f'hybrid_engine_load{{kind="{k}"}}' for k in ("waiting", "running", "rows")}
    expected |= {f'hybrid_cache_leases{{kind="{k}"}}' for k in ("read", "write")}
    expected |= {
        f"hybrid_{m}_seconds_{p}" for m in ("ttft", "inter_token") for p in ("count", "sum")
    }
    expected |= {"hybrid_cache_evicted_blocks_total", "hybrid_cache_leases_expired_total"}
    assert expected <= names


def test_sums_after_known_requests(chain: Chain) -> None:
    salt, head = chain.salt(), "y = 2\n" * 40  # 240 tokens
    before = chain.settled_metrics()
    chain.generate(head + "abcd", cache_salt=salt, max_tokens=5)  # cold
    chain.generate(head + "efgh", cache_salt=salt, max_tokens=5, replay_ratio=0.1)
    chain.reply({"text_input": "x" * 9000})  # refused
    chain.reply({"text_input": "x", "max_tokens": 8000, "deadline_ms": 300})

    def settled() -> bool:
        after = chain.metrics()
        asked = "hybrid_cache_tokens_asked_total"
        return after[asked] - before[asked] >= 244 + 244 + 1

    wait_until(settled, 5)
    moved = grown(chain, before)
    assert moved['hybrid_requests_total{outcome="ok"}'] == 2
    assert moved['hybrid_requests_total{outcome="refused"}'] == 1
    assert moved['hybrid_requests_total{outcome="cancelled"}'] == 1
    assert moved['hybrid_tokens_total{kind="prompt"}'] == 488
    assert moved['hybrid_tokens_total{kind="cached"}'] == 240
    assert moved['hybrid_tokens_total{kind="replayed"}'] == 24
    assert moved['hybrid_tokens_total{kind="computed"}'] == 244 + 4 + 24
    assert moved['hybrid_tokens_total{kind="generated"}'] == 10
    assert moved['hybrid_replay_source_total{source="recompute"}'] == 1
    assert moved['hybrid_replay_source_total{source="tail"}'] == 1
    assert moved["hybrid_ttft_seconds_count"] == 2
    assert moved["hybrid_inter_token_seconds_count"] == 2
    assert moved[LOOKUPS.format(MissReason.SALT)] == 1
    assert moved[LOOKUPS.format(MissReason.DIVERGED)] == 1


def test_histograms_hold_seconds(chain: Chain) -> None:
    before = chain.settled_metrics()
    chain.generate("z" * 50, max_tokens=20, cache_salt=chain.salt())
    count = "hybrid_ttft_seconds_count"
    wait_until(lambda: chain.metrics()[count] == before[count] + 1, 2)
    after = chain.metrics()
    took = after["hybrid_ttft_seconds_sum"] - before["hybrid_ttft_seconds_sum"]
    assert 1e-4 < took < 5
    buckets = {k: v for k, v in after.items() if k.startswith("hybrid_ttft_seconds_bucket")}
    assert max(buckets.values()) == after[count]


def test_answers_that_a_stop_word_ends_are_ok(chain: Chain) -> None:
    whole = chain.generate("def main():", max_tokens=40)["text_output"]
    before = chain.settled_metrics()
    chain.generate("def main():", max_tokens=4000, stop_words=[whole[10:14]])
    ok, cancelled = (f'hybrid_requests_total{{outcome="{o}"}}' for o in ("ok", "cancelled"))
    wait_until(lambda: chain.metrics()[ok] == before[ok] + 1, 2)
    assert chain.metrics()[cancelled] == before[cancelled]


def test_reason_of_a_miss_is_told_and_counted(chain: Chain) -> None:
    salt, prompt = chain.salt(), "a prompt of one tenant"
    for reason in (MissReason.SALT, MissReason.NONE):
        before = chain.settled_metrics()[LOOKUPS.format(reason)]
        assert chain.generate(prompt, cache_salt=salt)["miss_reason"] == reason
        wait_until(lambda r=reason, b=before: chain.metrics()[LOOKUPS.format(r)] == b + 1, 2)  # type: ignore[misc]
