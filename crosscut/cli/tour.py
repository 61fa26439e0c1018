"""`crosscut tour`: the collectives and the parallelisms, run for real on small tensors."""

from __future__ import annotations

import argparse
import difflib

from crosscut.cli.output import add_json_argument, write_json

TOURS = {  # name -> (default world size, what it shows)
    "collectives": (4, "each of the eight collectives: what every rank has before and after"),
    "dp": (4, "data parallelism: each rank takes its rows of the batch"),
    "tp": (4, "tensor parallelism: each rank holds a part of every weight"),
    "pp": (2, "pipeline parallelism: each rank holds some of the layers"),
    "algorithms": (4, "collectives by hand: who sends what in each step; then a name, such as ring"),
}
PARALLEL = ("form", "schedule", "micro_batches")
OPTIONS = {"form": "tp", "schedule": "pp", "micro_batches": "pp", "op": "algorithms", "hosts": "algorithms"}
MAX_WORLD_SIZE = 16


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "tour",
        help="see the collectives and the parallelisms at work on small tensors",
        description="Runs one tour for real and prints what every rank has and sends: "
        + "; ".join(f"{name} ({text})" for name, (_, text) in TOURS.items())
        + ". Without a name: lists them.",
    )
    parser.add_argument("name", nargs="?", metavar="|".join(TOURS), help="which tour")
    parser.add_argument("algorithm", nargs="?", metavar="ALGORITHM", help="algorithms: which one; without: lists them")
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks (default 4; pp: 2)")
    parser.add_argument(
        "--backend",
        default="threads",
        metavar="NAME",
        help="threads (default: all ranks in this process), shm, gloo or nccl",
    )
    parser.add_argument("--form", choices=("gather", "pairs"), help="tp: gather every layer (default), or pairs")
    parser.add_argument("--schedule", metavar="NAME", help="pp: 1f1b (default) or gpipe")
    parser.add_argument("--micro-batches", type=int, metavar="N", help="pp: micro-batches (default 4)")
    parser.add_argument("--op", metavar="OP", help="algorithms: the operation, such as all_reduce or all_gather")
    parser.add_argument("--hosts", type=int, metavar="K", help="algorithms hierarchical: number of hosts (default 2)")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Run the tour; 0, or 1 if what the ranks computed is not what it should equal."""
    if args.name is None:
        for name, (_, text) in TOURS.items():
            print(f"crosscut tour {name:<12} {text}")
        return 0
    if args.name not in TOURS:
        near = difflib.get_close_matches(args.name, TOURS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"tours: {', '.join(TOURS)}"
        raise ValueError(f"unknown tour {args.name!r}; {hint}")
    world_size = args.world_size if args.world_size is not None else TOURS[args.name][0]
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"--world-size {world_size}: a tour takes 1 to {MAX_WORLD_SIZE} ranks")
    for option, tour in OPTIONS.items():
        if getattr(args, option) is not None and args.name != tour:
            raise ValueError(f"--{option.replace('_', '-')} goes with tour {tour}, not with {args.name}")
    if args.algorithm is not None and args.name != "algorithms":
        raise ValueError(f"{args.algorithm!r} after {args.name}: only the tour algorithms takes a second name")
    if args.name == "algorithms":
        return _algorithms(world_size, args)
    return _collectives(world_size, args) if args.name == "collectives" else _parallel(world_size, args)


def _collectives(world_size: int, args: argparse.Namespace) -> int:
    from rich.console import Console

    from crosscut.tour import collectives, show

    tours = collectives.run(world_size, args.backend)
    if args.json:
        write_json(args.json, "crosscut.tour.collectives", collectives.to_json(tours, args.backend))
    if args.json != "-":
        show.collectives(tours, args.backend, Console(highlight=False))
    return 0 if collectives.is_equal(tours) else 1


def _parallel(world_size: int, args: argparse.Namespace) -> int:
    from rich.console import Console

    from crosscut.tour import parallel, show_parallel

    options = {name: getattr(args, name) for name in PARALLEL if getattr(args, name) is not None}
    step = parallel.run(args.name, world_size, args.backend, **options)
    if args.json:
        write_json(args.json, f"crosscut.tour.{args.name}", parallel.to_json(step))
    if args.json != "-":
        show_parallel.step(step, Console(highlight=False))
    return 0 if step.is_equal else 1


def _algorithms(world_size: int, args: argparse.Namespace) -> int:
    from rich.console import Console

    from crosscut.tour import algorithms, show_algorithms

    console = Console(highlight=False)
    if args.algorithm is None:
        if args.json or args.op or args.hosts:
            raise ValueError(f"say which algorithm: crosscut tour algorithms {' | '.join(algorithms.names(args.op))}")
        show_algorithms.overview(world_size, console)
        return 0
    tour = algorithms.run(args.algorithm, world_size, args.backend, op=args.op, hosts=args.hosts)
    if args.json:
        write_json(args.json, "crosscut.tour.algorithms", algorithms.to_json(tour))
    if args.json != "-":
        show_algorithms.algorithm(tour, console)
    return 0 if tour.is_equal else 1
