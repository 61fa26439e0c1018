"""One finding. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """status: "ok", "warn" (something will be slower, or work on one host only) or "problem" (training cannot work);
    text: what was found; fix: what to do about it, empty for "ok".
    """

    name: str
    status: str
    text: str
    fix: str = ""


def ok(name: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(name, "ok", text)


def warn(name: str, text: str, fix: str) -> Finding:
    """Works, but."""
    return Finding(name, "warn", text, fix)


def problem(name: str, text: str, fix: str) -> Finding:
    """Training cannot work until this is put right."""
    return Finding(name, "problem", text, fix)
