// Over seeds: intervals of each configuration, differences to the best, and runs that have met the target.

const SEEDS = D.seeds;
const panelsBeside = () => !narrow();

// The groups that have room: all, or the best of many.
const roomy = () => (N <= MAX_BARS ? [...Array(N).keys()] : best(D.metric.id, MAX_BARS).sort((a, b) => a - b));

// Axes of several panels: beside one another with one y axis, or below one another.
function panelAxes(titles, rowsOf, height, xMore, yMore) {
  const n = titles.length, axes = {}, beside = panelsBeside();
  titles.forEach((title, k) => {
    const suffix = k ? k + 1 : "";
    const gap = beside ? 0.03 : 62 / (height * n);
    const share = (1 - gap * (n - 1)) / n, from = k * (share + gap);
    axes[`xaxis${suffix}`] = { title: { text: title }, domain: beside ? [from, from + share] : [0, 1], anchor: beside ? "y" : `y${suffix}`, ...xMore(k) };
    if (!beside || !k) axes[`yaxis${suffix}`] = { ...yMore, domain: beside ? [0, 1] : [1 - from - share, 1 - from], anchor: `x${suffix}` };
  });
  return { axes, of: (k) => ({ xaxis: `x${k ? k + 1 : ""}`, yaxis: beside || !k ? "y" : `y${k + 1}` }) };
}

const rowAxis = (names) => ({
  tickvals: names.map((_, j) => j), ticktext: names.map((name) => escaped(short(name, narrow() ? 22 : 34))), range: [names.length - 0.4, -0.6],
  ticks: "", zeroline: false,
});

// The traces of bars in one panel: intervals, what goes on beyond them, centres, single runs.
function barTraces(bars, names, groups, unit, place) {
  const rows = bars.map((b, j) => ({ ...b, j, name: names[j], tint: colour(groups[j]), look: mark(groups[j]) })).filter((b) => b.runs);
  const held = rows.filter((b) => shown(b.low)), open = rows.filter((b) => !shown(b.high) && shown(b.end)), centred = rows.filter((b) => shown(b.centre));
  const range = (b) => (shown(b.low) ? `${number(b.low)} to ${shown(b.high) ? number(b.high) : `beyond ${number(b.end)}`}` : "no interval");
  const runs = (met) => rows.flatMap((b) => b.runs.map((value, s) => ({ b, value })).filter((_, s) => (b.met ? b.met[s] : true) === met));
  const single = (met, symbol, said) => ({
    ...place, mode: "markers", x: runs(met).map((r) => r.value), y: runs(met).map((r) => r.b.j + 0.3), marker: { symbol, size: 7, color: variable("--soft"), line: { width: 1.2, color: variable("--soft") } },
    customdata: runs(met).map((r) => escaped(r.b.name)), hovertemplate: `<b>%{customdata}</b><br>${said} %{x:.5~g}${unit}<extra></extra>`,
  });
  return [{
    ...place, type: "bar", orientation: "h", y: held.map((b) => b.j), base: held.map((b) => b.low), x: held.map((b) => (b.high ?? b.end) - b.low), width: 0.13, marker: { color: held.map((b) => b.tint) }, hoverinfo: "skip",
  }, single(true, "line-ns-open", "one run:"), single(false, "triangle-right-open", "one run ends without it at"), {
    ...place, mode: "markers", x: open.map((b) => b.end), y: open.map((b) => b.j), marker: { symbol: "triangle-right", size: 10, color: open.map((b) => b.tint) }, hoverinfo: "skip", cliponaxis: false,
  }, {
    ...place, mode: "markers", x: centred.map((b) => b.centre), y: centred.map((b) => b.j), marker: { symbol: centred.map((b) => b.look), size: 12, color: centred.map((b) => b.tint), line: { width: 1.2, color: variable("--card") } },
    customdata: centred.map((b) => [escaped(b.name), range(b)]), hovertemplate: `<b>%{customdata[0]}</b><br>%{x:.5~g}${unit}, interval %{customdata[1]}<extra></extra>`,
  }];
}

const barRow = (name, title, b) => [name, title, b.centre, b.low, shown(b.low) && !shown(b.high) ? "beyond the last run" : b.high, b.runs.map(number).join(" ")];
const BAR_HEAD = ["run", "figure", "centre", "interval from", "to", "single runs"];

