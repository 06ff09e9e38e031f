"""hybrid_trtllm on a fake of TensorRT-LLM: its cache managers keep the whole attention match, its
hooks change nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from build.checkpoint import Checkpoint, Weights
from build.lab import Lab
from build.tensorrt_llm.package.install import install
from build.tensorrt_llm.package.retention import Retention
from build.tensorrt_llm.package.settings import Settings, Sparse
from build.tensorrt_llm.package.step import Storage, make_step
from serving.engine.model import prefill_step
from serving.replay.calibration import UNCALIBRATED
from serving.replay.checkpoint import CheckpointCodec
from tests.families.cases import CASES
from tests.families.subject import Subject, error
from tests.gpu import fake_trtllm
from tests.gpu.fake_trtllm import Request, install_fake, remove_fake
from tests.gpu.trtllm_executor import Executor, Logits, Tiny

LIMIT = 3e-5  # largest logit difference of two fp32 computations


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["1.2", "1.4"])
def line(request: pytest.FixtureRequest) -> Iterator[str]:
    install_fake(request.param)
    yield request.param
    remove_fake()


def agree(request: Request, want: tuple[list[int], Logits]) -> None:
    assert request.tokens[request.prompt_len :] == want[0]
    assert error(np.stack(request.logits), want[1]) < LIMIT


def test_cold_answers_in_a_batch(tiny: Tiny, line: str) -> None:
    executor = Executor(Settings.of(tiny.spec, UNCALIBRATED), tiny.weights)
    prompts = [tiny.first, tiny.second[::-1], tiny.first[:1]]
    for prompt, request in zip(prompts, executor.generate(*map(list, prompts), new_tokens=6),
                               strict=True):  # fmt: skip
        agree(request, tiny.answer(prompt, 6))


def test_tied_heads_and_scaled_logits(tmp_path: Path, line: str) -> None:
    """TensorRT-LLM owns the output head; the embedding is loaded into it."""
    subject = Subject(CASES["granite_dense_rope"], tmp_path)
    assert subject.spec.tie_embeddings
    assert subject.spec.logit_scale != 1
    weights = Weights(subject.family, Checkpoint(tmp_path / "checkpoint"))
    executor = Executor(Settings.of(subject.spec, UNCALIBRATED), weights)
    (request,) = executor.generate(subject.ids[:40].tolist())
    assert error(request.logits[0], subject.prefilled[39]) < LIMIT


def test_in_16_bits(tiny: Tiny, line: str) -> None:
    """As a tree is served: products, K/V and attention in bf16, states and decays in fp32."""
    settings = Settings.of(tiny.spec, UNCALIBRATED)
    executor = Executor(settings, tiny.weights, dtype=torch.bfloat16)
    (request,) = executor.generate(tiny.first.tolist(), new_tokens=2)
    want = tiny.answer(tiny.first, 1)[1][0]
    assert 1e-4 < error(request.logits[0], want) < 0.05 * float(np.abs(want).max())
    assert all(s.dtype == torch.float32 for s in executor.manager.storage.recurrent.values())


def test_a_next_turn_starts_from_the_state_of_the_last(tiny: Tiny, line: str) -> None:
    executor = Executor(Settings.of(tiny.spec, UNCALIBRATED), tiny.weights)
    (turn,) = executor.generate(tiny.first.tolist(), new_tokens=4)
    prompt = [*turn.tokens, 9, 8, 7]
    (request,) = executor.generate(prompt, new_tokens=3)
    agree(request, tiny.answer(np.array(prompt), 3))
    assert executor.ran[request.py_request_id] <= len(prompt) - len(tiny.first) + 3


def test_an_exact_request_without_a_state_runs_everything_but_writes_only_its_own(
    tiny: Tiny, line: str
) -> None:
    """The linear layers need token 0; the K/V of the hit stays (the executor checks pages)."""
    executor = Executor(Settings.of(tiny.spec, UNCALIBRATED), tiny.weights)
    executor.generate(tiny.first.tolist())
    (request,) = executor.generate(tiny.second.tolist(), new_tokens=3)
    assert request.prepopulated_prompt_len == 137
    assert executor.ran[request.py_request_id] == len(tiny.second) + 2
    agree(request, tiny.answer(tiny.second, 3))


def test_tail_replay_keeps_the_whole_match(tiny: Tiny, line: str) -> None:
    """A hit that ends inside a block; the last 5 % of it from zeros, as the bundle does it."""
    settings = replace(
        Settings.of(tiny.spec, UNCALIBRATED), replay_mode="ratio", replay_amount=0.05
    )
    executor = Executor(settings, tiny.weights)
    executor.generate(tiny.first.tolist())
    (request,) = executor.generate(tiny.second.tolist())
    assert request.prepopulated_prompt_len == 137
    assert executor.ran[request.py_request_id] == len(tiny.second) - 137 + 7
    lab = Lab(tiny.model, 200)
    lab.prefill(tiny.second[:137])
    lab.zero_start(7)
    want = lab.ask(tiny.second[137:], np.array([12]))
    assert error(request.logits[0], want[0]) < LIMIT
    assert error(want[0], tiny.answer(tiny.second, 1)[1][0]) > 100 * LIMIT  # it is no exact hit


def test_split_replay_starts_at_a_checkpoint(tiny: Tiny, line: str) -> None:
    calibration = tiny.calibration(target_kl=0.015)  # too little for the tail from zeros
    executor = Executor(Settings.of(tiny.spec, calibration), tiny.weights)
    executor.generate(tiny.first.tolist())
    (request,) = executor.generate(tiny.second.tolist())
    assert executor.ran[request.py_request_id] == len(tiny.second) - 128
    lab = Lab(tiny.model, 200)
    lab.prefill(tiny.second[:137], keep=[128])
    lab.split_start(128, CheckpointCodec.of(tiny.spec, calibration))
    want = lab.ask(tiny.second[137:], np.array([12]))
    assert error(request.logits[0], want[0]) < LIMIT


def test_chunks_may_end_anywhere(tiny: Tiny, line: str) -> None:
    """Also where the hit ends: line 1.2 would take the next chunk for a first one."""
    settings = replace(Settings.of(tiny.spec, UNCALIBRATED), replay_mode="tokens", replay_amount=14)
    for budget in (7, 20):
        executor = Executor(settings, tiny.weights, budget)
        executor.generate(tiny.first.tolist())
        (request,) = executor.generate(tiny.second.tolist())
        assert executor.ran[request.py_request_id] == len(tiny.second) - 137 + 14
        lab = Lab(tiny.model, 200)
        lab.prefill(tiny.second[:137])
        lab.zero_start(14)
        want = lab.ask(tiny.second[137:], np.array([12]))
        assert error(request.logits[0], want[0]) < LIMIT


def test_conversations_that_share_prefixes(tiny: Tiny, line: str) -> None:
    """Random branches in random batches and chunks: every exact answer is that of a cold run."""
    rng = np.random.default_rng(5)
    calibration = tiny.calibration(status="uncalibrated")  # checkpoints are kept, none is used
    executor = Executor(Settings.of(tiny.spec, calibration), tiny.weights)
    seen = [rng.integers(3, 250, 40)]
    for _ in range(5):
        prompts = []
        for _ in range(rng.integers(1, 4)):
            trunk = seen[rng.integers(len(seen))]
            fresh = rng.integers(3, 250, rng.integers(1, 20))
            prompts.append(np.concatenate([trunk[: rng.integers(1, len(trunk) + 1)], fresh]))
        executor.budget = int(rng.integers(3, 40))
        for request in executor.generate(*(p.tolist() for p in prompts), new_tokens=3):
            prompt = np.array(request.tokens[: request.prompt_len])
            agree(request, tiny.answer(prompt, 3))
            seen.append(np.array(request.tokens))
    ran, given = sum(executor.ran.values()), sum(len(s) for s in seen[1:])
    assert ran < given  # something was reused


def test_what_is_approximate_leaves_nothing_behind(tiny: Tiny, line: str) -> None:
    settings = replace(Settings.of(tiny.spec, UNCALIBRATED), replay_mode="tokens", replay_amount=4)
    executor = Executor(settings, tiny.weights)
    executor.generate(tiny.first.tolist())
    kept = executor.manager.linear.store.used
    for _ in range(2):
        (request,) = executor.generate(tiny.second.tolist(), new_tokens=2)
        assert request.prepopulated_prompt_len == 137
    assert executor.manager.linear.store.used == kept


def test_salts_do_not_share_states(tiny: Tiny, line: str) -> None:
    """The fake's pages know no salt; the states beside them do."""
    executor = Executor(Settings.of(tiny.spec, UNCALIBRATED), tiny.weights)
    prompt = [*tiny.first.tolist(), 5]
    executor.generate(tiny.first.tolist(), salt="a")
    for salt, ran in (("b", len(prompt)), ("a", 1)):
        (request,) = executor.generate(prompt, salt=salt)
        assert executor.ran[request.py_request_id] == ran


