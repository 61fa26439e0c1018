"""Reading TOML with one-line errors, and writing the few kinds of value that a config holds. No torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same code under its old name
    import tomli as tomllib


def read(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ValueError naming the file if it is missing, unreadable or not TOML."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    return parse(text, str(path))


def parse(text: str, name: str) -> dict[str, Any]:
    """The tables of TOML text; `name` stands in the ValueError if it is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name}: not valid TOML: {error}") from None


def literal(text: str) -> Any:
    """The value of `text` as on the right of a TOML `=`; a word that is no TOML value is itself, a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def dump(value: Any) -> str:
    """`value` as TOML on one line: str, bool, int, float, lists, and mappings as inline tables."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(dump(item) for item in value) + "]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{dump(str(key))} = {dump(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    raise TypeError(f"no TOML form for {value!r}")
