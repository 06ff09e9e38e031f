"""Reading a config: nothing goes unnoticed."""

from __future__ import annotations

from typing import Any

import pytest

from engine_configs.errors import ConfigError
from engine_configs.families import read_family
from engine_configs.families.config import ConfigReader
from engine_configs.names import find_model

PUBLISHED = (
    "bamba-9b",
    "falcon-h1-7b",
    "granite-4.0-h-tiny",
    "hybrid-7b",
    "kimi-linear-48b",
    "lfm2-1.2b",
    "nemotron-h-8b",
    "qwen3-next-80b",
    "qwen3.5-9b",
)


def config_of(name: str, **changes: Any) -> ConfigReader:
    return ConfigReader({**find_model(name).config, **changes}, "config.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_unknown_key_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown key 'attention_sinks'"):
        read_family(config_of(name, attention_sinks=4))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bamba-9b", {"mamba_proj_bias": True}),
        ("falcon-h1-7b", {"attention_bias": True}),
        ("granite-4.0-h-tiny", {"position_embedding_type": "alibi"}),
        ("granite-4.0-h-tiny", {"layer_types": ["mamba"]}),
        ("granite-4.0-h-tiny", {"layer_types": ["rwkv"] * 40}),
        ("hybrid-7b", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}),
        ("kimi-linear-48b", {"q_lora_rank": 1536}),
        ("kimi-linear-48b", {"linear_attn_config": {"gate_lower_bound": -5.0}}),
        ("kimi-linear-48b", {"num_local_experts": 64}),  # num_experts says otherwise
        ("lfm2-1.2b", {"conv_bias": True}),
        ("nemotron-h-8b", {"hybrid_override_pattern": "M-X"}),
        ("nemotron-h-8b", {"mlp_hidden_act": "gelu"}),
        ("qwen3-next-80b", {"attn_output_gate": False}),
        ("qwen3.5-9b", {"vocab_size": "many"}),
    ],
)
def test_what_is_not_served_is_refused(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_family(config_of(name, **changes))


def test_time_step_limit_in_any_spelling() -> None:
    for high in (float("inf"), {"__float__": "Infinity"}):
        spec = read_family(config_of("bamba-9b", time_step_limit=[0.0, high])).spec
        assert spec == read_family(config_of("bamba-9b")).spec
    spec = read_family(config_of("bamba-9b", time_step_limit=[0.01, 0.5])).spec
    mixer = spec.state_layers()[0][1]
    assert (mixer.dt_min, mixer.dt_max) == (0.01, 0.5)  # type: ignore[union-attr]
