"""Limits of this process, shared memory, ptrace, ports, the host's name, what a launcher has put in the environment."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from crosscut.comm.launched import launched
from crosscut.doctor.finding import Finding, ok, problem, warn

_MIB = 2**20
UNLIMITED = -1


def open_files(soft: int, hard: int) -> Finding:
    """A rank holds some dozens of files, and a pair of connections to each peer."""
    text = "unlimited" if soft == UNLIMITED else f"{soft:,} a process"
    if soft != UNLIMITED and soft < 1024:
        most = "" if hard == UNLIMITED or hard >= 4096 else f" (the hard limit is {hard}: ask root for more)"
        fix = f"ulimit -n 4096{most}"
        return problem("open files", text, fix) if soft < 128 else warn("open files", text, fix)
    return ok("open files", text)


def locked_memory(soft: int, num_gpus: int) -> Finding:
    """Pinned buffers and network cards need it; the CPU back ends do not."""
    text = "unlimited" if soft == UNLIMITED else f"{soft / _MIB:,.0f} MiB"
    if num_gpus > 1 and soft != UNLIMITED and soft < 64 * _MIB:
        return warn(
            "locked memory", text, "NCCL over InfiniBand needs it: ulimit -l unlimited (docker: --ulimit memlock=-1)"
        )
    return ok("locked memory", text)


def shared_memory(total: int | None, num_gpus: int) -> Finding:
    """/dev/shm, in bytes. crosscut's shm does not use it (its segments are anonymous); NCCL and data loaders do."""
    if total is None:
        return ok("/dev/shm", "there is none, and crosscut needs none")
    text = f"{total / _MIB:,.0f} MiB (crosscut's shm does not use it)"
    if total <= 64 * _MIB:
        who = "NCCL and torch's data loaders do" if num_gpus else "torch's data loaders do"
        return warn("/dev/shm", text, f"{who}: docker run --shm-size=2g")
    return ok("/dev/shm", text)


def ptrace(scope: int | None) -> Finding:
    """Yama's setting: who may look into a running rank with py-spy or gdb. crosscut itself does not need it."""
    if scope is None:
        return ok("ptrace", "no restriction found")
    meaning = ("any process of yours", "a process's own parents, or root", "root only", "nobody")[min(scope, 3)]
    text = f"scope {scope}: {meaning} may look into a rank with py-spy or gdb"
    if scope == 3:
        return warn(
            "ptrace", text, "kernel.yama.ptrace_scope=3 stays until the next boot; crosscut itself is not concerned"
        )
    return ok("ptrace", text)


def temp_folder() -> Finding:
    """The launcher and its ranks exchange small files there."""
    try:
        with tempfile.TemporaryDirectory(prefix="crosscut-doctor-") as folder:
            Path(folder, "probe").write_bytes(b"x" * 4096)
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return problem("temp folder", f"cannot be written: {error.strerror}", "set TMPDIR to a folder that can")
    if free < 100 * _MIB:
        return warn("temp folder", f"{free / _MIB:,.0f} MiB free", "free some, or set TMPDIR to another disk")
    return ok("temp folder", f"writable, {free / 1e9:,.1f} GB free")


def port(environ: Mapping[str, str]) -> Finding:
    """Where ranks meet: a free port of the loopback, or what MASTER_PORT says."""
    said = environ.get("MASTER_PORT")
    try:
        place = launched(environ)
    except ValueError:
        place = None  # said under `environment`
    if said is not None and (not said.isdigit() or not 0 < int(said) < 65536):
        return problem("port", f"MASTER_PORT={said!r} is not a port", "use 1 to 65535, or unset MASTER_PORT")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", int(said or 0)))
            number = probe.getsockname()[1]
    except OSError as error:
        if said is None:
            return problem(
                "port", f"no port of the loopback is free: {error.strerror}", "look at firewall and namespaces"
            )
        if place is not None:
            return ok("port", f"MASTER_PORT={said} is in use, as it should be in a world that runs")
        return problem("port", f"MASTER_PORT={said}: {error.strerror}", "unset MASTER_PORT to take a free one")
    return ok("port", f"MASTER_PORT={said} is free" if said else f"a free one is found ({number})")


def host_name(addresses: list[str] | None, num_hosts: int, interface: str | None) -> Finding:
    """addresses: what this host's name resolves to; None: to nothing. interface: GLOO_SOCKET_IFNAME, which wins."""
    if interface:
        return ok("host name", f"not needed: GLOO_SOCKET_IFNAME={interface}")
    fix = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network interface, or correct /etc/hosts"
    if addresses is None:
        return warn("host name", "does not resolve: right for one host, not for several", fix)
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        if num_hosts > 1:
            return warn("host name", "resolves to the loopback, where other hosts find nobody", fix)
        return ok("host name", "resolves to the loopback: right for one host, not for several")
    return ok("host name", "resolves to an address of the network")


def environment(environ: Mapping[str, str]) -> Finding:
    """What a launcher has set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    said = {name: environ[name] for name in names if name in environ}
    text = ", ".join(f"{name}={value}" for name, value in said.items())
    try:
        place = launched(environ)
    except ValueError as error:
        return problem("environment", text, str(error))
    if place is not None:
        return ok("environment", f"one rank of a launched world: {text}")
    stray = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in said]
    if stray:
        return warn("environment", text, f"set without RANK; crosscut obeys them: unset {' '.join(stray)} if not meant")
    return ok("environment", text or "no variable of a launcher is set")


def num_hosts(environ: Mapping[str, str]) -> int:
    """Of the launched world; 1 otherwise."""
    try:
        place = launched(environ)
    except ValueError:
        return 1
    return 1 if place is None else -(-place.world_size // max(1, place.local_world_size))


def examine(num_gpus: int) -> list[Finding]:
    """This machine."""
    found = []
    if sys.platform != "win32":
        import resource

        found.append(open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)))
        found.append(locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], num_gpus))
    folder = Path("/dev/shm")
    found.append(shared_memory(shutil.disk_usage(folder).total if folder.is_dir() else None, num_gpus))
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    found.append(ptrace(int(scope.read_text()) if scope.is_file() else None))
    found.append(temp_folder())
    found.append(port(os.environ))
    try:
        addresses: list[str] | None = [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        addresses = None
    found.append(host_name(addresses, num_hosts(os.environ), os.environ.get("GLOO_SOCKET_IFNAME")))
    found.append(environment(os.environ))
    return found
