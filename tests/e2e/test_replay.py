"""Served, a model whose facts live in its linear states: split replay keeps what a tail loses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from build.calibrate import calibrate, tasks_of
from build.lab import Lab
from build.pipeline import Options, Silent, convert
from build.remote import RemoteModel
from build.tasks import make_samples, render
from build.trials import CalibrationOptions
from engine_configs.errors import ServerError
from engine_configs.names import find_model
from serving.engine.bundle import Bundle
from serving.engine.model import Model
from serving.engine.slots import SlotClass
from serving.launch import launch
from serving.replay.checkpoint import CheckpointCodec
from tests.e2e.chain import Chain, wait_until

NAME = "hybrid-tiny-linear"
# Measured by convert.py; in a test it would take minutes.
CALIBRATION = Path(__file__).with_name(f"{NAME}.calibration.json")
PREFIX = 1200


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    known = find_model(NAME)
    output = tmp_path_factory.mktemp("replay") / NAME
    options = Options(NAME, known.family(), known.checkpoint, output)
    made = convert(replace(options, import_calibration=CALIBRATION), Silent())
    with (output / "model_repository" / "engine" / "config.pbtxt").open("a") as config:
        for key, value in (("threads", "1"), ("calibration", "true")):
            config.write(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n')
    return made


@pytest.fixture(scope="module")
def served(bundle: Bundle) -> Iterator[Chain]:
    with launch(bundle.path / "model_repository") as server:
        yield Chain(server, 8)


def test_split_replay_answers_what_a_zero_start_forgets(served: Chain, bundle: Bundle) -> None:
    salt, before = served.salt(), served.settled_metrics()
    right = {"bounded": 0, "ratio": 0}
    asked = 0
    for sample in make_samples("needle", PREFIX, 16, seed=3):
        prefix = render(sample.prefix)
        served.generate(prefix + " and so on", cache_salt=salt)
        for question, answer in sample.prompts():
            prompt, want = render(question), render(answer)
            cold = served.generate(prompt, cache_salt=served.salt(), max_tokens=len(answer))
            if cold["text_output"] != want:
                continue
            asked += 1
            # Tried first: the other leaves states that would be of use to it.
            for fields in ({"replay_ratio": 0.05}, {}):
                hit = served.generate(prompt, cache_salt=salt, max_tokens=len(answer), **fields)
                mode = "ratio" if fields else "bounded"
                right[mode] += hit["text_output"] == want
                assert hit["cached_tokens"] >= PREFIX
    assert asked >= 8
    assert right["bounded"] == asked
    assert right["ratio"] < asked / 2
    calibration = bundle.calibration
    source = 'hybrid_replay_source_total{source="split"}'
    wait_until(lambda: served.metrics()[source] > before[source], 5)
    assert calibration.interval > 0


def test_the_choice_and_its_reason_come_with_the_answer(served: Chain, bundle: Bundle) -> None:
    salt, prefix = served.salt(), render(make_samples("needle", PREFIX, 1, seed=9)[0].prefix)
    served.generate(prefix + " one", cache_salt=salt)
    hit = served.generate(prefix + " two", cache_salt=salt)
    found = bundle.calibration
    start = (hit["cached_tokens"] - found.min_tail) // found.interval * found.interval
    assert (hit["replay_source"], hit["replay_reason"]) == ("split", f"checkpoint at {start}")
    assert hit["replayed_tokens"] == hit["cached_tokens"] - start
    assert 0 < hit["replay_error"] <= found.target_kl
    tight = served.generate(prefix + " three", cache_salt=salt, max_replay_error=0.0)
    assert (tight["replay_source"], tight["replay_error"]) == ("tail", 0.0), "from token 0: exact"
    assert tight["replayed_tokens"] == tight["cached_tokens"]


def test_steps_on_a_server_are_those_made_here(served: Chain, bundle: Bundle) -> None:
    digest = bundle.manifest["digest"]
    here = Lab(Model(bundle, threads=1), 1024)
    there = Lab(RemoteModel(served.server.grpc_url, bundle.spec, digest), 1024)
    codec = CheckpointCodec.of(bundle.spec, bundle.calibration)
    sample = make_samples("needle", 700, 1, seed=5)[0]
    found = []
    for lab in (here, there):
        lab.prefill(sample.prefix, [512])
        lab.split_start(512, codec)
        split = lab.ask(sample.suffix, np.arange(len(sample.suffix)))
        lab.zero_start(35)
        found.append((split, lab.ask(sample.suffix, np.arange(4)), lab.decay[700]))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
    for name, sums in found[0][2].items():
        np.testing.assert_allclose(found[1][2][name], sums, rtol=1e-6)


def test_another_models_steps_are_refused(served: Chain, bundle: Bundle) -> None:
    slots = SlotClass(bundle.spec, 64, 1)
    remote = RemoteModel(served.server.grpc_url, bundle.spec, "another")
    with pytest.raises(ServerError, match="not another"):
        Lab(remote, slots.capacity).prefill(np.arange(8))


@pytest.mark.full
def test_calibration_runs_on_a_server(served: Chain, bundle: Bundle) -> None:
    remote = RemoteModel(served.server.grpc_url, bundle.spec, bundle.manifest["digest"])
    found = calibrate(remote, tasks_of(bundle), CalibrationOptions(samples=1, seconds=600))
    assert found.known
    assert 0 < found.slow_units < 16
    assert json.dumps(found.to_json())
