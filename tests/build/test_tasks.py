"""The retrieval tasks: right answers, exact lengths, deterministic, and the same as text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from build import tasks

MODELS = ("hybrid-tiny", "hybrid-tiny-linear")
CONFIGS = Path(__file__).parents[2] / "engine_configs"


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("length", [tasks.MIN_LENGTH, 65, 333])
def test_lengths_and_mask(task: str, length: int) -> None:
    for sample in tasks.make_samples(task, length, 20, seed=3):
        assert sample.length == len(sample.prefix) == length
        assert sample.prefix[0] == tasks.BOS
        assert sample.suffix.shape == sample.answer_mask.shape
        answers = [token for question in sample.questions for token in question.answer]
        assert sample.suffix[sample.answer_mask].tolist() == answers
        for (prompt, answer), question in zip(sample.prompts(), sample.questions, strict=True):
            assert prompt[length:].tolist() == list(question.tokens)
            assert answer.tolist() == list(question.answer)


def _records(prefix: np.ndarray, marker: int, width: int) -> list[tuple[int, ...]]:
    return [tuple(prefix[i + 1 : i + 1 + width]) for i in np.flatnonzero(prefix == marker)]


@pytest.mark.parametrize(("task", "records"), [("needle", 8), ("mqar", 60)])
def test_recall_answers_are_the_hidden_values(task: str, records: int) -> None:
    (sample,) = tasks.make_samples(task, 600, 1, seed=1)
    facts = {(a, b): v for a, b, v in _records(sample.prefix, tasks.SET, 3)}
    assert len(facts) == records
    for question in sample.questions:
        marker, *key = question.tokens
        assert marker == tasks.QUERY
        assert question.answer == (facts[tuple(key)],)


def test_last_write_wins() -> None:
    for sample in tasks.make_samples("lww", 200, 40, seed=1):
        last = dict(_records(sample.prefix, tasks.WRITE, 2))  # a later write replaces an earlier
        assert len(last) == len(sample.questions) == 4
        for question in sample.questions:
            assert question.answer == (last[question.tokens[1]],)


def test_copy_repeats_the_span() -> None:
    for sample in tasks.make_samples("copy", 100, 5, seed=1):
        (span,) = _records(sample.prefix, tasks.SPAN, 16)
        assert sample.questions[0].answer == span


def test_split_question_continues_the_prefix() -> None:
    for sample in tasks.make_samples("split", 100, 5, seed=1):
        facts = {(a, b): v for a, b, v in _records(sample.prefix, tasks.SET, 3)}
        (question,) = sample.questions
        assert sample.prefix[-2] == tasks.QUERY
        assert question.answer == (facts[(sample.prefix[-1], question.tokens[0])],)


def test_deterministic_by_seed() -> None:
    first, again, other = (tasks.make_samples("needle", 128, 16, seed=s) for s in (5, 5, 6))
    assert all(np.array_equal(a.prefix, b.prefix) for a, b in zip(first, again, strict=True))
    assert [s.questions for s in first] == [s.questions for s in again]
    assert [s.questions for s in first] != [s.questions for s in other]


def test_heldout_text_is_not_trained_on() -> None:
    assert len(tasks.corpus("heldout")) > 2 * 8192
    train = tasks.corpus("train").tobytes()
    pieces = [bytes(tasks.heldout_text(200, seed=s)[1:].tolist()) for s in range(20)]
    assert not any(piece in train for piece in pieces)


def test_refuses_unknown_tasks_and_short_prefixes() -> None:
    generator = tasks.TaskGenerator(0)
    with pytest.raises(ValueError, match="unknown task 'haystack'"):
        generator.sample("haystack", 128)
    with pytest.raises(ValueError, match="too short"):
        generator.sample("needle", tasks.MIN_LENGTH - 1)


@pytest.mark.parametrize("model", MODELS)
def test_text_round_trips_through_the_tokenizer(model: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(CONFIGS / model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == tasks.VOCAB_SIZE
    for task in tasks.TASKS:
        (sample, *_) = tasks.make_samples(task, 300, 1, seed=2)
        for prompt, answer in sample.prompts():
            assert tokenizer.encode(tasks.render(prompt)).ids == prompt.tolist()
            # Answers survive the skipping of special tokens, as servers decode.
            assert tokenizer.decode(answer.tolist()) == tasks.render(answer)
    snippet = "naïve 日本語 😀\n"
    assert tokenizer.decode(tokenizer.encode(snippet).ids) == snippet


def test_imports_numpy_only() -> None:
    code = (
        "import sys, build.tasks; print(sorted({'torch', 'transformers', 'onnx'} & {*sys.modules}))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"
