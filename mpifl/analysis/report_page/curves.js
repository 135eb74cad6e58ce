// The curves with their legend and target, what the target costs, and bytes by kind.

const N = D.groups.length;
const FIRST_SHOWN = 10; // curves at the start, where there are more than twice as many
const state = {
  visible: new Set(),
  hovered: null,
};

function lastOf(i, metric) {
  const y = D.curves.groups[i].y[metric]?.[0];
  return y ? y.findLast(shown) : undefined;
}

// The groups with the best ends, as tables have it; in their order where no end is better than another.
function best(metric, count) {
  const better = D.curves.metrics.find((m) => m.id === metric)?.better ?? 0;
  return [...Array(N).keys()].filter((i) => shown(lastOf(i, metric)))
    .sort((a, b) => better * (lastOf(b, metric) - lastOf(a, metric))).slice(0, count);
}

function smoothed(values, width) {
  if (width < 2) return values;
  return values.map((value, i) => {
    const near = values.slice(Math.max(0, i - width + 1), i + 1).filter(shown);
    return shown(value) && near.length ? near.reduce((a, b) => a + b, 0) / near.length : value;
  });
}

function chosen() {
  const metric = D.curves.metrics.find((m) => m.id === byId("metric").value);
  const axis = D.curves.axes.find((a) => a.id === byId("axis").value);
  const typed = parseFloat(byId("target").value);
  const target = typed === rounded(D.target) ? D.target : typed; // the field shows it in four digits
  return { metric, axis, target, width: Number(byId("smooth").value), logX: byId("logx").checked, logY: byId("logy").checked, bands: byId("bands").checked };
}

// Where data change in the curves that are shown: lines in soft grey where all curves share them, otherwise in the colour of the curve.
const MAX_CHANGES = 60; // lines; more would hide the curves

function changes(axis, logX, which) {
  const found = which.map((i) => [i, (D.curves.groups[i].drift?.x[axis.id] ?? []).filter((x) => shown(x) && (!logX || x > 0))]).filter(([, xs]) => xs.length);
  const alike = found.length === which.length && found.every(([, xs]) => xs.join() === found[0][1].join());
  const lines = alike && found.length ? found[0][1].map((x) => [x, variable("--soft")]) : found.flatMap(([i, xs]) => xs.map((x) => [x, colour(i)]));
  if (lines.length > MAX_CHANGES) return [];
  return lines.map(([x, tint]) => ({ name: "drift", type: "line", layer: "below", yref: "paper", y0: 0, y1: 1, x0: x, x1: x, line: { color: tint, width: 1.2, dash: "dot" } }));
}

function changesInWords(which) {
  const said = new Set(which.map((i) => D.curves.groups[i]).filter((g) => g.drift).map(({ drift, word }) => `${drift.kind} from ${word} ${drift.steps.map(number).join(", ")} on`));
  return said.size && said.size <= 4 ? ` Dotted lines: data change (${[...said].join("; ")}).` : said.size ? " Dotted lines: data change." : "";
}

