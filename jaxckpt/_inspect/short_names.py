"""Names shortened to the width of a column, so that different names stay different."""

from __future__ import annotations

import bisect
import collections
import itertools
import unicodedata
from collections.abc import Sequence

_ELLIPSIS = "…"


def display_width(text: str) -> int:
    """Width of a text on a terminal."""
    return len(text) if text.isascii() else sum(map(_char_width, text))


def _char_width(char: str) -> int:
    return 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _offsets(text: str) -> Sequence[int]:
    """The display width of each prefix of a text."""
    if text.isascii():
        return range(len(text) + 1)
    return list(itertools.accumulate(map(_char_width, text), initial=0))


def shorten_end(text: str, width: int) -> str:
    """A text of at most `width` columns: its start, and an ellipsis if the end is cut."""
    offsets = _offsets(text)
    if offsets[-1] <= width:
        return text
    return f"{text[: max(0, bisect.bisect_right(offsets, width - 1) - 1)]}{_ELLIPSIS}"


def shorten_names(names: Sequence[str], width: int) -> list[str]:
    """Each name in at most `width` columns, shortened in the middle, with more of its end than of its start.

    Names that differ stay different: those that would look alike are not shortened.
    """
    short = {name: _shorten_middle(name, width) for name in names}
    uses = collections.Counter(short.values())
    return [short[name] if uses[short[name]] == 1 else name for name in names]


def _shorten_middle(name: str, width: int) -> str:
    offsets = _offsets(name)
    if offsets[-1] <= width:
        return name
    head = bisect.bisect_right(offsets, width // 3) - 1
    room = width - len(_ELLIPSIS) - offsets[head]
    tail = bisect.bisect_left(offsets, offsets[-1] - room)
    return f"{name[:head]}{_ELLIPSIS}{name[tail:]}"
