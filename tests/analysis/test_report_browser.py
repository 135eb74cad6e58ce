"""The report in a browser: no error, curves toggle, tables sort and filter, figures say their values."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import chrome

from mpifl.analysis.comparison import Choices
from mpifl.analysis.report import report
from mpifl.results.identity import deciding
from mpifl.results.run_folder import FORMAT

pytestmark = pytest.mark.skipif(chrome.PROGRAM is None, reason="no Chromium on the PATH")

COLUMNS = (
    "round",
    "seconds",
    "virtual_seconds",
    "accuracy_mean",
    "accuracy_worst",
    "accuracy_std",
    "num_clusters",
)
COLUMNS += ("num_unplaced", "ari", "churn", "federation_bytes_up", "federation_bytes_down")
ENDS = (0.5, 0.75, 0.625)  # accuracies of three runs


def write_run(
    folder: Path, learning_rate: float, end: float, seed: int = 0, changes: Sequence[int] = ()
) -> None:
    """Write a run folder of four clients and ten rounds, whose accuracy goes straight to its end.

    Data change at the steps in `changes`.
    """
    folder.mkdir()
    config: dict[str, Any] = {
        "algorithm": {"name": "fedavg"},
        "local": {"lr": learning_rate},
        "seed": {"training": seed},
    }
    config |= {"drift": {"kind": "swap", "at": [*changes]}} if changes else {}
    (folder / "config.yaml").write_text(json.dumps(config))
    lags = {"staleness_histogram": {"0": 3, "2": 1}}
    summary = {
        **{"format": FORMAT, "algorithm": "fedavg", "digest": "0" * 64, "ranks": 1, "clients": 4},
        **{"rounds": 10, "settings": deciding(config), "identity": {}, "data": {}},
        **{"model_parameters": 10, "mpi_bytes": 0, "wall_seconds": 9.0, "asynchronous": lags},
    }
    told = [
        {"step": t, "before": 0.5, "worst": 0.25, "recovered_after": 2, "lost": 0.5, "begins_s": t - 1.0}
        for t in changes
    ]
    (folder / "summary.json").write_text(json.dumps({**summary, **({"drift": told} if changes else {})}))
    rows = [
        (t, t * t, t, end * t / 10, end * t / 20, 0.1, 2, 0, 1.0, 0.0, int(1e6 * t / end), int(1e6 * t))
        for t in range(1, 11)
    ]
    tables = {
        "metrics": [COLUMNS, *rows],
        "ledger": [("step", "direction", "kind", "bytes", "group_bytes"), (1, "up", "model", 10, 10)],
        "clusters": [("client", "cluster", "group", "placed"), *((k, k % 2, k % 2, 1) for k in range(4))],
        "assignments": [("round", "client", "cluster"), *((1, k, 0) for k in range(4)), (5, 1, 1), (5, 3, 1)],
        "clients": [("client", "cluster", "accuracy"), *((k, k % 2, 0.25 * k) for k in range(4))],
        "timing": [("round", "rank", "train"), (10, 0, 2.0), (10, 1, 3.0)],
        "events": [("time", "client", "staleness"), (1.0, 0, 0), (2.0, 1, 2)],
    }
    for name, lines in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(lines)
    np.savez(folder / "matrices.npz", parameters=np.arange(16.0).reshape(4, 4))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of three runs in a browser."""
    folder = tmp_path_factory.mktemp("browser")
    for lr, end in zip((0.1, 0.2, 0.3), ENDS, strict=True):
        write_run(folder / f"run-{lr}", lr, end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpifl.analysis.report.FORMATS", ())  # no figures for papers: they are tested elsewhere
        path = report([str(folder)], str(folder / "out"))
    with chrome.Page(path, folder / "profile") as found:
        yield found


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """The report of three seeds of two configurations in a browser."""
    folder = tmp_path_factory.mktemp("seeds")
    for lr, ends in ((0.1, (0.5, 0.625, 0.75)), (0.2, (0.625, 0.875, 0.875))):
        for seed, end in enumerate(ends):
            write_run(folder / f"run-{lr}-{seed}", lr, end, seed)
    for run, moment in zip(sorted(folder.glob("run-*")), (3, 1, 2, 6, 5, 4), strict=True):
        os.utime(run / "summary.json", (86400 * moment, 86400 * moment))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpifl.analysis.report.FIGURES", {})  # those for papers are tested elsewhere
        path = report([str(folder)], str(folder / "out"))
    with chrome.Page(path, folder / "profile") as found:
        yield found


def resized(page, width: int) -> None:
    page.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
    )
    page("redraws.forEach((redraw) => redraw())")