function drawCurves() {
  const { metric, axis, target, width, logX, logY, bands } = chosen();
  const traces = [];
  const few = [...state.visible].length <= 8;
  for (const i of [...state.visible].sort((a, b) => a - b)) {
    const curve = D.curves.groups[i];
    const values = curve.y[metric.id];
    if (!values || !curve.x[axis.id]) continue;
    const x = curve.x[axis.id];
    const [mean, low, high] = values.map((v) => smoothed(v, width));
    if (low && bands) {
      const there = x.map((_, j) => j).filter((j) => shown(low[j]) && shown(high[j]));
      const back = [...there].reverse();
      traces.push({
        x: [...there, ...back].map((j) => x[j]), y: [...there.map((j) => low[j]), ...back.map((j) => high[j])],
        fill: "toself", mode: "lines", line: { width: 0 }, fillcolor: colour(i), opacity: 0.16, hoverinfo: "skip", showlegend: false,
      });
    }
    const faded = state.hovered !== null && state.hovered !== i;
    const about = x.map((_, j) => {
      const places = D.curves.known.filter((a) => curve.x[a.id]).map((a) => (a.id === "round" ? `${curve.word} ${number(curve.x.round[j])}` : withUnit(curve.x[a.id][j], a.unit) + (a.id === "seconds" ? " wall" : a.id === "virtual_seconds" ? " virtual" : "")));
      const band = low && shown(low[j]) ? ` (${number(low[j])} to ${number(high[j])})` : "";
      return [band, places.join(", ")];
    });
    const marked = x.length <= 40;
    traces.push({
      x, y: mean, name: escaped(D.groups[i].name), mode: marked ? "lines+markers" : "lines", connectgaps: true, customdata: about,
      line: { color: colour(i), width: state.hovered === i ? 3.5 : few ? 2.2 : 1.6, dash: dash(i) }, opacity: faded ? 0.22 : 1,
      marker: { symbol: mark(i), size: x.length <= 12 ? 8 : 6, color: colour(i) },
      hovertemplate: `<b>%{fullData.name}</b><br>%{y:.5~g}${metric.unit ? ` ${metric.unit}` : ""}%{customdata[0]}<br>%{customdata[1]}<extra></extra>`,
    });
  }
  const visible = [...state.visible];
  const shapes = changes(axis, logX, visible), marks = []; // the target's name stands outside of the axes: no curve runs through it
  if (metric.id === D.metric.id && Number.isFinite(target)) {
    shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: target, y1: target, line: { color: variable("--soft"), width: 1.3, dash: "dash" } });
    marks.push({ xref: "paper", x: 1, y: logY ? Math.log10(target) : target, xanchor: "left", yanchor: "middle", align: "left", showarrow: false, text: ` target<br> ${withUnit(rounded(target), D.metric.unit)}`, font: { size: 11, color: variable("--soft") } });
  }
  const unit = metric.unit ? `, ${metric.unit}` : "";
  const title = metric.title + unit;
  chart("curves-figure", traces, {
    height: narrow() ? 360 : 460, shapes, annotations: marks, margin: { l: 56, r: marks.length ? 66 : 16, t: 30, b: 46 }, hovermode: "closest",
    xaxis: { type: logX ? "log" : "linear", title: { text: axis.title + (axis.unit ? `, ${axis.unit}` : "") }, rangemode: logX ? "normal" : "tozero" },
    yaxis: { type: logY ? "log" : "linear", title: { text: narrow() ? short(title, 34) : title } },
  }, () => curveRows(metric, axis));
  const smooth = width > 1 ? ` Smoothed: each point is the mean of the last ${width} evaluations.` : "";
  byId("curves-caption").textContent = `${metric.title} against ${axis.title}${N > 1 ? `; ${state.visible.size} of ${N} shown` : ""}.${smooth}${shapes.some((s) => s.name) ? changesInWords(visible) : ""}`;
  const plot = byId("curves-figure").querySelector(".plot");
  plot.setAttribute("aria-label", `Line chart: ${metric.title} against ${axis.title}. ${best(metric.id, 3).map((i) => `${D.groups[i].name} ends at ${withUnit(lastOf(i, metric.id), metric.unit)}`).join("; ")}. The table below has all values.`);
  byId("bands").closest("label").hidden = !D.groups.some((g) => g.seeds > 1);
}

function curveRows(metric, axis) {
  const rows = [["run", axis.title, "round", `${metric.title}${metric.unit ? `, ${metric.unit}` : ""}`, "least over seeds", "most over seeds"]];
  for (const i of state.visible) {
    const curve = D.curves.groups[i];
    const [mean, low, high] = curve.y[metric.id] || [[]];
    mean.forEach((value, j) => rows.push([D.groups[i].name, curve.x[axis.id]?.[j], curve.x.round[j], value, low?.[j], high?.[j]]));
  }
  return D.groups.some((g) => g.seeds > 1) ? rows : rows.map((row) => row.slice(0, 4));
}

