"""The `gloo` and `nccl` back ends: ranks are processes under torch.distributed. (So they are with `shm`, whose groups
then talk without torch: `crosscut.comm.backends.shm`.)

What Gloo gets wrong or lacks is replaced here or before: dtypes it does not know travel as bytes, 16-bit floats are
summed in float32 (`crosscut.comm.dtypes`), empty tensors do not travel at all (it divides by their size), and its
reduce_scatter, an all_reduce of which most is thrown away, is an all_to_all whose pieces are added in rank order.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from crosscut.comm.backends.base import Backend, Work
from crosscut.comm.call import Call
from crosscut.comm.errors import PeerError, StuckError, one_line

Tensor = torch.Tensor
# torch 2.13 renames these two and warns about the old names; older versions have only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "prod": dist.ReduceOp.PRODUCT}
_SOURCE = re.compile(r"\[[^\]]*\.(cc|cpp):\d+\]\s*")  # torch's errors begin with a line of its own source
_MAX_COUNT = 2**31 - 1  # Gloo's all_to_all counts in 32 bits


class TorchWorld:
    """One rank of an initialised torch.distributed: a `World` of `crosscut.comm.backends.base`.

    `owns`: this crosscut called `init_process_group`, so it also destroys it. `check`: compare the ranks' calls first.
    """

    def __init__(
        self, name: str, device: torch.device, timeout_s: float, owns: bool = True, check: bool = False
    ) -> None:
        self.name = name
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.device = device
        self._timeout_s = timeout_s
        self._owns = owns
        self._made: dict[tuple[tuple[tuple[int, ...], ...], int], Backend | None] = {}
        self._own_groups: list[Any] = []  # made by new_group, in that order
        self._checker: Any = None
        if check:
            from crosscut.comm.checked.checker import Checker

            self._checker = Checker(dist.distributed_c10d._get_default_store(), self.rank, self.size, timeout_s)

    def group(self, partition: tuple[tuple[int, ...], ...], channel: int = 0) -> Backend | None:
        key = (partition, channel)
        if key not in self._made:
            mine: Backend | None = None
            for ranks in partition:  # every rank makes every group, its own or not: torch requires it
                if len(ranks) == self.size and channel == 0:
                    made: Any = dist.group.WORLD
                else:
                    made = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=self._timeout_s))
                    if self.rank in ranks:
                        self._own_groups.append(made)
                if self.rank in ranks:
                    mine = self._transport(made, ranks)
                    if self._checker is not None:
                        from crosscut.comm.checked.backend import CheckedGroup

                        mine = CheckedGroup(mine, self._checker.room(f"{partition} {channel}", str(ranks), ranks))
            self._made[key] = mine
        return self._made[key]

    def _transport(self, made: Any, ranks: tuple[int, ...]) -> Backend:
        if self.name != "shm" or not hasattr(made, "channel"):  # without one: `crosscut.checked` stands before it
            return TorchGroup(self, made, ranks)
        from crosscut.comm.backends.shm import ShmGroup  # here, since other platforms cannot import it

        return ShmGroup(made.channel)

    def claim(self, module: torch.nn.Module) -> None:
        """Nothing to do: processes share no modules."""

    def close(self, failed: bool) -> None:
        """Destroy the groups, last made first. After a failure NCCL's would wait for peers, so they are left."""
        try:
            if self._checker is not None and not failed:
                self._checker.finish()
        finally:
            if self._checker is not None:
                self._checker.close(failed)
            self._destroy(failed)

    def _destroy(self, failed: bool) -> None:
        if failed and self.name == "nccl":
            return
        for group in self._made.values():
            if group is not None:
                group.destroy()
        if failed and self.name == "shm":  # a group would first finish what is under way: peers may never come
            for made in [*self._own_groups, *([dist.group.WORLD] if self._owns else [])]:
                made.abort()
        for made in reversed(self._own_groups):
            dist.destroy_process_group(made)
        self._own_groups.clear()
        self._made.clear()
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def checks(self) -> bool:
        """Whether calls are compared."""
        return self._checker is not None

    @property
    def timeout_s(self) -> float:
        """How long a call waits for its peers."""
        return self._timeout_s