def test_figures_over_seeds_are_drawn_on_the_page_and_have_room_in_a_narrow_window(seeds):
    """Panels stand beside one another, or below one another at 700 pixels; a mark says its value."""
    layout = "document.querySelector('#intervals-figure .plot')._fullLayout"
    axes = [f"{layout}.{name}.domain" for name in ("xaxis", "xaxis2", "yaxis")]
    first, second, rows = (seeds(axis) for axis in axes)
    assert first[1] < second[0]
    assert rows == [0, 1]
    resized(seeds, 700)
    assert (seeds(axes[0]), seeds(axes[1])) == ([0, 1], [0, 1])
    assert seeds(axes[2])[0] > seeds(f"{layout}.yaxis2.domain")[1]
    assert seeds("document.documentElement.scrollWidth <= innerWidth")
    resized(seeds, 1280)
    bar = "document.querySelector('#intervals-figure .plot').data"
    assert seeds(f"{bar}.filter((t) => t.xaxis === 'x').at(-1).x") == [62.5, pytest.approx(79.167)]
    said = seeds("D.seeds.differences.map((row) => [row.name, row.bar.runs])")
    assert [runs for _, runs in said] == [[pytest.approx(v) for v in (-12.5, -25, -12.5)]]
    for name in ("intervals", "differences", "met"):
        assert seeds(f"byId('{name}-figure').querySelectorAll('.trace').length") > 0
    assert seeds.errors == []


def test_the_table_of_runs_has_what_each_reached_and_sorts_dates(seeds):
    titles = seeds("[...byId('runs-table').tHead.rows[0].cells].map((c) => c.textContent)")
    assert [t for t in ("accuracy, %", "worst client, %", "ARI", "MB up") if t not in titles] == []
    at = titles.index("finished")
    cells = f"[...byId('runs-table').tBodies[0].rows].map((r) => r.cells[{at}].textContent)"
    seeds(f"byId('runs-table').tHead.rows[0].cells[{at}].querySelector('button').click()")
    assert seeds(cells) == sorted(seeds(cells))
    assert len(set(seeds(cells))) == 6


CURVES = "document.querySelector('#curves-figure .plot')"
NAMES = f"{CURVES}.data.map((trace) => trace.name)"


def test_every_figure_is_drawn_without_an_error(page):
    empty = """[...document.querySelectorAll('figure')].filter((f) => f.checkVisibility() &&
        !f.querySelector('svg, table')).map((f) => f.id)"""
    assert page(empty) == []
    shown = page(
        "[...document.querySelectorAll('figure')].filter((f) => f.checkVisibility()).map((f) => f.id)"
    )
    names = ("curves", "target", "traffic", "flow", "over", "matrix", "confusion", "clients", "lags", "late")
    assert {*shown} == {f"{name}-figure" for name in (*names, "ranges", "phases")}
    assert page.errors == []


PLOTS = "[...document.querySelectorAll('figure .plot')].filter((p) => p._fullLayout && p.clientWidth)"


def test_charts_keep_their_height_and_the_page_its_width_when_the_window_changes(page):
    """A chart that adapts to the window takes the height of its element, which may be none."""
    heights = f"{PLOTS}.map((p) => p._fullLayout.height)"
    before = page(heights)
    for width in (700, 1280):
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        page(f"Promise.all({PLOTS}.map((p) => Plotly.Plots.resize(p))).then(() => null)")
        assert min(page(heights)) >= 100, "no chart is a strip"
        assert page(f"{PLOTS}.every((p) => p.clientHeight >= p._fullLayout.height)")
        assert page("document.documentElement.scrollWidth <= innerWidth")
    page("redraws.forEach((redraw) => redraw())")
    assert page(heights) == before


