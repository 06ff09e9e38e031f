"""The cache at the other end of a wire is the cache."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from engine_configs.errors import CacheError
from serving.prefix_cache import EXACT, CacheKey, Provenance
from serving.prefix_cache.rpc import Call, RemoteIndex, Reply, handle
from tests.serving.prefix_cache.client import KEY, Client, prompt


def wire(client: Client) -> RemoteIndex:
    """Everything passes as text and int64, as over the server."""

    def send(call: Call) -> Reply:
        tokens = call.tokens.astype(np.int64).astype(np.int32)
        reply = handle(client.cache, Call(str(call.text), tokens))
        return Reply(reply.text, reply.blocks.copy(), reply.generations.copy())

    return RemoteIndex(send)


def test_match_and_reserve_are_those_of_the_cache(client: Client) -> None:
    remote, tokens = wire(client), prompt(100)
    salted = CacheKey(KEY.model, KEY.layout, salt="größe", adapter="a")
    derived = Provenance(1, 0.25)
    reserved = remote.reserve(salted, tokens, provenance=derived, state_positions=(64, 100))
    assert (reserved.start, reserved.end, len(reserved.blocks)) == (0, 100, 4)
    assert [s.position for s in reserved.states] == [64, 100]
    assert reserved.states[0].provenance == derived
    client.write(reserved, tokens, salted, provenance=derived)
    assert remote.publish(reserved.lease) == 100

    over_wire = remote.match(salted, tokens, exact_only=False)
    direct = client.cache.match(salted, tokens, exact_only=False)
    for field in dataclasses.fields(direct):
        if field.name == "lease":
            continue
        mine, theirs = getattr(over_wire, field.name), getattr(direct, field.name)
        assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs
        assert type(mine) is type(theirs), field.name
    assert over_wire.hit_len == 99
    assert remote.arena.path == client.arena.path
    assert remote.release(over_wire.lease)
    assert not remote.release(over_wire.lease)
    client.cache.release(direct.lease)
    assert remote.stats() == client.cache.stats()


def test_abort_and_report_corrupt(client: Client) -> None:
    remote, tokens = wire(client), prompt(64)
    client.run(tokens)
    match = remote.match(KEY, tokens, exact_only=True)
    remote.report_corrupt(match.lease, block=0)
    remote.release(match.lease)
    assert client.peek(tokens).hit_len == 0
    reserved = remote.reserve(KEY, tokens, provenance=EXACT)
    assert remote.abort(reserved.lease)
    assert not remote.abort(reserved.lease)
    assert remote.publish(reserved.lease) == 0
    client.cache.check()


def test_restarted_cache_is_read_from_its_own_arena(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    current = [Client(tmp_path / "old")]
    remote = RemoteIndex(lambda call: handle(current[0].cache, call))
    with pytest.raises(CacheError, match="no call has told"):
        _ = remote.arena
    tokens = prompt(64)
    current[0].run(tokens)
    assert remote.match(KEY, tokens, exact_only=True).hit_len == 63
    first = remote.arena
    remote.stats()
    assert remote.arena is first, "the same arena is not opened again"

    current[0] = Client(tmp_path / "new")
    current[0].arena.path.chmod(0o600)
    (tmp_path / "old" / "arena").unlink()
    assert remote.match(KEY, tokens, exact_only=True).hit_len == 0
    assert remote.arena.path == tmp_path / "new" / "arena"
    current[0].run(tokens)
    match = remote.match(KEY, tokens, exact_only=True)
    slot = current[0].slot(len(tokens))
    good = remote.arena.read_blocks(match.blocks, match.generations, match.hit_len, slot)
    assert good == match.hit_len == 63


def test_arena_that_is_gone_is_an_error_of_that_call_only(client: Client, tmp_path: Path) -> None:
    remote = wire(client)
    moved = tmp_path / "moved"
    client.arena.path.rename(moved)
    with pytest.raises((CacheError, OSError)):
        remote.stats()
    moved.rename(client.arena.path)
    assert remote.stats() == client.cache.stats()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "JSONDecodeError"),
        ("{}", "KeyError"),
        ('{"op": "drop_everything"}', "KeyError"),
        ('{"op": "release"}', "TypeError"),
        ('{"op": "release", "lease": 1, "more": 2}', "TypeError"),
        ('{"op": "check"}', "KeyError"),  # not every method can be called from outside
    ],
)
def test_bad_calls_are_answered(client: Client, text: str, says: str) -> None:
    reply = handle(client.cache, Call(text))
    assert says in json.loads(reply.text)["error"]
    client.cache.check()


def test_errors_come_out_as_cache_errors() -> None:
    remote = RemoteIndex(lambda call: Reply('{"error": "KeyError: x"}'))
    with pytest.raises(CacheError, match="prefix cache: reserve: KeyError: x"):
        remote.reserve(KEY, prompt(8), provenance=EXACT)
