"""Names shortened to the width of a column, so that different names stay different."""

from __future__ import annotations

import bisect
import itertools
import os
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

_ELLIPSIS = "…"

_Span = tuple[int, int]
"""Start and stop of characters of a name."""


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
    """Each name in at most `width` columns, shortened in the middle.

    Names that differ stay different. A name shows its two ends, with more of the second. If several names then look
    alike, they also show the first number or word in which they differ. If this does not fit, they end in `#1`, `#2`,
    …, which is the only text that may be wider than `width`.
    """
    spans: dict[str, set[_Span]] = {name: set() for name in names}
    short = {name: _cut(name, max(1, width), ()) or name for name in spans}
    has_changed = True
    while has_changed:
        has_changed = False
        for alike in _alike(short):
            for name, span in zip(alike, _difference(alike, max(2, width // 3)), strict=True):
                text = _cut(name, width, {*spans[name], span})
                if text is not None and text != short[name]:
                    short[name], has_changed = text, True
                    spans[name].add(span)
    taken, marks = set(short.values()), itertools.count(1)
    for alike in _alike(short):
        for name in alike:
            if short[name] != name:
                short[name] = next(text for text in _numbered(name, width, marks) if text not in taken)
                taken.add(short[name])
    return [short[name] for name in names]


def _alike(short: dict[str, str]) -> list[list[str]]:
    """The groups of different names with the same short text."""
    groups: dict[str, list[str]] = {}
    for name, text in short.items():
        groups.setdefault(text, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _difference(names: Sequence[str], limit: int) -> list[_Span]:
    """In each name, the number or word that holds the first difference between these names: at most `limit`
    characters of it."""
    first = len(os.path.commonprefix(names))  # noqa: RUF071 - of characters, not of components
    start = max(first - limit // 2, min(_word_start(name, first) for name in names))
    spans: list[_Span] = []
    for name in names:
        stop = min(first + 1, len(name))
        while stop < min(len(name), start + limit) and _is_one_word(name[stop - 1 : stop + 1]):
            stop += 1
        spans.append((start, stop))
    return spans


def _word_start(name: str, position: int) -> int:
    while 0 < position < len(name) and _is_one_word(name[position - 1 : position + 1]):
        position -= 1
    return position


def _is_one_word(pair: str) -> bool:
    return pair.isalpha() or pair.isdecimal()


def _cut(name: str, width: int, spans: Iterable[_Span]) -> str | None:
    """A name with these spans and as much of its ends as fits; None if even the spans do not fit."""
    offsets = _offsets(name)
    if offsets[-1] <= width:
        return name

    def spans_with_ends(ends: int) -> list[_Span]:
        """The spans, and this number of characters at the ends: twice as many at the second as at the first."""
        head = (ends + 1) // 3
        return _merged([(0, head), *sorted(spans), (len(name) - ends + head, len(name))], offsets)

    def is_too_wide(ends: int) -> bool:
        shown = spans_with_ends(ends)
        return sum(offsets[stop] - offsets[start] for start, stop in shown) + len(shown) - 1 > width

    most = bisect.bisect_left(range(len(name)), True, key=is_too_wide) - 1
    return None if most < 0 else _ELLIPSIS.join(name[start:stop] for start, stop in spans_with_ends(most))


def _merged(spans: Iterable[_Span], offsets: Sequence[int]) -> list[_Span]:
    """Spans, ordered by their start, without overlaps and without gaps that are no wider than an ellipsis."""
    merged: list[_Span] = []
    for start, stop in spans:
        if merged and (start <= merged[-1][1] or offsets[start] - offsets[merged[-1][1]] <= 1):
            start, previous = merged.pop()
            stop = max(stop, previous)
        merged.append((start, stop))
    return merged


def _numbered(name: str, width: int, marks: Iterable[int]) -> Iterator[str]:
    for number in marks:
        mark = f"#{number}"
        yield f"{_cut(name, width - len(mark), ()) or ''}{mark}"
