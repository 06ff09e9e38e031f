"""Models known by name: their sizes are the published ones, and a plan needs no weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from convert import app
from engine_configs import names
from engine_configs.errors import ConfigError, UnsupportedModelError
from engine_configs.families import FAMILIES, read_family
from engine_configs.families.config import ConfigReader
from engine_configs.names import Dtypes, find_model, known_models

# Parameters in billions as published (the text model alone for Qwen3.5, no multi-token heads).
PUBLISHED = {
    "bamba-9b": 9.78,
    "falcon-h1-7b": 7.59,
    "granite-4.0-h-micro": 3.19,
    "granite-4.0-h-small": 32.2,
    "granite-4.0-h-tiny": 6.94,
    "hybrid-7b": 7.43,
    "kimi-linear-48b": 49.1,
    "lfm2-1.2b": 1.17,
    "nemotron-h-8b": 8.10,
    "nemotron-nano-9b-v2": 8.89,
    "qwen3-next-80b": 79.7,
    "qwen3.5-0.8b": 0.752,
    "qwen3.5-2b": 1.88,
    "qwen3.5-4b": 4.21,
    "qwen3.5-9b": 8.95,
}


def run(*arguments: str, columns: int = 80) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", PUBLISHED)
def test_size_is_the_published_one(name: str) -> None:
    billions = find_model(name).family().spec.num_parameters() / 1e9
    assert billions == pytest.approx(PUBLISHED[name], rel=3e-3)


def test_published_models_are_int4_on_a_cpu_and_bf16_on_a_gpu() -> None:
    assert {find_model(name).dtype for name in PUBLISHED} == {Dtypes("int4", "bf16")}


def test_latent_attention_keeps_the_latent_only() -> None:
    """Kimi Linear: 7 layers of 512 + 64 keys and 512 values a token, not 32 heads of each."""
    assert find_model("kimi-linear-48b").family().spec.kv_bytes_per_token(2) == 7 * 1088 * 2


def test_list_is_whole_on_a_narrow_terminal() -> None:
    output = run("--list")
    assert "…" not in output
    for name, model in known_models().items():
        line = next(line for line in output.splitlines() if f" {name} " in line)
        assert model.hub_id in line
        assert "tokens" in line


@pytest.mark.parametrize("name", PUBLISHED)
def test_plan_needs_no_weights(name: str) -> None:
    output = run("--model", name, "--plan")
    assert "…" not in output
    assert f"{find_model(name).family().spec.num_parameters():,}" in output


def test_an_unknown_name_gets_the_names_there_are() -> None:
    with pytest.raises(UnsupportedModelError, match="qwen3-next-80b"):
        find_model("gpt-2")


def test_an_unsupported_type_gets_the_types_there_are() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_family(ConfigReader({"model_type": "llama"}, "config.json"))
    assert all(family in str(caught.value) for family in FAMILIES)


@pytest.mark.parametrize("line", ["extra = 1", "dtype = { cpu = 'int4', tpu = 'bf16' }"])
def test_a_key_that_is_not_read_is_an_error(tmp_path: Path, line: str) -> None:
    file = tmp_path / "model.toml"
    dtype = "" if line.startswith("dtype") else "dtype = { cpu = 'int4', gpu = 'bf16' }\n"
    file.write_text(f"hub_id = 'a/b'\n{dtype}{line}\n[config]\nmodel_type = 'bamba'\n")
    with pytest.raises(ConfigError, match=r"model\.toml"):
        names._read(file)
