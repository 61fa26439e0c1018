"""All findings of this machine, and the block that goes into a bug report."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from crosscut.doctor import hardware, software, system
from crosscut.doctor.finding import Finding

_PUBLIC = ("/dev/shm", "/etc/hosts", "/proc", "/sys")  # paths that say nothing about anybody
_PATH = re.compile(r"(?<![\w/.>-])(?:[A-Za-z]:\\|/)[\w.+@-]+(?:[/\\][\w.+@-]+)*")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")


def examine() -> list[Finding]:
    """In the order in which they are shown."""
    devices = hardware.examine()
    names = hardware.gpu_names()
    return [*software.examine(), *devices, *system.examine(len(names))]


def can_train(findings: Iterable[Finding]) -> bool:
    """No finding is a problem."""
    return all(finding.status != "problem" for finding in findings)


def names_here() -> list[str]:
    """What must not be in a bug report: this host's and this user's names and home folder, the longest first."""
    found = {socket.gethostname(), str(Path.home()), os.environ.get("USER", ""), os.environ.get("HOSTNAME", "")}
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        found.add(getpass.getuser())
    return sorted((name for name in found if len(name) > 2 and name != "root"), key=len, reverse=True)


def redact(text: str, names: Sequence[str]) -> str:
    """Without names of people and hosts, paths and network addresses."""
    for name in names:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text)
    text = _PATH.sub(lambda found: found[0] if found[0].startswith(_PUBLIC) else "<path>", text)
    return _ADDRESS.sub(lambda found: found[0] if found[0].startswith("127.") else "<address>", text)


def paste(findings: Sequence[Finding], version: str, names: Sequence[str]) -> str:
    """Plain text for a bug report."""
    width = max(len(finding.name) for finding in findings)
    lines = [f"crosscut {version}"]
    for finding in findings:
        fix = f" -> {finding.fix}" if finding.fix else ""
        lines.append(redact(f"{finding.status:<8} {finding.name:<{width}}  {finding.text}{fix}", names))
    return "\n".join(lines) + "\n"
