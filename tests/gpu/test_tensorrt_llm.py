"""``convert.py --target tensorrt-llm``: the model in PyTorch equals the ONNX bundle, its cache
managers keep whole attention matches on a fake of TensorRT-LLM, the tree is complete."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from typer.testing import CliRunner

from build.checkpoint import Checkpoint, Weights
from build.lab import Lab
from build.pipeline import Options, Silent, new_manifest, write_graph, write_manifest
from build.tensorrt_llm.llm_args import LlmArgs, ModelYaml, parse, to_yaml
from build.tensorrt_llm.package.install import install
from build.tensorrt_llm.package.model import HybridModel, require_supported
from build.tensorrt_llm.package.retention import Retention
from build.tensorrt_llm.package.settings import Settings, Sparse, read_settings
from build.tensorrt_llm.package.step import Storage, make_step
from build.tensorrt_llm.package.symbols import SYMBOLS, SymbolMismatchError, check, line_of
from build.tensorrt_llm.tree import plan_shards
from convert import app
from engine_configs.errors import ConfigError, UnsupportedModelError
from engine_configs.families import read_checkpoint_config
from serving.engine.bundle import Bundle
from serving.engine.model import Model, decode_step, prefill_step
from serving.replay.calibration import UNCALIBRATED, Calibration, LayerUnits, Point
from serving.replay.checkpoint import CheckpointCodec
from tests.families.cases import CASES
from tests.families.subject import DECODED, LENGTH, Subject, error
from tests.gpu import fake_trtllm
from tests.gpu.fake_trtllm import Held, Request, install_fake, remove_fake
from tests.gpu.trtllm_executor import Executor

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 3e-5  # largest logit difference of two fp32 computations
Logits = NDArray[np.float32]


# --- the model against the ONNX bundle ---------------------------------------------------------


class TorchSide:
    """The PyTorch model with pages in no order and states in the last of three rows."""

    def __init__(self, subject: Subject) -> None:
        spec = subject.spec
        weights = Weights(subject.family, Checkpoint(subject.folder / "checkpoint"))
        self.ids = subject.ids
        self.model = HybridModel(spec, torch.float32)
        self.model.load((n, torch.from_numpy(weights.read(n))) for n in weights.shapes)
        self.storage = Storage.states(spec, 3, torch.float32)
        self.storage.add_pools(spec, 40, 16, torch.float32)
        self.pages = np.random.default_rng(0).permutation(40)[:13].tolist()

    def feed(self, start: int, end: int, write_from: int = 0) -> Logits:
        step = make_step([end - start], [start], [write_from], [self.pages], [2], 16)
        hidden, _ = self.model.hidden(torch.from_numpy(self.ids[start:end]), step, self.storage)
        return np.asarray(self.model.logits(hidden))

    def pools(self) -> list[torch.Tensor]:
        return [t.clone() for t in (*self.storage.keys.values(), *self.storage.values.values())]

    def zero_states(self) -> None:
        for state in (*self.storage.conv.values(), *self.storage.recurrent.values()):
            state[2] = 0


@pytest.mark.parametrize(
    "name", ["olmo_hybrid_rope", "qwen3_next", "nemotron_h", "kimi_linear", "minimax", "lfm2"]
)
def test_the_torch_model_equals_the_bundle(name: str, tmp_path: Path) -> None:
    """Prefill in chunks, tail replay (whose K/V stays as it is), decode."""
    subject = Subject(CASES[name], tmp_path)
    mine, slots = TorchSide(subject), subject.slots()
    cuts = [0, 1, 3, 36, 102, LENGTH]
    got = np.concatenate([mine.feed(a, b) for a, b in pairwise(cuts)])
    want = subject.feed(subject.model, slots, [LENGTH])
    assert error(got, want) < LIMIT
    before = mine.pools()
    mine.zero_states()
    mine.feed(LENGTH - 48, LENGTH, write_from=LENGTH)
    assert all(torch.equal(a, b) for a, b in zip(before, mine.pools(), strict=True))
    subject.replay(subject.model, slots, LENGTH, 48)
    got = np.concatenate([mine.feed(p, p + 1) for p in range(LENGTH, LENGTH + DECODED)])
    want = subject.decode(subject.model, slots, [LENGTH], DECODED)[:, 0]
    assert error(got, want) < LIMIT


def test_a_mixer_without_a_torch_form_is_named(tmp_path: Path) -> None:
    config = CASES["jamba"].config()
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="Mamba1"):
        require_supported(read_checkpoint_config(tmp_path).spec)


# --- cache managers on the fake ----------------------------------------------------------------


class Tiny:
    """hybrid-tiny: its bundle in fp32, its weights, two prompts that share 137 tokens."""

    def __init__(self, folder: Path) -> None:
        checkpoint = ROOT / "engine_configs" / "hybrid-tiny"
        self.family = read_checkpoint_config(checkpoint)
        self.spec = self.family.spec
        self.weights = Weights(self.family, Checkpoint(checkpoint))
        options = Options("tiny", self.family, checkpoint, folder)
        digest = write_graph(options, self.weights, folder, Silent())
        write_manifest(new_manifest(options, digest, folder), folder)
        self.model = Model(Bundle.open(folder), threads=1)
        ids = np.random.default_rng(7).integers(3, 250, 200)
        self.first, self.second = ids[:150], np.concatenate([ids[:137], ids[150:163]])

    def answer(self, prompt: NDArray[np.int64], count: int) -> tuple[list[int], Logits]:
        """Greedy tokens and logits of a cold run of the bundle."""
        lab = Lab(self.model, len(prompt) + count)
        rows = [lab.ask(prompt, np.array([len(prompt) - 1]))[0]]
        for position in range(len(prompt), len(prompt) + count - 1):
            step = decode_step([int(rows[-1].argmax())], [position])
            rows.append(self.model.run(lab.slots, 0, step)[0][0])
        return [int(r.argmax()) for r in rows], np.stack(rows)

    def calibration(self, **values: Any) -> Calibration:
        """Says that split replay costs 0.01 and a 5 % tail 0.02."""
        layers = tuple(
            LayerUnits(i, (0, 1), (1.0,) * m.units(), (0.1,) * m.units())
            for i, m in self.spec.state_layers()
        )
        known = Calibration(
            status="imported", interval=32, min_tail=8, dtype="fp32", layers=layers,
            curve=(Point(2, 8, 0.0, 1.0, 0.01), Point(0, 0, 0.05, 1.0, 0.02)), target_kl=0.1,
        )  # fmt: skip
        return replace(known, **values)


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


# --- symbols -----------------------------------------------------------------------------------


@pytest.mark.parametrize("line_", list(SYMBOLS))
def test_the_recorded_signatures_pass(line_: str) -> None:
    install_fake(line_)
    try:
        check(line_)
        assert install() == line_
        assert install() == line_  # done once
    finally:
        remove_fake()


def _less(held: Held) -> None:
    module = held["tensorrt_llm._torch.modules.mamba.mamba2_metadata"]
    module["Mamba2Metadata"] = type("Mamba2Metadata", (), {"prepare": lambda self, meta, x: None})


def _gone(held: Held) -> None:
    del held["tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2"]


def _renamed(held: Held) -> None:
    def choose(model_config: Any, kv_cache_config: Any) -> None: ...

    held["tensorrt_llm._torch.pyexecutor._util"]["get_kv_cache_manager_cls"] = choose


def _missing(held: Held) -> None:
    class KVCacheManagerV2(fake_trtllm.KVCacheManagerV2):
        def get_buffers(self, layer: int) -> None: ...  # type: ignore[override]

    module = held["tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2"]
    module["KVCacheManagerV2"] = KVCacheManagerV2


@pytest.mark.parametrize(
    ("change", "symbol", "expected", "found"),
    [
        (_less, "Mamba2Metadata.prepare", r"\(self, attn_metadata\)", r"\(self, meta, x\)"),
        (_gone, "KVCacheManagerV2.__init__", r"\(self, kv_cache_config", "nothing"),
        (_renamed, "get_kv_cache_manager_cls", "cache_transceiver_config",
         r"\(model_config, kv_cache_config\)"),
        (_missing, "KVCacheManagerV2.get_buffers", r"\(self, layer_idx, kv_layout\)",
         r"\(self, layer\)"),
    ],
)  # fmt: skip
def test_a_changed_symbol_is_named_and_nothing_is_patched(
    change: Callable[[Held], None], symbol: str, expected: str, found: str
) -> None:
    install_fake("1.4", change)
    try:
        util = sys.modules["tensorrt_llm._torch.pyexecutor._util"]
        before = util.get_kv_cache_manager_cls
        with pytest.raises(
            SymbolMismatchError, match=f"{symbol}: expected .*{expected}.*, found {found}"
        ):
            install()
        assert util.get_kv_cache_manager_cls is before
        assert not hasattr(sys.modules["tensorrt_llm"], "_hybrid_trtllm")
    finally:
        remove_fake()


@pytest.mark.parametrize("version", ["1.3.0rc29", "1.1.0", "2.0"])
def test_other_lines_are_refused(version: str) -> None:
    with pytest.raises(SymbolMismatchError, match=rf"__version__: expected 1.2.x .*{version}"):
        line_of(version)


def test_each_symbol_is_listed_once_with_what_it_was_read_from() -> None:
    for symbols in SYMBOLS.values():
        names = [s.name for s in symbols]
        assert len(set(names)) == len(names)
        assert all(s.read for s in symbols)


# --- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_beam": 1}, "max_beam: Extra inputs"),
        ({"kv_cache_config": {"enable_blok_reuse": True}}, "kv_cache_config.enable_blok_reuse"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 1.5}}, "free_gpu_memory_fraction"),
        ({"kv_cache_config": {"enable_block_reuse": False}}, "enable_block_reuse"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_seq_len": "long"}, "max_seq_len"),
        ({"backend": "tensorrt"}, "backend"),
        ({"cuda_graph_config": {}}, "cuda_graph_config"),
        ({"max_num_tokens": 4}, "one token of each"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    good = {"max_seq_len": 4096}
    text = to_yaml(LlmArgs.model_validate(good))
    assert parse(text, "llm_args.yaml") == LlmArgs.model_validate(good)
    with pytest.raises(ConfigError, match=message):
        parse(json.dumps(good | change), "llm_args.yaml")


def test_what_is_no_yaml_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"llm_args.yaml: not YAML"):
        parse("a: [", "llm_args.yaml")


# --- the tree ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "tree"
    arguments = ["--model", "hybrid-tiny", "--target", "tensorrt-llm", "--output", str(folder)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return folder


def test_the_tree_is_complete(tree: Path) -> None:
    files = {str(f.relative_to(tree)) for f in tree.rglob("*") if f.is_file()}
    wanted = {
        "README.md", "config.json", "llm_args.yaml", "tokenizer.json", "manifest.json",
        "model-00001-of-00001.safetensors", "model.safetensors.index.json",
        "requirements/tensorrt-llm.txt", "python/hybrid_trtllm/__init__.py",
        "triton/tensorrt_llm/config.pbtxt", "triton/tensorrt_llm/1/model.py",
        "triton/tensorrt_llm/1/model.yaml",
    }  # fmt: skip
    assert wanted <= files
    readme = (tree / "README.md").read_text()
    for part in ("trtllm-serve", "--custom_module_dirs", "not verified", "Not run anywhere",
                 *(s.name for s in SYMBOLS["1.4"])):  # fmt: skip
        assert part in readme
    assert "{" not in readme.replace("'{", "").replace("{{", "")
    assert str(ROOT) not in "".join((tree / f).read_text() for f in files if f.endswith(
        (".md", ".yaml", ".pbtxt", ".txt", "config.json")))  # fmt: skip


def test_config_and_arguments_read_back(tree: Path) -> None:
    config = json.loads((tree / "config.json").read_text())
    spec = read_checkpoint_config(ROOT / "engine_configs" / "hybrid-tiny").spec
    settings = read_settings(config["hybrid_serve"], "config.json")
    assert settings.spec == spec
    with pytest.raises(ConfigError, match="unknown key 'relpay_mode'"):
        read_settings(config["hybrid_serve"] | {"relpay_mode": "exact"}, "config.json")
    parse((tree / "llm_args.yaml").read_text(), "llm_args.yaml")
    yaml = tree / "triton" / "tensorrt_llm" / "1" / "model.yaml"
    arguments = parse(yaml.read_text(), "model.yaml", ModelYaml)
    assert isinstance(arguments, ModelYaml)
    assert (yaml.parent / arguments.model).resolve() == tree.resolve()
    assert config["torch_dtype"] == arguments.dtype == "bfloat16"


def test_weights_are_those_of_the_checkpoint_in_16_bits(tree: Path) -> None:
    index = json.loads((tree / "model.safetensors.index.json").read_text())["weight_map"]
    stored = load_file(tree / "model-00001-of-00001.safetensors")
    checkpoint = ROOT / "engine_configs" / "hybrid-tiny"
    weights = Weights(read_checkpoint_config(checkpoint), Checkpoint(checkpoint))
    assert set(index) == set(stored) == set(weights.shapes)
    for name, tensor in stored.items():
        want = torch.from_numpy(weights.read(name))
        assert torch.equal(tensor, want.to(tensor.dtype))
    assert stored["layers.0.attn.q_proj" if "layers.0.attn.q_proj" in stored
                  else "lm_head"].dtype == torch.bfloat16  # fmt: skip
    assert stored["final_norm"].dtype == torch.float32


def test_shards_keep_the_limit() -> None:
    sizes = {"a": 4, "b": 4, "c": 3, "d": 9, "e": 1}
    assert plan_shards(sizes, 8) == [["a", "b"], ["c"], ["d"], ["e"]]


SERVE = """
import sys
sys.path[:0] = [sys.argv[1] + "/python"]
sys.path.append(sys.argv[2])
from tests.gpu.fake_trtllm import install_fake
def change(held):
    if sys.argv[4] == "changed":
        held["tensorrt_llm._torch.pyexecutor._util"]["get_kv_cache_manager_cls"] = lambda: None