// -- legend -----------------------------------------------------------------------------------------------

const SHAPES = { // of the marks of curves, around (0, 0)
  "circle": "M-3.2,0a3.2,3.2 0 1 0 6.4,0a3.2,3.2 0 1 0 -6.4,0", "square": "M-3,-3h6v6h-6z", "triangle-up": "M0,-3.6L3.6,2.8H-3.6z", "diamond": "M0,-4L4,0L0,4L-4,0z",
  "x": "M-3,-3L3,3M3,-3L-3,3", "cross": "M-3.6,0H3.6M0,-3.6V3.6", "star": "M0,-4L1.1,-1.3L4,-1.2L1.7,.6L2.5,3.4L0,1.8L-2.5,3.4L-1.7,.6L-4,-1.2L-1.1,-1.3z", "pentagon": "M0,-3.6L3.4,-1.1L2.1,2.9H-2.1L-3.4,-1.1z",
};

function swatch(i) {
  const dashes = { solid: "", dash: "6 3", dot: "2 3", dashdot: "6 3 2 3" }[dash(i)];
  const holder = element("span", { "aria-hidden": "true" });
  holder.innerHTML = `<svg width="34" height="12"><line x1="1" x2="33" y1="6" y2="6" stroke="${colour(i)}" stroke-width="2.5" stroke-dasharray="${dashes}"/><path d="${SHAPES[mark(i)]}" transform="translate(17 6)" fill="${colour(i)}" stroke="${colour(i)}"/></svg>`;
  return holder;
}

function drawLegend() {
  const metric = chosen().metric;
  const wanted = (byId("legend-filter").value || "").toLowerCase();
  const focused = document.activeElement?.dataset?.group;
  const order = N > 2 * FIRST_SHOWN ? best(metric.id, N) : []; // a long list begins with the best
  const items = [...new Set([...order, ...Array(N).keys()])].filter((i) => D.groups[i].name.toLowerCase().includes(wanted)).map((i) => {
    const value = lastOf(i, metric.id);
    const button = element("button", { type: "button", "aria-pressed": state.visible.has(i), "data-group": i, title: `${D.groups[i].name}: click shows or hides it, double click shows it alone` },
      swatch(i), element("span", { class: "name" }, D.groups[i].name), element("span", { class: "value" }, shown(value) ? number(Number(value.toPrecision(4))) : "–"));
    button.addEventListener("click", () => toggle(i));
    button.addEventListener("dblclick", () => show([i]));
    const hover = (which) => { state.hovered = which; if (state.visible.size > 1) drawCurves(); };
    button.addEventListener("mouseenter", () => hover(i));
    button.addEventListener("mouseleave", () => hover(null));
    return button;
  });
  byId("legend").replaceChildren(...items);
  if (focused !== undefined) byId("legend").querySelector(`[data-group="${focused}"]`)?.focus();
}

function toggle(i) {
  if (!state.visible.delete(i)) state.visible.add(i);
  byId("legend").querySelector(`[data-group="${i}"]`)?.setAttribute("aria-pressed", state.visible.has(i));
  drawCurves();
}

function show(which) {
  state.visible = new Set(which);
  drawLegend();
  drawCurves();
}

// -- the target -------------------------------------------------------------------------------------------

const MAX_BARS = 40;

function costs(target, axis) {
  const place = 1 + D.curves.known.findIndex((a) => a.id === axis);
  return D.groups.map((group, i) => {
    const met = D.curves.groups[i].records.map((records) => records.find((r) => D.metric.better * r[0] >= D.metric.better * target - 1e-9 * Math.abs(target))?.[place]).filter(shown);
    const mean = met.length ? met.reduce((a, b) => a + b, 0) / met.length : null;
    return { i, name: group.name, seeds: group.seeds, met: met.length, mean, low: Math.min(...met), high: Math.max(...met) };
  });
}