class TorchGroup:
    """One rank's transport within one torch process group."""

    guards = False

    def __init__(self, world: TorchWorld, group: Any, ranks: tuple[int, ...]) -> None:
        self.name = world.name
        self.device = world.device
        self.reduces_in_fp32 = world.name == "gloo"
        self._world = world
        self._group = group
        self._ranks = ranks
        self._size = len(ranks)
        self._rank = ranks.index(world.rank)
        self._seq = 0

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def all_reduce(self, x: Tensor, op: str, call: Call) -> Work:
        return self._start(call, x, lambda: dist.all_reduce(x, _OPS[op], group=self._group, async_op=True))

    def broadcast(self, x: Tensor, src: int, call: Call) -> Work:
        root = self._ranks[src]
        return self._start(call, x, lambda: dist.broadcast(x, root, group=self._group, async_op=True))

    def reduce(self, x: Tensor, dst: int, op: str, call: Call) -> Work:
        root = self._ranks[dst]
        return self._start(call, x, lambda: dist.reduce(x, root, _OPS[op], group=self._group, async_op=True))

    def all_gather(self, out: Tensor, x: Tensor, call: Call) -> Work:
        return self._start(call, x, lambda: _all_gather(out, x, group=self._group, async_op=True))

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str, call: Call) -> Work:
        if self.name != "gloo":
            return self._start(call, x, lambda: _reduce_scatter(out, x, op=_OPS[op], group=self._group, async_op=True))
        pieces = torch.empty_like(x)
        work = self._start(call, x, lambda: dist.all_to_all_single(pieces, x, group=self._group, async_op=True))
        return _Then(work, lambda: _fold_into(out, pieces.view(self._size, -1), op))

    def gather(self, out: Tensor | None, x: Tensor, dst: int, call: Call) -> Work:
        rows = None if out is None else list(out.view(self._size, -1).unbind(0)) if out.numel() else []
        root = self._ranks[dst]
        return self._start(call, x, lambda: dist.gather(x, rows, root, group=self._group, async_op=True))

    def scatter(self, out: Tensor, x: Tensor | None, src: int, call: Call) -> Work:
        rows = None if x is None else list(x.view(self._size, -1).unbind(0)) if x.numel() else []
        root = self._ranks[src]
        return self._start(call, out, lambda: dist.scatter(out, rows, root, group=self._group, async_op=True))

    def all_to_all(self, out: Tensor, x: Tensor, out_counts: list[int], in_counts: list[int], call: Call) -> Work:
        # Never skipped for an empty tensor: the other ranks of the group may have something to say to each other.
        if self.name == "gloo" and max(out.numel(), x.numel()) > _MAX_COUNT:
            raise ValueError(
                f"{call.where()}: {max(out.numel(), x.numel())} elements on one rank are more than the {_MAX_COUNT} "
                f"that Gloo can count; make several calls"
            )

        def start() -> Any:
            return dist.all_to_all_single(out, x, out_counts, in_counts, group=self._group, async_op=True)

        return self._start(call, None, start)

    def send(self, x: Tensor, dst: int, call: Call) -> Work:
        peer = self._ranks[dst]
        return self._start(call, x, lambda: dist.isend(x, peer, group=self._group))

    def recv(self, out: Tensor, src: int, call: Call) -> Work:
        peer = self._ranks[src]
        return self._start(call, out, lambda: dist.irecv(out, peer, group=self._group))

    def exchange(self, x: Tensor, dst: int, out: Tensor, src: int, send_call: Call, recv_call: Call) -> Work:
        ops = []
        if x.numel():
            ops.append(dist.P2POp(dist.isend, x, self._ranks[dst], group=self._group))
        if out.numel():
            ops.append(dist.P2POp(dist.irecv, out, self._ranks[src], group=self._group))
        if not ops:
            return _Done()
        works = self._try(recv_call, lambda: dist.batch_isend_irecv(ops))
        return _All([_TorchWork(self, work, recv_call) for work in works])

    def barrier(self, call: Call) -> Work:
        ids = [self.device.index] if self.device.type == "cuda" else None
        return self._start(call, None, lambda: dist.barrier(group=self._group, async_op=True, device_ids=ids))

    def destroy(self) -> None:
        """Let go of torch's group: Gloo closes its connections, which is what stops waiting peers, once nobody holds
        it, and after an error the traceback holds this object.
        """
        self._group = None

    def _start(self, call: Call, x: Tensor | None, start: Callable[[], Any]) -> Work:
        """Begin a call, unless its tensor is empty (then it is empty on every rank)."""
        if x is not None and x.numel() == 0:
            return _Done()
        return _TorchWork(self, self._try(call, start), call)

    def _try(self, call: Call, act: Callable[[], Any]) -> Any:
        """Run `act`; torch's errors become one line that names the call."""
        try:
            return act()
        except RuntimeError as error:
            text = _SOURCE.sub("", one_line(str(error).splitlines()[0] if str(error) else error, 300)).split(". ")[0]
            if "timed out" in text.lower() or "timeout" in text.lower():
                raise StuckError(
                    f"{call.where()}: waited {self._world.timeout_s:g} s for the other ranks: one of them has not "
                    f"made this call; if it is only slow, raise timeout_s"
                ) from error
            hint = "" if self._world.checks else "; CROSSCUT_CHECK=1 tells which"
            raise PeerError(
                f"{call.where()}: a peer has ended, or the ranks made different calls{hint}: {text}"
            ) from error


class _TorchWork:
    def __init__(self, group: TorchGroup, work: Any, call: Call) -> None:
        self._group, self._work, self._call = group, work, call

    def wait(self) -> None:
        if self._work is not None:
            self._group._try(self._call, self._work.wait)

    def done(self) -> bool:
        return self._work is None or bool(self._work.is_completed())


class _Done:
    """Nothing had to travel."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        return True


class _Then:
    """A call whose data needs one more local step."""

    def __init__(self, work: Work, step: Callable[[], None]) -> None:
        self._work, self._step = work, step

    def wait(self) -> None:
        self._work.wait()
        self._step()

    def done(self) -> bool:
        return self._work.done()


class _All:
    """Several calls as one."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def done(self) -> bool:
        return all(work.done() for work in self._works)


def _fold_into(out: Tensor, pieces: Tensor, op: str) -> None:
    """Reduce the rows of `pieces`, in order."""
    if not out.numel():
        return
    out.copy_(pieces[0])
    for piece in pieces[1:]:
        if op == "sum":
            out.add_(piece)
        elif op == "prod":
            out.mul_(piece)
        else:
            (torch.minimum if op == "min" else torch.maximum)(out, piece, out=out)
