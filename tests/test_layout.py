"""Who may import whom, and that build/ is ours.

Two looks at the same rule, as each sees what the other cannot: a subprocess imports every module of
serving/ and lists what got loaded (through third parties as well); the sources are followed import
by import, those inside functions too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import build

ROOT = Path(__file__).resolve().parents[1]
# Each package may import itself and those before it.
ORDER = ("engine_configs", "plugins", "serving", "build", "perf")
NEVER_IN_SERVING = ("torch", "transformers", "onnx", "build", "perf")

IMPORT_ALL = """
import importlib, pkgutil, sys, unittest.mock
root, package, forbidden = sys.argv[1], sys.argv[2], sys.argv[3:]
sys.path.insert(0, root)
sys.modules["triton_python_backend_utils"] = unittest.mock.MagicMock()  # only in Triton's stubs
top = importlib.import_module(package)
def fail(name):
    raise
for module in pkgutil.walk_packages(top.__path__, package + ".", onerror=fail):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(*sorted({name.partition(".")[0] for name in sys.modules} & set(forbidden)))
"""


def loaded(root: Path, package: str, forbidden: tuple[str, ...]) -> list[str]:
    """Which of `forbidden` are in memory once every module of `package` was imported."""
    command = [sys.executable, "-c", IMPORT_ALL, str(root), package, *forbidden]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


class Imports:
    """The imports of the project's own modules, read from their source."""

    def __init__(self, root: Path) -> None:
        self.files: dict[str, Path] = {}
        for package in ORDER:
            for path in sorted((root / package).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                self.files[name] = path

    def of(self, module: str) -> Iterator[str]:
        path = self.files[module]
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in _nodes(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
                names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
            for name in names:
                yield from self._with_parents(name)

    def _with_parents(self, name: str) -> Iterator[str]:
        """Importing a.b.c runs a and a.b as well; a name that is no module of ours stays as is."""
        parts = name.split(".")
        if parts[0] not in ORDER:
            yield name
            return
        for end in range(1, len(parts) + 1):
            if (parent := ".".join(parts[:end])) in self.files:
                yield parent

    def chains(self, package: str, forbidden: tuple[str, ...]) -> list[str]:
        """`a -> b -> torch` for each forbidden import that a module of `package` leads to."""
        starts = [m for m in self.files if m.partition(".")[0] == package]
        came_from: dict[str, str | None] = dict.fromkeys(starts)
        found, queue = [], list(starts)
        while queue:
            module = queue.pop(0)
            for name in self.of(module):
                if name.partition(".")[0] in forbidden:
                    found.append(" -> ".join([*_path(came_from, module), name]))
                elif name in self.files and name not in came_from:
                    came_from[name] = module
                    queue.append(name)
        return sorted(set(found))


def _nodes(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import, but those for the type checker alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from _nodes(ast.Module([other], []))
        else:
            yield from _nodes(node)


def _path(came_from: dict[str, str | None], module: str) -> list[str]:
    path = [module]
    while (before := came_from[path[0]]) is not None:
        path.insert(0, before)
    return path


def test_serving_loads_no_converter_library() -> None:
    assert loaded(ROOT, "serving", NEVER_IN_SERVING) == []


@pytest.mark.parametrize("package", ORDER)
def test_arrows(package: str) -> None:
    later = ORDER[ORDER.index(package) + 1 :]
    forbidden = NEVER_IN_SERVING if package == "serving" else later
    imports = Imports(ROOT)
    assert any(m.startswith(package) for m in imports.files)
    assert imports.chains(package, (*forbidden, "convert", "tests")) == []


def write(root: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


PLANTED = {
    "torch/__init__.py": "",
    "plugins/__init__.py": "",
    "plugins/fast.py": "import torch",
    "plugins/middle.py": "from . import fast",
    "serving/__init__.py": "",
    "serving/deep/__init__.py": "from plugins.middle import fast",
}


def test_both_checks_see_an_import_through_other_modules(tmp_path: Path) -> None:
    write(tmp_path, PLANTED)
    assert loaded(tmp_path, "serving", NEVER_IN_SERVING) == ["torch"]
    assert Imports(tmp_path).chains("serving", NEVER_IN_SERVING) == [
        "serving.deep -> plugins.middle -> plugins.fast -> torch"
    ]


@pytest.mark.parametrize(
    ("source", "chains"),
    [
        ("def f():\n    from torch import nn", ["serving -> torch", "serving -> torch.nn"]),
        ("try:\n    import onnx.helper\nexcept ImportError: pass", ["serving -> onnx.helper"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", []),
        ("import onnxruntime, torchless", []),
        ("import plugins", ["serving -> plugins -> build"]),
    ],
)
def test_sources_are_followed(tmp_path: Path, source: str, chains: list[str]) -> None:
    write(
        tmp_path,
        {
            "serving/__init__.py": source,
            "plugins/__init__.py": "import build",
            "build/__init__.py": "",
        },
    )
    assert Imports(tmp_path).chains("serving", NEVER_IN_SERVING) == chains


def test_a_third_party_that_loads_torch_is_seen(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "serving/__init__.py": "import innocent",
            "innocent.py": "import torch",
            "torch.py": "",
        },
    )
    assert loaded(tmp_path, "serving", NEVER_IN_SERVING) == ["torch"]


def test_a_module_that_cannot_be_imported_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"serving/__init__.py": "", "serving/sub/__init__.py": "import nowhere"})
    with pytest.raises(AssertionError, match="nowhere"):
        loaded(tmp_path, "serving", NEVER_IN_SERVING)


def test_build_is_ours() -> None:
    """PyPI has a package of this name, and many a .gitignore has build/."""
    assert build.__file__ is not None
    assert Path(build.__file__) == ROOT / "build" / "__init__.py"


@pytest.mark.parametrize("package", ORDER)
def test_git_does_not_ignore_sources(package: str) -> None:
    command = ["git", "-C", str(ROOT), "check-ignore", "--no-index", f"{package}/new_module.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 128:
        pytest.skip("not a git checkout")
    assert done.returncode == 1, f"{done.stdout} is ignored by .gitignore"