function drawIntervals() {
  const groups = roomy(), names = groups.map((i) => D.groups[i].name), panels = SEEDS.intervals;
  const each = 40 + 26 * names.length, tall = panelsBeside() ? each + 70 : panels.length * (each + 62);
  const { axes, of } = panelAxes(panels.map((p) => p.title), names, each, (k) => ({ rangemode: panels[k].from_zero ? "tozero" : "normal", zeroline: false }), rowAxis(names));
  const traces = panels.flatMap((panel, k) => barTraces(groups.map((i) => panel.bars[i] ?? {}), names, groups, "", of(k)));
  const plot = chart("intervals-figure", traces, { height: tall, margin: { l: 10, r: 18, t: 30, b: 46 }, barmode: "overlay", ...axes },
    () => [BAR_HEAD, ...panels.flatMap((panel) => D.groups.flatMap((g, i) => (panel.bars[i] ? [barRow(g.name, panel.title, panel.bars[i])] : [])))]);
  plot.setAttribute("aria-label", `Dots with intervals of ${names.length} configurations: ${panels.map((p) => p.title).join("; ")}. The table below has all values.`);
}

function drawDifferences() {
  const rows = N <= MAX_BARS ? SEEDS.differences : SEEDS.differences.filter((row) => roomy().includes(row.group));
  const names = rows.map((row) => row.name);
  const traces = barTraces(rows.map((row) => row.bar), names, rows.map((row) => row.group), "", {});
  const plot = chart("differences-figure", traces, {
    height: 110 + 26 * rows.length, margin: { l: 10, r: 18, t: 30, b: 46 }, barmode: "overlay",
    xaxis: { title: { text: `difference, ${SEEDS.metric}` }, zeroline: false }, yaxis: rowAxis(names),
    shapes: [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: 0, x1: 0, line: { color: variable("--soft"), width: 1.2 } }],
  }, () => [BAR_HEAD, ...SEEDS.differences.map((row) => barRow(row.name, SEEDS.metric, row.bar))]);
  plot.setAttribute("aria-label", `Dots with intervals: ${names.length} differences to the best, ${SEEDS.metric}. The table below has all values.`);
}

function drawMet() {
  const groups = roomy(), panels = SEEDS.met;
  const each = 300, tall = panelsBeside() ? each + 46 : panels.length * (each + 30);
  const { axes, of } = panelAxes(panels.map((p) => p.title), [], each, () => ({ rangemode: "tozero" }), { range: [-0.03, 1.05], title: { text: "share of runs" } });
  const traces = panels.flatMap((panel, k) => groups.flatMap((i) => {
    const curve = panel.curves[i], name = escaped(D.groups[i].name);
    return [{
      ...of(k), x: curve.x, y: curve.y, name, mode: "lines", line: { shape: "hv", color: colour(i), width: 2, dash: dash(i) }, hovertemplate: `<b>%{fullData.name}</b><br>%{y:.3~g} of the runs by %{x:.5~g}<extra></extra>`,
    }, {
      ...of(k), x: curve.ends.map(([x]) => x), y: curve.ends.map(([, y]) => y), name, mode: "markers", marker: { symbol: "line-ns-open", size: 10, color: colour(i), line: { width: 2 } }, hovertemplate: "<b>%{fullData.name}</b><br>a run ends without it at %{x:.5~g}<extra></extra>",
    }];
  }));
  const plot = chart("met-figure", traces, { height: tall, margin: { l: 56, r: 18, t: 30, b: 46 }, ...axes },
    () => [["run", "figure", "from", "share of runs"], ...panels.flatMap((panel) => D.groups.flatMap((g, i) => panel.curves[i].x.map((x, j) => [g.name, panel.title, x, panel.curves[i].y[j]])))]);
  key("met-key", groups.map((i) => [colour(i), D.groups[i].name]));
  plot.setAttribute("aria-label", `Step lines: share of the runs of ${groups.length} configurations that have met ${SEEDS.target}. The table below has all values.`);
}

function startSeeds() {
  if (byId("intervals-figure")) drawn(drawIntervals);
  if (byId("differences-figure")) drawn(drawDifferences);
  if (byId("met-figure")) drawn(drawMet);
}
