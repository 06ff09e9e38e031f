"""The retrieval tasks of ``tasks.py`` in plain English, for any model's own tokenizer.

needle   8 records "The secret number of Mary is 48213." hidden in text, all are asked for
mqar     many such records, 16 are asked for
lww      last write wins: "Mary moved to Paris." 12 times for 4 people; where are they now?
copy     a list of 16 words near the end is repeated
split    a needle whose question begins inside the prefix
text     natural text (it has no right answer)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from build.tasks import Question, Sample, Tokens, corpus


def _words(text: str) -> list[str]:
    return text.split()


_NAMES = _words(
    "Mary John Linda Robert Susan David Karen Paul Nancy Mark Betty Steven Helen Kevin Sandra "
    "Brian Donna George Carol Edward Ruth Ronald Sharon Anthony Laura Jason Sarah Jeffrey Emma "
    "Gary Anna Scott Rose Eric Alice Frank Julia Peter Grace Henry Diana Oscar Clara Victor"
)
_TITLES = _words("Doctor Captain Judge Professor Colonel Sister Uncle Baker Painter Farmer")
_CITIES = _words(
    "Paris London Berlin Madrid Rome Vienna Prague Dublin Oslo Athens Lisbon Warsaw Tokyo Cairo "
    "Lima Delhi Boston Chicago Denver Seattle Toronto Sydney Moscow Geneva Milan Munich"
)
_WORDS = _words(
    "apple river stone chair cloud bread tiger music glass green table horse light paper water "
    "house train bridge garden window silver winter flower market summer copper island forest"
)
_NUM_NEEDLES = 8
_MAX_QUERIES = 16
_TEXT_ANSWER = 64


class TextTasks:
    """Draws samples as token ids of ``tokenizer``; the same seed and calls give the same ones."""

    def __init__(self, tokenizer: Tokenizer, seed: int, bos: Sequence[int] = ()) -> None:
        self.rng, self._tokenizer, self._bos = np.random.default_rng(seed), tokenizer, tuple(bos)
        self._corpus = np.array(self._encode(corpus("heldout").tobytes().decode("ascii")))

    def sample(self, task: str, length: int) -> Sample:
        """A sample of ``task`` whose prefix has exactly ``length`` tokens."""
        sample: Sample = getattr(self, f"_{task}")(length)
        return sample

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _filler(self, count: int) -> Tokens:
        start = int(self.rng.integers(len(self._corpus)))
        places = np.arange(start, start + count) % len(self._corpus)
        return np.asarray(self._corpus[places], np.int64)

    def _hide(self, records: list[str], length: int) -> Tokens:
        """Text of ``length`` tokens with the records, in order, at random places."""
        encoded = [self._encode(f"\n{record}\n") for record in records]
        filler = self._filler(length - len(self._bos) - sum(map(len, encoded)))
        cuts = np.sort(self.rng.integers(0, len(filler) + 1, len(records)))
        pieces: list[Sequence[int] | Tokens] = [self._bos]
        for piece, record in zip(np.split(filler, cuts)[:-1], encoded, strict=True):
            pieces += [piece, record]
        return np.concatenate([*pieces, filler[cuts[-1] :]]).astype(np.int64)

    def _question(self, text: str, answer: str) -> Question:
        return Question(tuple(self._encode(text)), tuple(self._encode(answer)), closed=False)

    def _recall(self, task: str, length: int, count: int) -> Sample:
        people = [f"{title} {name}" for title in _TITLES for name in _NAMES]
        chosen = [people[i] for i in self.rng.choice(len(people), count, replace=False)]
        numbers = [str(n) for n in self.rng.integers(10_000, 100_000, count)]
        records = [
            f"The secret number of {who} is {n}." for who, n in zip(chosen, numbers, strict=True)
        ]
        questions = tuple(
            self._question(f"\nThe secret number of {chosen[i]} is", f" {numbers[i]}")
            for i in self.rng.permutation(count)[:_MAX_QUERIES]
        )
        return Sample(task, self._hide(records, length), questions)

    def _needle(self, length: int) -> Sample:
        return self._recall("needle", length, _NUM_NEEDLES)

    def _mqar(self, length: int) -> Sample:
        """A quarter of the prefix is records."""
        size = len(self._encode("\nThe secret number of Doctor Mary is 12345.\n"))
        return self._recall("mqar", length, max(_NUM_NEEDLES, length // (4 * size)))

    def _split(self, length: int) -> Sample:
        """The first half of a question's tokens ends the prefix."""
        whole = self._recall("split", length - 3, _NUM_NEEDLES)
        asked = whole.questions[0]
        prefix = np.concatenate([whole.prefix, np.array(asked.tokens[:3], np.int64)])
        return Sample("split", prefix, (Question(asked.tokens[3:], asked.answer, closed=False),))

    def _lww(self, length: int) -> Sample:
        who = [_NAMES[i] for i in self.rng.choice(len(_NAMES), 4, replace=False)]
        order = self.rng.permutation([0, 1, 2, 3, *self.rng.integers(0, 4, 8)])
        moves = [
            (who[i], _CITIES[j]) for i, j in zip(order, self.rng.permutation(26), strict=False)
        ]
        last = dict(moves)
        prefix = self._hide([f"{name} moved to {city}." for name, city in moves], length)
        questions = tuple(
            self._question(f"\nAfter the last move, {name} lives in", f" {last[name]}")
            for name in self.rng.permutation(who)
        )
        return Sample("lww", prefix, questions)

    def _copy(self, length: int) -> Sample:
        words = " ".join(_WORDS[i] for i in self.rng.choice(len(_WORDS), 16, replace=False))
        listed = self._encode(f"\nThe list: {words}.\n")
        after = int(self.rng.integers(0, 48))
        before = length - len(self._bos) - len(listed) - after
        parts: list[Sequence[int] | Tokens]
        parts = [self._bos, self._filler(before), listed, self._filler(after)]
        question = self._question("\nThe list again:", f" {words}")
        return Sample("copy", np.concatenate(parts).astype(np.int64), (question,))

    def _text(self, length: int) -> Sample:
        room = length - len(self._bos)
        tokens = self._filler(room + _TEXT_ANSWER)
        prefix = np.concatenate([self._bos, tokens[:room]]).astype(np.int64)
        answer = Question((), tuple(map(int, tokens[room:])), closed=False)
        return Sample("text", prefix, (answer,))
