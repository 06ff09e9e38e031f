"""convert.py as it is called."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from build.plan import bytes_text, checkpoint_cost_tokens, tokens_that_fit
from convert import app
from engine_configs.names import known_models


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_it_converts_and_prints_the_parity(tmp_path: Path) -> None:
    result = run("--model", "hybrid-tiny", "--no-calibrate", "--output", str(tmp_path / "b"))
    assert result.exit_code == 0, result.output
    for path in ("prefill", "chunked", "decode", "replay"):
        assert f"parity {path}" in result.output
    assert f"wrote {tmp_path / 'b'}" in result.output
    assert (tmp_path / "b" / "manifest.json").exists()


def test_list_names_every_model() -> None:
    result = run("--list")
    assert result.exit_code == 0
    assert all(name in result.output for name in known_models())


def test_plan_gives_the_figures_of_the_spec() -> None:
    result = run("--model", "hybrid-7b", "--plan", "--memory-gib", "48")
    spec = known_models()["hybrid-7b"].family().spec
    assert result.exit_code == 0
    for figure in (
        f"{spec.num_parameters():,}",
        bytes_text(spec.kv_bytes_per_token(2)),
        bytes_text(spec.state_bytes(4)),
        f"{checkpoint_cost_tokens(spec, 2):,.0f} tokens of KV",
        f"{tokens_that_fit(spec, 48 * 2**30, 4, 4):,}",
    ):
        assert figure in result.output, figure


def test_the_plan_of_hybrid_7b_is_that_of_the_published_model() -> None:
    """32 layers, 8 of attention with 30 heads of 128: 120 KiB of bf16 KV per token."""
    spec = known_models()["hybrid-7b"].family().spec
    assert 7.4e9 < spec.num_parameters() < 7.5e9
    assert spec.kv_bytes_per_token(2) == 120 * 1024
    assert (len(spec.attention_layers()), len(spec.state_layers())) == (8, 24)


def test_weights_out_of_reach_end_in_the_plan_and_three_ways(tmp_path: Path) -> None:
    output = tmp_path / "out"
    result = run("--model", "hybrid-7b", "--output", str(output))
    assert result.exit_code == 2
    assert "parameters" in result.output
    for way in ("hf download allenai/Olmo-Hybrid-7B", "--checkpoint DIR", "--random-weights 0"):
        assert way in result.output
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model", "gpt-5"], ["no model is named 'gpt-5'", "hybrid-tiny", "hybrid-7b"]),
        ([], ["--model", "--list"]),
        (["--model", "hybrid-tiny", "--lowering", "onnx"], ["'onnx'", "ort or standard"]),
        (["--checkpoint", "/nonexistent/model"], ["/nonexistent/model: no config.json"]),
    ],
    ids=["unknown", "nothing", "lowering", "checkpoint"],
)
def test_mistakes_are_answered_in_one_line(arguments: list[str], parts: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.output.startswith("error: ")
    assert all(part in result.output for part in parts), result.output


def test_random_weights_need_no_checkpoint(tmp_path: Path) -> None:
    output = tmp_path / "b"
    result = run("--model", "hybrid-tiny", "--random-weights", "3", "--output", str(output))
    assert result.exit_code == 0
    assert "skipped parity: random weights" in result.output


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-llm"])
def test_a_gpu_plan_counts_two_bytes_a_value(target: str) -> None:
    result = run("--model", "hybrid-7b", "--random-weights", "0", "--target", target, "--plan")
    spec = known_models()["hybrid-7b"].family().spec
    assert result.exit_code == 0, result.output
    assert "bf16 on a GPU" in result.output
    for figure in (spec.num_parameters() * 2, 120 * 1024, spec.state_bytes(2)):
        assert bytes_text(figure) in result.output
    assert "engine profile: decode" in result.output


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--target", "gpu"], ["--target is 'gpu'", "onnx or tensorrt or tensorrt-llm"]),
        (["--target", "tensorrt", "--dtype", "int4"], ["'int4'", "bf16 or fp16"]),
        (["--dtype", "bf16"], ["'bf16'", "fp32 or int8 or int4"]),
        (["--target", "tensorrt", "--lowering", "ort"], ["'ort'", "expected tensorrt"]),
    ],
)
def test_options_that_do_not_fit_the_target(arguments: list[str], parts: list[str]) -> None:
    result = run("--model", "hybrid-tiny", *arguments)
    assert result.exit_code == 1
    assert all(part in result.output for part in parts), result.output
