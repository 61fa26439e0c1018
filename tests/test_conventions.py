"""What docs/conventions.md and README.md say: JSON, exit codes, commands that exist, links that lead somewhere."""

import json
import re
import shlex
from pathlib import Path

import pytest

from crosscut.cli.main import COMMANDS, main, parse

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
UNITS = ("_bytes", "_s", "_ms", "_us", "_gbs")
MEASURES = re.compile(r"(^|_)(time|memory|duration|latency|bandwidth|seconds|elapsed)(_|$)")

JSON_COMMANDS = [
    ["explain", "--mesh", "dp=2,tp=2"],
    ["tour", "collectives", "--world-size", "2"],
    ["tour", "dp", "--world-size", "2"],
    ["train", "--dry-run", "--mesh", "dp=2"],
    ["bench", "collectives", "--backends", "threads", "--ops", "all_reduce", "--sizes", "8", "--trials", "2"],
    ["doctor"],
]


def keys(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


@pytest.mark.parametrize("words", JSON_COMMANDS, ids=lambda words: "-".join(words[:2]))
def test_json(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a run folder, if any, is made here
    assert main([*words, "--json", "-"]) == 0
    out = json.loads(capsys.readouterr().out)  # nothing else went to stdout
    assert list(out)[:2] == ["schema", "version"]
    assert re.fullmatch(r"crosscut\.[a-z_.]+", out["schema"])
    assert type(out["version"]) is int
    assert all(isinstance(row, dict) for row in out.get("rows", []))
    numbers = [key for key, value in keys(out) if isinstance(value, (int, float)) and MEASURES.search(key)]
    assert [key for key in numbers if not re.sub(r"_(median|p95)$", "", key).endswith(UNITS)] == []
    assert main([*words, "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["schema"] == out["schema"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["trian"], "did you mean 'train'?"),
        (["train", "--mesh", "dp=2,tpp=2"], "unknown mesh axis 'tpp'"),
        (["explain", "--mesh", "tp=7"], "tp"),
        (["tour", "collectives", "--world-sise", "3"], "did you mean '--world-size'?"),
        (["train", "no-such-file.toml"], "no-such-file.toml"),
        (["train", "--train.stepz", "3"], "stepz"),
        (["bench", "collectives", "--ops", "all_redcue"], "did you mean 'all_reduce'?"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(words, part, capsys):
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"crosscut( [a-z]+)?: error: [^\n]+\n", shown.err)
    assert part in shown.err


def commands_in(path):
    """The `crosscut ...` lines of a document's code blocks."""
    for block in re.findall(r"```[a-z]*\n(.*?)```", path.read_text(), flags=re.DOTALL):
        for line in block.splitlines():
            words = (
                shlex.split(line.removeprefix("$ "), comments=True) if line.startswith(("crosscut ", "$ cro")) else []
            )
            if words:
                yield words[1:]


def test_the_documents_name_commands_that_exist():
    found = [(path.name, words) for path in DOCS for words in commands_in(path)]
    assert len(found) >= 6
    for name, words in found:
        args = parse(words)  # an unknown command or flag raises
        assert args.command in COMMANDS, (name, words)


def test_the_documents_name_make_targets_that_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {word for path in DOCS for word in re.findall(r"(?:`|^\$? ?)make ([a-z]+)", path.read_text(), flags=re.M)}
    assert {"setup", "train", "test", "check"} <= targets
    assert {"train", "test", "check"} <= named <= targets


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target
