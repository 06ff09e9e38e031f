"""Each family behind the engine: answers over cached prefixes are those of a cold run."""

from __future__ import annotations

import numpy as np

from serving.engine.requests import Request
from serving.prefix_cache import ReplayMode, ReplayRequest
from tests.families.subject import Subject
from tests.serving.engine.conftest import Lab, answer, greedy

ALL = ReplayRequest(ReplayMode.RATIO, 1.0)
SHARED, LENGTH = 90, 141


def test_hits_and_replays_answer_like_a_cold_run(subject: Subject) -> None:
    ids = subject.ids[:LENGTH].astype(np.int32)
    forked = np.concatenate([ids[:SHARED], ids[SHARED:][::-1]])
    longer = np.concatenate([ids, ids[:30]])
    lab = Lab(subject.model)
    try:
        sizes = {"max_seq_len": 256, "max_batch": 2, "slot_bytes": 1 << 28}
        cold, warm = lab.engine(**sizes), lab.engine(lab.cache(), **sizes)
        answer(warm.submit(Request(ids, greedy(4))))
        # From the state kept at the end of the prompt, then from K/V alone: all of it replayed.
        for tokens, replay in ((longer, ReplayRequest()), (forked, ALL)):
            stream = warm.submit(Request(tokens, greedy(6), replay=replay))
            assert answer(stream) == answer(cold.submit(Request(tokens, greedy(6))))
            assert stream.usage.cached_tokens >= SHARED - 1, stream.usage
        assert stream.usage.replayed_tokens >= SHARED - 1, stream.usage
    finally:
        lab.close()