function drawTarget() {
  const { target } = chosen();
  const axis = D.curves.known.find((a) => a.id === byId("cost").value);
  const all = costs(target, axis.id).sort((a, b) => (b.met === b.seeds) - (a.met === a.seeds) || (a.mean ?? Infinity) - (b.mean ?? Infinity)); // first those whose seeds all reach it
  const reached = all.filter((b) => b.met).length;
  const bars = N <= MAX_BARS ? all : all.slice(0, Math.min(reached + 3, MAX_BARS)); // of many, few that never reach it
  const lowest = bars.find((b) => b.mean > 0 && b.met === b.seeds)?.mean;
  const spread = (b) => b.met > 1 && b.high > b.low;
  const far = bars.map((b, j) => (spread(b) ? j : -1)).filter((j) => j >= 0); // bars with whiskers
  const room = narrow() ? 22 : 44;
  const text = bars.map((b) => (b.met ? ` ${withUnit(Number(b.mean.toPrecision(4)), axis.unit)}${b.met < b.seeds ? ` (${b.met} of ${b.seeds} seeds)` : ""}${lowest && b.met === b.seeds && b.mean > lowest * 1.005 ? `, ${number(Number((b.mean / lowest).toPrecision(3)))}×` : ""}` : " not reached"));
  const plot = chart("target-figure", [{
    type: "bar", orientation: "h", y: bars.map((_, j) => j), x: bars.map((b) => b.mean ?? 0), text, textposition: bars.map((b) => (spread(b) ? "none" : "outside")), cliponaxis: false,
    marker: { color: bars.map((b) => colour(b.i)), opacity: bars.map((b) => (b.met < b.seeds ? 0.55 : 1)) }, customdata: bars.map((b) => escaped(b.name)), hovertemplate: "<b>%{customdata}</b><br>%{text}<extra></extra>",
  }, {
    mode: "markers", y: far, x: far.map((j) => bars[j].mean), marker: { size: 1, color: variable("--soft") }, hoverinfo: "skip", cliponaxis: false,
    error_x: { type: "data", symmetric: false, array: far.map((j) => bars[j].high - bars[j].mean), arrayminus: far.map((j) => bars[j].mean - bars[j].low), thickness: 1.2, width: 3, color: variable("--soft") },
  }, { // behind the whiskers
    mode: "text", y: far, x: far.map((j) => bars[j].high), text: far.map((j) => ` ${text[j]}`), textposition: "middle right", cliponaxis: false, hoverinfo: "skip",
  }], {
    height: 94 + 26 * bars.length, bargap: 0.3, margin: { l: 10, r: 150, t: 30, b: 44 },
    yaxis: { tickvals: bars.map((_, j) => j), ticktext: bars.map((b) => escaped(short(b.name, room))), autorange: "reversed", showgrid: false, ticks: "", zeroline: false },
    xaxis: { title: { text: `until the target: ${axis.title}${axis.unit ? `, ${axis.unit}` : ""}` }, rangemode: "tozero" },
  }, () => [["run", `${axis.title} until the target${axis.unit ? `, ${axis.unit}` : ""}`, "least", "most", "seeds that reach it", "seeds"], ...all.map((b) => [b.name, b.mean, b.met ? b.low : null, b.met ? b.high : null, b.met, b.seeds])]);
  const alone = reached ? `${withUnit(rounded(all[0].mean), axis.unit || axis.title)}${all[0].met < all[0].seeds ? `, and ${all[0].met} of ${all[0].seeds} seeds reach it` : ""}` : "it is not reached";
  byId("target-caption").textContent = N === 1 ? `What a mean ${D.metric.title} of ${withUnit(rounded(target), D.metric.unit)} takes: ${alone}.` : `What a mean ${D.metric.title} of ${withUnit(rounded(target), D.metric.unit)} takes: ${reached} of ${N} reach it${D.groups.some((g) => g.seeds > 1) ? "; mean over the seeds that do, whiskers from the least to the most" : ""}${bars.length < N ? `; ${bars.length} are drawn, the table has all` : ""}.`;
  plot.setAttribute("aria-label", `Bar chart: ${byId("target-caption").textContent} The table below has all values.`);
}

