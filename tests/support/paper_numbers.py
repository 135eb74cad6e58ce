"""The numbers of tables and figures of papers, as texts name them."""

from __future__ import annotations

import re

ROMAN = {"I": "1", "II": "2", "III": "3", "IV": "4", "V": "5"}


def mentions(text: str, kind: str) -> list[set[str]]:
    """Return the numbers that each mention names: `Tables 1 and 7`, `Figures 14 to 17`, `Table I`."""
    found = []
    for named in re.findall(rf"{kind}s? ((?:(?:\d+|[IV]+)(?: ?\([a-e]\)|[a-e])?(?:, | and | to )?)+)", text):
        numbers = [ROMAN.get(n, n) for n in re.findall(r"\d+|[IV]+", named)]
        between = range(int(numbers[-2]), int(numbers[-1])) if " to " in named else ()
        found.append({*numbers, *map(str, between)})
    return found
