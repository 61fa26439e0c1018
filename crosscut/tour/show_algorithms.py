"""What `crosscut tour algorithms` prints."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from crosscut.comm.algorithms.registry import ALGORITHMS, COSTS
from crosscut.tour.algorithms import ACROSS, ALPHA_S, BETA_S, SHOWN_SIZES, Tour, size_text
from crosscut.tour.show import GAP, count, in_blocks

LABEL = 8
NARROW = 2  # spaces between columns: as many ranks side by side as go
MOST_NUMBERS = (5, 3)  # of one tensor: as many as let all ranks stand side by side

ABOUT = {
    "ring": "Every rank sends to the next one only, a piece at a time: all links are busy all the time.",
    "recursive_doubling": "Ranks at distance 1, 2, 4, ... exchange all they have: what each knows doubles every step.",
    "rabenseifner": "Halves, quarters, ... are exchanged to reduce, then gathered back in the opposite order.",
    "binomial": "Down or up a tree in which the ranks that have the data double in number every step.",
    "bruck": "Messages to ranks at distance 1, 2, 4, ...; each rank keeps its blocks in an order of its own.",
    "pairwise": "In every step each rank deals with another one, directly, until it has dealt with all.",
    "hierarchical": "Inside each host first, then across the hosts, so that little goes over the slow links.",
}
SUMS = "Number j of rank r is (j+1) x 10^r: the digits of a sum show whose numbers are in it, rank 0's last."
PLACES = "Number j of rank r is 100 r + j: 203 comes from rank 2."


def algorithm(tour: Tour, console: Console) -> None:
    """Print one tour."""
    trace = tour.trace
    title = f"{trace.op} by {trace.name}"
    console.print(Text.assemble((title, "bold"), f", run by {count(trace.world_size)} ({tour.backend})\n"))
    console.print(Text(ABOUT[trace.name]))
    console.print(Text(SUMS if "reduce" in trace.op else PLACES, style="dim"))
    if tour.hosts is not None:
        hosts = ", ".join(f"host {h}: {' '.join(map(str, ranks))}" for h, ranks in enumerate(tour.hosts))
        console.print(Text(f"Ranks of {hosts}.", style="dim"))
    _messages(tour, console)
    _costs(tour, console)


def _numbers(values: object, most: int) -> str:
    """`[0 1 2 3]`, nested ones one after another, or a dash."""
    if values is None:
        return "-"
    assert isinstance(values, list | tuple)
    if values and isinstance(values[0], list):
        values = [number for part in values for number in part]
    words = [str(v) for v in values]
    if len(words) > most:
        words = [*words[: most - 2], "…", words[-1]]
    return "[" + " ".join(words) + "]"


Row = tuple[Text, list[str], str]  # its label, the text of each rank, its style


def _rows(tour: Tour, most: int) -> list[Row]:
    """What every rank has, what it sends in each step and to whom, and what it has in the end."""
    trace = tour.trace
    names = {m.what for step in tour.steps for m in step}
    rows: list[Row] = [(Text("before", "dim"), [_numbers(v, most) for v in trace.before], "")]
    for number, step in enumerate(tour.steps, start=1):
        sent = {m.src: m for m in step}
        found = [sent.get(rank) for rank in range(trace.world_size)]
        texts = ["·" if m is None else f"→ {m.dst} {_numbers(m.values, most)}" for m in found]
        rows.append((Text(f"step {number}", "cyan"), texts, ""))
        if len(names) > 1:
            rows.append((Text(), ["" if m is None else m.what for m in found], "dim"))
    rows.append((Text("after", "dim"), [_numbers(v, most) for v in trace.after], "bold"))
    return rows


def _messages(tour: Tour, console: Console) -> None:
    room, size = console.width - LABEL + NARROW, tour.trace.world_size
    for most in MOST_NUMBERS:
        rows = _rows(tour, most)
        cell = NARROW + max(len(text) for _, texts, _ in rows for text in texts)
        if cell * size <= room:
            break
    for ranks in in_blocks(size, room, cell):
        table = Table(box=None, pad_edge=False, padding=(0, NARROW, 0, 0), header_style="dim")
        table.add_column("", min_width=LABEL - NARROW, no_wrap=True)
        for rank in ranks:
            table.add_column(f"rank {rank}", min_width=cell - NARROW, no_wrap=True)
        for label, texts, style in rows:
            if any(texts[rank] for rank in ranks):
                table.add_row(label, *(Text(texts[rank], style) for rank in ranks))
        console.print()
        console.print(table)
    line = Text("\nEqual to what the back end's own collective gives: ")
    console.print(line.append(*(("yes", "bold green") if tour.is_equal else ("NO", "bold red"))))


def _costs(tour: Tour, console: Console) -> None:
    op, n = tour.trace.op, tour.trace.world_size
    links = f"every pair of ranks its own link of {ALPHA_S * 1e6:g} us and {1 / BETA_S / 1e9:g} GB/s"
    if tour.hosts is not None:
        links = f"links of {ALPHA_S * 1e6:g} us, {1 / BETA_S / 1e9:g} GB/s, {ACROSS} times slower between hosts"
    console.print(Text.assemble("\n", ("What it costs", "bold cyan"), (f"  S bytes of {op}; {links}", "dim")))
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for name in ("", "steps", "bytes in a row", *(size_text(size) for size in SHOWN_SIZES)):
        table.add_column(name, no_wrap=True, justify="left" if not name else "right")
    for cost in tour.costs:
        style = "bold" if cost.name == tour.trace.name else ""
        numbers = (str(cost.steps), f"{cost.share:.4g} S", *(seconds_text(s) for s in cost.seconds))
        table.add_row(f"  {cost.name}", *numbers, style=style)
    console.print(table)
    console.print(Padding(Text(tour.wins()), (0, 0, 0, 2)))
    if n > 1:
        sent = sorted(set(tour.trace.ledger_bytes))
        span = f"{sent[0]}" if len(sent) == 1 else f"{sent[0]} to {sent[-1]}"
        console.print(Text(f"  In this run each rank sent {span} bytes, as the ledger counts.", style="dim"))


def seconds_text(seconds: float) -> str:
    """Three digits and a unit: `30.2 us`, `1.05 ms`, `107 ms`."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit * 0.9995:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def overview(world_size: int, console: Console) -> None:
    """Print all algorithms, by operation, with their steps and bytes."""
    console.print(Text.assemble(("Collectives by hand", "bold"), f", on {count(world_size)}\n"))
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for name in ("operation", "algorithm", "steps", "bytes in a row"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("steps", "bytes in a row") else "left")
    for op, algorithms in ALGORITHMS.items():
        for name in algorithms:
            steps, share = (COSTS[op][name](world_size, 1, *unit) for unit in ((1, 0), (0, 1)))
            table.add_row(op, name, f"{steps:g}", f"{share:.4g} S")
    console.print(table)
    console.print(Text("\ncrosscut tour algorithms NAME [--op OP] shows who sends what.", style="dim"))
