"""What to measure, checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from crosscut.bench.definitions import DTYPES, OPS, elements
from crosscut.bench.sizes import parse_size, size_text
from crosscut.layout.errors import nearest

BACKENDS = ("gloo", "shm", "nccl", "threads")
PROCESS_BACKENDS = ("gloo", "shm", "nccl")
SIZES = "8,512,4KiB,64KiB,1MB,10MB,100MB"
TRIALS = 20
QUICK = {"ops": "all_reduce,all_gather,reduce_scatter", "sizes": "8,4KiB,1MB,16MB", "trials": 10}
COPY_LIMIT_FROM_BYTES = 1_000_000  # below it, memory is not what limits
CHECKED_TO_BYTES = 100_000  # above it, a comparison of calls is lost in the time of the data
_RANK_BYTES = 350 * 10**6  # a process with torch in it
_BUFFERS = 5  # of S: in, out, a group's own result, the back end's, the copy


@dataclass(frozen=True)
class Variant:
    """One way of making a call. via: "group", "torch", "checked" (a group whose ranks compare each call
    first), or "copy" (the copy limit)."""

    backend: str
    via: str
    algorithm: str = ""


@dataclass(frozen=True)
class Cell:
    """One operation at one size: `count` numbers, `num_bytes` = S after rounding up to whole numbers and parts."""

    op: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class Plan:
    """What one world measures."""

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    world_size: int
    backends: tuple[str, ...]
    algorithms: tuple[str, ...] = ()
    dtype: str = "fp32"
    trials: int = TRIALS
    vias: tuple[str, ...] = ("group", "torch", "checked")
    matrix: bool = True
    with_machine: bool = False
    algorithm_ops: dict[str, tuple[str, ...]] = field(default_factory=dict)  # algorithm -> the operations it can do

    def cells(self) -> list[Cell]:
        """Every operation at every size, each size once."""
        size = DTYPES[self.dtype]
        found: dict[Cell, None] = {}
        for op in self.ops:
            for num_bytes in self.sizes:
                count = elements(op, self.world_size, num_bytes, size)
                found[Cell(op, count, count * size)] = None
        return list(found)

    def variants(self, op: str, num_bytes: int, backends: Sequence[str]) -> list[Variant]:
        """The ways to measure `op`, in the world of these back ends."""
        found = []
        for backend in backends:
            vias = [via for via in self.vias if backend != "threads" or via == "group"]
            if num_bytes > CHECKED_TO_BYTES and "checked" in vias:
                vias.remove("checked")
            found += [Variant(backend, via) for via in vias]
            found += [Variant(backend, "group", name) for name in self.algorithms if op in self.algorithm_ops[name]]
        if op == "all_reduce" and num_bytes >= COPY_LIMIT_FROM_BYTES and set(backends) & {"gloo", "shm"}:
            found.append(Variant("memory", "copy"))
        return found

    def worlds(self) -> list[tuple[str, ...]]:
        """The back ends by the world that measures them: processes together, threads apart."""
        processes = tuple(name for name in self.backends if name in PROCESS_BACKENDS)
        threads = tuple(name for name in self.backends if name == "threads")
        return [world for world in (processes, threads) if world]

    def num_ticks(self) -> int:
        """How many steps the progress bar has."""
        return len(self.cells()) * self.trials * len(self.worlds())


def words(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """A comma-separated list of known words, each once. Raises ValueError, naming the nearest, for an unknown one."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise ValueError(f"{flag} {text!r} names nothing; use {','.join(known)}")
    for word in found:
        if word not in known:
            raise ValueError(f"{flag}: unknown {word!r}{nearest(word, known)}")
    return tuple(dict.fromkeys(found))


def make_plan(
    *,
    ops: str | None,
    sizes: str | None,
    world_size: int,
    backends: str | None,
    algorithms: str | None,
    dtype: str,
    trials: int | None,
    quick: bool,
) -> Plan:
    """From the command line's words. Raises ValueError for what cannot be measured here."""
    if world_size < 2:
        raise ValueError(f"--world-size {world_size}: a collective needs 2 ranks or more")
    if trials is not None and trials < 1:
        raise ValueError(f"--trials {trials}: at least one")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: unknown {dtype!r}{nearest(dtype, DTYPES)}")
    known_ops = words("--ops", ops or (str(QUICK["ops"]) if quick else ",".join(OPS)), OPS)
    size_words = _size_words(sizes or str(QUICK["sizes"] if quick else SIZES))
    parsed = tuple(dict.fromkeys(parse_size(size) for size in size_words))
    named = words("--backends", backends, BACKENDS) if backends else default_backends(world_size)
    check_backends(named, world_size)
    check_memory(parsed, world_size, named)
    names, able = _algorithms(algorithms, known_ops)
    default_trials = int(str(QUICK["trials"])) if quick else TRIALS
    return Plan(known_ops, parsed, world_size, named, names, dtype, trials or default_trials, algorithm_ops=able)


def _size_words(text: str) -> list[str]:
    found = [word for word in text.split(",") if word.strip()]
    if not found:
        raise ValueError(f"--sizes {text!r} names nothing; use for example {SIZES}")
    return found


def _algorithms(text: str | None, ops: Sequence[str]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """The named algorithms, and the operations of each."""
    if text is None:
        return (), {}
    from crosscut.comm.algorithms.registry import ALGORITHMS, ops_of

    known = list(dict.fromkeys(name for table in ALGORITHMS.values() for name in table))
    names = words("--algorithms", ",".join(known) if text == "all" else text, known)
    able = {name: tuple(op for op in ops_of(name) if op in ops) for name in names}
    if text != "all":
        for name in names:
            if not able[name]:
                raise ValueError(f"--algorithms: {name} does {', '.join(ops_of(name))}, and --ops names none of them")
    return names, able


def default_backends(world_size: int) -> tuple[str, ...]:
    """What processes can run here."""
    import torch

    from crosscut.comm.shm import platform

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ("gloo", *(["shm"] if platform.why_not() is None else []), *(["nccl"] if gpus >= world_size else []))


def check_backends(backends: Sequence[str], world_size: int) -> None:
    """Raise ValueError for one that this machine cannot run."""
    from crosscut.comm.choose import choose_backend

    for backend in backends:
        choose_backend(backend, None, world_size)


def check_memory(sizes: Sequence[int], world_size: int, backends: Sequence[str]) -> None:
    """Raise ValueError for sizes and worlds that this machine cannot hold."""
    import psutil

    free = int(psutil.virtual_memory().available)
    base = _RANK_BYTES * world_size if set(backends) & set(PROCESS_BACKENDS) else 0
    if base > free:
        raise ValueError(
            f"--world-size {world_size}: as many processes take about {base / 1e9:.0f} GB of memory, {free / 1e9:.0f} "
            f"GB are free; use at most {max(free // _RANK_BYTES, 2)}"
        )
    need = base + _BUFFERS * max(sizes) * world_size
    if need > free:
        most = (free - base) // (_BUFFERS * world_size)
        raise ValueError(
            f"size {size_text(max(sizes))} on {world_size} ranks takes about {need / 1e9:.0f} GB of memory, "
            f"{free / 1e9:.0f} GB are free; use at most {max(1, most // 10**6)} MB"
        )
