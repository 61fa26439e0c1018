"""The matrix: every layout that so many ranks admit, each on a tiny model that it divides, each against one device.

The list is made without regard to what the engine can do; what it refuses is listed with its reason and never counted
as equal, so the matrix grows by itself. Sizes are odd where a layout allows it, and the features of the models (tied
ends, biases, grouped queries, QK-norm) take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crosscut.comm.launch import spawn
from crosscut.layout.layout import Layout
from crosscut.layout.mesh import AXES
from crosscut.layout.rules import derive
from crosscut.models.config import MLPConfig, TransformerConfig
from crosscut.models.mlp import MLP, mean_square
from crosscut.models.shapes import mlp_spec, transformer_spec
from crosscut.models.transformer import Transformer, next_token_loss
from crosscut.parallel.batch import IGNORE
from crosscut.parallel.distribute import LossFn
from crosscut.parallel.pipeline.schedules import build
from crosscut.parallel.supported import DTYPES, refuse_unsupported
from crosscut.testing.parity import Builder, GlobalBatch, RankReport, check_parity, single_device
from crosscut.testing.verdict import FP64_BOUND, Verdict

MAX_RANKS = 8
STEPS = 2
Config = TransformerConfig | MLPConfig
VARIANTS: tuple[dict[str, bool], ...] = (
    {}, {"tied": True}, {"bias": True}, {"qk_norm": True, "gqa": True}, {"tied": True, "bias": True, "qk_norm": True},
)  # fmt: skip
SMALL: tuple[tuple[str, dict[str, Any]], ...] = (  # each way to cut alone, in twos and threes, and products of them
    ("dp=1", {"micro_batches": 3}), ("dp=2", {}), ("dp=3", {"micro_batches": 2}), ("rep=2,dp=2", {}), ("dp=4", {}),
    ("tp=2", {}), ("tp=3", {}), ("tp=4", {}), ("tp=2", {"sp": True}), ("tp=3", {"sp": True, "micro_batches": 2}),
    ("dp=2,tp=2", {}), ("dp=2,tp=2", {"sp": True}), ("pp=2", {}), ("pp=2", {"micro_batches": 3}),
    ("pp=3", {"micro_batches": 4}),
    ("pp=4", {"micro_batches": 4, "schedule": "gpipe"}), ("pp=2,dp=2", {"micro_batches": 2}),
    ("pp=2,tp=2", {"sp": True, "micro_batches": 2}), ("pp=2,dp=2,tp=2", {"micro_batches": 2}),
    ("pp=2", {"schedule": "interleaved", "micro_batches": 4}), ("cp=2", {}),
    *((f"dp={n}", {"zero": zero, "micro_batches": 2}) for n in (1, 2, 3) for zero in (1, 2, 3)),
    ("dp=2", {"zero": 3, "reshard": "step"}), ("rep=2,dp=2", {"zero": 3}), ("dp=2,tp=2", {"zero": 1}),
    ("dp=2,tp=2", {"zero": 2, "sp": True}), ("dp=2,tp=2", {"zero": 3, "sp": True}),
    ("pp=2,dp=2", {"zero": 1, "micro_batches": 2}), ("pp=2,dp=2", {"zero": 3, "micro_batches": 2}),
    ("pp=2,dp=2,tp=2", {"zero": 3, "sp": True, "micro_batches": 2}), ("dp=2", {"recompute": "full"}),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One layout of the matrix with the model it is tried on. kind: "transformer" or "mlp"."""

    mesh: str
    options: tuple[tuple[str, Any], ...]
    kind: str
    turn: int  # which features the model has

    def layout(self) -> Layout:
        """Raises LayoutError where the options do not go together."""
        return Layout.of(self.mesh, **dict(self.options))

    def __str__(self) -> str:
        said = [name if value is True else f"{name}={value}" for name, value in self.options]
        return " ".join([self.mesh, *said, self.kind])


@dataclass(frozen=True)
class Row:
    """What became of a cell. outcome: "equal", "not equal", "refused" (why: by whom) or "failed" (why: the error)."""

    cell: Cell
    outcome: str
    why: str = ""
    verdict: Verdict | None = None


def small() -> list[Cell]:
    """The short list, on transformers and, where it says enough, on the MLP."""
    cells = [Cell(mesh, tuple(sorted(o.items())), "transformer", i) for i, (mesh, o) in enumerate(SMALL)]
    return cells + [Cell(m, tuple(sorted(o.items())), "mlp", i) for i, (m, o) in enumerate(SMALL) if "sp" not in o][::2]


