"""Tokens to text as they come: whole UTF-8 characters only, and never a piece of a stop word."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2.sandbox
from tokenizers import Tokenizer

from engine_configs.errors import BundleError, RequestError

REPLACEMENT = "\ufffd"


class Text:
    """The tokenizer and chat template of a bundle."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json"
        if not file.exists():
            raise BundleError(
                "has no tokenizer.json",
                where=str(path),
                fix="Convert from a checkpoint that has one",
            )
        try:
            self.tokenizer = Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises nothing more precise
            raise BundleError(f"cannot be read: {e}", where=str(file)) from None
        template = path / "chat_template.jinja"
        self._template = _compile(template.read_text()) if template.exists() else None
        config = path / "tokenizer_config.json"
        self._config: dict[str, Any] = json.loads(config.read_text()) if config.exists() else {}

    def encode(self, text: str) -> list[int]:
        """Raises RequestError for text that is not valid Unicode (lone surrogates)."""
        try:
            return list(self.tokenizer.encode(text).ids)
        except (UnicodeEncodeError, TypeError) as e:
            raise RequestError(f"the text is not valid Unicode: {e}") from None

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def chat(self, messages: list[dict[str, str]]) -> str:
        """The prompt of a conversation.

        Raises RequestError where the bundle has no template or the template refuses.
        """
        if self._template is None:
            raise RequestError("this model has no chat template", fix="Send text_input instead")
        tokens = {k: v for k, v in self._config.items() if k.endswith("_token")}
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **tokens)
        except jinja2.TemplateError as e:
            raise RequestError(f"the chat template refuses the messages: {e}") from None


def _compile(source: str) -> jinja2.Template:
    """As transformers reads chat templates."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)


class TextStream:
    """Turns one answer's tokens into text pieces whose join is the decoded answer.

    ``stop_words`` end the answer: the text before the first one found is all that comes out.
    """

    def __init__(self, text: Text, stop_words: Sequence[str] = ()) -> None:
        self._text = text
        self._stop_words = [w for w in stop_words if w]
        self._tokens: list[int] = []
        self._prefix = 0  # tokens [prefix, read) give the context that decoding needs
        self._read = 0
        self._held = ""  # decoded, but may still turn out to begin a stop word
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that has become certain with ``token``."""
        self._tokens.append(token)
        return "" if self.stopped else self._release(self._decode_new(final=False), final=False)

    def finish(self) -> str:
        """The rest; an incomplete character at the very end comes out as U+FFFD."""
        return "" if self.stopped else self._release(self._decode_new(final=True), final=True)

    def _decode_new(self, *, final: bool) -> str:
        before = self._text.decode(self._tokens[self._prefix : self._read])
        now = self._text.decode(self._tokens[self._prefix :])
        if not final and now.endswith(REPLACEMENT):
            return ""  # in the middle of a character
        self._prefix, self._read = self._read, len(self._tokens)
        return now[len(before) :]

    def _release(self, new: str, *, final: bool) -> str:
        self._held += new
        found = [(i + len(w), i) for w in self._stop_words if (i := self._held.find(w)) >= 0]
        if found:  # the first to be complete, so that the cut into tokens makes no difference
            self.stopped = True
            out, self._held = self._held[: min(found)[1]], ""
            return out
        keep = 0 if final else max((_overlap(self._held, w) for w in self._stop_words), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of ``text`` that begins ``word``."""
    for size in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:size]):
            return size
    return 0
