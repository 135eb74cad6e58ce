"""Where a configuration, a method or a page says what a paper leaves out, it names the place that was read.

`python tests/configs/test_claims.py` prints all these sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LACKS = re.compile(
    r"(does|did|do) not (say|give|print|tell|state|name|know)\b|do not have|not printed|prints? (no|none)\b"
    r"|without printing|numbers? .{0,40}(is|are) not available"
)
OF_A_PAPER = re.compile(r"\bpapers?\b|published|printed|print|We do not", re.IGNORECASE)
_PLACES = r"(?:sections? \d(?:\.\d)?|appendix [A-E]|footnote \d|\d\.\d|[A-E]\.\d|[IVX]+-[A-F](?:\.\d)?)"
PLACE = re.compile(rf"\((?:[^()]*[ ;,])?{_PLACES}(?:[ ,;:][^()]*)?\)|in {_PLACES}")
SOURCES = sorted(
    [
        *ROOT.glob("configs/papers/**/*.yaml"),
        *ROOT.glob("mpifl/algorithms/*.py"),
        *ROOT.glob("mpifl/data/scenarios/*.py"),
        ROOT / "docs" / "data.md",
    ]
)
PAPERS = ("ccfl", "emdcfl", "fedcuau", "flt", "ucfl", "fedsoft_async", "drift", "data")


def claims() -> Iterator[tuple[str, str]]:
    """Yield file and sentence of what is said to be missing in one of the five papers."""
    for path in SOURCES:
        if not {path.stem, path.parent.name} & set(PAPERS):
            continue
        text = re.sub(r"\s*\n\s*(#\s?|- >-)?\s*", " ", path.read_text())
        for sentence in re.split(r"(?<=[.:;>])\s+(?=[A-Z\"'#(])|(?<=\.)\"", text):
            if LACKS.search(sentence) and OF_A_PAPER.search(sentence):
                yield path.relative_to(ROOT).as_posix(), sentence.strip()


@pytest.mark.parametrize(("file", "sentence"), [*claims()])
def test_what_a_paper_is_said_to_leave_out_names_the_place(file, sentence):
    assert PLACE.search(sentence), f"{file}: {sentence}"


if __name__ == "__main__":
    for claim in claims():
        print(": ".join(claim))
