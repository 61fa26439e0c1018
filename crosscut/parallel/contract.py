"""Watches a model's first forward under a layout and refuses, by name, what tensor parallelism would compute wrongly.

Between a column-cut and a row-cut Linear a rank holds a part of the last dim; after the row-cut one it holds a partial
sum, until the boundary's exit adds the parts up. A model may do to a cut value whatever works element by element or
head by head, and to a partial value only what is linear. Everything else (a norm over the cut dim, a residual added
inside the boundary) would be silently wrong: see docs/model_contract.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Linear in the partial value, so they may come before the sum. (Dropout is not: each rank would drop other elements.)
_LINEAR = frozenset(
    "view reshape flatten unflatten squeeze unsqueeze transpose permute contiguous to float double bfloat16 half clone "
    "__getitem__ narrow split chunk neg view_as type_as expand movedim t".split()
)
_QUERY = frozenset(
    "size dim numel __get__ is_floating_point stride is_contiguous requires_grad_ __len__ ndimension element_size "
    "detach "
    "data_ptr is_complex __repr__ retain_grad".split()
)
_SCALED = frozenset("mul div __mul__ __rmul__ __truediv__ true_divide multiply divide".split())
_SUMS = frozenset("add sub __add__ __radd__ __sub__ __iadd__ add_ cat stack".split())
# Look across the last dim, which a column-cut Linear leaves in parts.
_ACROSS = frozenset(
    "softmax log_softmax layer_norm rms_norm group_norm mean sum norm vector_norm logsumexp max min argmax argmin "
    "amax amin "
    "var std cumsum sort topk prod normalize cosine_similarity linalg_vector_norm cross_entropy".split()
)
_ELEMENTWISE = frozenset(
    "silu gelu relu tanh sigmoid mul add sub div __mul__ __add__ __sub__ __truediv__ __rmul__ __radd__ contiguous "
    "clone to "
    "float double bfloat16 half pow square exp softplus relu6 leaky_relu elu hardswish mish dropout".split()
)


class ContractMode(TorchFunctionMode):
    """Active during one forward of a rank whose model has cut Linears.

    columns, rows: the local weight of each cut Linear -> its name. Values are followed by identity; an exit of a
    boundary calls `settle` on the summed value.
    """

    def __init__(self, columns: dict[int, str], rows: dict[int, str], axes: str) -> None:
        super().__init__()
        self.columns, self.rows, self.axes = columns, rows, axes
        # id -> (the tensor, held so that the id stays its own; the weight that made it)
        self.partial: dict[int, tuple[Tensor, str]] = {}
        self.cut: dict[int, tuple[Tensor, str]] = {}

    def settle(self, x: Any) -> None:
        """x went through a boundary's exit: it is whole now."""
        self.partial.pop(id(x), None)
        self.cut.pop(id(x), None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        tensors = list(_tensors((*args, *kwargs.values())))
        partial = [self.partial[id(t)][1] for t in tensors if id(t) in self.partial]
        cut = [self.cut[id(t)][1] for t in tensors if id(t) in self.cut]
        if name == "linear":
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if partial:
                self._refuse_partial(name, partial[0], "another Linear reads it")
            out = func(*args, **kwargs)
            if id(weight) in self.rows:
                self.partial[id(out)] = (out, self.rows[id(weight)])
            elif id(weight) in self.columns:
                self.cut[id(out)] = (out, self.columns[id(weight)])
            return out
        if partial and name not in _QUERY:
            self._check_partial(name, args, tensors, partial)
        if cut and name in _ACROSS and _touches_last_dim(name, args, kwargs):
            raise ValueError(
                f"{name} looks across the output of {cut[0]}, which is cut over {self.axes}: each rank would see "
                f"its part only; move it outside the boundary, or do not cut that dim"
            )
        out = func(*args, **kwargs)
        for value in _tensors(out if isinstance(out, (tuple, list)) else (out,)):
            if partial and name not in _QUERY:
                self.partial[id(value)] = (value, partial[0])
            elif cut and name in _ELEMENTWISE:
                self.cut[id(value)] = (value, cut[0])
        return out

    def _check_partial(self, name: str, args: tuple, tensors: list[Tensor], partial: list[str]) -> None:
        if name in _LINEAR:
            return
        if name in _SCALED and len(tensors) == 1:
            return
        if name in _SUMS:
            numbers = [a for a in args if isinstance(a, (int, float)) and not isinstance(a, bool) and a != 0]
            if len(partial) == len(tensors) and (name in ("cat", "stack") or not numbers):
                return
            self._refuse_partial(name, partial[0], "the other summand would be counted once by every rank")
        self._refuse_partial(name, partial[0], "only views, scaling by a number and sums of partial values are linear")

    def _refuse_partial(self, name: str, origin: str, why: str) -> None:
        raise ValueError(
            f"{name} is applied to the output of {origin} before the sum over {self.axes} that it is owed: {why}; "
            f"end the boundary (dims table) right after {origin}, or do not cut that dim"
        )


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _touches_last_dim(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether a reduction may run over the last dim: yes unless its dims are named and the last is not among them."""
    first = next((a for a in args if isinstance(a, torch.Tensor)), None)
    if first is None or name in ("layer_norm", "rms_norm", "group_norm"):  # their second argument is a shape
        return True
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = (dims,)
    if isinstance(dims, (tuple, list)) and all(isinstance(d, int) for d in dims) and dims:
        return any(d in (-1, first.ndim - 1) for d in dims)
    return True
