"""``convert.py --target tensorrt-llm``: the model in PyTorch equals the ONNX bundle, its cache
managers keep whole attention matches on a fake of TensorRT-LLM, the tree is complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
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
from build.tensorrt_llm.llm_args import LlmArgs, ModelYaml, parse, to_yaml
from build.tensorrt_llm.package.install import install
from build.tensorrt_llm.package.model import HybridModel, require_supported
from build.tensorrt_llm.package.settings import read_settings
from build.tensorrt_llm.package.step import Storage, make_step
from build.tensorrt_llm.package.symbols import SYMBOLS, SymbolMismatchError, check, line_of
from build.tensorrt_llm.tree import plan_shards
from convert import app
from engine_configs.errors import ConfigError, UnsupportedModelError
from engine_configs.families import read_checkpoint_config
from tests.families.cases import CASES
from tests.families.subject import DECODED, LENGTH, Subject, error
from tests.gpu import fake_trtllm
from tests.gpu.fake_trtllm import Held, install_fake, remove_fake

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
import importlib.util
file = sys.argv[1] + "/triton/tensorrt_llm/1/model.py"
spec = importlib.util.spec_from_file_location("model", file)
model = importlib.util.module_from_spec(spec)
spec.loader.exec_module(model)
triton = model.TritonPythonModel()
triton.initialize({})
print(triton.config["model"])
"""
# What the wrapper expects of the container's llmapi model.
STOCK = """
import helpers

def get_model_config(filename, include_keys=None, exclude_keys=None):
    return {"model": "../../.."}

class TritonPythonModel:
    def initialize(self, args):
        import os
        assert os.environ["TLLM_WORKER_USE_SINGLE_PROCESS"] == "1"
        self.config = get_model_config("model.yaml", exclude_keys=["triton_config"])
"""


def load_from(tree: Path, stock: Path, *state: str) -> subprocess.CompletedProcess[str]:
    """As --custom_module_dirs does it: the folder above the package goes on sys.path."""
    (stock / "model.py").write_text(STOCK)
    (stock / "helpers.py").write_text("")
    command = [sys.executable, "-c", SERVE, str(tree), str(ROOT), *state]
    env = os.environ | {"TRTLLM_LLMAPI_MODEL": str(stock)}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=stock, env=env)


def test_the_package_and_the_triton_model_load_from_the_tree_alone(
    tree: Path, tmp_path: Path
) -> None:
    done = load_from(tree, tmp_path, "1.2", "as recorded")
    assert done.returncode == 0, done.stderr
    wanted = ["HybridServeForCausalLM", "olmo_hybrid", "exact", str(tree.resolve())]
    assert done.stdout.split() == wanted


def test_importing_the_package_raises_where_a_symbol_changed(tree: Path, tmp_path: Path) -> None:
    done = load_from(tree, tmp_path, "1.4", "changed")
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
