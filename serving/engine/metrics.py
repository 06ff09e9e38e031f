"""What an operator sees of the engine: outcomes, latencies, and tokens by where they came from."""

from __future__ import annotations

from typing import Any, Protocol

from serving.engine.requests import Usage

OUTCOMES = ("ok", "cancelled", "error", "refused")
TOKENS = ("prompt", "cached", "replayed", "computed", "generated")
KV_ROWS = ("held", "read")
# Head steps whose first selection was not enough, that read all rows kept; steps that read evicted
# rows; returns to dense.
KV_EXPANSIONS = ("selected_more", "all_read", "fetched", "dense")
SOURCES = ("state", "split", "tail", "recompute")
_TTFT = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]
_REPLAY_ERROR = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]
_INTER_TOKEN = [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0]


class Registry(Protocol):
    """Where metrics are made: Triton's, in production."""

    def counter(self, name: str, description: str, labels: list[dict[str, str]]) -> list[Any]: ...

    def gauge(self, name: str, description: str, labels: list[dict[str, str]]) -> list[Any]: ...

    def histogram(self, name: str, description: str, buckets: list[float]) -> Any | None: ...


class EngineMetrics:
    """Moved once per request, not per token: each move is a message to the server."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry  # its families must outlive their metrics

        def counters(name: str, text: str, label: str, values: tuple[str, ...]) -> dict[str, Any]:
            made = registry.counter(name, text, [{label: v} for v in values])
            return dict(zip(values, made, strict=True))

        self._outcomes = counters(
            "hybrid_requests_total", "Requests by outcome", "outcome", OUTCOMES
        )
        self._tokens = counters("hybrid_tokens_total", "Tokens by what was done", "kind", TOKENS)
        self._sources = counters(
            "hybrid_replay_source_total", "Requests by start of their state", "source", SOURCES
        )
        self._freed = registry.counter(
            "hybrid_kv_freed_bytes_total", "Slot bytes given back by compaction", [{}]
        )[0]
        self._rows = counters("hybrid_kv_rows_total", "K/V rows of compact steps", "kind", KV_ROWS)
        self._expansions = counters(
            "hybrid_kv_expansions_total", "Compact steps that needed more", "kind", KV_EXPANSIONS
        )
        self._load = dict(
            zip(
                ("waiting", "running", "rows"),
                registry.gauge(
                    "hybrid_engine_load",
                    "Sequences waiting and running, slot rows in use",
                    [{"kind": k} for k in ("waiting", "running", "rows")],
                ),
                strict=True,
            )
        )
        self._ttft = registry.histogram("hybrid_ttft_seconds", "Time to first token", _TTFT)
        self._inter_token = registry.histogram(
            "hybrid_inter_token_seconds", "Mean time between an answer's tokens", _INTER_TOKEN
        )

        self._replay_error = registry.histogram(
            "hybrid_replay_error", "Expected logit KL of approximate replays", _REPLAY_ERROR
        )

    def outcome(self, name: str) -> None:
        self._outcomes[name].increment(1)

    def load(self, load: dict[str, int]) -> None:
        for kind, gauge in self._load.items():
            gauge.set(load[kind])

    def finished(self, usage: Usage, seconds: float) -> None:
        """``seconds``: from submission to the last token."""
        counts = {
            "prompt": usage.prompt_tokens,
            "cached": usage.cached_tokens,
            "replayed": usage.replayed_tokens,
            "computed": usage.computed_tokens,
            "generated": usage.generated_tokens,
        }
        for kind, count in counts.items():
            if count:
                self._tokens[kind].increment(count)
        self._sources[usage.replay_source].increment(1)
        if usage.kv_freed_bytes:
            self._freed.increment(usage.kv_freed_bytes)
            for kind in KV_ROWS:
                self._rows[kind].increment(getattr(usage, f"kv_rows_{kind}"))
            for kind in KV_EXPANSIONS:
                self._expansions[kind].increment(getattr(usage, f"kv_{kind}"))
        if self._replay_error is not None and usage.replay_error > 0:
            self._replay_error.observe(usage.replay_error)
        if self._ttft is not None:
            self._ttft.observe(usage.first_token_seconds)
        if self._inter_token is not None and usage.generated_tokens > 1:
            rest = seconds - usage.first_token_seconds
            self._inter_token.observe(rest / (usage.generated_tokens - 1))
