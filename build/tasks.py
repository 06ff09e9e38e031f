"""Retrieval tasks a tiny trained model can solve, as tokens and as text.

A sample is a prefix (what a server would have cached) and questions about it (what a new request
adds). Quality is judged by these, not by perplexity: a model whose retrieval is dead still
predicts text well.

    needle   8 records `<|set|> key key value` hidden in text, all are asked for
    mqar     multi-query associative recall: length/10 such records, 16 are asked for
    lww      last write wins: 12 writes to 4 registers, each register is read
    copy     the last span of 16 symbols is repeated
    split    a needle whose question begins inside the prefix: a hit may end at any token
    text     natural text (to measure KL and agreement; it has no right answer)

The tokens are those of the tokenizer in `engine_configs/hybrid-tiny`: ids 0-255 are bytes, the
symbols follow. All of it is numpy and the standard library; the text is Python's own language
reference (`pydoc_data`), of which the last tenth is held out from training.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

CONTROLS = (
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|user|>",
    "<|set|>",
    "<|query|>",
    "<|write|>",
    "<|read|>",
    "<|span|>",
    "<|copy|>",
)
NUM_BYTES = 256
NUM_KEYS = NUM_VALUES = 64
SYMBOLS = (
    *CONTROLS,
    *(f"<k{i}>" for i in range(NUM_KEYS)),
    *(f"<v{i}>" for i in range(NUM_VALUES)),
)
VOCAB_SIZE = NUM_BYTES + len(SYMBOLS)
BOS, EOS, PAD, USER, SET, QUERY, WRITE, READ, SPAN, COPY = range(
    NUM_BYTES, NUM_BYTES + len(CONTROLS)
)
FIRST_KEY = NUM_BYTES + len(CONTROLS)
FIRST_VALUE = FIRST_KEY + NUM_KEYS

TASKS = ("needle", "mqar", "lww", "copy", "split", "text")
Split = Literal["train", "heldout"]
Tokens = NDArray[np.int64]

_NUM_NEEDLES = 8
_MAX_QUERIES = 16
_NUM_REGISTERS = 4
_NUM_WRITES = 12
_SPAN_LENGTH = 16
_SPAN_MAX_DISTANCE = 48
_TEXT_ANSWER = 64
MIN_LENGTH = 64


@dataclass(frozen=True)
class Question:
    """What is appended to the prefix: question tokens, then the answer, then `<|eos|>`."""

    tokens: tuple[int, ...]
    answer: tuple[int, ...]
    closed: bool = True

    def __len__(self) -> int:
        return len(self.tokens) + len(self.answer) + int(self.closed)


@dataclass(frozen=True, eq=False)
class Sample:
    """One prefix [length] and the questions about it.

    `suffix` [S] is all questions one after the other with their answers, as teacher forcing
    wants them; `answer_mask` [S] is true on answer tokens.
    """

    task: str
    prefix: Tokens
    questions: tuple[Question, ...]

    @property
    def length(self) -> int:
        return len(self.prefix)

    @property
    def suffix(self) -> Tokens:
        parts = [(*q.tokens, *q.answer, *((EOS,) if q.closed else ())) for q in self.questions]
        return np.array([token for part in parts for token in part], np.int64)

    @property
    def answer_mask(self) -> NDArray[np.bool_]:
        parts = [
            [False] * len(q.tokens) + [True] * len(q.answer) + [False] * q.closed
            for q in self.questions
        ]
        return np.array([flag for part in parts for flag in part], np.bool_)

    def prompts(self) -> Iterator[tuple[Tokens, Tokens]]:
        """Yields one (prompt tokens, answer tokens) pair per question, as single requests."""
        for question in self.questions:
            yield (
                np.concatenate([self.prefix, np.array(question.tokens, np.int64)]),
                np.array(question.answer, np.int64),
            )


@functools.cache
def corpus(split: Split) -> NDArray[np.uint8]:
    """The natural text as ASCII bytes, blank runs squeezed; first 90 % train, last 10 % heldout.

    Topics repeat each other's paragraphs; each is kept once, so that none is in both splits.
    """
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    paragraphs = (re.sub(r"[ \t]+", " ", p).strip() for p in re.split(r"\n\s*\n", text))
    unique = dict.fromkeys(re.sub(r"[^\n -~]|(?<=\n) ", "", p) for p in paragraphs)
    data = np.frombuffer("\n".join(filter(None, unique)).encode("ascii"), np.uint8)
    cut = int(len(data) * 0.9)
    return data[:cut] if split == "train" else data[cut:]


class TaskGenerator:
    """Draws samples; the same seed and calls give the same samples."""

    def __init__(self, seed: int, split: Split = "heldout") -> None:
        self.rng = np.random.default_rng(seed)
        self.corpus = corpus(split)
        self._unsplit: list[Sample] = []

    def sample(self, task: str, length: int) -> Sample:
        """A sample of `task` whose prefix has exactly `length` tokens (at least MIN_LENGTH)."""
        if task not in TASKS:
            raise ValueError(f"unknown task {task!r}; one of {', '.join(TASKS)}")
        if length < MIN_LENGTH:
            raise ValueError(f"length {length} is too short for a task; at least {MIN_LENGTH}")
        sample: Sample = getattr(self, f"_{task}")(length)
        return sample

    def text(self, num_tokens: int) -> Tokens:
        """`num_tokens` of running text from a random place (wraps at the end of the corpus)."""
        start = int(self.rng.integers(len(self.corpus)))
        places = np.arange(start, start + num_tokens) % len(self.corpus)
        tokens: Tokens = self.corpus[places].astype(np.int64)
        return tokens

    def values(self, count: int) -> list[int]:
        return [int(v) for v in FIRST_VALUE + self.rng.integers(0, NUM_VALUES, count)]

    def hide(self, records: list[tuple[int, ...]], length: int) -> Tokens:
        """`<|bos|>` and text of `length` tokens with the records, in order, at random places."""
        filler = self.text(length - 1 - sum(map(len, records)))
        cuts = np.sort(self.rng.integers(0, len(filler) + 1, len(records)))
        pieces = [np.array([BOS])]
        for piece, record in zip(np.split(filler, cuts)[:-1], records, strict=True):
            pieces += [piece, np.array(record)]
        tokens: Tokens = np.concatenate([*pieces, filler[cuts[-1] :]]).astype(np.int64)
        return tokens

    def facts(self, count: int) -> list[tuple[int, int, int]]:
        """`count` (key, key, value) triples with distinct key pairs."""
        pairs = self.rng.choice(NUM_KEYS * NUM_KEYS, count, replace=False)
        return [
            (FIRST_KEY + int(p) // NUM_KEYS, FIRST_KEY + int(p) % NUM_KEYS, v)
            for p, v in zip(pairs, self.values(count), strict=True)
        ]

    def _recall(self, task: str, length: int, num_facts: int) -> Sample:
        facts = self.facts(num_facts)
        prefix = self.hide([(SET, *fact) for fact in facts], length)
        asked = self.rng.permutation(num_facts)[:_MAX_QUERIES]
        questions = [Question((QUERY, *facts[i][:2]), facts[i][2:]) for i in asked]
        return Sample(task, prefix, tuple(questions))

    def _needle(self, length: int) -> Sample:
        return self._recall("needle", length, _NUM_NEEDLES)

    def _mqar(self, length: int) -> Sample:
        return self._recall("mqar", length, max(_NUM_NEEDLES, length // 10))

    def _split(self, length: int) -> Sample:
        """Samples in a row share their prefix but for the last two tokens."""
        if not self._unsplit or self._unsplit[0].length != length - 2:
            whole = self._recall("split", length - 2, _NUM_NEEDLES)
            self._unsplit = [Sample("split", whole.prefix, (q,)) for q in whole.questions]
        whole = self._unsplit.pop()
        question = whole.questions[0]
        return Sample(
            "split",
            np.concatenate([whole.prefix, np.array(question.tokens[:2])]),
            (Question(question.tokens[2:], question.answer),),
        )

    def _lww(self, length: int) -> Sample:
        names = FIRST_KEY + self.rng.choice(NUM_KEYS, _NUM_REGISTERS, replace=False)
        # Every register is written at least once; the rest is random.
        extra = self.rng.integers(0, _NUM_REGISTERS, _NUM_WRITES - _NUM_REGISTERS)
        targets = self.rng.permutation(np.concatenate([np.arange(_NUM_REGISTERS), extra]))
        writes = [
            (int(names[t]), v) for t, v in zip(targets, self.values(_NUM_WRITES), strict=True)
        ]
        prefix = self.hide([(WRITE, *write) for write in writes], length)
        final = dict(writes)
        order = self.rng.permutation(_NUM_REGISTERS)
        questions = [Question((READ, int(names[i])), (final[int(names[i])],)) for i in order]
        return Sample("lww", prefix, tuple(questions))

    def _copy(self, length: int) -> Sample:
        span = FIRST_KEY + self.rng.integers(0, NUM_KEYS + NUM_VALUES, _SPAN_LENGTH)
        room = length - 1 - (_SPAN_LENGTH + 2)
        distance = int(self.rng.integers(0, min(_SPAN_MAX_DISTANCE, room + 1)))
        before, after = self.text(room - distance), self.text(distance)
        prefix = np.concatenate([[BOS], before, [SPAN], span, [EOS], after]).astype(np.int64)
        return Sample("copy", prefix, (Question((COPY,), tuple(map(int, span))),))

    def _text(self, length: int) -> Sample:
        tokens = self.text(length - 1 + _TEXT_ANSWER)
        prefix = np.concatenate([[BOS], tokens[: length - 1]]).astype(np.int64)
        answer = tuple(map(int, tokens[length - 1 :]))
        return Sample("text", prefix, (Question((), answer, closed=False),))


def make_samples(
    task: str, length: int, num_answers: int, *, seed: int = 0, split: Split = "heldout"
) -> list[Sample]:
    """As many samples of `task` as give at least `num_answers` questions, deterministic by seed."""
    generator = TaskGenerator(seed, split)
    samples: list[Sample] = []
    while sum(len(sample.questions) for sample in samples) < num_answers:
        samples.append(generator.sample(task, length))
    return samples


def heldout_text(num_tokens: int, *, seed: int = 0) -> Tokens:
    """`<|bos|>` and held-out natural text, [num_tokens] in all (for KL, parity, decay lengths)."""
    text = TaskGenerator(seed).text(num_tokens - 1)
    return np.concatenate([[BOS], text]).astype(np.int64)


def render(tokens: Iterable[int]) -> str:
    """The text that the tokenizer turns back into exactly `tokens` (of samples made here)."""
    raw = b"".join(
        bytes([t]) if t < NUM_BYTES else SYMBOLS[t - NUM_BYTES].encode() for t in map(int, tokens)
    )
    return raw.decode("utf-8")
