"""A bundle, ready to answer text: the engine, its prefix cache and the tokenizer in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from serving.engine.bundle import Bundle
from serving.engine.engine import Engine, EngineConfig
from serving.engine.model import Model
from serving.engine.prefix import Prefixes, make_cache
from serving.engine.requests import (
    EXACT_REPLAY,
    CompressionRequest,
    Finish,
    Request,
    SamplingParams,
    Stream,
    Usage,
)
from serving.engine.text import Text, TextStream
from serving.prefix_cache import CacheConfig, PrefixCache, ReplayRequest
from serving.replay.cost import measure_cost


@dataclass
class Answer:
    """A whole answer."""

    text: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage


@dataclass
class LLM:
    """``LLM.open(bundle).generate(prompt)``; use as a context manager, it owns an arena file."""

    bundle: Bundle
    text: Text
    engine: Engine
    cache: PrefixCache | None = None

    @classmethod
    def open(
        cls,
        path: Path | str,
        engine: EngineConfig = EngineConfig(),
        cache: CacheConfig | None = None,
    ) -> LLM:
        """``cache`` None = no prefix cache. Raises BundleError, CacheError."""
        bundle = Bundle.open(path)
        text, model = Text(bundle.path), Model(bundle, engine.threads)
        if cache is None:
            return cls(bundle, text, Engine(model, engine))
        index = make_cache(bundle, cache)
        prefixes = Prefixes(bundle, index, measure_cost(model))
        return cls(bundle, text, Engine(model, engine, prefixes), index)

    def close(self) -> None:
        self.engine.close()
        if self.cache is not None:
            self.cache.arena.unlink()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self,
        prompt: str,
        sampling: SamplingParams = SamplingParams(),
        replay: ReplayRequest = EXACT_REPLAY,
        cache_salt: str = "",
        use_cache: bool = True,
        compression: CompressionRequest = CompressionRequest(),
    ) -> Stream:
        """Raises RequestError and its kin at once; end tokens of the model stop the answer."""
        stops = (*sampling.stop_tokens, *self.bundle.spec.eos_token_ids)
        tokens = np.asarray(self.text.encode(prompt), np.int32)
        sampling = replace(sampling, stop_tokens=stops)
        request = Request(tokens, sampling, replay, compression, cache_salt, use_cache)
        return self.engine.submit(request)

    def stream(self, stream: Stream, stop_words: Sequence[str] = ()) -> Iterator[str | Answer]:
        """Pieces of text as they become certain, then the Answer."""
        pieces, out, ids = list[str](), TextStream(self.text, stop_words), list[int]()
        reason = ""
        try:
            for event in stream:
                if isinstance(event, Finish):
                    piece = out.finish()
                    reason = "stop_word" if out.stopped else event.reason
                elif out.stopped:
                    continue  # made before the engine heard of it
                else:
                    ids.append(event.token_id)
                    piece = out.push(event.token_id)
                    if out.stopped:
                        stream.cancel()
                if piece:
                    pieces.append(piece)
                    yield piece
            yield Answer("".join(pieces), ids, reason, stream.usage)
        finally:
            stream.cancel()  # also when the caller stops listening

    def generate(
        self,
        prompt: str,
        sampling: SamplingParams = SamplingParams(),
        replay: ReplayRequest = EXACT_REPLAY,
        stop_words: Sequence[str] = (),
        **options: object,
    ) -> Answer:
        """The whole answer to ``prompt``."""
        stream = self.submit(prompt, sampling, replay, **options)  # type: ignore[arg-type]
        *_, answer = self.stream(stream, stop_words)
        assert isinstance(answer, Answer)
        return answer
