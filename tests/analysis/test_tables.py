"""Tables in four forms: alignment, marks, escapes, width; LaTeX is read by a small parser."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mpifl.analysis.report_page import as_html
from mpifl.analysis.tables import (
    BEST,
    COLUMN_PT,
    TIED,
    Cell,
    Table,
    as_latex,
    as_markdown,
    as_text,
    escaped,
    narrowed,
    too_wide,
    width_pt,
)

MARKED = Table(
    ("run", "accuracy, %", "MB to target"),
    (
        (Cell("a_b & c"), Cell("91.00 +- 0.50", BEST), Cell("12 [3, inf]", TIED)),
        (Cell("x|y"), Cell("8.00 +- 1.50"), Cell("> 40")),
    ),
    ("target: 50 %",),
)
NASTY = ["100 % #1", "a_b^c ~ {d} & $e$", "\\begin{x}", "<p> +- |q|"]


def lint(text: str) -> int:
    """Check LaTeX as a compiler's first pass would; return the number of rows of the table.

    Raises:
        AssertionError: Braces or environments do not match, a special character is bare, or rows differ in
            their number of cells.
    """
    lines = [line for line in text.splitlines() if not line.startswith("%")]
    body = "\n".join(lines)
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", body):
        depth += 1 if brace == "{" else -1
        assert depth >= 0
    assert depth == 0
    begun, ended = (re.findall(rf"\\{word}{{(\w+)}}", body) for word in ("begin", "end"))
    assert begun == ended[::-1] == ["tabular"]
    spec = re.search(r"\\begin{tabular}{@{}(\w+)@{}}", body)
    assert spec
    rows = [line for line in lines if line.endswith(r" \\")]
    for row in rows:
        assert len(re.findall(r"(?<!\\)&", row)) == len(spec[1]) - 1
        assert not re.search(r"(?<!\\)[#_^~]", re.sub(r"\$[^$]*\$", "", row))
        assert not re.search(r"(?<!\\)%", row)
        assert len(re.findall(r"(?<!\\)\$", row)) % 2 == 0
    assert [body.count(rf"\{rule}") for rule in ("toprule", "midrule", "bottomrule")] == [1, 1, 1]
    return len(rows) - 1


def test_marks_in_every_form():
    text = as_text(MARKED).splitlines()
    assert text[1] == "a_b & c  91.00 +- 0.50 *   12 [3, inf] ~"
    assert text[2] == "x|y       8.00 +- 1.50            > 40"
    assert as_text(MARKED, bold=True).count("\033[1m91.00 +- 0.50 *\033[0m") == 1
    marked = as_markdown(MARKED)
    assert "| a_b & c | **91.00 ± 0.50** | 12 [3, ∞] ≈ |" in marked
    assert "| x\\|y | 8.00 ± 1.50 | > 40 |" in marked
    assert marked.endswith("\ntarget: 50 %\n")
    page = as_html(MARKED)
    assert "a_b &amp; c</th><td><b>91.00 &plusmn; 0.50</b></td><td>12 [3, &infin;] &asymp;</td>" in page
    latex = as_latex(MARKED)
    assert r"a\_b \& c & \textbf{91.00 $\pm$ 0.50} & 12 [3, $\infty$]$^{\sim}$ \\" in latex
    assert r"x|y & 8.00 $\pm$ 1.50 & $>$ 40 \\" in latex
    assert latex.startswith("% target: 50 %\n")
    assert lint(latex) == 2


def test_notes_explain_the_marks_of_their_form():
    """In Markdown, a note that begins with `* ` is an entry of a list, and its star is gone."""
    table = replace(MARKED, notes=("* best: every other is worse; ~ not distinguishable",))
    assert as_markdown(table).endswith("\n**bold**: best: every other is worse; ≈ not distinguishable\n")
    assert as_latex(table).startswith("% bold: best: every other is worse; ~ not distinguishable\n")


def test_infinity_is_a_figure_and_no_part_of_a_word():
    row = (
        Cell("informed"),
        Cell("inf +- inf"),
        Cell("[-inf, inf]"),
        Cell("info, inf"),
        Cell("inf_x 1e+inf2"),
    )
    table = Table(("run", "a", "b", "c", "d"), (row,))
    assert as_markdown(table).count("| informed | ∞ ± ∞ | [-∞, ∞] | info, ∞ | inf_x 1e+inf2 |") == 1
    cells = ("informed", "&infin; &plusmn; &infin;", "[-&infin;, &infin;]", "info, &infin;", "inf_x 1e+inf2")
    assert f'<th scope="row">{cells[0]}</th>' in as_html(table)
    assert "".join(f"<td>{cell}</td>" for cell in cells[1:]) in as_html(table)
    assert (
        r"informed & $\infty$ $\pm$ $\infty$ & [-$\infty$, $\infty$] & info, $\infty$ & inf\_x 1e+inf2"
        in as_latex(table)
    )


def test_the_first_column_has_its_marks_and_signs():
    table = Table(
        ("accuracy, %", "run"), ((Cell("91.0 +- 0.5", BEST), Cell("a")), (Cell("9 +- inf", TIED), Cell("b")))
    )
    assert [line[:19] for line in as_text(table).splitlines()[1:]] == [
        "91.0 +- 0.5 *    a",
        "9 +- inf ~       b",
    ]
    assert as_markdown(table).splitlines()[2:] == ["| **91.0 ± 0.5** | a |", "| 9 ± ∞ ≈ | b |"]
    assert '<th scope="row"><b>91.0 &plusmn; 0.5</b></th>' in as_html(table, "t")
    assert '<th scope="row">9 &plusmn; &infin; &asymp;</th>' in as_html(table)
    assert r"\textbf{91.0 $\pm$ 0.5} & a" in as_latex(table)


def test_brackets_and_stars_that_begin_a_row_are_no_arguments_of_latex():
    """`\\\\` and rules of booktabs look for them behind the end of the line, too."""
    table = Table(
        ("[a] method of [ours]", "n"), tuple((Cell(text), Cell("1")) for text in ("[ours]", "*", "a"))
    )
    lines = as_latex(table).splitlines()
    assert [line for line in lines if line.endswith(r"& 1 \\")] == [
        r"{}[ours] & 1 \\",
        r"{}* & 1 \\",
        r"a & 1 \\",
    ]
    assert r"\shortstack{{}[a] method\\of [ours]} & n \\" in lines
    assert lint(as_latex(table)) == 3


def test_columns_are_aligned_with_and_without_marks():
    lines = as_text(MARKED).splitlines()
    assert lines[0].index("%") == lines[1].index(" *") - 1
    table = Table.of(["run", "b"], [["a", "1"], ["cc", "22"]])
    assert as_text(table) == "run   b\na     1\ncc   22"


def test_nothing_of_a_label_is_a_command_of_latex():
    table = Table.of(["run", NASTY[0]], [[NASTY[0], NASTY[0]]])
    assert lint(as_latex(table)) == 1
    assert lint(as_latex(Table.of(["run", "x"], [[text, text] for text in NASTY]))) == len(NASTY)
    assert escaped("5 % of a_b") == r"5 \% of a\_b"
    assert escaped("\\") == r"\textbackslash{}"


def test_the_parser_of_this_test_finds_what_a_compiler_would():
    good = as_latex(MARKED)
    for old, new in ((r"\&", "&"), (r"\_", "_"), (r"\end{tabular}}", r"\end{tabular}"), ("$>$", "$>")):
        assert old in good
        with pytest.raises(AssertionError):
            lint(good.replace(old, new, 1))


def test_a_table_is_set_in_the_largest_size_that_fits_a_column():
    """Ten digits of 5.1 pt in a second column: 51 pt and two gaps of 3 pt, beside the first column."""
    narrow = Table(("run", "n"), ((Cell("i" * 10), Cell("0" * 10)),))
    assert width_pt(narrow) == pytest.approx(29 + 51 + 6)
    assert r"{\small" in as_latex(narrow)
    sizes = {
        name: as_latex(narrow, width_pt(narrow) * s)
        for name, s in (("small", 0.9), ("footnotesize", 0.8), ("scriptsize", 0.7))
    }
    for name, text in sizes.items():
        assert rf"{{\{name}\setlength" in text
    assert too_wide(narrow) == ""
    assert "pt wide in scriptsize, a paper's column has 40" in too_wide(narrow, 40)
    assert "choose --columns" in as_latex(narrow, 40)


def test_columns_that_do_not_fit_are_left_out_the_least_wanted_first():
    titles = tuple(f"column {i}" for i in range(12))
    table = Table(("run", *titles), ((Cell("method"), *(Cell("00.00 +- 00.00") for _ in titles)),))
    kept, left_out = narrowed(table, ("column 7", "column 3"))
    assert width_pt(kept) * 0.8 <= COLUMN_PT < width_pt(table) * 0.7
    assert kept.columns[0] == "run"
    assert {"column 3", "column 7"} <= set(kept.columns)
    assert list(kept.columns[1:]) == sorted(kept.columns[1:])
    assert set(kept.columns) | set(left_out) == set(table.columns)
    assert narrowed(MARKED, ())[1] == ()
