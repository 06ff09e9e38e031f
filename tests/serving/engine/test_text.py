"""Text as it comes: whole characters only, never a piece of a stop word, nothing lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine_configs.errors import BundleError, RequestError
from serving.engine.text import Text, TextStream

PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)
SAMPLES = [
    "plain",
    "naïve façade, Ünïcödé",
    "中文字符 и кириллица",
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, 👍🏽 skin, e\u0301 combining",
    "a\n\tb  c\u00a0d\ufeffe",
    "\ufffd is a character, too \ufffd",
]


class Pieces:
    """A tokenizer whose tokens are the given byte strings, as a byte-level one's are."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.pieces[t] for t in tokens).decode("utf-8", "replace")


def cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """``data`` in pieces of these sizes, round and round."""
    pieces, at = [], 0
    while at < len(data):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[at : at + size])
        at += size
    return pieces


def stream_all(text: Any, tokens: Sequence[int], stop_words: Sequence[str] = ()) -> list[str]:
    stream = TextStream(text, stop_words)
    return [*(stream.push(t) for t in tokens), stream.finish()]


def stream_pieces(pieces: list[bytes], stop_words: Sequence[str] = ()) -> list[str]:
    return stream_all(Pieces(pieces), range(len(pieces)), stop_words)


def until_stop(text: str, words: Sequence[str]) -> str:
    """The reference: character by character, until the first stop word is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(w) for w in words if w and text[:end].endswith(w)]
        if starts:
            return text[: min(starts)]
    return text


@pytest.fixture(scope="module")
def text(tiny_bundle: Path) -> Text:
    return Text(tiny_bundle)


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_join_of_the_stream_is_the_decoded_answer(text: Text, sample: str) -> None:
    tokens = text.encode(sample)
    parts = stream_all(text, tokens)
    assert "".join(parts) == text.decode(tokens)
    assert text.decode(tokens).endswith(sample)
    assert "\ufffd" in sample or not any("\ufffd" in part for part in parts)


@PROPERTY
@given(st.text(max_size=30), st.lists(st.integers(1, 5), min_size=1, max_size=6))
@example("👩‍👩‍👧‍👦", [1])
@example("中文", [2])
def test_no_part_of_a_character_comes_out(sample: str, sizes: list[int]) -> None:
    parts = stream_pieces(cut(sample.encode("utf-8", "ignore"), sizes))
    want = sample.encode("utf-8", "ignore").decode()
    assert "".join(parts) == want
    assert all("\ufffd" not in p for p in parts) or "\ufffd" in want


@PROPERTY
@given(st.binary(max_size=30), st.lists(st.integers(1, 5), min_size=1, max_size=6))
@example(b"\xf0\x9f\x91", [1])
@example(b"\xe4\xe4\xb8\xad\xff", [2, 1])
def test_bytes_that_are_no_text_come_out_as_the_whole_decodes(
    data: bytes, sizes: list[int]
) -> None:
    assert "".join(stream_pieces(cut(data, sizes))) == data.decode("utf-8", "replace")


def test_text_comes_as_soon_as_it_is_certain() -> None:
    parts = stream_pieces([b"a", b"\xe4\xb8", b"\xad", b"E", b"N", b"x"], ["END"])
    assert parts == ["a", "", "中", "", "", "ENx", ""]


@pytest.mark.parametrize("word", ["<stop>", "\n\n", "停止。", "👍🏽"])
def test_a_stop_word_cut_at_every_position_never_leaks(word: str) -> None:
    data = f"before{word}after".encode()
    for first in range(1, len(data)):
        for second in range(first + 1, len(data) + 1):
            pieces = [data[:first], data[first:second], data[second:]]
            assert "".join(stream_pieces(pieces, [word])) == "before"


ALPHABET = st.text("abé中", max_size=24)
WORDS = st.lists(st.text("abé中", min_size=1, max_size=4), max_size=4)


@PROPERTY
@given(ALPHABET, WORDS, st.lists(st.integers(1, 4), min_size=1, max_size=6))
@example("abcd", ["bcd", "c"], [4])
@example("aab", ["ab"], [1])
@example("ababc", ["abc", "abab"], [3])
def test_overlapping_stop_words_whatever_the_tokens(
    sample: str, words: list[str], sizes: list[int]
) -> None:
    stream_parts = stream_pieces(cut(sample.encode(), sizes), words)
    assert "".join(stream_parts) == until_stop(sample, words)
    so_far = ""
    for part in stream_parts:
        so_far += part
        assert not any(w in so_far for w in words)


def test_nothing_comes_after_a_stop_word() -> None:
    stream = TextStream(Pieces([b"a", b"STOP", b"more"]), ["STOP"])  # type: ignore[arg-type]
    assert [stream.push(0), stream.push(1), stream.push(2), stream.finish()] == ["a", "", "", ""]
    assert stream.stopped


def test_an_empty_stop_word_stops_nothing() -> None:
    assert "".join(stream_pieces([b"abc"], [""])) == "abc"


def test_text_that_is_no_unicode_is_refused(text: Text) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        text.encode("a\ud800b")


def test_the_chat_prompt_is_that_of_transformers(text: Text, tiny_bundle: Path) -> None:
    messages = [
        {"role": "user", "content": "Hi {{ 1 + 1 }} 中"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "  and now?\n"},
    ]
    theirs = AutoTokenizer.from_pretrained(tiny_bundle)
    want = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.chat(messages) == want


TEMPLATE = """
{%- for m in messages %}
    {%- if m.role not in ('user', 'assistant') %}
        {{- raise_exception('only users and assistants, not ' + m.role) }}
    {%- endif %}
{{ bos_token }}{{ m.content }}
{% endfor %}
{% if add_generation_prompt %}go{% endif %}
"""


@pytest.fixture
def other(tiny_bundle: Path, tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_bundle / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_whitespace_around_template_blocks_is_that_of_transformers(other: Path) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    theirs = AutoTokenizer.from_pretrained(other)
    want = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert Text(other).chat(messages) == want


def test_a_template_may_refuse(other: Path) -> None:
    with pytest.raises(RequestError, match="only users and assistants, not pirate"):
        Text(other).chat([{"role": "pirate", "content": "arr"}])


def test_a_template_cannot_reach_python(other: Path) -> None:
    (other / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(RequestError, match="unsafe"):
        Text(other).chat([])


def test_no_template_and_no_tokenizer(other: Path) -> None:
    (other / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="no chat template"):
        Text(other).chat([])
    (other / "tokenizer.json").write_text("{")
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        Text(other)
    (other / "tokenizer.json").unlink()
    with pytest.raises(BundleError, match=r"no tokenizer\.json"):
        Text(other)
