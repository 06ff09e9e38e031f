"""Compacted sequences answer like dense ones, grow back when they must, and leave nothing held."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from build.tasks import make_samples
from engine_configs.errors import ConfigError, RequestError
from serving.engine.compact_slots import CompactSlots
from serving.engine.compression import Compression
from serving.engine.engine import Engine
from serving.engine.model import Model
from serving.engine.requests import CompressionRequest, Request, SamplingParams
from serving.prefix_cache.planner import ReplayMode, ReplayRequest
from tests.serving.engine.conftest import Lab, greedy, prompt, run, wait_idle

LENGTH = 1500
BOUNDED = CompressionRequest("bounded", budget=0.4, epsilon=0.1)


@pytest.fixture
def engine(lab: Lab) -> Engine:
    assert lab.model.native, "make native builds the kernels"
    return lab.engine(lab.cache(), max_seq_len=4096)


def asked(tokens: Any, compression: CompressionRequest, count: int = 8) -> Request:
    replay = ReplayRequest(ReplayMode.TOKENS, 64)
    return Request(np.asarray(tokens, np.int32), SamplingParams(count), replay, compression)


def test_answers_are_those_of_dense_attention(engine: Engine) -> None:
    same = total = 0
    for sample in make_samples("needle", LENGTH, 16, seed=2):
        for question, answer in sample.prompts():
            dense, bounded = (
                engine.submit(asked(question, c, len(answer)))
                for c in (CompressionRequest("off"), BOUNDED)
            )
            same += dense.tokens() == bounded.tokens()
            total += 1
            usage = bounded.usage
            assert 0.2 < usage.kv_kept <= 0.41
            assert usage.kv_freed_bytes > 0
            assert usage.kv_rows_read < usage.kv_rows_held
            assert usage.derived
            assert dense.usage.kv_kept == 1.0
    assert same == total


def test_a_bound_that_nothing_keeps_makes_it_dense_again(engine: Engine) -> None:
    tokens = make_samples("text", LENGTH, 1, seed=4)[0].prefix
    dense = engine.submit(asked(tokens, CompressionRequest(), 24))
    tight = engine.submit(asked(tokens, CompressionRequest("bounded", 0.3, 1e-6), 24))
    assert tight.tokens() == dense.tokens()
    assert tight.usage.kv_fetched + tight.usage.kv_dense > 0
    assert tight.usage.kv_error <= 1e-6


def test_sound_bounds_are_kept_too(lab: Lab) -> None:
    engine = lab.engine(lab.cache(), max_seq_len=4096, kv_alpha=0.0)
    tokens = make_samples("copy", LENGTH, 1, seed=6)[0].prefix
    dense = engine.submit(asked(tokens, CompressionRequest(), 16))
    sound = engine.submit(asked(tokens, BOUNDED, 16))
    assert sound.tokens() == dense.tokens()
    assert sound.usage.kv_error <= 0.1


def test_another_question_still_hits_the_whole_prefix(engine: Engine) -> None:
    shared = prompt(LENGTH, 1)
    engine.submit(asked([*shared, 7, 8, 9], BOUNDED)).tokens()
    wait_idle(engine)
    other = engine.submit(asked([*shared, 3, 2, 1], BOUNDED))
    other.tokens()
    assert other.usage.cached_tokens == LENGTH
    # A prompt that is a hit to its end shows no query but those of a look back.
    again = engine.submit(asked([*shared, 3, 2, 1], BOUNDED))
    again.tokens()
    assert (again.usage.computed_tokens, again.usage.kv_freed_bytes > 0) == (1, True)


def test_freed_slots_admit_others(lab: Lab) -> None:
    engine = lab.engine(lab.cache(), max_seq_len=2048, max_batch=1)
    loose = CompressionRequest("bounded", 0.4, 0.5)
    first = engine.submit(asked(make_samples("text", LENGTH, 1, seed=8)[0].prefix, loose, 300))
    second = engine.submit(asked(prompt(LENGTH, 3), CompressionRequest("off"), 4))
    second.tokens()
    assert first.usage.generated_tokens < 300, "the second was served while the first went on"
    first.cancel()


def test_short_prompts_stay_dense(engine: Engine) -> None:
    short = engine.submit(asked(prompt(300), BOUNDED))
    short.tokens()
    assert (short.usage.kv_kept, short.usage.derived) == (1.0, False)


def test_cancelled_in_the_middle_nothing_is_held(lab: Lab) -> None:
    cache = lab.cache()
    engine = lab.engine(cache, max_seq_len=4096)
    stream = engine.submit(asked(prompt(LENGTH, 5), BOUNDED, 2000))
    for _, _ in zip(range(5), stream, strict=False):
        pass
    stream.cancel()
    wait_idle(engine)
    assert cache.stats()["leases_read"] == 0


def test_a_pin_is_renewed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases run out; a sequence that goes on holds what its steps read."""
    monkeypatch.setattr("serving.engine.compression.RENEW", 0.0)
    cache = lab.cache()
    renewed: list[int] = []
    monkeypatch.setattr(cache, "renew", lambda lease: renewed.append(lease) or True)
    engine = lab.engine(cache, max_seq_len=4096)
    loose = CompressionRequest("bounded", budget=0.4, epsilon=0.5)
    engine.submit(asked(prompt(LENGTH, 6), loose, 5)).tokens()
    assert len(renewed) == 5
    assert len(set(renewed)) == 1


