"""The TensorRT engine class on a fake device: pages, states, copies and answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from engine_configs.errors import BundleError, ConfigError, OverloadedError, RequestError
from serving.engine import fixtures
from serving.engine.model import decode_step, prefill_step
from serving.engine.requests import Request
from serving.engine.runner import open_runner
from serving.engine.tensorrt.layout import EngineLayout
from serving.engine.tensorrt.pages import PagePool
from serving.engine.tensorrt.slots import DeviceSlots
from serving.prefix_cache import ReplayMode, ReplayRequest
from tests.gpu.conftest import Make, open_fake
from tests.serving.engine.conftest import Answer, Lab, answer, greedy, prompt, run

Solo = Callable[[Request], Answer]
EVERYTHING = ReplayRequest(ReplayMode.RATIO, 1.0)


@pytest.fixture
def fake_lab(tree: Make) -> Iterator[Lab]:
    lab = Lab(open_fake(tree("fp32"))[0])  # type: ignore[arg-type]
    yield lab
    lab.close()


# The last bits: fp32 none, fp16 and bf16 those that rounding costs a GPU too. check_engine.py
# allows an engine what bf16 needs here, twice.
@pytest.mark.parametrize(
    ("dtype", "error", "kl"), [("fp32", 1e-4, 1e-9), ("fp16", 0.2, 1e-4), ("bf16", 0.5, 0.01)]
)
def test_it_repeats_what_the_cpu_bundle_answered(
    tree: Make, dtype: str, error: float, kl: float
) -> None:
    """Prefill in chunks, decode, replay of all and of a tail."""
    bundle = tree(dtype)
    model, _, executor = open_fake(bundle)
    expected = fixtures.Recording.load(bundle.path / "fixtures.npz")
    table = fixtures.errors(expected, fixtures.play(model, expected.tokens, expected.turns))
    assert {name.split()[0] for name in table} == {"prefill", "decode"}
    for name, row in table.items():
        assert row["max_abs_logit_error"] <= error, name
        assert row["logit_kl"] <= kl, name
    assert set(executor.runs) == {0, 1, 2}  # every profile


def texts(made: Answer) -> list[int]:
    return [token for token, _ in made]


def test_requests_are_answered_as_on_the_cpu(fake_lab: Lab, solo: Solo) -> None:
    engine = fake_lab.engine(fake_lab.cache())
    requests = [Request(prompt(50 + 17 * i, i), greedy(12)) for i in range(6)]
    streams = [engine.submit(r) for r in requests]  # more than max_batch
    for request, stream in zip(requests, streams, strict=True):
        assert texts(answer(stream)) == texts(solo(request))


def test_hits_share_pages_and_wait_for_copies(tree: Make, solo: Solo) -> None:
    model, device, executor = open_fake(tree("fp32"))
    lab = Lab(model)  # type: ignore[arg-type]
    cache = lab.cache()
    first = lab.engine(cache)
    text = prompt(150)
    run(first, Request(text, greedy(4)))
    assert device.pinned_arena
    assert executor.waited == []

    other, device, executor = open_fake(tree("fp32"))  # same arena, nothing on the device yet
    engine = lab.engine(cache, other)
    longer = np.concatenate([text, prompt(40, 9)])
    asked = Request(longer, greedy(8), EVERYTHING)
    stream = engine.submit(asked)
    assert texts(answer(stream)) == texts(solo(Request(longer, greedy(8))))
    assert stream.usage.cached_tokens >= 150
    assert set(executor.waited) == {i for i, _ in other.spec.attention_layers()}
    page = max(other.layout.page_bytes(p) for p in other.layout.pools)
    arrived = [n for _, n in device.uploads].count(page)
    assert arrived == len(other.layout.pools) * 5  # 150 tokens and more in pages of 32

    before = len(device.uploads)
    stream = engine.submit(replace(asked, tokens=np.concatenate([text[:128], prompt(30, 5)])))
    answer(stream)
    assert stream.usage.cached_tokens == 128
    assert page not in [n for _, n in device.uploads[before:]]  # all four are here
    lab.close()


def test_a_block_that_went_stale_on_the_way_is_a_miss(
    tree: Make, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, _ = open_fake(tree("fp32"))
    lab = Lab(model)  # type: ignore[arg-type]
    cache = lab.cache()
    text = np.concatenate([prompt(150), prompt(20, 3)])
    run(lab.engine(cache), Request(text[:150], greedy(4)))
    other, _, _ = open_fake(tree("fp32"))
    engine = lab.engine(cache, other)
    load = DeviceSlots.load

    def overwritten(self: DeviceSlots, row: int, arena: object, *rest: object) -> int:
        good = load(self, row, arena, *rest)  # type: ignore[arg-type]
        monkeypatch.setattr(cache.arena.blocks, "first_damaged", lambda run: 0)
        return good

    monkeypatch.setattr(DeviceSlots, "load", overwritten)
    stream = engine.submit(Request(text, greedy(8), EVERYTHING))
    assert texts(answer(stream)) == texts(solo(Request(text, greedy(8))))
    assert stream.usage.miss_reason == "stale"
    assert stream.usage.cached_tokens == 0
    monkeypatch.undo()
    lab.close()


def test_states_travel_when_the_host_asks_and_only_then(tree: Make) -> None:
    model, device, _ = open_fake(tree("fp32"))
    slots = model.new_slots(256, 2)
    tokens = prompt(33)
    model.run(slots, 1, prefill_step(tokens, 0))
    uploads = len(device.uploads)
    model.run(slots, 1, decode_step([5], [33]))
    sizes = [n for _, n in device.uploads[uploads:]]
    assert max(sizes) < 4096  # the step's inputs, no state
    kept = {name: rows[1].copy() for name, rows in slots.states.items()}
    one, _ = model.run(slots, 1, decode_step([7], [34]))
    for name, rows in slots.states.items():
        assert not np.array_equal(rows[1], kept[name])
        rows[1][...] = kept[name]
    two, _ = model.run(slots, 1, decode_step([7], [34]))
    assert np.array_equal(one, two)


def test_rows_are_exchanged_with_their_pages(tree: Make) -> None:
    model, _, _ = open_fake(tree("fp32"))
    slots = model.new_slots(256, 3)
    owners = ["a", "b"]
    for i, owner in enumerate(owners):
        row = slots.allocate(owner)
        model.run(slots, row, prefill_step(prompt(40, i), 0))
    expected = model.run(slots, slots.row_of("b"), decode_step([3], [40]))[0]
    lonely = model.new_slots(256, 1)
    model.run(lonely, 0, prefill_step(prompt(40, 1), 0))
    slots.activate("b")  # moves to row 0
    assert slots.row_of("b") == 0
    after = model.run(slots, 0, decode_step([3], [41]))[0]
    assert np.array_equal(expected, model.run(lonely, 0, decode_step([3], [40]))[0])
    assert np.array_equal(after, model.run(lonely, 0, decode_step([3], [41]))[0])


def test_what_it_does_not_serve_is_said(tree: Make) -> None:
    model, _, _ = open_fake(tree("fp32"))
    slots = model.new_slots(2048, 1)
    with pytest.raises(RequestError, match="queries"):
        model.run(slots, 0, prefill_step(prompt(4), 0), queries=True)
    with pytest.raises(BundleError, match=r"no profile.*T = 600.*prefill: B 1\.\.1"):
        model.run(slots, 0, prefill_step(np.zeros(600, np.int64), 0))
    bundle = tree("fp32")
    with pytest.raises(BundleError, match="--target tensorrt"):
        EngineLayout.of(replace(bundle, manifest=bundle.manifest | {"engine": {}}))
    lab = Lab(model)  # type: ignore[arg-type]
    cache = lab.cache(block_size=16)
    with pytest.raises(ConfigError, match="block_size to 32"):
        slots.memory.pin(cache.arena)
    lab.close()


def test_a_machine_without_cuda_says_what_is_missing(tree: Make) -> None:
    with pytest.raises(Exception, match=r"cuda-python.*pip install"):
        open_runner(tree("fp32"))


def test_pages_are_in_one_place_at_a_time() -> None:
    """Random holders against an oracle that knows what each page holds."""
    rng = random.Random(0)
    pool, held, content = PagePool(12), list[int](), dict[int, tuple[int, int]]()
    for step in range(4000):
        kind = rng.random()
        key = (rng.randrange(20), 1)
        if kind < 0.4 and pool.available():
            page = pool.take()
            assert page not in held
            assert page
            held.append(page)
            content.pop(page, None)
        elif kind < 0.6:
            found = pool.share(key)
            if found is not None:
                assert content[found] == key
                held.append(found)
        elif kind < 0.8 and held:
            page = rng.choice(held)
            if pool.is_private(page) and key not in content.values():
                pool.name(page, key)
                content[page] = key
        elif held:
            pool.drop(held.pop(rng.randrange(len(held))))
        if step % 50 == 0:
            pool.check()
    while pool.available():
        pool.take()
    with pytest.raises(OverloadedError, match="1 K/V pages are wanted, 0 of 11"):
        pool.take()
