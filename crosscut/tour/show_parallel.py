"""What `crosscut tour dp | tp | pp` prints: a column a rank, then the ranks put together, then one device."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from crosscut.parallel.pipeline import Action, bubble_fraction, grid, peak_in_flight, utilisation
from crosscut.testing.parity import FP64_BOUND
from crosscut.tour.parallel import RankStep, Step, norms
from crosscut.tour.show import GAP, count, in_blocks, rank_table

TITLES = {"dp": "Data parallelism", "tp": "Tensor parallelism", "pp": "Pipeline parallelism"}
ABOUT = {
    "dp": "Every rank holds all weights and computes on its own rows of the batch, so the losses of the rows differ. "
    "The gradients are summed over the ranks by all_reduce, which is all that differs from one device.",
    "tp": "Every rank sees the whole batch and holds some output columns of every weight (torch stores them as rows). "
    "The outputs are all-gathered after every layer; backward, the gradients of a layer's input are summed.",
    "pairs": "Every rank sees the whole batch. Layers go in pairs, the first cut by its outputs, the second by its "
    "inputs: only the sum after the second layer is communicated, and one sum on the way back.",
    "pp": "Every rank holds some of the layers. The batch goes through in micro-batches: activations are sent forward "
    "and their gradients backward, so that the ranks can work at the same time.",
}
ORDER = ("forward", "backward", "gradients", "loss", "gradient norm")  # of the rows of what is sent
COLOURS = {"F": "black on cyan", "B": "black on green"}
LABEL = 25
NUMBER = "{:.6f}"


def step(result: Step, console: Console) -> None:
    """Print one tour."""
    size = len(result.ranks)
    about = "pairs" if result.cfg.form == "pairs" else result.name
    console.print(
        Text.assemble(
            (TITLES[result.name], "bold"), f" on {count(size)} ({result.backend}): {result.layout.describe()}\n"
        )
    )
    console.print(Text(ABOUT[about]))
    cfg = result.cfg
    model = (
        f"x = gelu(x @ W), {cfg.layers} layers of {cfg.dim} x {cfg.dim}, loss = mean(x²), batch {result.batch}, fp64"
    )
    console.print(Text(f"Model: {model}; one step of SGD.", style="dim"))
    if result.lists is not None:
        _schedule(result, console)
    _held(result, console)
    _numbers(result, console)
    _sent(result, console)
    _verdict(result, console)


def _heading(console: Console, title: str, note: str = "") -> None:
    console.print(Text.assemble("\n", (title, "bold cyan"), (f"  {note}" if note else "", "dim")))


def _span(start: int, stop: int) -> str:
    return f"{start}:{stop}"


def _rows(rank: RankStep) -> str:
    """`0:4`, or `0 2 4` where the rows are no range."""
    rows = rank.rows
    whole = rows == tuple(range(rows[0], rows[-1] + 1))
    return _span(rows[0], rows[-1] + 1) if whole else " ".join(map(str, rows))


def _blocks(result: Step, console: Console, cell: int, more: tuple[str, ...] = ()) -> list[tuple[range, Table]]:
    """Tables with a column a rank, and on the last one `more` columns, as they fit the screen's width."""
    room = console.width - LABEL
    spare = sum(max(len(name), 8) + GAP for name in more)
    blocks = list(in_blocks(len(result.ranks), room, cell))
    if len(blocks) == 1 and cell * len(result.ranks) + spare > room:
        blocks = list(in_blocks(len(result.ranks), room - spare, cell))
    return [(ranks, rank_table(LABEL, ranks, cell, more if ranks is blocks[-1] else ())) for ranks in blocks]


def _held(result: Step, console: Console) -> None:
    _heading(console, "What each rank has", "of each W: rows, columns, as torch stores it (out, in)")
    names = list(result.one_device.params)
    texts = {name: [_slice_text(r, name) for r in result.ranks] for name in names}
    rows = [_rows(r) for r in result.ranks]
    cell = GAP + max(len(t) for column in (rows, *texts.values()) for t in column)
    for ranks, table in _blocks(result, console, cell):
        table.add_row("  rows of the batch", *(rows[r] for r in ranks))
        for name in names:
            table.add_row(f"  {name}", *(texts[name][r] for r in ranks))
        console.print(table)


def _slice_text(rank: RankStep, name: str) -> str:
    held = rank.held(name)
    return "-" if held is None else "[" + ", ".join(_span(*r) for r in held) + "]"


