"""`crosscut train --check`: reaches the ranks, and the first lines say that it is on."""

from types import SimpleNamespace

import pytest
import torch

from crosscut.cli.main import main
from crosscut.comm import launch
from crosscut.train import report
from crosscut.train.config import load_config


class Asked(Exception):
    exit_code = 9


@pytest.mark.parametrize("words, check", [(["--check"], True), ([], None)])
def test_the_flag_reaches_spawn(tmp_path, monkeypatch, words, check):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    asked = {}

    def spawn(*args, **options):
        asked.update(options)
        raise Asked

    monkeypatch.setattr(launch, "spawn", spawn)
    assert main(["train", "--steps", "1", "--mesh", "dp=2", *words]) == 9
    assert asked["check"] is check


@pytest.mark.parametrize("why, world_size, said", [("CROSSCUT_CHECK=1", 2, True), ("", 2, False), ("x", 1, False)])
def test_the_first_lines_say_so(why, world_size, said):
    ctx = SimpleNamespace(
        threads=1,
        threads_why="",
        device=torch.device("cpu"),
        backend="gloo",
        backend_why="",
        check_why=why,
        world_size=world_size,
    )
    lines = list(report.introduction(ctx, load_config(None, {}, world_size=1)))
    assert any(line.startswith("checked ") and line.endswith(why) for line in lines) == said
