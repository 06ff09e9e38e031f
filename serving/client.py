"""``python -m serving.client PROMPT``: a prompt in, streamed text out, over gRPC.

``Client.stream`` is the whole protocol: tensors by name in, dictionaries by name out.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tritonclient.grpc as grpc
import typer
from tritonclient.utils import InferenceServerException

from engine_configs.errors import HybridServeError, ServerError
from serving.interface import INPUTS, OUTPUTS

_DTYPES: dict[str, tuple[str, Any]] = {
    "STRING": ("BYTES", np.object_),
    "INT64": ("INT64", np.int64),
    "FP32": ("FP32", np.float32),
    "BOOL": ("BOOL", np.bool_),
}
_KINDS = {t.name: t.kind for t in INPUTS}
RETRY_SECONDS = 0.5


class TryAgain(ServerError):
    """The connection broke or the server is full: the same request may well succeed later."""


class Client:
    """One connection, one request at a time: ``with Client(url) as c: c.generate("...")``."""

    def __init__(self, url: str = "127.0.0.1:8001", model: str = "llm") -> None:
        self.url, self.model = url, model
        self._client = grpc.InferenceServerClient(url)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def stream(
        self, text_input: str, *, timeout: float | None = None, **fields: Any
    ) -> Iterator[dict[str, Any]]:
        """Responses as they come: ``text_output`` in each, counts in the last one.

        ``fields``: any input of serving/interface.py by name. Leaving the iterator early cancels
        the request on the server. Raises ServerError with the server's message.
        """
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        inputs = [_tensor(n, v) for n, v in {"text_input": text_input, **fields}.items()]
        self._client.start_stream(lambda result, error: answers.put(error or result))
        finished = False
        try:
            self._client.async_stream_infer(self.model, inputs, enable_empty_final_response=True)
            while not finished:
                answer = answers.get(timeout=timeout)
                if isinstance(answer, InferenceServerException):
                    raise self._error(answer)
                finished = answer.get_response().parameters["triton_final_response"].bool_param
                values = _values(answer)
                if values:
                    yield values
        except InferenceServerException as e:  # the stream was broken before the request went out
            raise self._error(e if answers.empty() else answers.get()) from None
        except queue.Empty:
            raise ServerError(f"no answer in {timeout} s", where=self.url) from None
        finally:
            self._client.stop_stream(cancel_requests=not finished)

    def _error(self, error: InferenceServerException) -> ServerError:
        """Only errors of the transport have a status; the model's have a message alone."""
        message = str(error.message())
        again = error.status() is not None or message.startswith("overloaded")
        return (TryAgain if again else ServerError)(message, where=self.url)

    def generate(self, text_input: str, *, retries: int = 0, **fields: Any) -> dict[str, Any]:
        """The whole answer as one dictionary.

        Where the connection breaks or the server is full it is asked for again, half a second
        later. What the server refuses is raised at once.
        """
        for attempt in range(retries + 1):
            try:
                parts = list(self.stream(text_input, **{"stream": True, **fields}))
                return {**parts[-1], "text_output": "".join(p["text_output"] for p in parts)}
            except TryAgain:
                if attempt == retries:
                    raise
                time.sleep(RETRY_SECONDS)
        raise AssertionError("unreachable")


def _tensor(name: str, value: Any) -> Any:
    if name not in _KINDS:
        raise ServerError(f"no input is named {name!r}", fix=f"Known: {', '.join(_KINDS)}")
    kind, dtype = _DTYPES[_KINDS[name]]
    values = value if isinstance(value, (list, tuple)) else [value]
    if kind == "BYTES":
        values = [v.encode() if isinstance(v, str) else v for v in values]
    array = np.array(values, dtype=dtype)
    tensor = grpc.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def _values(result: Any) -> dict[str, Any]:
    values = {}
    for spec in OUTPUTS:
        array = result.as_numpy(spec.name)
        if array is None:
            continue
        items = [v.decode() if isinstance(v, bytes) else v.item() for v in array.reshape(-1)]
        values[spec.name] = items if spec.many else items[0]
    return values


def main(
    prompt: Annotated[str, typer.Argument(help="Text, @FILE, or - for standard input")],
    url: Annotated[str, typer.Option(help="gRPC address of the server")] = "127.0.0.1:8001",
    max_tokens: Annotated[int, typer.Option()] = 64,
    temperature: Annotated[float, typer.Option()] = 0.0,
    seed: Annotated[int | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop word; may be repeated")] = None,
    cache_salt: Annotated[str, typer.Option(help="Prefixes are shared within a salt only")] = "",
    replay_ratio: Annotated[float | None, typer.Option(help="Replay this share of a hit")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print counts and times")] = False,
) -> None:
    """Send one prompt and print the answer as it comes."""
    fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "stream": True}
    optional = {"seed": seed, "stop_words": stop, "replay_ratio": replay_ratio}
    fields |= {k: v for k, v in optional.items() if v is not None}
    try:
        text = _read(prompt)
        started, first, last = time.monotonic(), 0.0, dict[str, Any]()
        with Client(url) as client:
            for last in client.stream(text, cache_salt=cache_salt, **fields):
                first = first or time.monotonic() - started
                print(last["text_output"], end="", flush=True)
        print()
    except (HybridServeError, OSError) as e:
        typer.echo(f"error: {e}", err=True)
        raise typer.Exit(1) from None
    if stats:
        total = time.monotonic() - started
        counts = ", ".join(f"{k} {v}" for k, v in last.items() if k != "text_output")
        typer.echo(f"first text {first * 1e3:.1f} ms, all {total * 1e3:.1f} ms, {counts}", err=True)


def _read(prompt: str) -> str:
    if prompt == "-":
        return sys.stdin.read()
    return Path(prompt[1:]).read_text() if prompt.startswith("@") else prompt


if __name__ == "__main__":
    typer.run(main)
