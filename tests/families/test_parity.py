"""Each family against transformers, and against itself under every way to cut its input."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from build.checkpoint import RandomWeights
from engine_configs.families import FAMILIES
from engine_configs.spec import ShortConv, from_json
from serving.engine.model import prefill_step
from tests.families import oracle
from tests.families.cases import CASES
from tests.families.subject import (
    DECODED,
    LENGTH,
    ODD_CUTS,
    REPLAYED,
    Subject,
    error,
    errors,
)

SHORT = ["lfm2"]  # their only states are short convolutions: a tail this long forgets nothing


def test_every_family_has_a_case() -> None:
    assert {case.family for case in CASES.values()} == set(FAMILIES)


def test_logits_equal_transformers(subject: Subject) -> None:
    assert subject.want.std() > 0.3, "too quiet a model for an absolute error to mean anything"
    found = errors(subject, subject.model)
    assert max(found.values()) <= subject.case.limit, found


@pytest.mark.parametrize("subject", sorted(set(CASES) - set(SHORT)), indirect=True)
def test_a_replay_that_forgets_is_seen(subject: Subject) -> None:
    """The oracle of the replay differs from a cold run by far more than the limit."""
    replayed = oracle.replayed_logits(subject.reference, subject.ids, LENGTH, REPLAYED)
    assert error(replayed, subject.want[LENGTH:]) > 10 * subject.case.limit


def test_standard_lowering_equals_transformers(subject: Subject) -> None:
    found = errors(subject, subject.convert("standard"))
    assert max(found.values()) <= subject.case.limit, found


def test_odd_chunks_are_bit_equal_to_one_prefill(subject: Subject) -> None:
    chunked = subject.feed(subject.model, subject.slots(), list(ODD_CUTS))
    np.testing.assert_array_equal(chunked, subject.prefilled)


def test_batch_of_unequal_lengths_is_bit_equal_to_each_alone(subject: Subject) -> None:
    starts = [LENGTH, 37, 90]
    together = subject.slots(rows=len(starts))
    alone = []
    for row, start in enumerate(starts):
        subject.feed(subject.model, together, [start], row=row)
        slots = subject.slots()
        subject.feed(subject.model, slots, [start])
        alone.append(subject.decode(subject.model, slots, [start], 8)[:, 0])
    got = subject.decode(subject.model, together, starts, 8)
    np.testing.assert_array_equal(got, np.stack(alone, axis=1))


def test_replaying_everything_is_bit_equal_to_a_cold_run(subject: Subject) -> None:
    slots = subject.slots()
    subject.feed(subject.model, slots, [LENGTH])
    cold = subject.decode(subject.model, slots, [LENGTH], DECODED)
    slots = subject.slots()
    subject.feed(subject.model, slots, [LENGTH])
    subject.replay(subject.model, slots, LENGTH, LENGTH)
    np.testing.assert_array_equal(subject.decode(subject.model, slots, [LENGTH], DECODED), cold)


@pytest.mark.parametrize("subject", SHORT, indirect=True)
def test_short_convolutions_need_only_their_windows(subject: Subject) -> None:
    """Replaying the sum of (W - 1) over the layers restores every state exactly."""
    mixers = [m for _, m in subject.spec.state_layers()]
    assert all(isinstance(m, ShortConv) for m in mixers)
    tail = sum(m.conv_state()[0] for m in mixers)
    slots = subject.slots()
    subject.feed(subject.model, slots, [LENGTH])
    states = {name: array.copy() for name, array in slots.states.items()}
    subject.replay(subject.model, slots, LENGTH, tail)
    for name, array in slots.states.items():
        np.testing.assert_array_equal(array, states[name], err_msg=name)


def test_graph_has_one_of_our_ops_per_mixer(subject: Subject) -> None:
    graph = onnx.load(subject.folder / "ort" / "model.onnx", load_external_data=False).graph
    ours = [n for n in graph.node if n.domain == "hybrid"]
    spec = subject.spec
    recurrent = [m for _, m in spec.state_layers() if m.recurrent_state()]
    convs = [m for _, m in spec.state_layers() if m.conv_state()]
    assert len(ours) == len(spec.attention_layers()) + len(recurrent) + len(convs)
    outer = [n for n in graph.node if n.op_type == "MatMul"]
    assert all(n.name.startswith("/layers/") for n in outer), [n.name for n in outer]


def test_random_weights_have_the_shapes_of_the_spec(subject: Subject) -> None:
    weights = RandomWeights(subject.family, seed=0)
    for name, shape in subject.spec.weights().items():
        value = weights.read(name)
        assert (value.shape, value.dtype) == (shape, np.float32), name
        assert np.isfinite(value).all(), name


def test_spec_survives_json(subject: Subject) -> None:
    text = json.dumps(subject.spec.to_json(), allow_nan=False)
    assert from_json(json.loads(text), "test") == subject.spec


def test_decay_sums_are_those_of_the_tokens(subject: Subject) -> None:
    """Summed over chunks they do not depend on the cuts; a padding token adds nothing."""

    def sums(cuts: list[int]) -> dict[str, np.ndarray]:
        slots, total, start = subject.slots(), {}, 0
        for end in cuts:
            step = prefill_step(subject.ids[start:end], start)
            _, part = subject.model.run(slots, 0, step, decay_sums=True)
            total = {k: total.get(k, 0) + v for k, v in part.items()}
            start = end
        return total

    whole, cut = sums([LENGTH]), sums(list(ODD_CUTS))
    units = {f"decay_sum_{i}": m.units() for i, m in subject.spec.state_layers() if m.units()}
    assert {k: v.shape[1] for k, v in whole.items()} == units
    for name, value in whole.items():
        assert (value < 0).all()
        np.testing.assert_allclose(cut[name], value, rtol=1e-4)


def test_queries_are_what_the_attention_op_sees(subject: Subject) -> None:
    """They come with the logits of the same run, and asking for them changes nothing."""
    layers = dict(subject.spec.attention_layers())
    model = onnx.load(subject.folder / "ort" / "model.onnx", load_external_data=False)
    ops = [n for n in model.graph.node if n.op_type == "CompressedSparseAttention"]
    assert [n.input[0] for n in ops] == [f"query_{i}" for i in layers]

    step = prefill_step(subject.ids[:40], 0, logits=range(40))
    logits, found = subject.model.run(subject.slots(), 0, step, queries=True)
    np.testing.assert_array_equal(logits, subject.prefilled[:40])
    assert {n: a.shape for n, a in found.items()} == {
        f"query_{i}": (1, 40, m.num_heads * m.head_dim) for i, m in layers.items()
    }
    slots = subject.slots()
    subject.feed(subject.model, slots, [12])
    _, rest = subject.model.run(slots, 0, prefill_step(subject.ids[12:40], 12), queries=True)
    for name, array in rest.items():
        np.testing.assert_array_equal(array, found[name][:, 12:])
