"""Put intercepted groups in the place of torch's, wherever it looks groups up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from crosscut.comm.intercept.group import InterceptedGroup, Observer, label_of

_c10d: Any = dist.distributed_c10d
_BY_GROUP = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "pg_default_device")


class Interception:
    """What `intercept` has put in place. `group`: the one in the place of the first; `close()` takes all out again."""

    def __init__(self, observer: Observer, group: Any) -> None:
        self._observer = observer
        self._placed: list[InterceptedGroup] = []
        self._make = _c10d._new_process_group_helper
        members = sorted((index, rank) for rank, index in _c10d._world.pg_group_ranks[group].items())
        label = "world" if group is dist.group.WORLD else label_of(group)
        self.group = self._place(group, label, [rank for _, rank in members])
        _c10d._new_process_group_helper = self._new_group

    def _new_group(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        made, store = self._make(*args, **kwargs)
        if self.group not in _c10d._world.pg_map:  # it was destroyed: what is made now is not ours to see
            self.close()
        elif isinstance(made, dist.ProcessGroup) and made not in self._placed:
            ranks = kwargs.get("global_ranks_in_group", args[2] if len(args) > 2 else ())
            made = self._place(made, label_of(made), ranks or range(made.size()))
        return made, store

    def _place(self, inner: Any, label: str, ranks: Sequence[int]) -> InterceptedGroup:
        group = InterceptedGroup(inner, self._observer, label, ranks)
        _replace(inner, group)
        self._placed.append(group)
        return group

    def close(self) -> None:
        """Give the groups that are still there their places back, and leave new ones alone."""
        if _c10d._new_process_group_helper == self._new_group:
            _c10d._new_process_group_helper = self._make
        for group in self._placed:
            if group in _c10d._world.pg_map:
                self._observer.on_close(group)
                _replace(group, group.inner)
        self._placed.clear()

    def __enter__(self) -> Interception:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def intercept(observer: Observer, group: Any = None) -> Interception:
    """Show an observer every later call of a process group (default: the world) and of groups made from now on.

    Raises ValueError before `init_process_group`.
    """
    if not dist.is_initialized():
        raise ValueError("there is no process group yet; call torch.distributed.init_process_group first")
    return Interception(observer, dist.group.WORLD if group is None else group)


def _replace(old: Any, new: Any) -> None:
    """Put a group in another one's place wherever torch looks groups up."""
    world = _c10d._world
    for name in _BY_GROUP:
        table = getattr(world, name, None)
        if table is not None and old in table:
            table[new] = table.pop(old)
    for groups in world.tags_to_pg.values():
        groups[:] = [new if group is old else group for group in groups]
    if world.default_pg is old:
        world.default_pg = new
    _c10d._unregister_process_group(old.group_name)
    _c10d._register_process_group(old.group_name, new)
