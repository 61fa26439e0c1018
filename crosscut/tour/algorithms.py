"""One collective done by hand: the messages of every step, really sent, and when which algorithm is the cheapest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crosscut.comm.algorithms.hierarchical import host_lists
from crosscut.comm.algorithms.registry import ALGORITHMS, COSTS, find, ops_of
from crosscut.comm.algorithms.trace import Message, Seconds, Trace, record
from crosscut.layout.errors import nearest

ALPHA_S = 10e-6  # of the links that costs are shown for: what a message costs before its first byte
BETA_S = 1 / 10e9  # and a byte: 10 GB/s
ACROSS = 10  # how many times slower links between hosts are
SIZES = tuple(2**i for i in range(3, 33))  # 8 B to 4 GiB, as they are searched for the cheapest
SHOWN_SIZES = (1024, 1024**2, 1024**3)
DEFAULT_OP = {"binomial": "broadcast", "bruck": "all_gather", "pairwise": "all_to_all"}  # others: all_reduce
MAX_WORLD_SIZE = 9  # the digits of a sum tell the ranks apart; more do not fit a screen


@dataclass(frozen=True)
class Cost:
    """What an algorithm costs. steps: messages one after another; share: the bytes of these, in whole arrays;
    seconds: for SHOWN_SIZES, on equal links, or with `hosts` on links between them that are ACROSS times slower.
    """

    name: str
    steps: int
    share: float
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Tour:
    """What is shown. hosts: the ranks of each host, of the hierarchical tour. winners: (from, to, name), in bytes."""

    trace: Trace
    steps: tuple[tuple[Message, ...], ...]
    backend: str
    hosts: tuple[tuple[int, ...], ...] | None
    costs: tuple[Cost, ...]
    winners: tuple[tuple[int, int, str], ...]

    @property
    def is_equal(self) -> bool:
        """Whether every rank has what the back end's own collective gives."""
        return self.trace.after == self.trace.group_after

    def wins(self) -> str:
        """One line: for which sizes this algorithm is the cheapest of those for its operation."""
        op, name, n = self.trace.op, self.trace.name, self.trace.world_size
        if n == 1:
            return "one rank has nothing to send"
        if len(ALGORITHMS[op]) == 1:
            return f"the only algorithm for {op} here"
        ranges = [(start, stop) for start, stop, winner in self.winners if winner == name]
        if not ranges:
            return f"{name} is never the cheapest on {n} ranks: {self._others()}"
        parts = [_range(start, stop) for start, stop in ranges]
        if len(self.winners) == 1:
            return f"{name} is the cheapest on {n} ranks for every size"
        return f"{name} is the cheapest on {n} ranks {' and '.join(parts)}; {self._others()}"

    def _others(self) -> str:
        return ", ".join(
            f"{_range(start, stop)} {winner} is" for start, stop, winner in self.winners if winner != self.trace.name
        )


def names(op: str | None = None) -> list[str]:
    """All algorithms, or those of `op`. Raises ValueError for an unknown operation."""
    if op is not None and op not in ALGORITHMS:
        raise ValueError(f"unknown operation {op!r}{nearest(op, ALGORITHMS)}")
    ops = ALGORITHMS if op is None else (op,)
    return list(dict.fromkeys(name for each in ops for name in ALGORITHMS[each]))


def run(
    name: str, world_size: int, backend: str = "threads", *, op: str | None = None, hosts: int | None = None
) -> Tour:
    """Run the algorithm `name` for `op` (default: what it is known for) on small numbers; hosts: of hierarchical.

    Raises ValueError for unknown names, and for more ranks than can be shown.
    """
    if not ops_of(name):
        raise ValueError(f"unknown algorithm {name!r}{nearest(name, names())}")
    op = op or DEFAULT_OP.get(name, "all_reduce")
    find(op, name)
    if world_size > MAX_WORLD_SIZE:
        raise ValueError(f"--world-size {world_size}: the tour of an algorithm shows 1 to {MAX_WORLD_SIZE} ranks")
    if hosts is not None and name != "hierarchical":
        raise ValueError(f"--hosts goes with hierarchical, not with {name}")
    lists = host_lists(hosts, world_size) if name == "hierarchical" else None
    trace = record(op, name, world_size, backend=backend, **_hosts(name, lists))
    steps = tuple(tuple(step) for step in trace.steps())
    costs, winners = _compare(op, world_size, lists)
    shown = tuple(map(tuple, lists)) if lists else None
    return Tour(trace, steps, backend, shown, costs, winners)


