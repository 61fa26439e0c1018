"""The parts of a layout beside mesh and cuts: store, schedule, recompute, precision and context, each checked."""

from __future__ import annotations

from dataclasses import dataclass

from crosscut.layout.errors import LayoutError, nearest

SCHEDULES = ("gpipe", "1f1b", "interleaved")
POLICIES = ("none", "selective", "full")
METHODS = ("ring", "allgather", "ulysses")
RESHARD = ("use", "step")
DTYPES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4}  # bytes a number
COMPUTE_DTYPES = ("fp64", "fp32", "bf16", "fp16")
STORE_AXES = ("rep", "dp", "cp")  # a store needs an axis over which the weights are whole: one that cuts data


def choice(section: str, key: str, value: object, known: tuple[str, ...]) -> str:
    """`value` if it is one of `known`; else LayoutError with the nearest."""
    if value not in known:
        raise LayoutError(f"[{section}] unknown {key} {value!r}{nearest(str(value), known)}")
    return str(value)


def whole(section: str, key: str, value: object, least: int = 1) -> int:
    """`value` if it is a whole number of at least `least`; else LayoutError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise LayoutError(f"[{section}] {key} = {value!r} must be a whole number of at least {least}")
    return value


@dataclass(frozen=True)
class Store:
    """What is kept cut between uses, and over which axes.

    ZeRO stage 1 keeps the optimizer state cut, 2 the gradients also, 3 the parameters also (Rajbhandari et al., 2020,
    arXiv:1910.02054). `reshard`: parameters that are kept cut are let go after each "use" (and gathered again in
    backward), or once a "step".
    """

    optimizer: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    reshard: str = "use"

    def __post_init__(self) -> None:
        choice("store", "reshard", self.reshard, RESHARD)
        for key in ("optimizer", "gradients", "parameters"):
            for axis in getattr(self, key):
                if axis not in STORE_AXES:
                    raise LayoutError(f"[store] {key}: a store runs over {', '.join(STORE_AXES)}, not {axis!r}")
        if self.gradients and self.gradients != self.optimizer:
            raise LayoutError(
                f"[store] gradients = {list(self.gradients)} needs the optimizer over the same axes, not "
                f"{list(self.optimizer)}"
            )
        if self.parameters and self.parameters != self.gradients:
            raise LayoutError(
                f"[store] parameters = {list(self.parameters)} needs the gradients over the same axes, not "
                f"{list(self.gradients)}"
            )

    @classmethod
    def of_stage(cls, zero: int, reshard: str = "use", axes: tuple[str, ...] = ("dp",)) -> Store:
        """The store of ZeRO stage 0 to 3 over `axes`."""
        if isinstance(zero, bool) or zero not in (0, 1, 2, 3):
            raise LayoutError(f"[store] zero = {zero!r} must be 0, 1, 2 or 3")
        optimizer, gradients, parameters = (axes if zero >= stage else () for stage in (1, 2, 3))
        return cls(optimizer, gradients, parameters, reshard)

    @property
    def zero(self) -> int:
        """The ZeRO stage: 0 to 3."""
        return 3 if self.parameters else 2 if self.gradients else 1 if self.optimizer else 0


@dataclass(frozen=True)
class Schedule:
    """In which order the micro-batches of a step run. Without pp, `micro_batches` is gradient accumulation."""

    name: str = "1f1b"
    micro_batches: int = 1
    virtual_stages: int = 1  # stages a rank holds; more than one only with "interleaved"

    def __post_init__(self) -> None:
        choice("schedule", "name", self.name, SCHEDULES)
        whole("schedule", "micro_batches", self.micro_batches)
        whole("schedule", "virtual_stages", self.virtual_stages)
        if self.virtual_stages > 1 and self.name != "interleaved":
            raise LayoutError(
                f'[schedule] virtual_stages = {self.virtual_stages} needs name = "interleaved", not {self.name!r}'
            )
        if self.name == "interleaved" and self.virtual_stages == 1:
            raise LayoutError("[schedule] interleaved needs virtual_stages of at least 2; with 1 it is 1f1b")


@dataclass(frozen=True)
class Recompute:
    """What is computed again in backward instead of being kept. `regather`: under sequence parallelism keep a block's
    cut input and gather it again in backward (Korthikanti et al., 2022, arXiv:2205.05198)."""

    policy: str = "none"
    regather: bool = False

    def __post_init__(self) -> None:
        choice("recompute", "policy", self.policy, POLICIES)
        if not isinstance(self.regather, bool):
            raise LayoutError(f"[recompute] regather = {self.regather!r} must be true or false")


@dataclass(frozen=True)
class Precision:
    """The dtype of activations and of parameters in use, and the one in which gradients are summed over ranks."""

    compute: str = "fp32"
    reduce: str = "fp32"

    def __post_init__(self) -> None:
        choice("precision", "compute", self.compute, COMPUTE_DTYPES)
        choice("precision", "reduce", self.reduce, COMPUTE_DTYPES)
        if self.compute == "fp64" and self.reduce != "fp64":
            raise LayoutError(f'[precision] reduce = {self.reduce!r} loses what compute = "fp64" keeps; use "fp64"')

    @property
    def master(self) -> str:
        """The dtype of what the optimizer works on: parameters, their gradients, its state, checkpoints (Micikevicius
        et al., 2018, arXiv:1710.03740)."""
        return "fp64" if self.compute == "fp64" else "fp32"

    @property
    def scalar(self) -> str:
        """The dtype of losses, squared norms and the three numbers a token of the vocab-cut loss."""
        return "fp64" if self.compute == "fp64" else "fp32"


@dataclass(frozen=True)
class Context:
    """How attention sees the whole sequence when seq is cut over cp."""

    method: str = "ring"

    def __post_init__(self) -> None:
        choice("context", "method", self.method, METHODS)
