"""Text in, text out: in process and as a command."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_configs.errors import BundleError, RequestError
from serving.engine.engine import EngineConfig
from serving.engine.llm import LLM, Answer
from serving.engine.requests import SamplingParams
from serving.prefix_cache import CacheConfig
from tests.serving.engine.conftest import LEASES, wait_idle

ROOT = Path(__file__).parents[3]
PROMPT = "Once upon a time, 在一个 town 👍🏽 there lived"
FREE = SamplingParams(40, temperature=1.5, seed=3)  # random bytes, broken characters included
CACHE = CacheConfig(name=f"test-{uuid.uuid4().hex}", kv_bytes=8 << 20, state_bytes=8 << 20)


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM.open(
        tiny_bundle, EngineConfig(max_seq_len=1024, max_batch=2, threads=1), CACHE
    ) as llm:
        yield llm


def test_the_streamed_pieces_are_the_decoded_answer(llm: LLM) -> None:
    for seed in range(8):
        sampling = SamplingParams(40, temperature=1.5, seed=seed)
        *pieces, answer = llm.stream(llm.submit(PROMPT, sampling))
        assert isinstance(answer, Answer)
        assert "".join(map(str, pieces)) == answer.text == llm.text.decode(answer.token_ids)
        assert all(pieces)


def test_a_stop_word_ends_the_answer_and_the_work(llm: LLM) -> None:
    whole = llm.generate(PROMPT, FREE).text
    at = next(i for i in range(5, len(whole)) if whole[i : i + 2].isascii())
    word = whole[at : at + 2]
    answer = llm.generate(PROMPT, FREE, stop_words=["never there", word])
    assert answer.text == whole[: whole.index(word)]
    assert answer.finish_reason == "stop_word"
    assert word in llm.text.decode(answer.token_ids)
    assert word not in llm.text.decode(answer.token_ids[:-1])
    assert len(answer.token_ids) <= answer.usage.generated_tokens < 40


def test_the_models_own_end_token_stops(llm: LLM) -> None:
    end = llm.bundle.spec.eos_token_ids[0]
    sampling = SamplingParams(
        300, temperature=1.0, seed=0, bad_tokens=tuple((t,) for t in range(394) if t != end)
    )
    answer = llm.generate(PROMPT, sampling)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", [], "stop")


def test_a_caller_that_stops_listening_cancels(llm: LLM) -> None:
    stream = llm.submit(PROMPT, SamplingParams(900, temperature=1.5, seed=1))
    pieces = llm.stream(stream)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    wait_idle(llm.engine)
    assert stream.usage.generated_tokens < 900
    assert llm.cache is not None
    stats = llm.cache.stats()
    assert all(stats[name] == 0 for name in LEASES)


def test_a_repeated_prompt_is_a_hit_with_the_same_answer(llm: LLM) -> None:
    prompt = PROMPT + " a hit"
    first, second = (llm.generate(prompt, SamplingParams(8)) for _ in range(2))
    assert (first.text, first.token_ids) == (second.text, second.token_ids)
    assert second.usage.cached_tokens == second.usage.prompt_tokens - 1


def test_text_that_is_no_unicode_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        llm.generate("\udfff")


def test_the_arena_is_gone_after_close(tiny_bundle: Path) -> None:
    cache = CacheConfig(name=f"test-{uuid.uuid4().hex}", kv_bytes=1 << 20, state_bytes=1 << 20)
    with LLM.open(tiny_bundle, EngineConfig(max_seq_len=512), cache) as llm:
        assert llm.cache is not None
        path = Path(llm.cache.arena.path)
        assert path.exists()
    assert not path.exists()


def test_a_missing_bundle() -> None:
    with pytest.raises(BundleError, match="not a bundle"):
        LLM.open("/nonexistent/bundle")


# The command -------------------------------------------------------------------------------


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serving.engine.generate", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_command_streams_the_answer(tiny_bundle: Path, llm: LLM) -> None:
    options = ["--max-tokens", "40", "--temperature", "1.5", "--seed", "3"]
    result = generate(str(tiny_bundle), PROMPT, "--stream", "--stats", *options)
    assert result.returncode == 0, result.stderr
    answer = llm.generate(PROMPT, FREE)
    assert result.stdout == answer.text + "\n"
    assert f"finish: {answer.finish_reason}" in result.stderr


def test_the_command_reads_a_file(tiny_bundle: Path, llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text(PROMPT)
    result = generate(str(tiny_bundle), f"@{tmp_path / 'prompt'}", "--max-tokens", "5")
    assert result.stdout == llm.generate(PROMPT, SamplingParams(5)).text + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hello", "--max-tokens", "99999999999"], "max_tokens is 99999999999, expected"),
        (["hello", "--top-p", "7"], "top_p is 7.0, expected"),
        (["", "--max-tokens", "3"], "the prompt is empty"),
        (["@/nonexistent/prompt"], "/nonexistent/prompt"),
    ],
    ids=["max_tokens", "top_p", "empty", "file"],
)
def test_the_commands_mistakes_end_in_one_line(
    tiny_bundle: Path, arguments: list[str], message: str
) -> None:
    result = generate(str(tiny_bundle), *arguments)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
