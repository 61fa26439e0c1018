"""The error of this package, and the helpers that make its one-line messages say what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LayoutError(ValueError):
    """A layout, a dims table or both together are wrong. The message is one line: the offending value and the fix."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'heads'?"` for the known name nearest to `name`, else the list of all of them."""
    options = list(known)
    word = name.lower()

    def likeness(option: str) -> tuple[float, bool, bool]:  # ties: pd is dp, not pp; tpp is tp, not pp
        ratio = difflib.SequenceMatcher(None, word, option).ratio()
        return ratio, sorted(word) == sorted(option), word[:1] == option[:1]

    best = max(options, key=likeness, default="")
    close = best and likeness(best)[0] >= 0.5
    return f"; did you mean {best!r}?" if close else f"; known: {', '.join(options)}"


def divisors(n: int, limit: int = 12) -> str:
    """The divisors of `n` as `{1,2,3,6}`; the middle is left out when there are more than `limit`."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    found = sorted({*small, *(n // d for d in small)})
    if len(found) > limit:
        return "{" + ",".join(map(str, found[:limit])) + ",...}"
    return "{" + ",".join(map(str, found)) + "}"


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Names joined by commas; what is beyond `limit` is counted."""
    items = list(names)
    more = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {more} more" if more > 0 else "")
