"""Bad checkpoints: each is refused with a message that says what, where and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from build.pipeline import Options, Silent, convert
from engine_configs.errors import CheckpointError, ConfigError, UnsupportedModelError
from engine_configs.families import FAMILIES, read_checkpoint_config
from tests.random_models import save_olmo_hybrid

Tensors = dict[str, Any]
KEY = "model.layers.0.linear_attn.a_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_olmo_hybrid(tmp_path_factory.mktemp("good") / "hf")


@pytest.fixture
def checkpoint(good: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    copy = tmp_path / "hf"
    copy.mkdir()
    for file in good.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def refused(checkpoint: Path, error: type[Exception] = CheckpointError) -> str:
    """The message; nothing may have been written."""
    output = checkpoint.parent / "out" / "bundle"
    with pytest.raises(error) as caught:
        convert(Options("bad", read_checkpoint_config(checkpoint), checkpoint, output), Silent())
    assert not output.parent.exists() or list(output.parent.iterdir()) == []
    return str(caught.value)


def change_tensors(checkpoint: Path, change: Callable[[Tensors], None]) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def change_config(checkpoint: Path, **changes: Any) -> None:
    file = checkpoint / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v != "DELETE"}))


def test_missing_shards_are_named(tmp_path: Path) -> None:
    checkpoint = save_olmo_hybrid(tmp_path / "hf", shard="30KB")
    shards = sorted(checkpoint.glob("*.safetensors"))
    shards[1].unlink()
    message = refused(checkpoint)
    assert f"missing 1 of {len(shards)} shards: {shards[1].name}" in message
    assert "Download the checkpoint again" in message


@pytest.mark.parametrize("index", ["not json", "[]", "{}", '{"weight_map": {"a": 3}}'])
def test_a_broken_index_is_named(checkpoint: Path, index: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refused(checkpoint)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_named(checkpoint: Path, keep: float) -> None:
    file = checkpoint / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    message = refused(checkpoint)
    assert str(file) in message
    assert "damaged or incomplete" in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-2.bin", "m.pt"])
def test_pickles_are_never_read(checkpoint: Path, name: str) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_bytes(b"\x80\x04cos\nsystem\n")
    message = refused(checkpoint)
    assert name in message
    assert "runs code" in message


def test_no_weights_at_all(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "no *.safetensors file" in refused(checkpoint)


def test_every_tensor_that_does_not_fit_is_listed_at_once(checkpoint: Path) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors["model.norm.weight"]
        tensors[KEY] = tensors[KEY].astype(np.int32)
        tensors["lm_head.weight"] = np.ascontiguousarray(tensors["lm_head.weight"][:-1])
        tensors["model.layers.9.surprise"] = np.zeros((2, 3), np.float32)

    change_tensors(checkpoint, damage)
    message = refused(checkpoint)
    assert "4 tensors do not fit olmo_hybrid" in message
    assert "missing model.norm.weight (36,)" in message
    assert f"{KEY} has dtype I32, expected one of F32, F16, BF16, F64" in message
    assert "lm_head.weight has shape (100, 36), expected (101, 36)" in message
    assert "unexpected model.layers.9.surprise (2, 3)" in message


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types_are_read(checkpoint: Path, dtype: Any) -> None:
    def cast(tensors: Tensors) -> None:
        tensors |= {name: x.astype(dtype) for name, x in tensors.items()}

    change_tensors(checkpoint, cast)
    family = read_checkpoint_config(checkpoint)
    convert(Options("cast", family, checkpoint, checkpoint.parent / "out"), Silent())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named(checkpoint: Path, bad: float) -> None:
    def poison(tensors: Tensors) -> None:
        tensors[KEY][0, 0] = bad

    change_tensors(checkpoint, poison)
    message = refused(checkpoint)
    assert KEY in message
    assert "finite" in message


def test_an_unsupported_model_type_lists_the_supported_ones(checkpoint: Path) -> None:
    change_config(checkpoint, model_type="gpt2")
    message = refused(checkpoint, UnsupportedModelError)
    assert "'gpt2'" in message
    assert all(name in message for name in FAMILIES)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"window_of_wonders": 7}, ["unknown key 'window_of_wonders' (value 7)"]),
        ({"hidden_size": "DELETE"}, ["'hidden_size' is missing"]),
        ({"hidden_size": "36"}, ["'hidden_size' is '36'", "int"]),
        ({"hidden_size": -36}, ["'hidden_size' is -36", "> 0"]),
        ({"vocab_size": True}, ["'vocab_size' is True"]),
        ({"hidden_act": "gelu"}, ["'hidden_act' is 'gelu'", "'silu'"]),
        ({"attention_bias": True}, ["'attention_bias' is True"]),
        ({"layer_types": ["linear_attention"]}, ["layer_types", "1", "3"]),
        ({"layer_types": ["mamba"] * 3}, ["layer_types[0]", "'mamba'"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["rope_type", "'yarn'"]),
        ({"model_type": "DELETE"}, ["'model_type' is missing"]),
    ],
    ids=lambda x: str(x)[:40],
)
def test_config_errors_name_file_key_and_value(
    checkpoint: Path, changes: dict[str, Any], parts: list[str]
) -> None:
    change_config(checkpoint, **changes)
    message = refused(checkpoint, ConfigError)
    assert message.startswith(str(checkpoint / "config.json"))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("text", ["{", "\x00\x01", "[1]", '"olmo_hybrid"', ""])
def test_a_config_that_is_not_a_json_object(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    assert str(checkpoint / "config.json") in refused(checkpoint, ConfigError)


def test_a_directory_without_config(tmp_path: Path) -> None:
    assert "no config.json" in refused(tmp_path / "nowhere", ConfigError)
