"""`ShardedOptimizer`: optimizer state kept in parts, one a rank (ZeRO-1; Rajbhandari et al., 2020, arXiv:1910.02054).

A step is three things: the ranks' gradients are averaged, each rank getting its part (reduce_scatter); each rank
updates its part of every parameter, with the only state there is for it; the parts are put together (all_gather).
Both collectives run on buckets: W rows, one a rank, in which each parameter has a few columns.

A parameter of n numbers is cut flat, in ceil(n / W) numbers a rank, the last ranks holding fewer or none; a 0-d
parameter is updated by every rank. This rank's part is a view of the parameter's own memory.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from crosscut.comm.group import Group
from crosscut.parallel.elementwise import require_elementwise
from crosscut.parallel.shard import collect, spread
from crosscut.parallel.standalone.ranks import Ranks, check_same, copy_from_first, describe, join, owner

BUCKET_BYTES = 25_000_000
_steppers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> a weak reference to what steps it


@dataclass(eq=False)
class _Part:
    """This rank's part of a parameter. width: numbers a rank; local: the part, which the inner optimizer updates."""

    name: str
    param: nn.Parameter
    width: int
    local: nn.Parameter


class ShardedOptimizer(torch.optim.Optimizer):
    """`cls(params, **kw)` with its state divided over the ranks: `ShardedOptimizer(params, torch.optim.AdamW, lr=0.1)`.

    params: what `cls` takes: parameters, named parameters or groups. cls: any optimizer that updates each number by
    itself; another one is refused by name (it is tried on a small tensor, whole and in parts). group: a crosscut Group
    or Context, or None for the world of torch.distributed (without one, a single rank). Collective, like `step`,
    `add_param_group` and `state_dict`: every rank calls them. The parameters become rank 0's.

    `step` averages the gradients itself. Gradients that are equal on all ranks already (after `data_parallel`, say)
    come out unchanged (but for rounding, where the number of ranks is no power of two), since the average of equal
    numbers is that number: nothing is divided twice. What looks at gradients before the step, such as clip_grad_norm_
    or a GradScaler, needs them averaged before: use data_parallel.
    A parameter whose gradient is None on every rank is left alone; None on some ranks counts as zeros.

    Otherwise an optimizer like any other: param_groups are its own (schedulers change them), `step` takes a closure,
    `state_dict` is that of `cls` on one device, whole, and loads on any number of ranks.
    """

    def __init__(self, params: Any, cls: type[torch.optim.Optimizer], *, group: Ranks = None, **kw: Any) -> None:
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise ValueError(f"ShardedOptimizer: {cls!r:.60} is no class of optimizer; pass torch.optim.AdamW, say")
        if isinstance(params, nn.Module):
            raise ValueError("ShardedOptimizer: params is a module; pass module.parameters()")
        params, tensors = _listed(params)
        device = tensors[0].device if tensors else torch.device("cpu")
        self.group: Group = join(group, device)
        try:
            self.inner = cls([nn.Parameter(torch.zeros(1, 1, device=device))], **kw)
        except TypeError as error:
            raise ValueError(f"ShardedOptimizer: {cls.__name__} does not take {kw}: {error}") from error
        require_elementwise(cls, kw, "ShardedOptimizer")
        self.inner.param_groups.clear()
        self._parts: list[list[_Part]] = []  # of each param group
        super().__init__(params, self.inner.defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, at any time. Collective. Raises ValueError where ranks add different ones or with different
        options, and for parameters that another ShardedOptimizer steps."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        numbered = [f"parameter {i}" for i in range(len(added["params"]))]
        named = dict(zip(added.get("param_names", numbered), added["params"], strict=True))
        try:
            for name, p in named.items():
                if owner(p) == "fully_shard":
                    raise ValueError(
                        f"ShardedOptimizer: {name!r} is sharded by fully_shard already, and so is the state of any "
                        f"optimizer of it; use {type(self.inner).__name__} itself"
                    )
                self._refuse_second(name, p)
            options = {k: v for k, v in added.items() if isinstance(v, str | int | float | tuple | None)}
            described = {name: describe(p) for name, p in named.items()}
            described["its optimizer"] = f"{type(self.inner).__name__} with {options}"
            check_same("ShardedOptimizer", self.group, described)
        except ValueError:
            self.param_groups.pop()
            raise
        _steppers.update((p, weakref.ref(self)) for p in named.values())
        copy_from_first(self.group, named.values(), "ShardedOptimizer/start")
        self._parts.append([self._part(name, p) for name, p in named.items()])
        options = {key: value for key, value in added.items() if key != "param_names"}
        self.inner.add_param_group({**options, "params": [part.local for part in self._parts[-1]]})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, update this rank's part, gather all parts. Returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hand_down()
        buckets = [_Bucket(self.group, parts) for parts in self._buckets()]
        _one_ahead(buckets, _Bucket.reduce_gradients, _Bucket.hand_out_gradients)
        self.inner.step()
        _one_ahead(buckets, _Bucket.gather_parameters, _Bucket.write_parameters)
        for part in (part for parts in self._parts for part in parts):
            part.local.grad = None
        self._show_state()
        return loss

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state of the whole model, as `cls` would have it on one device. Collective; the same on every rank."""
        out = super().state_dict()
        parts = dict(enumerate(part for parts in self._parts for part in parts))
        out["state"] = {
            index: {key: self._whole(parts[index], value) for key, value in state.items()}
            for index, state in sorted(out["state"].items())
        }
        return out

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's parts of a whole state, of this class or of `cls` itself, saved by any number of ranks."""
        parts = dict(enumerate(part for parts in self._parts for part in parts))
        cut = {
            index: {key: self._cut(parts[index], key, value) for key, value in state.items()}
            for index, state in state_dict["state"].items()
            if index in parts
        }
        self.inner.load_state_dict({**state_dict, "state": cut})
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key not in ("params", "param_names")})
        self.state.clear()
        self._show_state()

    @torch.no_grad()
    def averaged_gradients(self) -> dict[Tensor, Tensor]:
        """The gradients that `step` works with, whole, by parameter: averages over the ranks, None counting as zeros.
        Collective; for whoever looks at them between `step` and `zero_grad`."""
        found: dict[Tensor, Tensor] = {}
        for p in (part.param for parts in self._parts for part in parts if part.param.requires_grad):
            own = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            found[p] = self.group.all_reduce(own.clone(), op="avg", tag="gradients/look", kind="control")
        return found

    # -- inside -------------------------------------------------------------------------------------------------------

    def _refuse_second(self, name: str, p: Tensor) -> None:
        """Two would each average the gradients and step the parameter."""
        if p in _steppers and _steppers[p]() is not None:
            gc.collect()  # one that was let go may be part of a cycle
            if _steppers[p]() is not None:
                raise ValueError(
                    f"ShardedOptimizer: another ShardedOptimizer steps {name!r} already; use one for all, or delete "
                    f"the first"
                )

    def _hand_down(self) -> None:
        """The inner optimizer works with the options that schedulers and users see and change."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key not in ("params", "param_names")})

    def _show_state(self) -> None:
        """`state`, by the whole parameters: this rank's part of it, for whoever looks."""
        for part in (part for parts in self._parts for part in parts):
            if self.inner.state.get(part.local):
                self.state[part.param] = self.inner.state[part.local]

    def _part(self, name: str, p: nn.Parameter) -> _Part:
        if p.dim() == 0:
            return _Part(name, p, 1, nn.Parameter(p.detach()))
        if 1 + sum((n - 1) * stride for n, stride in zip(p.shape, p.stride(), strict=True)) != p.numel() > 0:
            raise ValueError(f"ShardedOptimizer: {name!r} has gaps in memory (strides {p.stride()}); .contiguous()")
        width = -(-p.numel() // self.group.size)
        start = min(self.group.rank * width, p.numel())
        return _Part(name, p, width, nn.Parameter(_flat(p, p)[start : min(start + width, p.numel())]))

    def _buckets(self) -> Iterable[list[_Part]]:
        """The trained parameters in order; those of one dtype and device share a bucket until it is full."""
        runs: dict[tuple[torch.dtype, torch.device], list[_Part]] = {}
        for part in (part for parts in self._parts for part in parts if part.param.requires_grad):
            run = runs.setdefault((part.param.dtype, part.param.device), [])
            run.append(part)
            if sum(p.width for p in run) * self.group.size * part.param.element_size() >= BUCKET_BYTES:
                yield runs.pop((part.param.dtype, part.param.device))
        yield from runs.values()

    def _whole(self, part: _Part, value: Any) -> Any:
        """A piece of state of the whole parameter: gathered where it is one number for each of the part's."""
        if not isinstance(value, Tensor) or part.param.dim() == 0 or value.shape != part.local.shape:
            return value.clone() if isinstance(value, Tensor) else value
        row = value.new_zeros(part.width)
        row[: value.numel()] = value
        rows = self.group.all_gather(row, tag="ShardedOptimizer/state", kind="control")
        whole = torch.empty_strided(part.param.shape, part.param.stride(), dtype=value.dtype, device=value.device)
        _flat(whole, part.param).copy_(rows[: whole.numel()])
        return whole

    def _cut(self, part: _Part, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or part.param.dim() == 0:
            return value
        if value.shape != part.param.shape:
            if value.numel() == 1:
                return value
            raise ValueError(
                f"ShardedOptimizer: the state {key!r} to load for {part.name!r} has shape {tuple(value.shape)}, the "
                f"parameter {tuple(part.param.shape)}; load the state of the same model"
            )
        start = min(self.group.rank * part.width, value.numel())
        return _flat(value, part.param)[start : start + part.local.numel()].clone()


class _Bucket:
    """The gradients of some parameters on their way to the ranks, then the updated parameters on their way back.

    Its rows, one a rank: for each parameter `width` numbers, then for each parameter a 1 if this rank has a gradient.
    """

    def __init__(self, group: Group, parts: Sequence[_Part]) -> None:
        self.group, self.parts = group, list(parts)
        self.widths = [part.width for part in parts]

    def reduce_gradients(self) -> None:
        """Start to average: row r of the result is rank r's."""
        first, size = self.parts[0].param, self.group.size
        rows = first.new_empty(size, sum(self.widths) + len(self.parts))
        *columns, marks = rows.split([*self.widths, len(self.parts)], dim=1)
        given = [part.param.grad is not None for part in self.parts]
        marks.copy_(torch.tensor(given, device=first.device))
        for part, column in zip(self.parts, columns, strict=True):
            grad = part.param.grad
            if part.local.untyped_storage().data_ptr() != part.param.untyped_storage().data_ptr():
                raise ValueError(
                    f"ShardedOptimizer: {part.name!r} was moved or converted since; make the optimizer after that"
                )
            if grad is not None and grad.layout != torch.strided:
                raise ValueError(f"ShardedOptimizer: the gradient of {part.name!r} is sparse; use sparse=False")
            if grad is not None and grad.dim() == 0:
                column.fill_(grad)  # every rank updates it
            else:
                spread(None if grad is None else _flat(grad, part.param), column)
        self.handle = self.group.reduce_scatter(rows, op="avg", async_op=True, tag="gradients/step")

    def hand_out_gradients(self) -> None:
        """Give the parts their gradients; None where no rank has one."""
        *pieces, marks = self.handle.wait().view(-1).split([*self.widths, len(self.parts)])
        self.used = []
        for part, piece, mark in zip(self.parts, pieces, marks.tolist(), strict=True):
            if mark:
                self.used.append(part)
                part.local.grad = piece[: part.local.numel()].view(part.local.shape)

    def gather_parameters(self) -> None:
        """Start to send this rank's updated parts to all."""
        if self.used and self.group.size > 1:
            row = self.used[0].param.new_zeros(sum(part.width for part in self.used))
            for part, piece in zip(self.used, row.split([part.width for part in self.used]), strict=True):
                piece[: part.local.numel()] = part.local.detach().view(-1)
            self.handle = self.group.all_gather(row, async_op=True, tag="parameters/step")

    def write_parameters(self) -> None:
        """Put everybody's parts into the parameters."""
        if self.used and self.group.size > 1:
            rows = self.handle.wait().view(self.group.size, -1)
            for part, column in zip(self.used, rows.split([part.width for part in self.used], dim=1), strict=True):
                collect(column[:1] if part.param.dim() == 0 else column, _flat(part.param, part.param))


def _flat(x: Tensor, like: Tensor) -> Tensor:
    """The numbers of `x` in the order in which those of `like` lie in memory, flat: a view where x lies like it."""
    x, like = x.detach(), like.detach()
    if like.is_contiguous():
        return x.reshape(-1)
    if x.stride() != like.stride():
        x = torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)
    return x.as_strided((x.numel(),), (1,))


def _one_ahead(buckets: list[_Bucket], start: Callable[[_Bucket], None], end: Callable[[_Bucket], None]) -> None:
    """Start each bucket before the one before it ends, so that two are under way and no more are in memory."""
    for i, bucket in enumerate(buckets):
        start(bucket)
        if i:
            end(buckets[i - 1])
    if buckets:
        end(buckets[-1])


def _listed(params: Any) -> tuple[Any, list[Tensor]]:
    """Whatever an optimizer takes, with its generators made lists; and the tensors in it."""
    if isinstance(params, Tensor):
        return params, [params]
    listed = [{**item, "params": _listed(item["params"])[0]} if isinstance(item, dict) else item for item in params]
    tensors: list[Tensor] = []
    for item in listed:
        tensors += (
            _listed(item["params"])[1] if isinstance(item, dict) else [item[1] if isinstance(item, tuple) else item]
        )
    return listed, tensors