def test_a_table_without_room_hides_columns_that_can_be_chosen(page):
    """At 700 pixels, and not in small print; the number of seeds is 1 in all rows and goes first."""
    box, chooser = "byId('final-table').closest('.scroll')", "document.querySelector('#final .chooser')"
    fits = f"{box}.scrollWidth <= {box}.clientWidth"
    titles = "[...byId('final-table').tHead.rows[0].cells].filter((c) => !c.hidden).map((c) => c.textContent)"

    def wide(width):
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        page("redraws.forEach((redraw) => redraw())")

    page("byId('final-table').style.fontSize = '6px'")
    wide(1280)
    every = page(titles)
    assert page(f"{chooser}.hidden")
    page("byId('final-table').style.fontSize = ''")
    wide(700)
    left = page(titles)
    assert left[:2] == ["run", "accuracy, %"]
    assert len(left) < len(every)
    assert page(fits)
    assert page(f"{chooser}.querySelector('summary').textContent").startswith(f"{len(left)} of {len(every)}")
    labels = f"[...{chooser}.querySelectorAll('label')]"
    assert "seeds (1 in all)" in page(f"{labels}.map((l) => l.textContent)")
    page(f"{labels}.find((l) => l.textContent.startsWith('seeds')).click()")
    assert page(titles) == ["run", "seeds", *left[1:]]
    wide(680)
    assert page(titles) == ["run", "seeds", *left[1:]], "what was chosen stays"
    page(f"[...{chooser}.querySelectorAll('button')].find((b) => b.textContent === 'All').click()")
    assert page(titles) == every
    page(f"[...{chooser}.querySelectorAll('button')].find((b) => b.textContent !== 'All').click()")
    assert page(fits)
    wide(1280)
    assert page.errors == []


def test_staleness_is_of_a_run_of_its_own(page):
    assert page("[...document.getElementById('stale-run').options].length") == 3
    page("""{ const e = document.getElementById('stale-run');
        e.value = '2'; e.dispatchEvent(new Event('change')); }""")
    assert "uploads of fedavg, lr 0.3" in page("document.getElementById('lags-caption').textContent")
    assert "lr 0.2" in page("document.getElementById('run').selectedOptions[0].textContent")
    page("redraws.forEach((redraw) => redraw())")
    assert "uploads of fedavg, lr 0.3" in page("document.getElementById('lags-caption').textContent")


def test_a_click_on_a_name_hides_its_curve_and_a_key_brings_it_back(page):
    assert page(NAMES) == ["fedavg, lr 0.1", "fedavg, lr 0.2", "fedavg, lr 0.3"]
    page("document.querySelector('#legend [data-group=\"1\"]').click()")
    assert page(NAMES) == ["fedavg, lr 0.1", "fedavg, lr 0.3"]
    page("document.querySelector('#legend [data-group=\"1\"]').focus()")
    page.press("Enter")
    assert page(f"{NAMES}.length") == 3
    assert page("document.querySelector('#legend [data-group=\"1\"]').getAttribute('aria-pressed')") == "true"


def test_a_title_sorts_the_table_and_words_filter_it(page):
    column = "[...document.querySelectorAll('#final-table tbody tr')].map((row) => row.cells[0].textContent)"
    titles = "[...document.querySelectorAll('#final-table th button')]"
    title = f"{titles}.find((b) => b.textContent.startsWith('accuracy'))"
    page(f"{title}.click()")
    assert page(column) == ["fedavg, lr 0.1", "fedavg, lr 0.3", "fedavg, lr 0.2"]
    page(f"{title}.click()")
    assert page(column) == ["fedavg, lr 0.2", "fedavg, lr 0.3", "fedavg, lr 0.1"]
    assert page(f"{title}.parentElement.getAttribute('aria-sort')") == "descending"
    page("""{ const input = document.querySelector('[data-filters="runs-table"]');
        input.value = '0.3'; input.dispatchEvent(new Event('input')); }""")
    assert page("[...document.querySelectorAll('#runs-table tbody tr')].filter((r) => !r.hidden).length") == 1


