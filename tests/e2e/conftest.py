"""One server for all tests, from a bundle with its own copy of the code."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.engine.text import Text
from serving.launch import LaunchOptions, launch
from tests.e2e.chain import Chain

MAX_REQUESTS = 56  # more than run at once and more than the server has threads for them


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def served_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hybrid-tiny with a small limit of concurrent requests and one thread."""
    bundle = tmp_path_factory.mktemp("served") / "hybrid-tiny"
    shutil.copytree(tiny_bundle, bundle)
    for model, key, value in (("llm", "max_requests", MAX_REQUESTS), ("engine", "threads", 1)):
        with (bundle / "model_repository" / model / "config.pbtxt").open("a") as config:
            config.write(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n')
    return bundle


@pytest.fixture(scope="session")
def chain(served_bundle: Path) -> Iterator[Chain]:
    # Triton keeps a reference for each refused tensor of 2^62 values and waits for it at the end.
    options = LaunchOptions(restarts=20, drain_timeout=4)
    with launch(served_bundle / "model_repository", options) as server:
        running = Chain(server, MAX_REQUESTS)
        running.generate("warm up", max_tokens=2)
        yield running
        time.sleep(1.2)  # by then the gauges are of now
        assert running.held() == {}


@pytest.fixture(scope="session")
def text(served_bundle: Path) -> Text:
    return Text(served_bundle)


@pytest.fixture(autouse=True)
def idle_after(chain: Chain) -> Iterator[None]:
    """Whatever a test did, nothing of it is held a moment later."""
    yield
    chain.wait_idle(5)
