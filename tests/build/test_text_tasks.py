"""English tasks in any tokenizer's tokens: exact lengths, answers that the prefix gives."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tokenizers import Tokenizer

from build.tasks import Sample
from build.text_tasks import TextTasks
from build.trials import TASKS
from engine_configs.names import find_model

BOS = 256


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    checkpoint = find_model("hybrid-tiny").checkpoint
    assert checkpoint is not None
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def texts(tokenizer: Tokenizer, sample: Sample) -> tuple[str, list[tuple[str, str]]]:
    pairs = [(tokenizer.decode(list(q.tokens)), tokenizer.decode(list(q.answer)))
             for q in sample.questions]  # fmt: skip
    return tokenizer.decode(sample.prefix.tolist()), pairs


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1024, 2048])
def test_prefixes_are_exactly_as_long_as_asked(
    tokenizer: Tokenizer, task: str, length: int
) -> None:
    first, again = (TextTasks(tokenizer, 5, [BOS]).sample(task, length) for _ in range(2))
    assert (first.length, first.prefix[0]) == (length, BOS)
    np.testing.assert_array_equal(first.prefix, again.prefix)
    assert first.answer_mask.sum() == sum(len(q.answer) for q in first.questions) > 0


@pytest.mark.parametrize("task", ["needle", "mqar"])
def test_numbers_stand_in_the_prefix(tokenizer: Tokenizer, task: str) -> None:
    prefix, pairs = texts(tokenizer, TextTasks(tokenizer, 1).sample(task, 2000))
    for question, answer in pairs:
        assert f"{question.strip()}{answer}." in prefix


def test_the_last_move_counts(tokenizer: Tokenizer) -> None:
    prefix, pairs = texts(tokenizer, TextTasks(tokenizer, 2).sample("lww", 1500))
    moves = dict(re.findall(r"(\w+) moved to (\w+)\.", prefix))
    assert {re.search(r", (\w+) lives", q)[1]: a.strip() for q, a in pairs} == moves  # type: ignore[index]


def test_the_list_is_asked_for_as_it_was(tokenizer: Tokenizer) -> None:
    prefix, [(_, answer)] = texts(tokenizer, TextTasks(tokenizer, 3).sample("copy", 900))
    assert f"The list:{answer}." in prefix


def test_a_split_question_begins_inside_the_prefix(tokenizer: Tokenizer) -> None:
    prefix, [(rest, answer)] = texts(tokenizer, TextTasks(tokenizer, 4).sample("split", 1500))
    whole = prefix[-3:] + rest
    assert f"{whole.strip()}{answer}." in prefix