def _compare(
    op: str, n: int, hosts: list[list[int]] | None
) -> tuple[tuple[Cost, ...], tuple[tuple[int, int, str], ...]]:
    """The costs of all algorithms of `op`, by their formulas; where links differ, by replaying their messages."""
    seconds = {name: _timer(op, name, n, hosts) for name in ALGORITHMS[op]}
    costs = tuple(
        Cost(
            name,
            int(COSTS[op][name](n, 1, 1, 0, **_hosts(name, hosts))),
            COSTS[op][name](n, 1, 0, 1, **_hosts(name, hosts)),
            tuple(time(size) for size in SHOWN_SIZES),
        )
        for name, time in seconds.items()
    )
    winners: list[tuple[int, int, str]] = []
    for size in SIZES:
        # Of equal ones the first named: rounding must not decide.
        best = min(seconds, key=lambda name: round(seconds[name](size), 12))
        if winners and winners[-1][2] == best:
            winners[-1] = (winners[-1][0], size, best)
        else:
            winners.append((size, size, best))
    return costs, tuple(winners)


def _hosts(name: str, hosts: list[list[int]] | None) -> dict[str, Any]:
    return {"hosts": hosts} if hosts and name == "hierarchical" else {}


def _timer(op: str, name: str, n: int, hosts: list[list[int]] | None) -> Any:
    """size -> seconds."""
    if hosts is None:
        return lambda size: COSTS[op][name](n, size, ALPHA_S, BETA_S)
    home = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    numel = 5040  # divided by every number of pieces on up to 9 ranks
    trace = record(op, name, n, numel=numel, **_hosts(name, hosts))

    def link(scale: float) -> Seconds:
        def seconds(src: int, dst: int, num_bytes: int) -> float:
            return (ALPHA_S + BETA_S * num_bytes * scale) * (1 if home[src] == home[dst] else ACROSS)

        return seconds

    return lambda size: trace.seconds(link(size / (numel * 8)))


def size_text(num_bytes: int) -> str:
    """`8 B`, `64 KiB`, `4 GiB`: powers of two."""
    unit = max(i for i in range(4) if num_bytes >= 1024**i)
    return f"{num_bytes // 1024**unit} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def _range(start: int, stop: int) -> str:
    if start == SIZES[0]:
        return f"up to {size_text(stop)}"
    return f"from {size_text(start)}" if stop == SIZES[-1] else f"from {size_text(start)} to {size_text(stop)}"


def to_json(tour: Tour) -> dict[str, Any]:
    """The body of `--json`: one of `rows` a message; `costs` and `cheapest` beside them."""
    rows = [
        {"step": number, **message._asdict()} for number, step in enumerate(tour.steps, start=1) for message in step
    ]
    return {
        "algorithm": tour.trace.name,
        "op": tour.trace.op,
        "world_size": tour.trace.world_size,
        "backend": tour.backend,
        "hosts": tour.hosts,
        "before": tour.trace.before,
        "rows": rows,
        "after": tour.trace.after,
        "equal": tour.is_equal,
        "sent_bytes": tour.trace.ledger_bytes,
        "alpha_s": ALPHA_S,
        "beta_s": BETA_S,
        "costs": [
            {
                "algorithm": cost.name,
                "steps": cost.steps,
                "share_of_bytes": cost.share,
                "sizes_bytes": SHOWN_SIZES,
                "seconds_s": cost.seconds,
            }
            for cost in tour.costs
        ],
        "cheapest": [{"from_bytes": a, "to_bytes": b, "algorithm": name} for a, b, name in tour.winners],
        "when_it_wins": tour.wins(),
    }
