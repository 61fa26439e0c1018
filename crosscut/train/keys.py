"""The keys of a config section: type, default and bounds in one line each, checked strictly. No torch.

A section is a frozen dataclass whose fields are made with `key(default, least=..., ...)`. Checking it here rather than
with a validation library keeps `crosscut explain` fast: importing one takes longer than a derivation.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", dict: "a table"}
_SIGNS = {"least": ">=", "above": ">", "most": "<=", "below": "<"}


def key(default: Any, **bounds: Any) -> Any:
    """A key with its default. Bounds: `least`, `above`, `most`, `below` for numbers, `choices` for strings."""
    return dataclasses.field(default=default, metadata=bounds)


@cache
def keys_of(section: type) -> dict[str, Any]:
    """The keys of a section with the type of each, in order."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def default_of(section: type, name: str) -> Any:
    """The default of a key."""
    return getattr(section(), name)


def takes_text(section: type, name: str) -> bool:
    """Whether the key's value is a string."""
    return str in _kinds(keys_of(section)[name])


def takes_numbers(section: type, name: str) -> int:
    """How many numbers a list-valued key takes; 0 for other keys."""
    hint = keys_of(section)[name]
    return len(get_args(hint)) if get_origin(hint) is tuple else 0


def mistake(section: type, name: str, value: Any) -> str | None:
    """What is wrong with `value` for the key, as the end of a sentence ("must be ..."); None if nothing is."""
    field = next(f for f in dataclasses.fields(section) if f.name == name)
    count = takes_numbers(section, name)
    if count:
        if not (isinstance(value, (list, tuple)) and len(value) == count and all(_fits(item, float) for item in value)):
            return f"must be a list of {count} numbers"
        return next((f"each {found}" for item in value if (found := _out_of_bounds(item, field.metadata))), None)
    kinds = _kinds(keys_of(section)[name])
    if not any(_fits(value, kind) for kind in kinds):
        return f"must be {' or '.join(_NAMES[kind] for kind in kinds if kind is not types.NoneType)}"
    if value is None:
        return None
    return _out_of_bounds(value, field.metadata)


def made(section: type, values: Mapping[str, Any]) -> Any:
    """The section with `values`, all of which are right, and defaults for the rest."""
    return section(
        **{name: tuple(v) if isinstance(v, list) and takes_numbers(section, name) else v for name, v in values.items()}
    )


def _kinds(hint: Any) -> tuple[type, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return get_args(hint)
    return (get_origin(hint) or hint,)


def _fits(value: Any, kind: type) -> bool:
    """Strict: "100" is no number, and a truth value is none either; a whole number does for a number."""
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _out_of_bounds(value: Any, bounds: Mapping[str, Any]) -> str | None:
    if "choices" in bounds and value not in bounds["choices"]:
        return f"must be one of {', '.join(map(repr, bounds['choices']))}"
    inside = {
        "least": lambda limit: value >= limit,
        "above": lambda limit: value > limit,
        "most": lambda limit: value <= limit,
        "below": lambda limit: value < limit,
    }
    if isinstance(value, float) and not math.isfinite(value):
        return "must be finite"
    if isinstance(value, (int, float)) and abs(value) >= 2**63:  # torch would overflow, after the start
        return "must be below 2^63"
    limits = {name: limit for name, limit in bounds.items() if name in inside}
    if all(inside[name](limit) for name, limit in limits.items()):
        return None
    return f"must be {' and '.join(f'{_SIGNS[name]} {limit}' for name, limit in limits.items())}"