def full(max_ranks: int = MAX_RANKS) -> list[Cell]:
    """Every mesh of at most `max_ranks` ranks, with every option that changes what such a mesh does."""
    cells: list[Cell] = []
    for world in range(1, max_ranks + 1):
        for sizes in _factorisations(world, len(AXES)):
            mesh = dict(zip(AXES, sizes, strict=True))
            text = ",".join(f"{a}={n}" for a, n in mesh.items() if n > 1) or "dp=1"
            for options in _options(mesh):
                turn = len(cells)
                cells.append(Cell(text, tuple(sorted(options.items())), "transformer", turn))
                if not options.keys() & {"sp", "recompute"} and turn % 2:
                    cells.append(Cell(text, tuple(sorted(options.items())), "mlp", turn // 2))
    return cells


def _options(mesh: dict[str, int]) -> Iterator[dict[str, Any]]:
    pp = mesh["pp"]
    orders: list[dict[str, Any]] = [{}, {"micro_batches": 2 + mesh["tp"] % 2}]
    if pp > 1:
        orders = [{"schedule": "gpipe", "micro_batches": pp}, {"schedule": "1f1b", "micro_batches": pp + 1}, {},
                  {"schedule": "interleaved", "micro_batches": 2 * pp}]  # fmt: skip
    stores: list[dict[str, Any]] = [{}]
    if mesh["dp"] > 1 or sum(mesh.values()) == len(mesh):  # one rank: an axis of size 1
        stores += [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "reshard": "step" if pp == 1 else "use"}]
    for order in orders:
        for store in stores:
            for sp in (False, True)[: 1 + (mesh["tp"] > 1)]:
                yield {**order, **store, **({"sp": True} if sp else {})}
    yield {**orders[-1 if pp == 1 else 1], "recompute": "full"}
    yield {**orders[0], "recompute": "selective"}


def _factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every tuple of `count` whole numbers whose product is `number`."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factorisations(number // first, count - 1))


# ---- models and data -----------------------------------------------------------------------------------------------


def sizes_for(kind: str, layout: Layout, turn: int = 0) -> dict[str, Any]:
    """Sizes of a tiny model that the layout divides; as odd as that allows."""
    tp, stages = layout.mesh.size("tp"), layout.num_stages
    tp *= layout.mesh.size("cp") if layout.context.method == "ulysses" else 1
    layers = stages if stages > 1 else 2
    if kind == "mlp":
        form = ("gather", "pairs")[turn % 2]
        return {"dim": 5 * tp if tp > 1 else 7, "layers": 2 * layers if form == "pairs" else layers, "form": form,
                "bias": turn % 3 == 0}  # fmt: skip
    features = dict(VARIANTS[turn % len(VARIANTS)])
    kv_heads = tp if tp > 1 else 2
    heads = 2 * kv_heads if features.pop("gqa", False) else kv_heads
    return {"vocab": 11 * tp, "embed": 10, "layers": layers, "heads": heads, "kv_heads": kv_heads, "head_dim": 4,
            "mlp": 5 * tp, **features}  # fmt: skip


def batches_for(
    kind: str, cfg: Config, layout: Layout, steps: int, seed: int = 7, rows_each: int = 1
) -> list[GlobalBatch]:  # fmt: skip
    """Data that depend on position and row, `rows_each` a rank and micro-batch. Some labels are ignored, unevenly: the
    first row has none left."""
    generator = torch.Generator().manual_seed(seed)
    ranks = layout.mesh.size(layout.batch_axes) * layout.micro_batches
    rows = rows_each * ranks if ranks > 1 else 3
    if isinstance(cfg, MLPConfig):
        return [(torch.randn(rows, cfg.dim, generator=generator) + torch.arange(rows)[:, None] / rows, None)
                for _ in range(steps)]  # fmt: skip
    seq = layout.mesh.size("tp") * 2 * layout.mesh.size("cp")
    return token_batches(rows, seq if seq > 2 else 5, cfg.vocab, steps, generator)


def token_batches(rows: int, seq: int, vocab: int, steps: int, generator: torch.Generator) -> list[GlobalBatch]:
    """Random ids and the next ones as labels, some of them ignored."""
    out: list[GlobalBatch] = []
    for _ in range(steps):
        ids = torch.randint(vocab, (rows, seq + 1), generator=generator)
        labels: Tensor = ids[:, 1:].clone()
        labels[torch.rand(rows, seq, generator=generator) < 0.2] = IGNORE
        if rows > 1:
            labels[0] = IGNORE
        out.append((ids[:, :-1], labels))
    return out


def model_of(cfg: Config) -> tuple[Builder, Any, LossFn]:
    """(builder, spec, loss) of a reference model."""
    if isinstance(cfg, MLPConfig):
        return partial(MLP, cfg), mlp_spec(cfg), mean_square
    return partial(Transformer, cfg), transformer_spec(cfg), next_token_loss


# ---- running -------------------------------------------------------------------------------------------------------


def refusal(cell: Cell, dtype: str = "fp64") -> str:
    """Why the engine does not execute a cell, or ''."""
    try:
        layout = cell.layout().adjusted(compute=dtype)
        refuse_unsupported(layout)
        build(layout.schedule.name, layout.mesh.size("pp"), layout.micro_batches)
        cfg = _config(cell, layout)
        batch = batches_for(cell.kind, cfg, layout, 1)[0][0]
        derive(model_of(cfg)[1], layout, batch=len(batch), seq=batch.size(1) if cell.kind == "transformer" else None)
    except ValueError as error:
        return str(error)
    return ""


def _config(cell: Cell, layout: Layout) -> Config:
    sizes = sizes_for(cell.kind, layout, cell.turn)
    return MLPConfig(**sizes) if cell.kind == "mlp" else TransformerConfig(**sizes)


def run_cell(cell: Cell, *, dtype: str = "fp64", steps: int = STEPS, seed: int = 0, **options: Any) -> Row:
    """Try one cell. options: those of `under_layout`."""
    if why := refusal(cell, dtype):
        return Row(cell, "refused", why)
    layout = cell.layout().adjusted(compute=dtype)
    cfg = _config(cell, layout)
    builder, spec, loss_fn = model_of(cfg)
    data = batches_for(cell.kind, cfg, layout, steps, 7 + seed)
    bound: Any = FP64_BOUND
    clip, bucket_bytes = (None, 0.05)[cell.turn % 2], (1, 400)[cell.turn % 2]
    shared = {"max_norm": clip, "seed": seed}
    if dtype == "fp64":
        ref = single_device(builder, data, loss_fn, **shared)
    else:
        from crosscut.testing.noise import noisy_reference

        ref, bound = noisy_reference(builder, data, loss_fn, DTYPES[dtype], **shared)
    try:
        verdict, reports = check_parity(
            builder, spec.dims, data, layout, loss_fn=loss_fn, ref=ref, bound=bound, bucket_bytes=bucket_bytes,
            **shared, **options,
        )  # fmt: skip
    except Exception as error:
        return Row(cell, "failed", f"{type(error).__name__}: {error}".splitlines()[0])
    if not verdict.equal:
        return Row(cell, "not equal", verdict.sentence(), verdict)
    odd = byte_differences(reports, steps)
    return Row(cell, "failed" if odd else "equal", "; ".join(odd[:2]), verdict)


def run_matrix(
    cells: Sequence[Cell], *, backend: str = "threads", done: Callable[[Row], None] = lambda row: None, **options: Any
) -> list[Row]:
    """Try every cell; `done` is called with each row. On process back ends one warm pool serves all."""
    if backend == "threads":
        return [_told(run_cell(cell, launch=spawn, **options), done) for cell in cells]
    from crosscut.testing.pool import WorkerPool

    pool = WorkerPool(MAX_RANKS)
    try:
        return [_told(run_cell(cell, launch=pool.run, backend=backend, **options), done) for cell in cells]
    finally:
        pool.close()


def _told(row: Row, done: Callable[[Row], None]) -> Row:
    done(row)
    return row


def byte_differences(reports: Sequence[RankReport], steps: int) -> list[str]:
    """Where a rank's ledger counted other bytes (or calls, where the rules say how many) than were predicted."""
    odd = []
    for rank, report in enumerate(reports):
        predicted: dict[tuple[str, str, str], list[int]] = {}
        unknown = set()
        for rule in report.plan.rules(report.coords["pp"]):
            entry = predicted.setdefault((rule.tag, rule.axis, rule.op), [0, 0])
            entry[0] += rule.bytes * steps
            entry[1] += (rule.calls or 0) * steps
            if rule.calls is None:
                unknown.add((rule.tag, rule.axis, rule.op))
        counted = {(tag, *key): value for tag, by in report.by_tag.items() for key, value in by.items()}
        for key in sorted(set(counted) | set(predicted)):
            calls, size = counted.get(key, (0, 0))
            expected = predicted.get(key, [0, 0])
            if size != expected[0] or (key not in unknown and calls != expected[1]):
                said = f"rank {rank}, {' '.join(key)}: counted {size} bytes in {calls} calls, predicted {expected[0]}"
                odd.append(said + ("" if key in unknown else f" in {expected[1]}"))
    return odd
