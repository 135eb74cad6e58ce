"""Where a configuration, a method or a page says what a paper leaves out, it names the place that was read.

`python tests/configs/test_claims.py` prints all these sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.each import for_each

ROOT = Path(__file__).parents[2]
LACKS = re.compile(
    r"(does|did|do) not (say|give|print|tell|state|name|know|mention|specify|describe|explain|report)\b"
    r"|do not have|not printed|(prints?|gives?) (no|none)\b|without printing"
    r"|numbers? .{0,40}(is|are) not available"
)
OF_A_PAPER = re.compile(r"\bpapers?\b|published|printed|print|We do not", re.IGNORECASE)
_PLACES = (
    r"(?:sections? \d(?:\.\d)?|appendix [A-E]|footnote \d|[1-9]\.\d(?!\d)|[A-E]\.\d|[IVX]+-[A-F](?:\.\d)?)"
)
PLACE = re.compile(rf"\((?:[^()]*[ ;,])?{_PLACES}(?:[ ,;:][^()]*)?\)|in {_PLACES}")
SOURCES = sorted(
    [
        *ROOT.glob("configs/papers/**/*.yaml"),
        *ROOT.glob("mpifl/algorithms/*.py"),
        *ROOT.glob("mpifl/data/scenarios/*.py"),
        *ROOT.glob("mpifl/models/*.py"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/notes/*.md"),
    ]
)


def claims_of(text: str) -> Iterator[str]:
    """Yield the sentences of a text that say what is missing in a paper."""
    text = re.sub(r"\s*\n\s*(#\s?|- >-)?\s*", " ", text)
    for sentence in re.split(r"(?<=[.:;>])\s+(?=[A-Z\"'#(])|(?<=\.)\"", text):
        if LACKS.search(sentence) and OF_A_PAPER.search(sentence):
            yield sentence.strip()


CLAIMS = [
    (path.relative_to(ROOT).as_posix(), found) for path in SOURCES for found in claims_of(path.read_text())
]


@for_each(("file", "sentence"), CLAIMS)
def test_what_a_paper_is_said_to_leave_out_names_the_place(file, sentence):
    assert PLACE.search(sentence), f"{file}: {sentence}"


def test_claims_are_found_in_sources_of_every_kind():
    for folder in ("configs", "mpifl", "docs"):
        assert any(file.startswith(f"{folder}/") for file, _ in CLAIMS), folder


@pytest.mark.parametrize(
    ("sentence", "claims", "named"),
    [
        ("The paper gives no channels: 32 are taken.", True, False),
        ("Without momentum, which the paper does not mention, it is 96.6.", True, False),
        ("Without momentum, which the paper does not mention (4.1), it is 96.6.", True, True),
        ("The paper prints none of its numbers (ours: 0.83).", True, False),
        ("The paper does not explain it (5.25 points).", True, False),
        ("The paper says 0.83 (5.2).", False, True),
    ],
)
def test_a_claim_and_its_place_are_told_from_other_sentences(sentence, claims, named):
    assert bool([*claims_of(sentence)]) == claims
    assert bool(PLACE.search(sentence)) == named


if __name__ == "__main__":
    for claim in CLAIMS:
        print(": ".join(claim))
