"""The parts of the load test that can be wrong without anybody noticing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine_configs.errors import HybridServeError
from perf import perf_analyzer
from perf.load import MOST_PROMPTS, Row, make_prompts, summarise
from perf.perf_analyzer import read_export, write_inputs
from serving.engine.text import Text


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_prompts_share_exactly_what_they_should(tiny_checkpoint: Path, share: float) -> None:
    text = Text(tiny_checkpoint)
    warm, prompts, common = make_prompts(share, 400, 20, seed=1)
    ids = [text.encode(p) for p in prompts]
    assert common == int(share * 400)
    assert [len(i) for i in ids] == [400] * 20
    assert len({tuple(i[:common]) for i in ids}) == 1
    assert len({i[common] for i in ids}) == 20, "they must differ from the next token on"
    assert text.encode(warm)[:common] == ids[0][:common]
    assert (warm == "") == (share == 0.0)


def test_as_many_prompts_as_first_tokens() -> None:
    assert len(set(make_prompts(0.5, 64, MOST_PROMPTS, seed=1)[1])) == MOST_PROMPTS


def test_inputs_are_one_entry_a_request(tmp_path: Path) -> None:
    file = tmp_path / "inputs.json"
    write_inputs(file, [{"text_input": "a", "stop_words": ["x", "y"]}, {"text_input": "b"}])
    assert json.loads(file.read_text()) == {
        "data": [{"text_input": ["a"], "stop_words": ["x", "y"]}, {"text_input": ["b"]}]
    }


def test_export_is_read_in_seconds_and_empty_texts_do_not_count(tmp_path: Path) -> None:
    def request(start: int, *pieces: tuple[int, str]) -> dict[str, object]:
        return {
            "timestamp": start,
            "response_timestamps": [t for t, _ in pieces],
            "response_outputs": [{"text_output": text} for _, text in pieces],
        }

    requests = [
        request(0, (10_000_000, "a"), (13_000_000, "b"), (20_000_000, "")),
        request(5_000_000, (1_005_000_000, "c")),
    ]
    file = tmp_path / "export.json"
    file.write_text(json.dumps({"experiments": [{"requests": requests}]}))
    got = read_export(file)
    assert got.ttft == [0.01, 1.0]
    assert got.inter_token == [0.003]
    assert (got.tokens, got.seconds) == (3, 1.005)
    assert got.percentile(50) == pytest.approx(0.505)


def test_failure_says_what_perf_analyzer_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "perf_analyzer"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho cannot reach the server >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(perf_analyzer, "HOME", tmp_path)
    with pytest.raises(HybridServeError, match=r"\(3\): cannot reach the server"):
        perf_analyzer.run("127.0.0.1:1", tmp_path / "in", tmp_path / "out", 1, [])


def row(share: float, load: str, ttft: float, gap: float) -> Row:
    return Row(share, load, 8, ttft, ttft, gap, 100.0, 0, 0, ttft / 2)


def test_summary_compares_the_least_and_the_most_shared() -> None:
    one = "concurrency 1"
    rows = [row(0.0, one, 0.2, 0.003), row(0.95, one, 0.05, 0.003), row(0.5, one, 0.1, 0.003)]
    lines = summarise(rows, 0.19, 0.002)
    assert "at 95% share is 0.250 of that at 0%" in lines[one]
    assert "add 1.00 ms to the in-process engine's 2.00 ms" in lines["overhead"]
