"""`crosscut parity`: does a layout compute the single-device step; `crosscut parity compare`: does anybody's program.

The verdict is one sentence: equal, or the first tensor to diverge and what is wrong with it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from crosscut.cli.config_flags import LAYOUT_FLAGS, add_layout_arguments, overrides_of, world_size_of
from crosscut.cli.output import add_json_argument, check_destination, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from crosscut.testing.compare import Compared
    from crosscut.testing.matrix import Row
    from crosscut.testing.verdict import Verdict

SCHEMA = "crosscut.parity"
BACKENDS = ("threads", "shm", "gloo")
DTYPES = ("fp64", "fp32", "bf16")
SHOWN = 8  # failures printed; --json has all
COMPARE = """\
Does your distributed training compute what one device computes? Add three
lines to the program:

    from crosscut.testing import capture                # 1
    ...
    loss.backward()
    optimizer.step()
    capture(model, optimizer, "run/", loss=loss)        # 2: before zero_grad
    optimizer.zero_grad()

Run it once the way you trust (one process, the whole batch, folder "ref/"),
once as it is ("run/"), then

    crosscut parity compare ref/ run/                   # 3

and read one sentence:

    NOT EQUAL: the first to diverge, at step 0: layers.0.norm.weight.grad
    differs between rank 0 and rank 1, which hold the same part; their mean
    is the reference: the average over the ranks is missing

Give both runs the same weights and the same data, and fp64 if you can:
model.double() makes the bound 1e-11, and a factor shows to ten digits. Plain
tensors count as replicated (DDP, hand-written loops); DTensors (FSDP2, tensor
parallel) say themselves what they hold; for other shards:
capture(names={"w": ("w", slice(0, 8))}). Where ranks hold unequal numbers of
tokens, say loss=(loss, num_tokens). The first three steps are kept.
"""


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "parity",
        help="prove that a layout, or any training program, computes the step of one device",
        description="Run a few steps on one device and under a layout and compare loss, gradient norm, every gradient "
        "and every updated parameter by name. Exit code 1 if they differ, with the first divergence and what is wrong "
        "there. For training programs that are not crosscut's: crosscut parity compare --help.",
    )
    actions = parser.add_subparsers(dest="action", metavar="[compare]")
    compare = actions.add_parser(
        "compare",
        help="compare two folders that crosscut.testing.capture wrote",
        description=COMPARE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compare.add_argument("ref", metavar="REF", help="the folder of the run you trust")
    compare.add_argument("run", metavar="RUN", help="the folder of the run in question")
    compare.add_argument("--noise", metavar="REF2", help="a second correct run: the bound is 8 times its distance")
    compare.add_argument("--rtol", type=float, metavar="X", help="the bound, relative to a tensor's norm")
    add_json_argument(compare, default=argparse.SUPPRESS)  # one that is given before `compare` stays
    add_layout_arguments(parser)
    parser.add_argument("--matrix", choices=("small", "full"), help="many layouts: some, or all that 8 ranks admit")
    parser.add_argument("--backend", choices=BACKENDS, default="threads", help="how ranks talk (default threads)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp64", help="of the run; the reference is fp64 always")
    parser.add_argument("--steps", type=int, default=2, metavar="K", help="steps to compare (default 2)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and data (default 0)")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Compare; 0 if all is equal, else 1."""
    check_destination(args.json)
    if args.action == "compare":
        given = sorted(overrides_of(args))
        if given:
            raise ValueError(f"compare reads two folders and runs nothing; drop --{given[0].replace('_', '-')}")
        return _compare(args)
    if not -(2**62) < args.seed < 2**62:  # torch takes 64 bits; data and weights add a little to it
        raise ValueError(f"--seed {args.seed}: must be below 2^62 in size")
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: at least one")
    import torch

    torch.set_num_threads(1)  # the tensors are tiny: threads would wait for each other, most of all those of bf16
    if args.matrix is not None:
        given = sorted(overrides_of(args)) + ["world_size"] * (args.world_size is not None)
        if given:
            flag = given[0].replace("_", "-")
            raise ValueError(f"--matrix {args.matrix} makes its own layouts and models; drop --{flag}")
        return _matrix(args)
    return _layout(args)


# ---- one layout -----------------------------------------------------------------------------------------------------


