"""The commands in README.md do what they say."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.chain import Chain

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("   #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip()
]
CLIENTS = [c for c in COMMANDS if c.startswith("curl") or "serving.client" in c]
CONVERSIONS = [c for c in COMMANDS if "convert.py" in c]
BENCHMARKS = [c for c in COMMANDS if " -m perf." in c]
SERVERS = [c for c in COMMANDS if "serving.launch" in c or "genai-perf" in c]
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(command: str, timeout: float = 120) -> str:
    command = command.replace(".venv/bin/python", sys.executable)
    done = subprocess.run(
        shlex.split(command), cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout


def here(text: str, chain: Chain) -> str:
    """The text with this run's addresses."""
    text = text.replace("localhost:8000", chain.server.http_address)
    return text.replace("127.0.0.1:8001", chain.server.grpc_address)


def test_every_command_is_known_to_this_test() -> None:
    known = {*CLIENTS, *CONVERSIONS, *BENCHMARKS, *SERVERS}
    assert [c for c in COMMANDS if c not in known and not c.startswith("make ")] == []
    makefile = (ROOT / "Makefile").read_text()
    for command in COMMANDS:
        if command.startswith("make "):
            assert f"\n{command.split()[1]}:" in makefile


@pytest.mark.parametrize("command", CLIENTS)
def test_clients(chain: Chain, command: str) -> None:
    command = here(command, chain)
    if "serving.client" in command:
        command += f" --url {chain.server.grpc_address} --max-tokens 8"
    out = run(command)
    assert out.strip()
    assert '"error"' not in out


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets(chain: Chain, snippet: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", here(snippet, chain)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("command", [c for c in CONVERSIONS if "--list" in c or "--plan" in c])
def test_plans(command: str) -> None:
    assert "parameters" in run(command)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "command", [*(c for c in CONVERSIONS if "--list" not in c and "--plan" not in c), *BENCHMARKS]
)
def test_long_commands(command: str) -> None:
    run(command, timeout=1800)