install_fake(sys.argv[3], change)
import hybrid_trtllm
from transformers import AutoConfig
config = AutoConfig.from_pretrained(sys.argv[1])
import engine_configs
assert engine_configs.__file__.startswith(sys.argv[1]), engine_configs.__file__
assert "build" not in sys.modules
print(config.architectures[0], config.settings.spec.model_type, config.settings.replay_mode)
"""


def load_from(tree: Path, line: str, state: str) -> subprocess.CompletedProcess[str]:
    """As --custom_module_dirs does it: the folder above the package goes on sys.path."""
    command = [sys.executable, "-c", SERVE, str(tree), str(ROOT), line, state]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tree)


def test_the_package_loads_from_the_tree_alone(tree: Path) -> None:
    done = load_from(tree, "1.2", "as recorded")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["HybridServeForCausalLM", "olmo_hybrid", "exact"]


def test_importing_the_package_raises_where_a_symbol_changed(tree: Path) -> None:
    done = load_from(tree, "1.4", "changed")
    assert done.returncode != 0
    assert "get_kv_cache_manager_cls: expected (model_config" in done.stderr


def test_random_weights_of_another_family(tmp_path: Path) -> None:
    arguments = ["--checkpoint", str(ROOT / "engine_configs" / "hybrid-tiny-linear"), "--dtype",
                 "fp16", "--random-weights", "3", "--target", "tensorrt-llm",
                 "--output", str(tmp_path / "tree")]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    manifest = json.loads((tmp_path / "tree" / "manifest.json").read_text())
    assert manifest["weights"] == "random(3)"
    assert "execution" in manifest["skipped"]
    assert "torch.float16"[6:] in (tmp_path / "tree" / "llm_args.yaml").read_text()


def test_prefill_of_the_bundle_is_what_the_lab_asks(tiny: Tiny) -> None:
    """The yardstick itself: one prefill and the Lab's question agree."""
    lab = Lab(tiny.model, 160)
    rows = np.array([149])
    step = prefill_step(tiny.first, 0, logits=[149])
    slots = Lab(tiny.model, 160).slots
    assert error(lab.ask(tiny.first, rows), tiny.model.run(slots, 0, step)[0]) == 0