def test_rows_come_back_and_warm_up_takes_spare_ones(tiny: Tiny, line: str) -> None:
    executor = Executor(Settings.of(tiny.spec, UNCALIBRATED), tiny.weights)
    manager = executor.manager
    rows = len(manager.linear._free)
    dummies = manager.add_dummy_requests([1, 2, 3], [5, 1, 9])
    assert len(manager.linear._free) == rows - 3
    for dummy in dummies:
        manager.free_resources(dummy)
    executor.generate(*[[3, 4, 5, i] for i in range(4)], new_tokens=2)
    assert len(manager.linear._free) == rows
    assert not manager.pages.tables


def test_memory_is_that_of_the_layers_that_keep_something(tiny: Tiny, line: str) -> None:
    manager = Executor(Settings.of(tiny.spec, UNCALIBRATED), tiny.weights).manager
    config = manager_config(tiny)
    assert set(manager.pages.buffers) == {2, 5}
    if line == "1.2":
        assert manager.get_cache_size_per_token(config, None) == tiny.spec.kv_bytes_per_token(2)
    else:
        slope, fixed = manager.get_cache_size_per_token(
            config, None, tokens_per_block=16, max_batch_size=4
        )
        assert slope == tiny.spec.kv_bytes_per_token(2)
        assert fixed == (4 + manager.settings.spare_rows) * tiny.spec.state_bytes()