def test_the_pointer_on_a_curve_shows_its_value(page):
    """The second run, an asynchronous one, after server step 4: 30 %, 9.333 MB, 4 s virtual, 16 s wall."""
    page(f"{CURVES}.scrollIntoView()")
    place = page(f"""(() => {{
        const plot = {CURVES}, box = plot.getBoundingClientRect(), {{ xaxis, yaxis }} = plot._fullLayout;
        return [box.x + xaxis._offset + xaxis.l2p(4), box.y + yaxis._offset + yaxis.l2p(30)];
    }})()""")
    for nudge in (3, 1, 0):
        page.move(place[0] + nudge, place[1])
        page("new Promise((done) => setTimeout(done, 120))")
    text = page(f"[...{CURVES}.querySelectorAll('.hovertext text')].map((t) => t.textContent).join(' ')")
    for word in ("fedavg, lr 0.2", "30 %", "step 4", "9.3333 MB", "4 s virtual", "16 s wall"):
        assert word in text, text


def test_target_axis_scale_and_smoothing_act_on_the_figures(page):
    def change(name, value):
        page(f"{{ const e = document.getElementById('{name}'); e.value = '{value}';"
             "e.dispatchEvent(new Event('input')); e.dispatchEvent(new Event('change')); }")  # fmt: skip

    assert page("[...document.getElementById('axis').options].map((o) => o.value)") == [
        "round",
        "bytes",
        "seconds",
    ]
    change("target", 60)  # 0.75 t / 10 >= 0.6 at t = 8, 0.625 t / 10 at t = 10; MB: t / end + t
    bars = page("document.querySelector('#target-figure .plot').data[0].x")
    np.testing.assert_allclose(bars, [8 / 0.75 + 8, 10 / 0.625 + 10, 0], rtol=1e-4)
    change("smooth", 3)
    np.testing.assert_allclose(page(f"{CURVES}.data[0].y.slice(0, 4)"), [5, 7.5, 10, 15])
    change("smooth", 1)
    change("axis", "bytes")
    np.testing.assert_allclose(page(f"{CURVES}.data[0].x[9]"), 30)
    page("document.getElementById('logx').click()")
    assert page(f"{CURVES}.layout.xaxis.type") == "log"
    assert page.errors == []


