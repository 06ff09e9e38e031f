"""Another family through the whole chain: a small random Granite-4 hybrid, bytes as tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from build.pipeline import Options, Silent, convert
from engine_configs.families import read_family
from engine_configs.families.config import ConfigReader
from serving.client import Client
from serving.launch import launch
from tests.families.cases import CASES

PREFIX = "a prefix that many prompts share, and that is longer than a block of the cache. " * 3
ROOM = {"kv_bytes": 32 << 20, "state_bytes": 32 << 20}


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    config: dict[str, Any] = json.loads(CASES["granite_moe_nope"].config().to_json_string())
    config |= {"model_type": "granitemoehybrid", "eos_token_id": None}
    family = read_family(ConfigReader(config, "granite"))
    output = tmp_path_factory.mktemp("granite") / "bundle"
    bundle = convert(Options("granite", family, None, output, seed=3), Silent())
    pbtxt = bundle.path / "model_repository" / "prefix_cache" / "config.pbtxt"
    with Path(pbtxt).open("a") as file:
        for key, value in ROOM.items():
            file.write(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n')
    with launch(bundle.path / "model_repository") as server, Client(server.grpc_url) as client:
        yield client


def test_the_same_prompt_again(granite: Client) -> None:
    cold = granite.generate(PREFIX, max_tokens=12, cache_salt="again")
    hit = granite.generate(PREFIX, max_tokens=12, cache_salt="again")
    assert cold["cached_tokens"] == 0
    assert hit["cached_tokens"] == hit["prompt_tokens"] - 1
    assert hit["text_output"] == cold["text_output"]


def test_a_replayed_prefix_answers_like_a_cold_run(granite: Client) -> None:
    granite.generate(PREFIX + "and something else", max_tokens=1, cache_salt="whole")
    question = PREFIX + "what is it?"
    cold = granite.generate(question, max_tokens=12, cache_salt="alone")
    hit = granite.generate(question, max_tokens=12, cache_salt="whole", replay_ratio=1.0)
    assert hit["cached_tokens"] == hit["replayed_tokens"] == len(PREFIX)
    assert hit["text_output"] == cold["text_output"]


def test_a_tail_is_replayed(granite: Client) -> None:
    granite.generate(PREFIX + "and other things", max_tokens=1, cache_salt="tail")
    hit = granite.generate(PREFIX + "who?", max_tokens=4, cache_salt="tail", replay_tokens=20)
    assert (hit["cached_tokens"], hit["replayed_tokens"]) == (len(PREFIX), 20)
    assert (hit["replay_source"], hit["replay_error"]) == ("tail", -1.0)