def test_without_its_host_copy_a_sequence_goes_on_and_says_so(lab: Lab) -> None:
    """The cache took its blocks back: the answer's bound is not kept, and the next one's is."""
    cache = lab.cache()
    engine = lab.engine(cache, max_seq_len=4096)
    tokens = make_samples("text", LENGTH, 1, seed=4)[0].prefix
    tight = CompressionRequest("bounded", 0.3, 0.01)
    stream = engine.submit(asked(tokens, tight, 40))
    next(iter(stream))
    cache.arena.blocks.words[:] += np.uint64(2)
    assert len(stream.tokens()) == 39
    assert stream.usage.kv_error > 0.01
    wait_idle(engine)
    assert cache.stats()["leases_read"] == 0
    again = engine.submit(asked(tokens, tight, 4))
    assert len(again.tokens()) == 4
    assert again.usage.kv_error <= 0.01


def test_another_cache_is_not_taken_for_the_host_copy(lab: Lab) -> None:
    """A cache that was restarted has other rows in the same places, and other leases."""
    cache, restarted = lab.cache(), lab.cache()
    engine = lab.engine(cache, max_seq_len=4096)
    tight = CompressionRequest("bounded", 0.3, 0.01)
    first = engine.submit(asked(make_samples("text", LENGTH, 1, seed=4)[0].prefix, tight, 400))
    next(iter(first))
    assert engine._prefixes is not None
    engine._prefixes._index = restarted
    second = engine.submit(asked(make_samples("text", LENGTH, 1, seed=5)[0].prefix, tight, 3))
    assert len(second.tokens()) == 3
    assert second.usage.kv_error <= 0.01
    first.cancel()
    first.tokens()
    assert first.usage.kv_error > 0.01
    wait_idle(engine)
    assert restarted.stats()["leases_read"] == 0
    assert cache.expire(float("inf")) == 1


def test_without_kernels_it_is_refused(
    lab: Lab, tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_OPS_LIBRARY", os.devnull)
    plain = Model(tiny_model.bundle, threads=1)
    assert not plain.native
    engine = lab.engine(lab.cache(plain), plain)
    with pytest.raises(RequestError, match="keeps K/V dense"):
        engine.submit(asked(prompt(20), BOUNDED))
    assert len(run(engine, Request(prompt(20), greedy(4)))) == 4
    with pytest.raises(ConfigError, match="make native"):
        lab.engine(lab.cache(plain), plain, kv_compression="bounded")


def check_host(
    slots: CompactSlots, groups: list[Any], i: int, h: int, prompt_kv: list[Any]
) -> None:
    """Where the op would read the evicted rows of a head, they are."""
    for e, group in enumerate(groups):
        if not len(group) or group.max() >= LENGTH // 32 * 32:
            continue
        first = slots.host[f"host_first_{i}"][0, h, slots.blocks + e]
        at = slots.host[f"host_rows_{i}"][0, h, first : first + len(group)].astype(np.int64) * 8
        for name, want in zip(("key", "value"), prompt_kv, strict=True):
            memory = slots.memory()[f"host_{name}_{i}"]
            got = memory[at[:, None] + np.arange(want.shape[2])]
            np.testing.assert_array_equal(got, want[h, group])


def test_the_kept_set_shrinks_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come back for one question and go for the next; every row stays where it is noted."""
    engine = lab.engine(lab.cache(), max_seq_len=4096)
    seen: list[tuple[int, int]] = []
    after = Compression.after

    def check(self: Compression, slots: CompactSlots, batch: list[Any], found: Any) -> list[Any]:
        wide = after(self, slots, batch, found)
        [seq] = batch
        prompt_kv = self.prefixes.read_blocks(seq.compacted.match, np.arange(LENGTH // 32))
        assert prompt_kv is not None
        for n, (i, heads) in enumerate(seq.compacted.layers.items()):
            for h, count in enumerate(slots.counts[f"kv_rows_{i}"][0].tolist()):
                at = heads.positions[h, :count]
                gone = [p for g in heads.groups[h] for p in g.tolist()]
                whole = sorted([*at[at >= 0].tolist(), *gone])
                assert whole == list(range(len(seq.request.tokens) - 1))
                known = np.flatnonzero((at >= 0) & (at < LENGTH // 32 * 32))
                for name, array in enumerate(slots.layer(0, i)):
                    np.testing.assert_array_equal(
                        array[h, known], prompt_kv[2 * n + name][h, at[known]]
                    )
                assert [int(rows[h]) for rows in heads.own] == np.flatnonzero(at < 0).tolist()
                check_host(slots, heads.groups[h], i, h, prompt_kv[2 * n : 2 * n + 2])
                seen.append((count, heads.rows))
        return wide

    monkeypatch.setattr(Compression, "after", check)
    tokens = make_samples("mqar", LENGTH, 1, seed=4)[0].prefix
    tight = engine.submit(asked(tokens, CompressionRequest("bounded", 0.3, 0.01), 60))
    dense = engine.submit(asked(tokens, CompressionRequest("off"), 60))
    assert tight.tokens() == dense.tokens()
    assert 0 < tight.usage.kv_selected_more < 2 * 2 * 60
    counts = [count for count, _ in seen]
    assert any(b < a for a, b in zip(counts, counts[4:], strict=False)), "it shrank"
    assert any(b > a + 1 for a, b in zip(counts, counts[4:], strict=False)), "it grew"