def manager_config(tiny: Tiny) -> Any:
    settings = Settings.of(tiny.spec, UNCALIBRATED)
    pretrained = type("Config", (), {"settings": settings, "torch_dtype": torch.bfloat16})
    return type("ModelConfig", (), {"pretrained_config": pretrained})


def test_initial_state_flags_follow_the_states_not_the_cached_tokens(tiny: Tiny, line: str) -> None:
    from tensorrt_llm._torch.modules.mamba.mamba2_metadata import Mamba2Metadata

    settings = replace(Settings.of(tiny.spec, UNCALIBRATED), replay_mode="tokens", replay_amount=4)
    executor = Executor(settings, tiny.weights, budget=16)
    executor.generate(tiny.first.tolist())
    request = Request(1, tiny.second.tolist(), len(tiny.second))
    executor.step([request])  # tokens 133.. of a hit of 137, from zeros
    metadata = Mamba2Metadata()
    executor.manager.linear.of(1).fresh = True  # as it was before the step
    metadata.prepare(executor.metadata)
    assert executor.metadata.kv_cache_params.num_cached_tokens_per_seq == [133]
    assert not metadata.has_initial_states[0]
    assert not metadata.use_initial_states
    executor.manager.linear.of(1).fresh = False
    metadata.prepare(executor.metadata)
    assert metadata.has_initial_states[0]
    assert metadata.use_initial_states


def test_other_models_and_managers_are_left_alone(line: str) -> None:
    install()
    from tensorrt_llm._torch.modules.mamba.mamba2_metadata import Mamba2Metadata
    from tensorrt_llm._torch.pyexecutor import _util

    class Named:
        architectures = ("Qwen3NextForCausalLM",)

    class Config:
        pretrained_config = Named

    class Batch:
        kv_cache_manager, num_contexts, request_ids = object(), 1, (7,)

        class kv_cache_params:
            num_cached_tokens_per_seq = (3,)

    arguments = (Config,) if line == "1.2" else (Config, None)
    chosen = _util.get_kv_cache_manager_cls(*arguments)
    assert chosen in (fake_trtllm.KVCacheManager, fake_trtllm.KVCacheManagerV2)
    metadata = Mamba2Metadata()
    metadata.prepare(Batch)
    assert metadata.has_initial_states[0]


# --- retention ---------------------------------------------------------------------------------


def test_selected_blocks_are_those_that_can_weigh_most(tiny: Tiny) -> None:
    """Sinks and recent blocks always; of the others the one that holds the query's key."""
    storage = Storage.states(tiny.spec, 1, torch.float32)
    storage.add_pools(tiny.spec, 8, 16, torch.float32)
    layer = tiny.spec.attention_layers()[0][0]
    table = [5, 2, 7, 0, 1, 3, 4]
    generator = torch.Generator().manual_seed(0)
    storage.keys[layer].normal_(generator=generator).mul_(0.1)
    step = make_step([1], [100], [0], [table], [0], 16)
    q = torch.randn(1, 4, 32, generator=generator)
    for head in range(2):  # the key that either K/V head's queries look for
        storage.keys[layer][table[2 + head], 3, head] = q[0, 2 * head : 2 * head + 2].mean(0) * 9
    select = Retention(Sparse(budget=1, sinks=1, recent=1), storage).select
    chosen = select(layer, q, step)
    assert chosen is not None
    assert [sorted(row) for row in chosen[0].tolist()] == [[0, 2, 6], [0, 3, 6]]
    assert Retention(Sparse(budget=9), storage).select(layer, q, step) is None


def test_sparse_decode_reads_less_and_stays_close(tiny: Tiny) -> None:
    install_fake("1.4")
    try:
        dense = Settings.of(tiny.spec, UNCALIBRATED)
        prompt = tiny.first.tolist()
        (want,) = Executor(dense, tiny.weights).generate(prompt, new_tokens=4)
        gaps = []
        for budget in (0, 3, 99):
            settings = replace(dense, sparse=Sparse(budget, sinks=1, recent=1))
            (got,) = Executor(settings, tiny.weights).generate(prompt, new_tokens=4)
            gaps.append(error(got.logits[1], want.logits[1]))
        assert gaps[0] > gaps[1] > 1e-4
        assert gaps[2] == 0
    finally:
        remove_fake()


def test_prefill_of_the_bundle_is_what_the_lab_asks(tiny: Tiny) -> None:
    """The yardstick itself: one prefill and the Lab's question agree."""
    lab = Lab(tiny.model, 160)
    rows = np.array([149])
    step = prefill_step(tiny.first, 0, logits=[149])
    slots = Lab(tiny.model, 160).slots
    assert error(lab.ask(tiny.first, rows), tiny.model.run(slots, 0, step)[0]) == 0