def _numbers(result: Step, console: Console) -> None:
    _heading(console, "What each rank computes", "a row a gradient: its norm")
    more = ("together", "one device")
    one = norms(result.one_device.grads[0])
    whole = norms(result.whole.grads[0])
    parts = [norms(r.report.grads[0]) for r in result.ranks]
    for ranks, table in _blocks(result, console, GAP + 8, more):
        last = ranks[-1] == len(result.ranks) - 1
        own = [result.ranks[r].own_loss for r in ranks]
        if any(x is not None for x in own):
            table.add_row("  loss of its rows", *(_number(x) for x in own))
        ends = (_number(result.whole.losses[0]), _number(result.one_device.losses[0])) if last else ()
        table.add_row("  loss", *(_number(result.ranks[r].report.losses[0]) for r in ranks), *ends)
        for name, norm in one.items():
            ends = (_number(whole[name]), _number(norm)) if last else ()
            table.add_row(f"  {name}", *(_number(parts[r].get(name)) for r in ranks), *ends)
        ends = (_number(result.whole.norms[0]), _number(result.one_device.norms[0])) if last else ()
        table.add_row("  all of them", *(_number(result.ranks[r].report.norms[0]) for r in ranks), *ends)
        console.print(table)


def _number(x: float | None) -> str:
    return "-" if x is None else NUMBER.format(x)


def _sent(result: Step, console: Console) -> None:
    _heading(console, "What each rank sends", "calls x bytes handed in, as counted")
    keys = list(dict.fromkeys((s.what, s.op) for r in result.ranks for s in r.sent))
    keys.sort(key=lambda key: next((i for i, word in enumerate(ORDER) if key[0].endswith(word)), len(ORDER)))
    if not keys:
        console.print("  nothing: there is one rank")
        return
    table_of = [{(s.what, s.op): f"{s.calls} x {s.bytes // max(s.calls, 1)}" for s in r.sent} for r in result.ranks]
    cell = GAP + max(len(t) for column in table_of for t in column.values())
    for ranks, table in _blocks(result, console, max(cell, 9 + GAP)):
        for what, op in keys:
            table.add_row(f"  {op}: {what}", *(table_of[r].get((what, op), "-") for r in ranks))
        console.print(table)
    counted = sum(s.bytes for r in result.ranks for s in r.sent)
    predicted = sum(s.predicted_bytes for r in result.ranks for s in r.sent)
    each = all(s.bytes == s.predicted_bytes for r in result.ranks for s in r.sent)
    line = Text(f"  {counted:,} bytes over all ranks counted, {predicted:,} predicted from the layout: ")
    console.print(line.append("equal" if each else "NOT EQUAL", style="bold green" if each else "bold red"))


def _schedule(result: Step, console: Console) -> None:
    assert result.lists is not None
    name, micro = result.layout.schedule.name, result.layout.micro_batches
    _heading(console, f"Schedule {name}", "F forward, B backward of a micro-batch; a backward takes two units of time")
    cells = grid(result.lists)
    for rank, row in enumerate(cells):
        line = Text(f"  rank {rank:<4}")
        for t, action in enumerate(row):
            first = t == 0 or row[t - 1] != action
            line.append(_cell(action, first, 1 + len(str(micro - 1))), style=COLOURS[action.kind] if action else "dim")
        line.truncate(console.width, overflow="ellipsis")
        console.print(line)
    busy, idle = utilisation(result.lists), bubble_fraction(result.lists)
    kept = ", ".join(map(str, peak_in_flight(result.lists)))
    console.print(
        Text(
            f"  busy {busy:.0%} of the time = m/(m+p-1); idle/ideal {idle:.2f} = (p-1)/m; micro-batches kept: {kept}",
            style="dim",
        )
    )


def _cell(action: Action | None, first: bool, width: int) -> str:
    text = "·" if action is None else f"{action.kind}{action.micro}" if first else ""
    return f" {text:<{width}}"


def _verdict(result: Step, console: Console) -> None:
    _heading(console, "Against one device", f"relative differences; equal up to {FP64_BOUND:g}")
    for kind, label in (("loss", "loss"), ("gradient", "gradients"), ("parameter", "weights after the step")):
        console.print(f"  {label:<{LABEL - 2}} {result.largest(kind):.1e}", highlight=False)
    equal = result.is_equal
    console.print(
        Text("  the step is ").append(
            "equal to the step of one device" if equal else "NOT the step of one device",
            style="bold green" if equal else "bold red",
        )
    )
