"""A small TOML writer for flat sections of strings, numbers, booleans and lists of them: what layout files need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def write_value(value: object) -> str:
    """One value as TOML. Raises TypeError for what a layout file never holds."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML basic string
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(write_value(v) for v in value) + "]"
    raise TypeError(f"cannot write {type(value).__name__} as TOML")


def write_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of keys as TOML text; empty sections are kept (an empty [cuts] means: nothing is cut)."""
    blocks = []
    for name, body in sections.items():
        width = max((len(k) for k in body), default=0)
        lines = [f"[{name}]", *(f"{key:<{width}} = {write_value(value)}" for key, value in body.items())]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"
