"""The shape of the package: who may import whom, what may import torch, what is public, how large it is."""

import ast
import importlib
import io
import json
import pkgutil
import subprocess
import sys
import time
import tokenize
from pathlib import Path

import pytest

import crosscut

PACKAGE = Path(crosscut.__file__).parent
SNAPSHOT = Path(__file__).parent / "public_api.json"

# What each part may import besides itself. Arrows only point down.
BELOW = {
    "layout": set(),
    "comm": {"layout"},
    "models": {"layout"},
    "parallel": {"layout", "comm", "models"},
    "testing": {"layout", "comm", "models", "parallel"},
    "train": {"layout", "comm", "models", "parallel"},
    "tour": {"layout", "comm", "models", "parallel", "testing"},
    "bench": {"layout", "comm", "models", "parallel", "testing", "watch"},
    "doctor": {"layout", "comm"},
    "watch": {"layout", "comm"},
    "report": {"layout"},
    "plan": {"layout"},
    "cli": {
        "layout",
        "comm",
        "models",
        "parallel",
        "testing",
        "train",
        "tour",
        "bench",
        "doctor",
        "report",
        "plan",
        "watch",
    },
}
NO_TORCH = ("layout", "report", "plan")
STARTS_WITHOUT_TORCH = [
    "crosscut",
    "crosscut.comm",
    "crosscut.comm.ledger",
    "crosscut.models.config",
    "crosscut.models.dims",
    "crosscut.models.shapes",
    "crosscut.parallel.pipeline",
    "crosscut.train.config",
    "crosscut.watch",
    "crosscut.watch.folder",
    "crosscut.watch.monitor",
    "crosscut.watch.program",
]
TOOLS = {"testing", "watch", "plan", "bench", "report", "doctor", "tour", "cli"}
MAX_LINES = 15_000
MAX_TOOL_LINES = 15_000


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path, package):
    """Every module named by an import statement, wherever it stands; `from a import b` names a and a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: -node.level + 1 or None], base]).strip(".")
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def part_of(name):
    """`crosscut.comm.group` -> `comm`; None outside crosscut and for crosscut itself."""
    words = name.split(".")
    return words[1] if words[0] == "crosscut" and len(words) > 1 and (PACKAGE / words[1]).is_dir() else None


def upward(found):
    """(importing module, line, imported module) of the imports that are not allowed."""
    for module, line, target in found:
        ours, theirs = part_of(module), part_of(target)
        if ours is not None and theirs is not None and theirs != ours and theirs not in BELOW[ours]:
            yield f"{module}:{line} imports {target}"


def all_imports():
    for module, path in modules():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for target, line in imports(path, package):
            yield module, line, target


def test_every_folder_is_a_package_of_a_known_part():
    """Without `__init__.py` a type checker and a list of the public API would pass a folder by."""
    folders = {path.parent for _, path in modules()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []
    assert {part_of(module) for module, _ in modules()} - {None} <= set(BELOW)


def test_imports_point_down():
    found = list(all_imports())
    assert len(found) > 200
    assert list(upward(found)) == []


def test_an_upward_import_would_be_found():
    assert list(upward([("crosscut.layout.mesh", 3, "crosscut.comm.group")]))
    assert list(upward([("crosscut.models.mlp", 3, "crosscut.parallel.batch")]))
    assert not list(upward([("crosscut.parallel.clip", 3, "crosscut.comm.group"), ("crosscut.comm.group", 1, "torch")]))
    source = Path(__file__)
    assert ("importlib", 4) in set(imports(source, "tests"))
    assert ("pathlib.Path", 12) in set(imports(source, "tests"))


def test_layout_never_names_torch():
    found = [
        f"{module}:{line}"
        for module, line, target in all_imports()
        if part_of(module) in NO_TORCH and target.split(".")[0] == "torch"
    ]
    assert found == []


def test_what_needs_no_torch_starts_without_it():
    """In a fresh process, since this one has imported torch: every module of layout, the schedules, the help texts."""
    names = [name for name, _ in modules() if part_of(name) in NO_TORCH] + STARTS_WITHOUT_TORCH
    code = f"""
import contextlib, importlib, io, sys
for name in {names!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
from crosscut.cli.main import COMMANDS, main
for words in (["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0, words
    assert out.getvalue(), words
    assert "torch" not in sys.modules, words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_answers_at_once():
    """Under half a second on an idle machine; five times that where tests compete for two cores."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "crosscut", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "train" in done.stdout
    assert time.monotonic() - began < 5 * 0.5


def public_names():
    """`__all__` of crosscut and of every subpackage that has one."""
    found = {"crosscut": sorted(crosscut.__all__)}
    for info in pkgutil.walk_packages([str(PACKAGE)], "crosscut."):
        if info.ispkg:
            names = getattr(importlib.import_module(info.name), "__all__", None)
            if names is not None:
                found[info.name] = sorted(names)
    return found


def test_the_public_api_is_the_recorded_one():
    """A name that comes or goes is a decision: record it in tests/public_api.json and CHANGELOG.md."""
    assert public_names() == json.loads(SNAPSHOT.read_text())


@pytest.mark.parametrize("name", crosscut.__all__)
def test_every_public_name_is_there_and_documented(name):
    value = getattr(crosscut, name)
    assert value.__doc__, name
    assert name in dir(crosscut)


def test_no_public_name_is_that_of_a_subpackage():
    assert not set(crosscut.__all__) & {path.name for path in PACKAGE.iterdir() if path.is_dir()}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        crosscut.nothing  # noqa: B018


def code_lines(path):
    """Lines that hold code: blank lines, comments and docstrings apart."""
    source = path.read_text(encoding="utf-8")
    lines = set()
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                lines.difference_update(range(first.lineno, first.end_lineno + 1))
    return len(lines)


def test_the_package_stays_small():
    """Docstrings are what a reader comes for; what must stay small is the code. The system itself has the limit that
    was promised; the tools around it, which one may use without reading the rest, have one of their own."""
    lines = {"system": 0, "tools": 0}
    for module, path in modules():
        lines["tools" if part_of(module) in TOOLS else "system"] += code_lines(path)
    print(lines)
    assert 1000 < lines["system"] < MAX_LINES
    assert 1000 < lines["tools"] < MAX_TOOL_LINES
