"""The training model: its delta rule, its states, its replay and the trained files it wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from build.tasks import VOCAB_SIZE, heldout_text  # noqa: E402
from perf.train_tiny import checkpoint  # noqa: E402
from perf.train_tiny.batches import BatchGenerator  # noqa: E402
from perf.train_tiny.evaluate import Plan, decay_lengths, measure_cell, replayed  # noqa: E402
from perf.train_tiny.init import initialise  # noqa: E402
from perf.train_tiny.model import TinyConfig, TinyHybrid, gated_delta_rule  # noqa: E402
from perf.train_tiny.muon import orthogonalise  # noqa: E402
from perf.train_tiny.recipe import RECIPES  # noqa: E402
from perf.train_tiny.train import losses  # noqa: E402

CONFIGS = Path(__file__).parents[2] / "engine_configs"


@pytest.fixture(autouse=True)
def one_thread_no_grad():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> TinyHybrid:
    model = TinyHybrid(TinyConfig(VOCAB_SIZE))
    initialise(model, attention_retrieval=True, memory_lengths=(300.0, 1000.0))
    return model.eval()


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 100])
def test_chunked_delta_rule_is_the_recurrence(num_tokens: int) -> None:
    shape = (2, 3, num_tokens)
    q, v = torch.randn(*shape, 8), torch.randn(*shape, 5)
    k = torch.nn.functional.normalize(torch.randn(*shape, 8), dim=-1)
    log_decay, beta = -torch.rand(shape), 2 * torch.rand(shape)
    first = torch.randn(2, 3, 8, 5)
    out, last = gated_delta_rule(q, k, v, log_decay, beta, first)

    state, expected = first, []
    for t in range(num_tokens):
        key, step = k[:, :, t, :, None], beta[:, :, t, None, None]
        state = state * log_decay[:, :, t, None, None].exp()
        state = state + step * key * (v[:, :, t, None] - key.mT @ state)
        expected.append((q[:, :, t, None] @ state)[:, :, 0])
    torch.testing.assert_close(out, torch.stack(expected, 2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(last, state, atol=1e-4, rtol=1e-4)


def test_states_continue_exactly(model: TinyHybrid) -> None:
    tokens = torch.from_numpy(heldout_text(150))[None]
    whole, _ = model(tokens)
    first, states = model(tokens[:, :77])
    second, _ = model(tokens[:, 77:], states)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, atol=1e-4, rtol=0)


def test_replay_of_everything_is_exact_and_less_is_not(model: TinyHybrid) -> None:
    tokens = torch.from_numpy(heldout_text(120))[None]
    _, exact = model(tokens)
    suffix = torch.from_numpy(heldout_text(8, seed=1))[None]
    expected, _ = model(suffix, exact)
    whole, _ = model(suffix, replayed(model, tokens, exact, 120))
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
    dropped, _ = model(suffix, replayed(model, tokens, exact, 0))
    assert (dropped - expected).abs().max() > 1e-2


def test_muon_step_is_nearly_orthogonal() -> None:
    for shape in ((3, 64, 128), (3, 192, 128)):
        singular = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert singular.min() > 0.5
        assert singular.max() < 1.4


def test_batches_weigh_only_answers() -> None:
    mixture = RECIPES["hybrid-tiny"].rounds[0].mixture
    batch = BatchGenerator(0, mixture).draw(64, 257)
    assert batch.tokens.shape == (64, 257)
    assert not (batch.answers * batch.text).any()
    asked = dict(zip(batch.tasks, batch.answers.sum(1).tolist(), strict=True))
    assert asked.keys() == mixture.keys()
    assert (asked["text"], asked["lww"], asked["copy"], asked["needle"]) == (0, 4, 16, 8)
    # A model that gives every target probability one has no loss.
    perfect = torch.nn.functional.one_hot(batch.tokens[:, 1:], VOCAB_SIZE) * 1e4
    assert [float(loss) for loss in losses(perfect.float(), batch)] == [0.0, 0.0]


@pytest.mark.parametrize("name", RECIPES)
def test_trained_files_equal_transformers(name: str) -> None:
    model = checkpoint.load(CONFIGS / name).eval()
    lengths = np.concatenate(decay_lengths(model))
    assert len(lengths) == 16
    assert lengths.min() < 10
    assert lengths.max() > 1000


def test_trained_model_needs_what_it_should() -> None:
    """At 1024 tokens, a 5 % tail is enough for hybrid-tiny and useless for its control."""
    plan = Plan(answers=64)
    attention = measure_cell(checkpoint.load(CONFIGS / "hybrid-tiny").eval(), "needle", 1024, plan)
    assert attention.exact >= 0.95
    assert attention.accuracy[0.05] >= 0.99 * attention.exact
    linear = checkpoint.load(CONFIGS / "hybrid-tiny-linear").eval()
    control = measure_cell(linear, "needle", 1024, plan)
    assert control.exact >= 0.9
    assert control.accuracy[0.05] <= 0.5 * control.exact
