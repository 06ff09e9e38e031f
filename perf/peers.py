"""The same model on three engines, and how each of them takes a second prompt.

    (i)   the same prompt again
    (ii)  its first 75 % and another question
    (iii) its first n tokens for a random n and another question

Per engine the second prompts come in falling order of what they share with the first: what an
earlier one computed beyond that is of no use to a later one. (llama.cpp may still find a checkpoint
that an earlier one took on the way, to its advantage.)
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from build.lab import kl
from engine_configs.errors import HybridServeError
from perf import peer_model
from serving.engine.llm import LLM
from serving.engine.requests import EXACT_REPLAY, Request, SamplingParams
from serving.prefix_cache import ReplayRequest

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]
QUESTION = 64
SAME, PART, RANDOM = "the same again", "75 % + question", "random n + question"
STEP = 13  # tokens by which each repeat shares less


@dataclass(frozen=True)
class Served:
    """Seconds to the first token; prompt tokens that were reused and that ran."""

    seconds: float
    cached: int
    ran: int


class Engine(Protocol):
    name: str

    def first_token(self, prompt: Tokens) -> Served: ...


@dataclass
class Ours:
    """The engine in process; ``replay`` is how the next prompt may be reused."""

    llm: LLM
    name: str = "ours"
    replay: ReplayRequest = EXACT_REPLAY

    def first_token(self, prompt: Tokens) -> Served:
        request = Request(prompt, SamplingParams(max_tokens=1), self.replay)
        stream = self.llm.engine.submit(request)
        stream.tokens()
        usage = stream.usage
        return Served(usage.first_token_seconds, usage.cached_tokens, usage.computed_tokens)


class LlamaServer:
    """llama.cpp's server at its defaults, in a process of its own; a context manager.

    Raises HybridServeError when it does not start.
    """

    name = "llama.cpp"

    def __init__(self, model: Path, context: int, threads: int, checkpoint_step: int) -> None:
        command = [sys.executable, str(Path(__file__).with_name("llama_server.py")), str(model)]
        command += [str(context), str(threads)]
        if checkpoint_step:
            command.append(str(checkpoint_step))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(peer_model.SITE)}, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        lines = (line.split() for line in self._process.stdout)
        address = next((words[1] for words in lines if words[:1] == ["address"]), None)
        if address is None:
            raise HybridServeError("llama.cpp's server did not start", where=str(model))
        self._address = address

    def __enter__(self) -> LlamaServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def first_token(self, prompt: Tokens) -> Served:
        started = time.monotonic()
        timings = self._complete(prompt)["timings"]
        seconds = time.monotonic() - started
        return Served(seconds, timings["cache_n"], timings["prompt_n"])

    def log_probs(self, prompt: Tokens, vocab: int) -> Floats:
        """Of the token after ``prompt``, [V]; -inf where the server gave none."""
        answer = self._complete(prompt, n_probs=vocab)["completion_probabilities"][0]
        out = np.full(vocab, -np.inf, np.float32)
        for entry in answer["top_logprobs"]:
            out[entry["id"]] = entry["logprob"]
        return out

    def _complete(self, prompt: Tokens, **options: Any) -> dict[str, Any]:
        body = {"prompt": prompt.tolist(), "n_predict": 1, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self._address}/completion",
            json.dumps(body | options).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            answer: dict[str, Any] = json.load(response)
        return answer


class Transformers:
    """transformers in fp32 (bf16 is several times slower without AMX); keeps the cache of a
    prompt up to its last token and goes on from a copy of it where a prompt begins so."""

    name = "transformers"

    def __init__(self, source: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        self._kept: tuple[Tokens, Any] | None = None

    def first_token(self, prompt: Tokens) -> Served:
        started = time.monotonic()
        head, last = prompt[:-1], prompt[-1:]
        reused = self._kept is not None and np.array_equal(self._kept[0], head)
        if not reused:
            self._kept = head, self._run(head, None).past_key_values
        assert self._kept is not None
        self._run(last, copy.deepcopy(self._kept[1]))
        ran = 1 if reused else len(prompt)
        return Served(time.monotonic() - started, len(prompt) - ran, ran)

    def refuses_to_crop(self) -> str:
        """What it says when its kept cache is to be cut to a prefix; "" = it can."""
        assert self._kept is not None
        try:
            copy.deepcopy(self._kept[1]).crop(-1)
        except Exception as e:
            return str(e)
        return ""

    def log_probs(self, prompt: Tokens) -> Floats:
        logits = self._run(prompt, None).logits[0, -1]
        return np.asarray(self._torch.log_softmax(logits, -1).numpy())

    def _run(self, tokens: Tokens, cache: Any) -> Any:
        ids = self._torch.as_tensor(tokens.astype(np.int64))[None]
        with self._torch.inference_mode():
            return self._model(ids, cache=cache, use_cache=True, logits_to_keep=1)


@dataclass(frozen=True)
class PeerRow:
    """One engine, one kind of prompt; ``over_ours``: TTFT over that of our fixed tail (our exact
    hit for the same prompt, our cold run for the first one)."""

    prefix: int
    kind: str
    engine: str
    shared: int
    cached: int
    ran: int
    ttft: float
    over_ours: float = 1.0


@dataclass
class Race:
    """A first prompt of ``prefix`` + 64 tokens and the second prompts, on every engine."""

    prefix: int
    vocab: int
    rng: np.random.Generator = field(init=False)
    first: Tokens = field(init=False)
    kinds: list[tuple[str, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.prefix)
        self.first = self._draw(self.prefix + QUESTION)
        part = (RANDOM, int(self.rng.integers(1, self.prefix))), (PART, self.prefix * 3 // 4)
        self.kinds = sorted(part, key=lambda kind: -kind[1])

    def second(self, shared: int) -> Tokens:
        """The first ``shared`` tokens and another question, other from its first token on."""
        question = self._draw(QUESTION)
        question[0] = (self.first[shared] + 1) % self.vocab
        return np.concatenate([self.first[:shared], question])

    def ours(self, engine: Ours, tail: ReplayRequest, ratio: ReplayRequest) -> Iterator[PeerRow]:
        """Each hit twice: the fixed tail and the paper's share; medians of three."""
        engine.replay = EXACT_REPLAY
        yield self._row("cold", engine.name, self.prefix, [engine.first_token(self.first)])
        again = [engine.first_token(self.first) for _ in range(3)]
        yield self._row(SAME, engine.name, len(self.first), again)
        names = {f"ours, r = {tail.amount:.0f}": tail, f"ours, {ratio.amount:.0%}": ratio}
        at = len(self.first)
        for kind, shared in self.kinds:
            got: dict[str, list[Served]] = {name: [] for name in names}
            at = min(at, shared + STEP)
            for _ in range(3):
                for name, engine.replay in names.items():
                    at = max(1, at - STEP)
                    got[name].append(engine.first_token(self.second(at)))
            for name, served in got.items():
                yield self._row(kind, name, shared, served)

    def peer(self, engine: Engine, skip_parts: bool = False) -> Iterator[PeerRow]:
        yield self._row("cold", engine.name, self.prefix, [engine.first_token(self.first)])
        again = [engine.first_token(self.first) for _ in range(3)]
        yield self._row(SAME, engine.name, len(self.first), again)
        for kind, shared in [] if skip_parts else self.kinds:
            yield self._row(kind, engine.name, shared, [engine.first_token(self.second(shared))])

    def _row(self, kind: str, engine: str, shared: int, served: list[Served]) -> PeerRow:
        ttft = statistics.median(s.seconds for s in served)
        return PeerRow(self.prefix, kind, engine, shared, served[0].cached, served[0].ran, ttft)

    def _draw(self, count: int) -> Tokens:
        return self.rng.integers(1, self.vocab, count, dtype=np.int32)


@dataclass(frozen=True)
class Conversion:
    """llama.cpp's next-token distribution against transformers': mean KL over prompts, beside the
    KL to that of another prompt, and how often the most likely token is the same."""

    kl: float
    kl_other: float
    same_token: float

    @property
    def right(self) -> bool:
        return self.kl < 0.05 * self.kl_other

    def text(self) -> str:
        verdict = "the same model" if self.right else "NOT the same model: no claim is made"
        return (
            f"llama.cpp's Q8_0 against transformers: KL {self.kl:.1e} (to another prompt's "
            f"{self.kl_other:.1e}), same first token {self.same_token:.0%}: {verdict}"
        )


def check_conversion(server: LlamaServer, reference: Transformers, vocab: int) -> Conversion:
    """Short random prompts through both."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, vocab, n, dtype=np.int32) for n in (16, 40, 97, 128)]
    want = np.stack([reference.log_probs(p) for p in prompts])
    got = np.stack([server.log_probs(p, vocab) for p in prompts])
    return Conversion(
        float(kl(want, got).mean()),
        float(kl(want, np.roll(got, 1, axis=0)).mean()),
        float((want.argmax(1) == got.argmax(1)).mean()),
    )