// -- bytes by kind ----------------------------------------------------------------------------------------

function drawTraffic() {
  const { parts, megabytes } = D.traffic;
  const order = megabytes.map((row, i) => [row.reduce((a, b) => a + b, 0), i]).sort((a, b) => a[0] - b[0]).slice(0, MAX_BARS);
  const room = narrow() ? 22 : 44;
  const traces = parts.map((part, p) => ({
    type: "bar", orientation: "h", name: escaped(part), y: order.map((_, j) => j), x: order.map(([, i]) => megabytes[i][p]),
    marker: { color: colour(p), line: { color: variable("--card"), width: 1 } },
    customdata: order.map(([total, i]) => [escaped(D.groups[i].name), total]), hovertemplate: "<b>%{customdata[0]}</b><br>%{fullData.name}: %{x:.4~g} MB of %{customdata[1]:.4~g} MB<extra></extra>",
  }));
  const plot = chart("traffic-figure", traces, {
    barmode: "stack", height: 94 + 26 * order.length, bargap: 0.3, margin: { l: 10, r: 20, t: 30, b: 44 },
    yaxis: { tickvals: order.map((_, j) => j), ticktext: order.map(([, i]) => escaped(short(D.groups[i].name, room))), autorange: "reversed", showgrid: false, ticks: "", zeroline: false },
    xaxis: { title: { text: "MB sent by unicast, both directions" }, rangemode: "tozero" },
  }, () => [["run", ...parts.map((p) => `${p}, MB`), "all, MB"], ...order.map(([total, i]) => [D.groups[i].name, ...megabytes[i], total])]);
  key("traffic-key", parts.map((part, p) => [colour(p), part]));
  plot.setAttribute("aria-label", `Stacked bars: megabytes by kind and direction for ${order.length} configurations. The table below has all values.`);
}

function startCurves() {
  options(byId("metric"), D.curves.metrics.map((m) => [m.id, m.title + (m.unit ? `, ${m.unit}` : ""), m.kind]));
  options(byId("axis"), D.curves.axes.map((a) => [a.id, a.title]));
  options(byId("cost"), D.curves.known.map((a) => [a.id, a.title]));
  if (D.curves.metrics.some((m) => m.id === D.metric.id)) byId("metric").value = D.metric.id;
  byId("cost").value = D.curves.known[0].id !== "round" ? D.curves.known[0].id : D.curves.known.some((a) => a.id === "bytes") ? "bytes" : "round";
  byId("target").value = rounded(D.target);
  byId("target-figure").classList.toggle("sentence", N === 1); // one bar tells nothing that its caption does not
  byId("target-unit").textContent = D.metric.unit ? `target, ${D.metric.unit}` : "target";
  state.visible = new Set(N > 2 * FIRST_SHOWN ? best(D.metric.id, FIRST_SHOWN) : [...Array(N).keys()]);
  byId("axis").closest("label").hidden = D.curves.axes.length < 2;
  byId("legend-filter").hidden = N <= 12;
  byId("legend-buttons").hidden = N < 3;
  byId("legend").closest(".with-legend").classList.toggle("alone", N === 1); // its name is the title of the page
  byId("show-all").addEventListener("click", () => show([...Array(N).keys()]));
  byId("show-none").addEventListener("click", () => show([]));
  byId("show-best").addEventListener("click", () => show(best(chosen().metric.id, FIRST_SHOWN)));
  byId("show-best").hidden = N <= FIRST_SHOWN;
  byId("legend-filter").addEventListener("input", drawLegend);
  for (const id of ["metric", "axis", "smooth", "logx", "logy", "bands"]) byId(id).addEventListener("change", drawCurves);
  byId("metric").addEventListener("change", drawLegend);
  byId("target").addEventListener("input", () => { drawCurves(); drawTarget(); });
  byId("cost").addEventListener("change", drawTarget);
  drawn(() => { drawLegend(); drawCurves(); drawTarget(); });
  if (D.traffic) drawn(drawTraffic);
}