def _layout(args: argparse.Namespace) -> int:
    from functools import partial

    from crosscut.models.config import MLPConfig
    from crosscut.parallel.supported import DTYPES as EXECUTED
    from crosscut.parallel.supported import refuse_unsupported
    from crosscut.testing import matrix
    from crosscut.testing.parity import check_parity, single_device
    from crosscut.testing.verdict import FP64_BOUND
    from crosscut.train.config import load_config
    from crosscut.train.model import recipe_of

    overrides, world_size = overrides_of(args, LAYOUT_FLAGS), world_size_of(args)
    config = load_config(None, overrides, world_size=world_size)
    layout = config.layout.adjusted(compute=args.dtype)
    refuse_unsupported(layout)
    if config.kind != "file":  # tiny sizes that the layout divides, unless flags say others
        sizes = {f"model.{key}": value for key, value in matrix.sizes_for(config.kind, layout).items()}
        tp = layout.mesh.size("tp")
        if config.kind == "transformer":
            sizes["model.vocab"] = -(-256 // tp) * tp
        config = load_config(None, {**sizes, **overrides}, world_size=world_size)
        cfg = config.model_config()
        build, spec, loss_fn = matrix.model_of(cfg)
        dims, batches = spec.dims, matrix.batches_for(config.kind, cfg, layout, args.steps, 7 + args.seed)
    else:
        if args.backend != "threads":
            raise ValueError(f"--backend {args.backend}: a model of one's own is compared on --backend threads")
        import torch

        from crosscut.parallel.inspect import input_dims

        recipe = recipe_of(config)
        if recipe.dims.params and "seq" not in input_dims(recipe.dims):
            raise ValueError(
                f"--model {config.model.name}: its table has no vocab and no seq, so what it reads is not known here; "
                f"use crosscut.testing.assert_parity with a batch of its own"
            )
        build, dims, loss_fn = recipe.build, recipe.dims, recipe.loss_fn
        generator = torch.Generator().manual_seed(7 + args.seed)
        rows = layout.micro_batches * layout.mesh.size(layout.batch_axes)
        vocab = min(config.model.vocab, 256)
        batches = matrix.token_batches(rows, layout.mesh.size("tp") * 4, vocab, args.steps, generator)
    shared: dict[str, Any] = {"seed": args.seed}
    ref, bound = None, FP64_BOUND
    if args.dtype == "fp64":
        ref = single_device(build, batches, loss_fn, **shared)
    else:
        from crosscut.testing.noise import noisy_reference

        ref, bound = noisy_reference(build, batches, loss_fn, EXECUTED[args.dtype], **shared)  # type: ignore[assignment]
    check = partial(check_parity, build, dims, batches, layout, loss_fn=loss_fn, ref=ref, bound=bound)
    verdict, _ = check(backend=args.backend, **shared)
    name = f"{config.kind} under {layout.describe()}"
    if config.kind == "mlp" and isinstance(config.model_config(), MLPConfig):
        name = f"mlp ({config.model.form}) under {layout.describe()}"
    how = "1e-11 of each tensor's norm" if args.dtype == "fp64" else "8 x the noise of correct runs, per tensor"
    if args.json:
        layouts = [{"layout": layout.describe(), "model": config.kind, "outcome": _outcome(verdict), "why": ""}]
        body = {**verdict.to_json(), "dtype": args.dtype, "backend": args.backend, "bound": how, "layouts": layouts}
        write_json(args.json, SCHEMA, body)
    if args.json != "-":
        console = _console()
        console.print(f"{name}, {_count(args.steps, 'step')} in {args.dtype}, against one device in fp64; bound: {how}")
        _show(console, verdict)
    return 0 if verdict.equal else 1


def _outcome(verdict: Verdict) -> str:
    return "equal" if verdict.equal else "not equal"


# ---- the matrix -----------------------------------------------------------------------------------------------------


def _matrix(args: argparse.Namespace) -> int:
    from collections import Counter

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from crosscut.testing import matrix

    cells = matrix.small() if args.matrix == "small" else matrix.full()
    bar = Progress(
        TextColumn("layout"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[last]}"),
        TimeRemainingColumn(), console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=len(cells), last="")
        rows = matrix.run_matrix(
            cells, backend=args.backend, dtype=args.dtype, steps=args.steps, seed=args.seed,
            done=lambda row: bar.update(task, advance=1, last=str(row.cell)),
        )  # fmt: skip
    count = Counter(row.outcome for row in rows)
    wrong = [row for row in rows if row.outcome in ("not equal", "failed")]
    verdicts = [row.verdict for row in rows if row.verdict is not None]
    if args.json:
        write_json(args.json, SCHEMA, _matrix_json(rows, args))
    if args.json != "-":
        console = _console()
        if verdicts:
            worst = max((v.worst for v in verdicts), key=lambda d: d.error_over_bound)
            compared = sum(len(v.differences) for v in verdicts)
            console.print(
                f"{count['equal']} of {len(rows) - count['refused']} layouts equal to one device in {args.dtype}: "
                f"{compared:,} tensors, the largest error {worst.error_over_bound:.2g} of its bound "
                f"({worst.kind} {worst.name}); bytes as predicted"
            )
        for why, times in Counter(_reason(row) for row in rows if row.outcome == "refused").most_common():
            console.print(f"  {times:4} not executed: {why}")
        for row in wrong[:SHOWN]:
            console.print(f"[bold red]{row.outcome}[/] {row.cell}: {row.why}")
    return 1 if wrong or not count["equal"] else 0


def _reason(row: Row) -> str:
    """The refusal without its numbers' variety: layouts that are refused alike are counted together."""
    import re

    return re.sub(r"=\d+", "", row.why, count=1)


def _matrix_json(rows: Sequence[Row], args: argparse.Namespace) -> dict[str, Any]:
    """equal, worst and failures over all layouts; `layouts` one by one."""
    from crosscut.testing.verdict import finite

    verdicts = [row.verdict for row in rows if row.verdict is not None]
    worst = max((v.worst for v in verdicts), key=lambda d: d.error_over_bound, default=None)
    failures = [
        {"layout": str(row.cell), **failure}
        for row in rows
        for failure in (row.verdict.to_json()["failures"][:SHOWN] if row.verdict is not None else [])
    ]
    layouts = []
    for row in rows:
        most = finite(row.verdict.worst.error_over_bound) if row.verdict is not None else None
        layouts.append(
            {"layout": str(row.cell), "model": row.cell.kind, "outcome": row.outcome, "why": row.why,
             "worst_error_over_bound": most}
        )  # fmt: skip
    return {
        "equal": any(r.outcome == "equal" for r in rows) and all(r.outcome in ("equal", "refused") for r in rows),
        "worst": worst and {"name": worst.name, "kind": worst.kind, "error_over_bound": finite(worst.error_over_bound)},
        "failures": failures,
        "dtype": args.dtype,
        "backend": args.backend,
        "layouts": layouts,
    }


# ---- two folders ----------------------------------------------------------------------------------------------------


def _compare(args: argparse.Namespace) -> int:
    from crosscut.testing.compare import compare_captures

    result = compare_captures(args.ref, args.run, noise=args.noise, rtol=args.rtol)
    if args.json:
        body = {**result.verdict.to_json(), "bound": result.bound, "ref": result.ref.folder, "run": result.run.folder}
        write_json(args.json, SCHEMA + ".compare", {**body, "layouts": []})
    if args.json != "-":
        console = _console()
        console.print(_header(result))
        _show(console, result.verdict)
    return 0 if result.verdict.equal else 1


def _header(result: Compared) -> str:
    run, ref = result.run, result.ref
    ranks = [_count(one.world_size, "rank") for one in (run, ref)]
    return (
        f"{run.folder} ({ranks[0]}) against {ref.folder} ({ranks[1]}): {_count(len(run.indices), 'step')}, "
        f"{_count(len(run.shapes()), 'parameter')} in {run.dtype}; bound: {result.bound}"
    )


# ---- what is shown --------------------------------------------------------------------------------------------------


def _console() -> Console:
    from rich.console import Console

    # Piped into a file or another program lines are not folded: one sentence stays one line.
    return Console(highlight=False, markup=True, soft_wrap=not sys.stdout.isatty())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _show(console: Console, verdict: Verdict) -> None:
    from rich.text import Text

    if verdict.equal:
        console.print(Text.assemble(("EQUAL", "bold green"), verdict.sentence().removeprefix("equal")))
        return
    console.print(Text.assemble(("NOT EQUAL", "bold red"), ": ", (verdict.sentence(), "bold")))
    rest = [f for f in verdict.failures[1:] if f.diagnosis]
    if rest:
        console.print(Text(f"after it, in order of execution ({len(rest)} more at this step):", style="dim"))
    for failure in rest[:SHOWN]:
        console.print(Text(f"  {failure}"))
    left = len(verdict.failures) - 1 - min(len(rest), SHOWN)
    if left:
        console.print(Text(f"  ... {left} more, which follow from these (--json FILE has all)", style="dim"))
