"""What a person sees: plain lines, or a bar on a terminal; nothing from other ranks."""

import io

import pytest

from crosscut.train.display import Display, duration, megabytes

ROW = {"step": 0, "loss": 2.5, "tokens_per_s": 12345.6, "grad_norm": 1.25, "lr": 1e-3}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(display, stream, steps=6):
    display.stream = stream
    display.start(0, steps)
    for step in range(1, steps + 1):
        display.step({**ROW, "step": step})
        if step == 3:
            display.line("in between")
    display.stop()
    display.line("after")
    return stream.getvalue()


def test_without_a_terminal_a_plain_line_every_so_many_steps():
    lines = shown(Display(True, False, 2), io.StringIO()).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2/6", "in between", "step 4/6", "step 6/6", "after"]
    assert "loss 2.5000  12,346 tokens/s  norm 1.250  lr 1.00e-03" in lines[0]
    assert lines[3].endswith("0 s left")
    odd = shown(Display(True, False, 4), io.StringIO()).splitlines()
    assert [line for line in odd if line.startswith("step 6/6")]  # the last step is always shown


def test_on_a_terminal_a_bar_with_loss_speed_norm_and_time_left():
    text = shown(Display(True, False, 2), Terminal())
    assert "6/6" in text
    assert "loss 2.500  12,346 tokens/s  norm 1.25" in text
    assert "in between" in text
    assert "step 2/6" not in text


def test_other_ranks_show_nothing():
    assert shown(Display(False, False, 1), io.StringIO()) == ""


@pytest.mark.parametrize(
    "value, text", [(0, "0 B"), (999, "999 B"), (8_659_968, "8.66 MB"), (2.5e9, "2.5 GB"), (1_500, "1.5 kB")]
)
def test_megabytes(value, text):
    assert megabytes(value) == text


@pytest.mark.parametrize("value, text", [(0.4, "0 s"), (59, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")])
def test_duration(value, text):
    assert duration(value) == text