def test_a_target_that_the_page_shows_in_fewer_digits_is_met_as_in_tables(tmp_path):
    end = 0.974285714
    write_run(tmp_path / "run", 0.1, end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpifl.analysis.report.FIGURES", {})
        path = report([str(tmp_path / "run")], str(tmp_path / "out"), Choices(target=end))
    with chrome.Page(path, tmp_path / "profile") as found:
        assert found("byId('target').value") == "97.43"
        assert found("costs(chosen().target, 'round')[0].mean") == 10
        found("byId('target').value = 97.44")
        assert found("costs(chosen().target, 'round')[0].met") == 0
        assert found.errors == []


def test_a_small_target_is_met_on_the_page_where_it_is_in_tables(tmp_path):
    """Accuracies of 1e-8 % t / 10 meet 0.95e-8 % at t = 10; with a slack of 1e-9 %, they would at t = 9."""
    write_run(tmp_path / "run", 0.1, 1e-10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpifl.analysis.report.FIGURES", {})
        path = report([str(tmp_path / "run")], str(tmp_path / "out"), Choices(target=0.95e-10))
    with chrome.Page(path, tmp_path / "profile") as found:
        assert found("costs(chosen().target, 'round')[0].mean") == 10
        assert found.errors == []


def test_lines_say_where_data_change_on_every_axis_and_a_table_what_they_did(tmp_path):
    """At steps 4 and 8 of both runs; MB differ, so that lines over MB have the colours of their runs."""
    for lr, end in ((0.1, 0.5), (0.2, 0.75)):
        write_run(tmp_path / f"run-{lr}", lr, end, changes=(4, 8))
    write_run(tmp_path / "still", 0.3, 0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpifl.analysis.report.FIGURES", {})
        path = report([str(tmp_path)], str(tmp_path / "out"))
    drawn = f"{CURVES}.layout.shapes.filter((s) => s.name === 'drift').map((s) => [s.x0, s.line.color])"
    caption = "byId('curves-caption').textContent"
    with chrome.Page(path, tmp_path / "profile") as found:
        assert "Dotted lines: data change (swap from step 4, 8 on)." in found(caption)
        assert [x for x, _ in found(drawn)] == [3.5, 7.5, 3.5, 7.5], "the third run has none"
        found("show([0, 1])")
        assert [x for x, _ in found(drawn)] == [3.5, 7.5], "those that all curves share are drawn once"
        found("{ const e = byId('axis'); e.value = 'bytes'; e.dispatchEvent(new Event('change')); }")
        places = [x for x, _ in found(drawn)]
        np.testing.assert_allclose(
            places, [t / end + t for end in (0.5, 0.75) for t in (3.5, 7.5)], rtol=1e-3
        )
        colours = [found(f"colour({i})") for i in (0, 0, 1, 1)]
        assert [tint for _, tint in found(drawn)] == colours
        found("show([2])")
        assert found(drawn) == []
        assert "Dotted" not in found(caption)
        rows = found("[...byId('drift-table').tBodies[0].rows].map((r) => r.cells[2].textContent)")
        assert rows == ["4", "8", "4", "8"]
        assert found("[...document.querySelectorAll('nav a')].some((a) => a.textContent === 'Drift')")
        assert "swap (at [4, 8])" in found("byId('runs-table').textContent")
        assert found.errors == []


def test_a_report_without_drift_has_no_section_of_it(page):
    assert page("byId('drift')") is None
    assert "Dotted" not in page("byId('curves-caption').textContent")


def test_the_table_of_a_large_matrix_has_means_over_the_pairs_that_have_a_value(page):
    """61 clients; the first has 30 pairs of value 1 and 30 without: the mean is 1, not a half."""
    page("""{
        const kept = D.details[D.start].matrices, shades = new Uint8Array(61 * 61).fill(254);
        shades.fill(255, 1, 31);
        const clients = [...Array(61).keys()].map((k) => `client ${k}`);
        const cluster = clients.map(() => 0), text = btoa(String.fromCharCode(...shades));
        const drawn = [{ title: "made", low: 0, high: 1, shades: text }];
        D.details[D.start].matrices = { clients, cluster, group: null, averaged: false, drawn };
        drawMatrix();
        document.querySelector('#matrix-figure summary').click();
        window.restore = () => { D.details[D.start].matrices = kept; drawMatrix(); };
    }""")
    page("new Promise((done) => setTimeout(done, 50))")
    rows = page("[...document.querySelectorAll('#matrix-figure tbody tr')].map((r) => r.textContent)")
    page("window.restore()")
    assert rows[:2] == ["client 0mean over all others1", "client 1mean over all others1"]
    assert page.errors == []


def test_a_dark_page_is_printed_light_with_its_tables_unrolled(page):
    """On paper: light ground, dark text in charts, colours kept, no box that rolls; then dark as before."""
    ground = "getComputedStyle(document.body).backgroundColor"
    lettering = f"getComputedStyle({CURVES}.querySelector('.xtick text')).fill"
    lines = f"{CURVES}.data.map((t) => t.line.color)"
    page("{ if (!isDark()) switchTheme(); }")
    dark = [page(what) for what in (ground, lettering, lines)]
    page("dispatchEvent(new Event('beforeprint'))")
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page(ground) == "rgb(255, 255, 255)"
    assert page(lettering) == "rgb(28, 33, 39)"
    assert page("getComputedStyle(document.body).printColorAdjust") == "exact"
    assert set(page(lines)) <= set(page("LIGHT"))
    rolled = (
        "[...document.querySelectorAll('.scroll')].filter((e) => getComputedStyle(e).maxHeight !== 'none')"
    )
    assert page(f"{rolled}.length") == 0
    assert page(f"{PLOTS}.every((p) => p._fullLayout.width <= 700)"), "charts fit the paper"
    page.call("Emulation.setEmulatedMedia", media="")
    page("dispatchEvent(new Event('afterprint'))")
    assert [page(what) for what in (ground, lettering, lines)] == dark
    page("switchTheme()")
    assert page.errors == []


def test_behind_a_figure_is_its_table_and_the_theme_switches(page):
    page("document.querySelector('#clients-figure summary').click()")
    page("new Promise((done) => setTimeout(done, 50))")
    rows = page("[...document.querySelectorAll('#clients-figure tbody tr')].map((r) => r.textContent)")
    assert rows == ["3751", "2500", "1251", "000"], "client, accuracy, cluster"
    before = page("getComputedStyle(document.body).backgroundColor")
    page("document.getElementById('theme').click()")
    assert page("getComputedStyle(document.body).backgroundColor") != before
    assert page.errors == []
