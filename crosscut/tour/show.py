"""What `crosscut tour collectives` prints, and the tables with a column a rank that all tours print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from crosscut.tour.collectives import COLLECTIVES, TO_REMEMBER, Collective, RankTour, Values, is_equal

GAP = 3  # spaces between columns
LABEL = 12  # width of the column of labels
MOST_NUMBERS = 8  # of one tensor; longer ones are cut in the middle


def numbers(values: Values) -> str:
    """`[0 1 2 3]`, or a dash where there is no tensor."""
    if values is None:
        return "-"
    words = [str(v) for v in values]
    if len(words) > MOST_NUMBERS:
        words = [*words[:3], "…", words[-1]]
    return "[" + " ".join(words) + "]"


def in_blocks(num_ranks: int, room: int, cell: int) -> Iterator[range]:
    """All ranks, in blocks whose columns of `cell` characters fit into `room` side by side."""
    fit = max(1, room // cell)
    for start in range(0, num_ranks, fit):
        yield range(start, min(start + fit, num_ranks))


def rank_table(label: int, ranks: Sequence[int], cell: int = 0, more: Sequence[str] = ()) -> Table:
    """An empty table: a column of labels, one for each rank (at least `cell` wide), then `more`."""
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    table.add_column("", min_width=label - GAP, no_wrap=True)
    for rank in ranks:
        table.add_column(f"rank {rank}", min_width=max(0, cell - GAP), no_wrap=True)
    for name in more:
        table.add_column(name, no_wrap=True)
    return table


def count(num_ranks: int) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{num_ranks} rank{'' if num_ranks == 1 else 's'}"


def collectives(tours: Sequence[RankTour], backend: str, console: Console) -> None:
    """Print the tour of the collectives."""
    console.print(Text.assemble(("The eight collectives", "bold"), f", run by {count(len(tours))} ({backend})\n"))
    for word, meaning in TO_REMEMBER.items():
        console.print(Text(f"  {word:<{LABEL}}{meaning}", style="dim"))
    widths = {c.name: GAP + max(_widths(c, tours)) for c in COLLECTIVES}
    common = max(widths.values())  # one width for all, so that the columns stand under each other, if that fits
    room = console.width - LABEL
    for collective in COLLECTIVES:
        cell = common if common * len(tours) <= room else widths[collective.name]
        _one(collective, tours, console, cell)
    _two_steps(tours, console)


def _widths(collective: Collective, tours: Sequence[RankTour]) -> Iterator[int]:
    yield len(f"rank {len(tours) - 1}")
    for tour in tours:
        yield len(numbers(tour.shown[collective.name].before))
        yield len(numbers(tour.shown[collective.name].after))


def _one(collective: Collective, tours: Sequence[RankTour], console: Console, cell: int) -> None:
    console.print(Text.assemble("\n", (collective.name, "bold cyan"), f"  {collective.does}"))
    for ranks in in_blocks(len(tours), console.width - LABEL, cell):
        table = rank_table(LABEL, ranks, cell)
        shown = [tours[r].shown[collective.name] for r in ranks]
        table.add_row(Text("  before", "dim"), *(Text(numbers(s.before)) for s in shown))
        new = ["" if s.after is None or s.after == s.before else "bold" for s in shown]
        after = (Text(numbers(s.after), style) for s, style in zip(shown, new, strict=True))
        table.add_row(Text("  after", "dim"), *after)
        console.print(table)
    console.print(Text(f"  {'used for':<{LABEL - 2}}{collective.used_for}", style="dim"))


def _two_steps(tours: Sequence[RankTour], console: Console) -> None:
    size, equal = len(tours), is_equal(tours)
    reduced = tours[0].shown["all_reduce"]
    lines: Mapping[str, Text] = {
        "reduce_scatter": Text(" ".join(numbers(tour.pieces) for tour in tours)),
        "then all_gather": Text(f"{numbers(tours[0].whole)} on every rank"),
        "all_reduce": Text.assemble(
            (numbers(reduced.after), "bold"),
            " on every rank: ",
            ("equal", "bold green") if equal else ("NOT EQUAL", "bold red"),
        ),
    }
    console.print(Text("\nall_reduce = reduce_scatter + all_gather", "bold cyan"))
    for name, text in lines.items():
        console.print(Text(f"  {name:<17}").append_text(text))
    if size > 1:
        first, second = (tours[0].two_step_bytes[op] * (size - 1) // size for op in ("reduce_scatter", "all_gather"))
        console.print(
            Text(
                f"  in a ring        {first} + {second} bytes leave each rank, (n-1)/n of its {reduced.bytes} in "
                "each step",
                style="dim",
            )
        )
