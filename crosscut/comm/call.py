"""One call of one rank: what is matched against the other ranks' calls and named in messages. No torch."""

from __future__ import annotations

from typing import Any, NamedTuple

END = "end"  # the last "call" of a rank, in every group: it has returned


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
        shape = self.shape[1:] if self.input_splits is not None else self.shape
        return (self.op, self.label, self.reduce_op, self.root, self.dim, shape, self.dtype, self.tag)

    def arguments(self, differing: Call | None = None) -> str:
        """The matched arguments for a message: `sum`, or with those that differ from another call's spelled out."""
        parts = [self.reduce_op] if self.reduce_op else []
        other = differing or self
        if self.root is not None and (self.op != other.op or self.root != other.root):
            parts.append(f"root={self.root}")
        if self.dim != other.dim and self.dim is not None:
            parts.append(f"dim={self.dim}")
        if self.dtype and (self.shape != other.shape or self.dtype != other.dtype):
            parts.append(f"shape={self.shape}")
            parts.append(self.dtype)
        if self.tag != other.tag:
            parts.append(f'tag="{self.tag}"')
        return ", ".join(parts)

    def name(self) -> str:
        """`all_reduce #118 over tp`."""
        return f"{self.op} #{self.seq} over {self.label}"

    def did(self, differing: Call | None = None) -> str:
        """`called all_reduce(max)`, without the site."""
        if self.op == END:
            return "has returned from its function"
        arguments = self.arguments(differing)
        return f"called {self.op}{f'({arguments})' if arguments else ''}"

    def where(self) -> str:
        """`all_reduce(sum) #118 over tp, tag "loss", at a.py:40`."""
        arguments = self.arguments()
        peer = ""
        if self.peer is not None:
            peer = f" with group rank {self.peer}" if self.peer >= 0 else " with any rank"
        tag = f', tag "{self.tag}"' if self.tag else ""
        call = f"{self.op}{f'({arguments})' if arguments else ''}"
        number = f" #{self.seq}" if self.peer is None else ""
        return f"{call}{number} over {self.label or 'self'}{peer}{tag}, at {self.site}"
