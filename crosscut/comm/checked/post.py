"""Small frames from rank to rank, in order, beside the data: what checked mode tells the other ranks.

Each rank listens on a socket and says where in the job's store. A rank that has something to say to another one
connects to it; the connection carries frames one way only, so that nobody waits for an answer to set it up. Sending
never blocks: what a socket does not take is kept until `pump`. The end of a process closes its sockets, and so is
noticed at once.

    frame: length 4 | kind 1 | room 8 | number 4 | the sender's count of calls 4 | payload (JSON)
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from crosscut.comm.errors import PeerError, StuckError

_HEAD = struct.Struct("<IBQII")
_TOKEN_BYTES = 16
_LINGER_S = 1.0  # how long the last words may take
_LOST_S = 0.1  # a connection that broke may still have something to be read
HELLO, BYE = 0, 1  # the kinds that are the post's own
KEY = "crosscut-check"


class Frame(NamedTuple):
    """What another rank said. `calls`: how many calls it had made by then."""

    source: int
    kind: int
    room: int
    number: int
    calls: int
    payload: bytes


class _Link:
    """A connection to another rank (`rank`), or from one (-1 until it has said who it is)."""

    def __init__(self, sock: socket.socket, rank: int, incoming: bool) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.rank, self.incoming = sock, rank, incoming
        self.buffer = bytearray()  # read and not yet a whole frame, or not yet sent


class Post:
    """This rank's frames to and from the others of a world. Every rank of the world makes one, over the same store.

    `gone`: the ranks that will say nothing more, and how they went. `calls`: this rank's count of calls, sent along.
    Not thread-safe: its user holds a lock, but for `sleep`.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float, take: Callable[[Frame], None]) -> None:
        self.rank, self.size, self.calls = rank, size, 0
        self.gone: dict[int, str] = {}
        self.pids: dict[int, int] = {}
        self._take, self._timeout_s = take, timeout_s
        host = _own_address(store)
        self._listener = socket.create_server((host, 0), backlog=min(size + 8, 1024))
        self._listener.setblocking(False)
        self._token = os.urandom(_TOKEN_BYTES)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._out: dict[int, _Link] = {}
        self._in: list[_Link] = []
        self._lost: dict[int, float] = {}
        # A store may hold what an earlier world in the same processes has said: each world has its number.
        self._prefix = f"{KEY}/{store.add(f'{KEY}/worlds/{rank}', 1)}"
        self._store = store
        place = [host, self._listener.getsockname()[1], self._token.hex(), os.getpid()]
        store.set(f"{self._prefix}/{rank}", json.dumps(place))

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, rank: int, kind: int, room: int, number: int, payload: bytes = b"") -> None:
        """Say something to another rank. Nothing happens if it is gone."""
        if rank not in self.gone:
            link = self._out.get(rank) or self._connect(rank)
            if link is not None:
                link.buffer += _HEAD.pack(len(payload), kind, room, number, self.calls & 0xFFFFFFFF) + payload
                self._flush(link)

    def _connect(self, rank: int) -> _Link | None:
        """Raises StuckError for a rank that has not said where it is by the time-out."""
        key, deadline = f"{self._prefix}/{rank}", time.monotonic() + self._timeout_s
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise StuckError(
                    f"checked mode: waited {self._timeout_s:g} s for rank {rank} to join; turn it on on every rank"
                )
            time.sleep(0.01)
        host, port, token, self.pids[rank] = json.loads(self._store.get(key))
        try:
            link = _Link(socket.create_connection((host, port), timeout=self._timeout_s), rank, incoming=False)
        except ConnectionRefusedError:
            self.gone[rank] = "has ended"
            return None
        except OSError as error:
            raise PeerError(f"checked mode: rank {rank} cannot be reached at {host}:{port}: {error}") from None
        hello = bytes.fromhex(token) + json.dumps([self.rank, os.getpid()]).encode()
        link.buffer += _HEAD.pack(len(hello), HELLO, 0, 0, 0) + hello
        self._out[rank] = link
        self._selector.register(link.sock, selectors.EVENT_READ, link)  # it never says anything: reading finds its end
        return link

    def watch(self, ranks: list[int]) -> None:
        """Connect to these, so that their end is noticed; those that have not joined yet are left for later."""
        for rank in ranks:
            if rank not in self._out and rank not in self.gone and self._store.check([f"{self._prefix}/{rank}"]):
                self._connect(rank)

    def reaches(self, rank: int) -> bool:
        """Whether there is a connection to a rank."""
        return rank in self._out and rank not in self.gone

    def _flush(self, link: _Link) -> None:
        try:
            while link.buffer:
                del link.buffer[: link.sock.send(link.buffer)]
        except BlockingIOError:
            pass
        except OSError:
            link.buffer.clear()
            self._lost.setdefault(link.rank, time.monotonic())

    # -- receiving ----------------------------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Return when something has come, or after that long."""
        if seconds > 0:
            self._selector.select(seconds)

    def pump(self) -> bool:
        """Send what was kept, take in what has come; whether anything came."""
        came = False
        for link in self._out.values():
            if link.buffer:
                self._flush(link)
        for key, _ in self._selector.select(0):
            came = True
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)
        if self._lost:
            now = time.monotonic()
            for rank, since in list(self._lost.items()):
                if now - since > _LOST_S:
                    del self._lost[rank]
                    self.gone.setdefault(rank, "has ended")
        return came

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            link = _Link(sock, -1, incoming=True)
            self._in.append(link)
            self._selector.register(sock, selectors.EVENT_READ, link)

    def _read(self, link: _Link) -> None:
        try:
            data = link.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(link)
            return
        link.buffer += data
        begin = 0
        while len(link.buffer) - begin >= _HEAD.size:
            length, kind, room, number, calls = _HEAD.unpack_from(link.buffer, begin)
            end = begin + _HEAD.size + length
            if link.rank < 0 and (kind != HELLO or length > 256):
                self._drop(link)
                return
            if len(link.buffer) < end:
                break
            payload = bytes(link.buffer[begin + _HEAD.size : end])
            begin = end
            if kind == HELLO:
                if payload[:_TOKEN_BYTES] != self._token:  # a stranger
                    self._drop(link)
                    return
                link.rank, self.pids[link.rank] = json.loads(payload[_TOKEN_BYTES:])
            elif kind == BYE:
                self.gone[link.rank] = payload.decode()
            else:
                self._take(Frame(link.rank, kind, room, number, calls, payload))
        del link.buffer[:begin]

    def _drop(self, link: _Link) -> None:
        self._selector.unregister(link.sock)
        link.sock.close()
        if link.incoming:
            self._in.remove(link)
            if link.rank >= 0:
                self.gone.setdefault(link.rank, "has ended")  # everything it has said was read
        else:
            link.buffer.clear()
            self._lost.setdefault(link.rank, time.monotonic())

    # -- the end ------------------------------------------------------------------------------------------------------

    def who(self, rank: int) -> str:
        """`rank 3 (pid 1234)`."""
        return f"rank {rank}" + (f" (pid {self.pids[rank]})" if rank in self.pids else "")

    def close(self, how: str) -> None:
        """Say goodbye to those who were spoken to, and close. `how`: "has left" or "has failed"."""
        for rank in self._out:
            if rank not in self.gone and rank not in self._lost:
                self.send(rank, BYE, 0, 0, how.encode())
        deadline = time.monotonic() + _LINGER_S
        while any(link.buffer for link in self._out.values()) and time.monotonic() < deadline:
            self.pump()
            time.sleep(0.001)
        self._selector.close()
        for one in [*self._out.values(), *self._in]:
            one.sock.close()
        self._listener.close()


def _own_address(store: Any) -> str:
    """The address of this host that the others can reach: the one from which it reaches the job's store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None) or os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # no packet is sent
        try:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
