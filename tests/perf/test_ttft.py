"""The parts of the TTFT benchmark that can be wrong without anybody noticing."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from build.checkpoint import Checkpoint
from perf.peer_model import checkpoint, gguf_tensor
from perf.peers import QUESTION, STEP, Ours, PeerRow, Race
from perf.prefix_hits import SPLIT_HIT, SUFFIX, Prefix, Row, breakdown, measure, pairs
from perf.ttft import over_ours
from serving.engine.engine import EngineConfig
from serving.engine.llm import LLM
from serving.prefix_cache import CacheConfig, ReplayMode, ReplayRequest
from serving.replay.calibration import Calibration, Gate, LayerUnits, Point

INTERVAL, MIN_TAIL = 128, 16
LENGTH = 512


def calibrated(bundle: Path, target: Path) -> Path:
    """A copy of the bundle whose manifest claims that one slow unit a layer is good enough."""
    target.mkdir()
    for file in bundle.iterdir():
        if file.is_file() and file.name != "manifest.json":
            os.link(file, target / file.name)
    units = (0.25,) * 4
    calibration = Calibration(
        "measured", INTERVAL, MIN_TAIL, "int8",
        tuple(LayerUnits(i, (0,), (1.0,) * 4, units) for i in (0, 1, 3, 4)),
        split=Gate((1e9,), (0.0,)), zero=Gate((1e9,), (1.0,)),
        curve=(Point(4, MIN_TAIL, 0.0, 1.0, 0.001),),
    )  # fmt: skip
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["calibration"] = calibration.to_json()
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = calibrated(tiny_bundle, tmp_path_factory.mktemp("calibrated") / "hybrid-tiny")
    config = EngineConfig(max_seq_len=2048, max_batch=2, threads=1)
    with LLM.open(path, config, CacheConfig("test-perf-ttft", kv_bytes=1 << 26)) as llm:
        yield llm


@pytest.fixture(scope="module")
def rows(llm: LLM) -> dict[str, Row]:
    return {row.method: row for row in measure(llm, LENGTH, repeats=2, ratio=0.05)}


def test_suffixes_ask_for_the_prefix_and_leave_it_at_once() -> None:
    prefix = Prefix(LENGTH)
    answers, text = prefix.rows()
    for number in range(3):
        suffix = prefix.suffix(number, LENGTH - 5)
        assert len(suffix) == SUFFIX
        assert suffix[0] != prefix.base[LENGTH - 5]
        assert suffix[answers + 1].tolist() == [q.answer[0] for q in prefix.sample.questions]
        assert (suffix[text + 1] < 256).all(), "text is bytes"
    assert len({int(prefix.suffix(n)[0]) for n in range(3)}) == 3


def test_each_method_reuses_what_its_name_says(rows: dict[str, Row]) -> None:
    assert [rows[m].source for m in ("cold", "exact hit", "5% hit", SPLIT_HIT)] == [
        "recompute", "state", "tail", "split",
    ]  # fmt: skip
    assert rows["cold"].tokens == LENGTH + SUFFIX
    assert rows["exact hit"].tokens == SUFFIX
    hit = LENGTH - 1
    assert rows["5% hit"].tokens == -(-hit // 20) + SUFFIX
    start = (hit - MIN_TAIL) // INTERVAL * INTERVAL
    assert rows[SPLIT_HIT].tokens == hit - start + SUFFIX
    assert rows["cold"].answers == rows["exact hit"].answers == -1
    for name in ("5% hit", SPLIT_HIT):
        assert rows[name].kl_text > 0
        assert 0 <= rows[name].answers <= 1
    assert rows[SPLIT_HIT].kl_text < rows["5% hit"].kl_text


def test_the_parts_of_a_hit_add_up(llm: LLM, rows: dict[str, Row]) -> None:
    row = rows[SPLIT_HIT]
    parts = breakdown(llm, replace(row, ttft=10.0))
    assert sum(p.tokens for p in parts) == row.tokens
    assert sum(p.seconds for p in parts) == pytest.approx(10.0)
    assert all(p.attention < p.seconds for p in parts if p.tokens)


def test_pairs_are_compared_with_one_hit(llm: LLM) -> None:
    same, apart = pairs(llm, LENGTH)
    assert 0.5 < same < 3
    assert 0.5 < apart < 4


def test_second_prompts_share_what_they_say(llm: LLM) -> None:
    race, vocab = Race(LENGTH, llm.bundle.spec.vocab_size), llm.bundle.spec.vocab_size
    assert [shared for _, shared in race.kinds] == sorted((s for _, s in race.kinds), reverse=True)
    second = race.second(300)
    assert len(second) == 300 + QUESTION
    assert (second[:300] == race.first[:300]).all()
    assert second[300] != race.first[300]
    tail, ratio = ReplayRequest(ReplayMode.TOKENS, 32), ReplayRequest(ReplayMode.RATIO, 0.05)
    rows = list(Race(LENGTH, vocab).ours(Ours(llm), tail, ratio))
    cold, same, *parts = rows
    assert (cold.cached, cold.ran) == (0, LENGTH + QUESTION)
    assert (same.cached, same.ran) == (LENGTH + QUESTION - 1, 1)
    at = parts[0].shared + STEP
    for row in parts:
        first = row.engine != "ours, 5%"
        at = min(at, row.shared + STEP) - STEP if first else at - STEP
        assert row.cached == at, "an earlier prompt was of use to a later one"
        assert row.ran == QUESTION + (32 if first else -(-at // 20))
        at -= 0 if first else 2 * 2 * STEP  # two more repeats of both


def test_ratios_are_those_to_our_fixed_tail() -> None:
    rows = [
        PeerRow(8, "cold", "ours", 8, 0, 8, 2.0),
        PeerRow(8, "part", "ours, r = 4", 6, 6, 4, 0.5),
        PeerRow(8, "part", "ours, 5%", 6, 6, 4, 1.0),
        PeerRow(8, "part", "other", 6, 0, 8, 4.0),
        PeerRow(8, "cold", "other", 8, 0, 8, 3.0),
    ]
    assert [r.over_ours for r in over_ours(rows, 4)] == [1.0, 1.0, 2.0, 8.0, 1.5]


def test_every_tensor_has_a_place_in_gguf(tmp_path: Path) -> None:
    source = checkpoint(
        tmp_path / "model", vocab_size=320, hidden_size=64, intermediate_size=96,
        num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32,
        linear_value_head_dim=32,
    )  # fmt: skip
    weights = Checkpoint(source)
    names = {name: gguf_tensor(name, weights.read(name)) for name in weights.names()}
    assert len({tensor for tensor, _ in names.values()}) == len(names)
    assert names["model.embed_tokens.weight"][0] == "token_embd.weight"
    base = "model.layers.0.linear_attn"
    tensor, value = names[f"{base}.A_log"]
    assert tensor == "blk.0.ssm_a"
    assert np.allclose(value, -np.exp(weights.read(f"{base}.A_log")))
    assert names[f"{base}.dt_bias"][0] == "blk.0.ssm_dt.bias"
    assert names[f"{base}.conv1d.weight"][1].shape == (3 * 64, 4)
    assert names["model.norm.weight"][1].mean() == pytest.approx(1.0), "1 + w"
    assert (names[f"{base}.norm.weight"][1] == weights.read(f"{base}.norm.weight")).all()
    with pytest.raises(KeyError):
        gguf_tensor("model.layers.0.mystery.weight", np.zeros((1, 1), np.float32))
