"""The command-line client and its protocol, without a server."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from engine_configs.errors import ServerError
from serving import client as module
from serving.client import Client, TryAgain, _tensor, main

runner = CliRunner()
app = typer.Typer()
app.command()(main)


@pytest.fixture
def nowhere() -> str:
    """An address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(
    ("name", "value", "kind", "shape"),
    [
        ("max_tokens", 4, "INT64", [1]),
        ("temperature", 0.5, "FP32", [1]),
        ("stream", True, "BOOL", [1]),
        ("stop_words", ["a", "ö"], "BYTES", [2]),
    ],
)
def test_values_become_tensors(name: str, value: Any, kind: str, shape: list[int]) -> None:
    tensor = _tensor(name, value)
    assert (tensor.name(), tensor.datatype(), tensor.shape()) == (name, kind, shape)


def test_unknown_field_is_refused_before_anything_is_sent(nowhere: str) -> None:
    with Client(nowhere) as client, pytest.raises(ServerError, match=r"'temperatur'.*temperature"):
        client.generate("x", temperatur=1)


def test_nobody_there(nowhere: str) -> None:
    started = time.monotonic()
    with Client(nowhere) as client, pytest.raises(TryAgain, match=nowhere):
        client.generate("x")
    assert time.monotonic() - started < 10


class Scripted(Client):
    """A client whose streams are given."""

    def __init__(self, *streams: list[dict[str, Any]] | Exception) -> None:
        self.streams, self.asked = list(streams), 0
        super().__init__("127.0.0.1:1")

    def stream(self, text_input: str, **fields: Any) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        self.asked += 1
        current = self.streams.pop(0)
        if isinstance(current, Exception):
            raise current
        yield from current


ANSWER = [{"text_output": "a"}, {"text_output": "b", "finish_reason": "length"}]


def test_retries_what_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    client = Scripted(TryAgain("gone"), TryAgain("full"), ANSWER)
    assert client.generate("x", retries=2) == {"text_output": "ab", "finish_reason": "length"}
    client = Scripted(TryAgain("gone"), TryAgain("full"), ANSWER)
    with pytest.raises(TryAgain, match="full"):
        client.generate("x", retries=1)
    assert client.asked == 2


def test_does_not_retry_a_refusal() -> None:
    client = Scripted(ServerError("top_p is 2.0"), ANSWER)
    with pytest.raises(ServerError, match="top_p"):
        client.generate("x", retries=5)
    assert client.asked == 1


@pytest.mark.parametrize(
    ("message", "status", "kind"),
    [
        ("Socket closed", "StatusCode.UNAVAILABLE", TryAgain),
        ("overloaded: 64 requests are running", None, TryAgain),
        ("max_tokens is 0", None, ServerError),
    ],
)
def test_kinds_of_errors(message: str, status: str | None, kind: type[Exception]) -> None:
    error = Client("here:1")._error(InferenceServerException(message, status=status))
    assert type(error) is kind
    assert str(error) == f"here:1: {message}"


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The command line's client answers "ab" and notes what it was asked."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def stream(self: Client, text_input: str, **fields: Any) -> Iterator[dict[str, Any]]:
        asked.append((text_input, fields))
        yield from ANSWER

    monkeypatch.setattr(Client, "stream", stream)
    return asked


def test_prompt_from_argument_file_and_standard_input(
    answering: list[tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_text("from a file")
    for argument, text in (("hi", None), (f"@{tmp_path / 'prompt'}", None), ("-", "typed in")):
        done = runner.invoke(app, [argument, "--max-tokens", "3"], input=text)
        assert (done.exit_code, done.stdout) == (0, "ab\n")
    assert [prompt for prompt, _ in answering] == ["hi", "from a file", "typed in"]
    assert answering[0][1] == {
        "max_tokens": 3, "temperature": 0.0, "stream": True, "cache_salt": "",
    }  # fmt: skip


def test_options_become_fields(answering: list[tuple[str, dict[str, Any]]]) -> None:
    options = ["--seed", "3", "--stop", "a", "--stop", "b", "--replay-ratio", "0.1", "--stats"]
    done = runner.invoke(app, ["hi", *options])
    assert done.exit_code == 0
    assert "finish_reason length" in done.stderr
    fields = answering[0][1]
    assert (fields["seed"], fields["stop_words"], fields["replay_ratio"]) == (3, ["a", "b"], 0.1)


def test_errors_are_one_line(nowhere: str) -> None:
    for arguments in (["@/no/such/file"], ["hi", "--url", nowhere]):
        done = runner.invoke(app, arguments)
        assert done.exit_code == 1
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.output
