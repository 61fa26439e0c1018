"""One call of one rank: what is matched against the other ranks' calls and named in messages. No torch."""

from __future__ import annotations

from typing import Any, NamedTuple


class Call(NamedTuple):
    """One call of one rank, as it is matched against the other ranks' and named in messages.

    `shape`, `dtype` are the user's, before any conversion. `root` and `peer` are group-local. `site` is the
    `file:line` of the caller.
    """

    op: str
    label: str
    tag: str
    kind: str
    site: str
    seq: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    reduce_op: str | None = None
    root: int | None = None
    dim: int | None = None
    input_splits: tuple[int, ...] | None = None
    output_splits: tuple[int, ...] | None = None
    peer: int | None = None

    def key(self) -> tuple[Any, ...]:
        """Everything that must be equal on all ranks of the group."""
        shape = self.shape[1:] if self.op == "all_to_all" else self.shape
        return (self.op, self.label, self.reduce_op, self.root, self.dim, shape, self.dtype)

    def arguments(self, differing: Call | None = None) -> str:
        """The matched arguments for a message: `sum`, or with those that differ from another call's spelled out."""
        parts = [self.reduce_op] if self.reduce_op else []
        other = differing or self
        if self.root is not None and (self.op != other.op or self.root != other.root):
            parts.append(f"root={self.root}")
        if self.dim != other.dim and self.dim is not None:
            parts.append(f"dim={self.dim}")
        if self.shape != other.shape or self.dtype != other.dtype:
            parts.append(f"shape={self.shape}")
            parts.append(self.dtype)
        return ", ".join(parts)

    def text(self, differing: Call | None = None) -> str:
        """`all_reduce(max) at a.py:40`."""
        arguments = self.arguments(differing)
        return f"{self.op}{f'({arguments})' if arguments else ''} at {self.site}"

    def where(self) -> str:
        """`all_reduce(sum) #118 over tp, tag "loss", at a.py:40`."""
        arguments = self.arguments()
        peer = f" with group rank {self.peer}" if self.peer is not None else ""
        tag = f', tag "{self.tag}"' if self.tag else ""
        call = f"{self.op}{f'({arguments})' if arguments else ''}"
        number = f" #{self.seq}" if self.peer is None else ""
        return f"{call}{number} over {self.label or 'self'}{peer}{tag}, at {self.site}"
