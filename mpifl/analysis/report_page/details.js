// One run: clusters over rounds, cluster against group, pairs of clients, clients, staleness, phases of ranks.

const run = () => D.details[Number(byId("run").value)];
const has = (id, condition) => { byId(id).hidden = !condition; return condition; };
const named = (kind, label) => (label < 0 ? `no ${kind}` : `${kind} ${label}`);

// The colour of each cluster: that of the true group that most of its clients belong to, where no larger cluster has it.
function tints({ cluster, group } = run()) {
  const sizes = new Map();
  cluster.forEach((label) => sizes.set(label, (sizes.get(label) || 0) + 1));
  const labels = [...sizes.keys()].sort((a, b) => sizes.get(b) - sizes.get(a) || a - b);
  if (!group) return (label) => (label < 0 ? 8 : label);
  const wanted = new Map(labels.map((label) => {
    const counts = new Map();
    cluster.forEach((c, k) => { if (c === label) counts.set(group[k], (counts.get(group[k]) || 0) + 1); });
    return [label, [...counts].sort((a, b) => b[1] - a[1] || a[0] - b[0])[0][0]];
  }));
  const taken = new Set(), found = new Map();
  for (const label of labels) {
    let tint = wanted.get(label);
    if (taken.has(tint)) for (tint = Math.max(...group) + 1; taken.has(tint);) tint += 1;
    taken.add(tint);
    found.set(label, tint);
  }
  return (label) => found.get(label) ?? 8;
}
const tintOf = (kind) => (kind === "cluster" ? tints() : (label) => (label < 0 ? 8 : label));

// -- clusters over rounds ---------------------------------------------------------------------------------

function drawFlow() {
  const flow = run().flow;
  if (!has("flow-figure", flow)) return;
  const svgSpace = "http://www.w3.org/2000/svg";
  const make = (tag, attributes, text) => {
    const made = document.createElementNS(svgSpace, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const holder = byId("flow-figure").querySelector(".plot");
  const width = Math.max(300, holder.clientWidth || 600), height = 330, top = 26, thick = 12;
  const total = flow.columns[0].nodes.reduce((sum, [, n]) => sum + n, 0);
  const most = Math.max(...flow.columns.map((c) => c.nodes.length));
  const gap = Math.min(14, (height - top) * 0.4 / Math.max(most - 1, 1));
  const scale = (height - top - gap * (most - 1) - 4) / total;
  const edge = 66;
  const step = (width - 2 * edge - thick) / Math.max(flow.columns.length - 1, 1);
  // nodes of a column in the order of where their clients come from
  let before = null;
  const columns = flow.columns.map((column, c) => {
    const nodes = column.nodes.map(([label, n]) => ({ label, n, from: 0 }));
    if (before) {
      for (const node of nodes) {
        const incoming = flow.links[c - 1].filter(([, to]) => to === node.label);
        node.from = incoming.reduce((sum, [from, , , n]) => sum + n * before[from], 0) / node.n;
      }
      nodes.sort((a, b) => a.from - b.from || a.label - b.label);
    }
    let y = top + (height - top - scale * total - gap * (nodes.length - 1)) / 2;
    for (const node of nodes) { node.y = y; node.x = edge + c * step; y += node.n * scale + gap; node.out = node.y; node.in = node.y; }
    before = Object.fromEntries(nodes.map((node) => [node.label, node.y + node.n * scale / 2]));
    return Object.fromEntries(nodes.map((node) => [node.label, node]));
  });
  const svg = make("svg", { class: "flow", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Clusters over ${run().word}s: ${flow.columns.map((c) => `${c.title}: ${c.nodes.map(([l, n]) => `${named(c.kind, l)} with ${n}`).join(", ")}`).join("; ")}` });
  const order = (c) => (a, b) => columns[c][a[0]].y - columns[c][b[0]].y || columns[c + 1][a[1]].y - columns[c + 1][b[1]].y || a[2] - b[2];
  flow.links.forEach((links, c) => {
    const sorted = [...links].sort(order(c)).map((link) => ({ link, y0: 0, y1: 0 }));
    for (const item of sorted) { const node = columns[c][item.link[0]]; item.y0 = node.out; node.out += item.link[3] * scale; }
    for (const item of [...sorted].sort((a, b) => columns[c + 1][a.link[1]].y - columns[c + 1][b.link[1]].y || columns[c][a.link[0]].y - columns[c][b.link[0]].y || a.link[2] - b.link[2])) {
      const node = columns[c + 1][item.link[1]];
      item.y1 = node.in;
      node.in += item.link[3] * scale;
    }
    for (const { link: [from, to, tint, n], y0, y1 } of sorted) {
      const x0 = columns[c][from].x + thick, x1 = columns[c + 1][to].x, mid = (x0 + x1) / 2, h = n * scale;
      const path = make("path", { d: `M${x0},${y0}C${mid},${y0} ${mid},${y1} ${x1},${y1}V${y1 + h}C${mid},${y1 + h} ${mid},${y0 + h} ${x0},${y0 + h}Z`, fill: colour(flow.colours[tint] < 0 ? 8 : flow.colours[tint]) });
      const said = `${n} client${n > 1 ? "s" : ""} of ${named(flow.by, flow.colours[tint])}: ${named("cluster", from)} (${flow.columns[c].title}) to ${named(flow.columns[c + 1].kind, to)} (${flow.columns[c + 1].title})`;
      path.addEventListener("mousemove", (event) => tip(event, said));
      path.addEventListener("mouseleave", () => tip(null));
      svg.append(path);
    }
  });
  flow.columns.forEach((column, c) => {
    const last = c === flow.columns.length - 1;
    svg.append(make("text", { class: "title", x: edge + c * step + thick / 2, y: 12, "text-anchor": "middle" }, flow.columns.length > 6 || narrow() ? column.title.replace(`${run().word} `, "") : column.title));
    for (const node of Object.values(columns[c])) {
      svg.append(make("rect", { x: node.x, y: node.y, width: thick, height: Math.max(node.n * scale, 1), fill: column.kind === "group" ? colour(node.label) : variable("--soft") }));
      if ((c === 0 || last) && node.n * scale > 9) svg.append(make("text", { x: last ? node.x + thick + 5 : node.x - 5, y: node.y + node.n * scale / 2 + 4, "text-anchor": last ? "start" : "end" }, `${named(column.kind, node.label)}`));
    }
  });
  holder.replaceChildren(svg);
  byId("flow-caption").textContent = `Clients from evaluation to evaluation, coloured by ${flow.by === "group" ? "true group" : "final cluster"}.${run().kept ? "" : " This run kept no clusters but the final ones (assignments.csv came later)."}`;
  tableBehind(byId("flow-figure"), () => [["from", "to", "coloured by", "clients"], ...flow.links.flatMap((links, c) => links.map(([a, b, tint, n]) => [`${flow.columns[c].title}: ${named("cluster", a)}`, `${flow.columns[c + 1].title}: ${named(flow.columns[c + 1].kind, b)}`, named(flow.by, flow.colours[tint]), n]))]);
}

function tip(event, text) {
  let box = byId("tip");
  if (!box) document.body.append((box = element("div", { id: "tip" })));
  box.hidden = !event;
  if (!event) return;
  box.textContent = text;
  box.style.left = `${Math.min(event.clientX + 12, window.innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${event.clientY + 14}px`;
}

const OVER = { ari: "ARI", churn: "churn", num_clusters: "clusters" };

function drawOver() {
  const over = run().over;
  const names = ["ari", "churn"].filter((n) => over[n]);
  if (!has("over-figure", over.round.length > 1 && (names.length || over.num_clusters))) return;
  const line = (name, i, extra) => ({ x: over.round, y: over[name], name: OVER[name], mode: "lines+markers", connectgaps: true, line: { color: colour(i), width: 2, dash: DASHES[i] }, marker: { size: 6, symbol: mark(i) }, hovertemplate: `${run().word} %{x}<br>${OVER[name]} %{y:.4~g}<extra></extra>`, ...extra });
  const traces = names.map((n, i) => line(n, i));
  if (over.num_clusters) traces.push(line("num_clusters", 2, names.length ? { yaxis: "y2", line: { color: colour(2), width: 2, shape: "hv", dash: "dot" } } : {}));
  const plot = chart("over-figure", traces, {
    height: 330, margin: { l: 46, r: 46, t: 30, b: 44 },
    xaxis: { title: { text: run().word === "step" ? "server steps" : "rounds" } },
    yaxis: names.length ? { title: { text: names.map((n) => OVER[n]).join(", ") }, range: [Math.min(-0.04, ...names.flatMap((n) => over[n].filter(shown))) , 1.05] } : { title: { text: "clusters" }, rangemode: "tozero" },
    ...(names.length && over.num_clusters ? { yaxis2: { title: { text: "clusters" }, overlaying: "y", side: "right", rangemode: "tozero", showgrid: false, dtick: Math.max(1, Math.ceil(Math.max(...over.num_clusters) / 6)) } } : {}),
  }, () => [[run().word, ...Object.keys(OVER).filter((n) => over[n]).map((n) => OVER[n])], ...over.round.map((r, j) => [r, ...Object.keys(OVER).filter((n) => over[n]).map((n) => over[n][j])])]);
  key("over-key", [...names.map((n, i) => [colour(i), OVER[n]]), ...(over.num_clusters ? [[colour(2), "clusters found"]] : [])]);
  plot.setAttribute("aria-label", `Line chart: ${[...names, "num_clusters"].filter((n) => over[n]).map((n) => `${OVER[n]} ends at ${number(over[n].findLast(shown))}`).join(", ")}`);
}

// -- cluster against true group ---------------------------------------------------------------------------

function drawConfusion() {
  const { cluster, group } = run();
  if (!has("confusion-figure", group)) return;
  const clusters = [...new Set(cluster)].sort((a, b) => a - b), groups = [...new Set(group)].sort((a, b) => a - b);
  const count = clusters.map((c) => groups.map((g) => cluster.reduce((n, label, k) => n + (label === c && group[k] === g), 0)));
  // clusters in the order of the group that most of their clients belong to
  const rank = (row) => row.indexOf(Math.max(...row));
  const order = clusters.map((_, i) => i).sort((a, b) => rank(count[a]) - rank(count[b]) || clusters[a] - clusters[b]);
  const most = Math.max(...count.flat());
  const table = element("table", { class: "confusion" });
  table.append(element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "cluster"), ...groups.map((g) => element("th", { scope: "col" }, `group ${g}`)), element("th", { scope: "col" }, "clients"))));
  const body = element("tbody");
  for (const i of order) {
    const cells = count[i].map((n) => {
      const cell = element("td", {}, n ? String(n) : "·");
      if (n) cell.style.background = `rgb(${variable("--shade")}, ${0.12 + 0.6 * n / most})`;
      return cell;
    });
    body.append(element("tr", {}, element("th", { scope: "row" }, named("cluster", clusters[i])), ...cells, element("td", {}, String(count[i].reduce((a, b) => a + b, 0)))));
  }
  table.append(body);
  byId("confusion-figure").querySelector(".scroll").replaceChildren(table);
}

// -- pairs of clients -------------------------------------------------------------------------------------

function strip(labels, axis) {
  const codes = labels.map(tintOf(axis)).map((tint) => tint % 10);
  return {
    type: "heatmap", z: codes.map((c) => [c]), x: [axis], y: run().matrices.clients, xaxis: { cluster: "x2", group: "x3" }[axis], zmin: -0.5, zmax: 9.5, showscale: false,
    colorscale: [...Array(10).keys()].flatMap((i) => [[i / 10, colour(i)], [(i + 1) / 10, colour(i)]]),
    customdata: labels.map((l) => [named(axis, l)]), hovertemplate: "%{y}: %{customdata}<extra></extra>",
  };
}

const meanOf = (values) => (values.length ? values.reduce((sum, v) => sum + v, 0) / values.length : null);

function drawMatrix() {
  const found = run().matrices;
  if (!has("matrix-figure", found)) return;
  const select = byId("matrix");
  const before = select.value;
  select.replaceChildren();
  options(select, found.drawn.map((m, i) => [i, m.title]));
  if (Number(before) < found.drawn.length && before !== "") select.value = before;
  const matrix = found.drawn[Number(select.value)];
  const n = found.clients.length;
  const bytes = Uint8Array.from(atob(matrix.shades), (c) => c.charCodeAt(0));
  const value = (i, j) => (bytes[i * n + j] === 255 ? null : matrix.low + (bytes[i * n + j] / 254) * (matrix.high - matrix.low));
  const z = found.clients.map((_, i) => found.clients.map((__, j) => value(i, j)));
  const holder = byId("matrix-figure").querySelector(".plot");
  const side = Math.max(260, Math.min(holder.clientWidth || 500, 520));
  const traces = [{
    type: "heatmap", z, x: found.clients, y: found.clients, colorscale: "Cividis", reversescale: false, zmin: matrix.low, zmax: matrix.high === matrix.low ? matrix.low + 1 : matrix.high,
    hovertemplate: "%{y} and %{x}<br>%{z:.4~g}<extra></extra>", colorbar: { thickness: 10, len: 0.9, outlinewidth: 0, tickfont: { size: 11 } },
  }, strip(found.cluster, "cluster")];
  if (found.group) traces.push(strip(found.group, "group"));
  const hide = { showticklabels: false, ticks: "", showgrid: false, zeroline: false, title: { text: "" } };
  const shapes = [];
  found.cluster.forEach((label, i) => { // where the cluster changes
    if (i && label !== found.cluster[i - 1]) {
      const at = i - 0.5;
      shapes.push({ type: "line", xref: "x", yref: "y", x0: -0.5, x1: n - 0.5, y0: at, y1: at, line: { color: "#ffffff", width: 1 } });
      shapes.push({ type: "line", xref: "x", yref: "y", y0: -0.5, y1: n - 0.5, x0: at, x1: at, line: { color: "#ffffff", width: 1 } });
    }
  });
  const top = { side: "top", ticks: "", showgrid: false, tickangle: -60, title: { text: "" }, tickfont: { size: 10 } };
  const plot = chart("matrix-figure", traces, {
    height: side + 40, margin: { l: 8, r: 8, t: 52, b: 8 }, shapes,
    xaxis: { ...hide, type: "category", domain: [found.group ? 0.11 : 0.06, 1] }, xaxis2: { ...top, type: "category", domain: [found.group ? 0.055 : 0, found.group ? 0.1 : 0.045] }, ...(found.group ? { xaxis3: { ...top, type: "category", domain: [0, 0.045] } } : {}),
    yaxis: { ...hide, type: "category", autorange: "reversed" },
  }, () => [["client", "other", matrix.title], ...(n <= 60 ? found.clients.flatMap((a, i) => found.clients.map((b, j) => [a, b, z[i][j]])) : found.clients.map((a, i) => [a, "mean over all others", meanOf(z[i].filter((v, j) => shown(v) && j !== i))]))]);
  byId("matrix-caption").textContent = `${matrix.title}, clients ordered by ${found.group ? "cluster and true group" : "cluster"}${found.averaged ? `; neighbours averaged to ${n} rows` : ""}. Strips on the left: ${found.group ? "true group, then cluster" : "cluster"}.`;
  plot.setAttribute("aria-label", `Heat map: ${byId("matrix-caption").textContent} Values from ${number(matrix.low)} to ${number(matrix.high)}.`);
}

// -- clients ----------------------------------------------------------------------------------------------

function drawClients() {
  const clients = run().clients;
  if (!has("clients-figure", clients)) return;
  const select = byId("score");
  const before = select.value;
  select.replaceChildren();
  options(select, Object.keys(clients.scores).map((n) => [n, clients.titles[n]]));
  if (before in clients.scores) select.value = before;
  select.closest("label").hidden = Object.keys(clients.scores).length < 2;
  const group = byId("tint").querySelector('[value="group"]');
  group.hidden = group.disabled = !clients.group;
  if (!clients.group && byId("tint").value === "group") byId("tint").value = "cluster";
  const by = byId("tint").value, labels = clients[by];
  const tint = tintOf(by);
  const score = clients.scores[select.value];
  const order = [...score.keys()];
  const [title, unit] = [clients.titles[select.value], clients.titles[select.value].endsWith(", %") ? " %" : ""];
  const value = (k) => score[k] ?? -Infinity;
  order.sort((a, b) => (byId("order").value === "label" ? labels[a] - labels[b] : 0) || value(b) - value(a));
  const mean = score.filter(shown).reduce((a, b) => a + b, 0) / score.filter(shown).length;
  const plot = chart("clients-figure", [{
    type: "bar", x: order.map((_, j) => j), y: order.map((k) => score[k]), marker: { color: order.map((k) => colour(tint(labels[k]))), line: { width: 0 } },
    customdata: order.map((k) => [clients.client[k], named("cluster", clients.cluster[k]) + (clients.group ? `, group ${clients.group[k]}` : ""), clients.train ? `${clients.train[k]} training samples` : ""]),
    hovertemplate: "<b>client %{customdata[0]}</b>: %{y:.4~g}" + unit + "<br>%{customdata[1]}<br>%{customdata[2]}<extra></extra>",
  }], {
    height: 300, bargap: order.length > 150 ? 0 : 0.15, margin: { l: 52, r: 16, t: 30, b: 40 },
    xaxis: { title: { text: `${order.length} clients` }, showticklabels: order.length <= 40, tickvals: order.map((_, j) => j), ticktext: order.map((k) => clients.client[k]), tickangle: 0, tickfont: { size: 10 }, showgrid: false, zeroline: false, ticks: "" },
    yaxis: { title: { text: title }, rangemode: "tozero" },
    shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: mean, y1: mean, line: { color: variable("--soft"), width: 1.2, dash: "dash" }, label: { text: `mean ${number(Number(mean.toPrecision(4)))}${unit}`, textposition: "end", yanchor: "bottom", font: { size: 11, color: variable("--text") } } }],
  }, () => [["client", title, "cluster", ...(clients.group ? ["group"] : []), ...(clients.train ? ["training samples"] : [])], ...order.map((k) => [clients.client[k], score[k], clients.cluster[k], ...(clients.group ? [clients.group[k]] : []), ...(clients.train ? [clients.train[k]] : [])])]);
  key("clients-key", [...new Set(labels)].sort((a, b) => a - b).slice(0, 40).map((l) => [colour(tint(l)), named(by, l)]));
  plot.setAttribute("aria-label", `Bar chart: ${title} of ${order.length} clients, from ${number(Math.min(...score.filter(shown)))} to ${number(Math.max(...score.filter(shown)))}${unit}, mean ${number(mean)}${unit}.`);
}

function drawSilhouette() {
  const scores = run().silhouette;
  if (!has("silhouette-figure", scores)) return;
  chart("silhouette-figure", [{ x: scores.map((s) => s[0]), y: scores.map((s) => s[1]), mode: "lines+markers", line: { color: colour(0) }, hovertemplate: "k = %{x}: %{y:.4~g}<extra></extra>" }], {
    height: 260, xaxis: { title: { text: "number of clusters k" }, dtick: Math.max(1, Math.ceil(scores.length / 12)) }, yaxis: { title: { text: "mean silhouette" } },
  }, () => [["k", "mean silhouette"], ...scores]).setAttribute("aria-label", "Line chart: mean silhouette by number of clusters.");
}

// -- staleness --------------------------------------------------------------------------------------------

function drawStaleness() {
  const late = D.details[Number(byId("stale-run").value)], found = late.staleness;
  const all = D.details.map((d, i) => ({ i, name: d.name, s: d.staleness })).filter((d) => d.s);
  if (has("lags-figure", found)) {
    const [q10, median, q90, most] = found.quantiles;
    const wide = found.width > 1;
    const at = (lag, text, y) => ({ type: "line", yref: "paper", x0: lag, x1: lag, y0: 0, y1: 1, line: { color: variable("--soft"), width: 1.2, dash: "dash" }, label: { text, textposition: "end", xanchor: "left", yanchor: "top", textangle: 0, padding: 4 + y, font: { size: 11, color: variable("--text") } } });
    const plot = chart("lags-figure", [{
      type: "bar", x: found.bars.map(([lag]) => lag + (found.width - 1) / 2), y: found.bars.map(([, n]) => (100 * n) / found.arrivals), width: found.width * 0.92,
      marker: { color: colour(0) }, customdata: found.bars.map(([lag, n]) => [wide ? `${lag} to ${lag + found.width - 1}` : lag, n]), hovertemplate: "staleness %{customdata[0]}<br>%{customdata[1]} uploads, %{y:.3~g} %<extra></extra>",
    }], {
      height: 300, bargap: 0, shapes: [at(median, `median ${median}`, 0), ...(q90 > median ? [at(q90, `90 % up to ${q90}`, 16)] : [])],
      xaxis: { title: { text: "staleness: server steps between download and upload" } },
      yaxis: byId("logstale").checked ? { title: { text: "share of uploads, % (log)" }, type: "log" } : { title: { text: "share of uploads, %" }, range: [0, (118 * Math.max(...found.bars.map(([, n]) => n))) / found.arrivals] }, // room for the names of the lines
    }, () => [["staleness from", "uploads"], ...found.bars]);
    byId("lags-caption").textContent = `${found.arrivals} uploads of ${late.name}: a tenth up to ${q10}, half up to ${median}, nine tenths up to ${q90}, all up to ${most} server steps.`;
    plot.setAttribute("aria-label", `Histogram: ${byId("lags-caption").textContent}`);
  }
  if (has("ranges-figure", all.length > 1)) {
    const rows = all.slice(0, MAX_BARS);
    const room = narrow() ? 22 : 34;
    const plot = chart("ranges-figure", [
      { type: "bar", orientation: "h", y: rows.map((_, j) => j), base: rows.map((r) => r.s.quantiles[0]), x: rows.map((r) => Math.max(r.s.quantiles[2] - r.s.quantiles[0], 0.15)), marker: { color: rows.map((r) => colour(r.i)), opacity: 0.55 }, customdata: rows.map((r) => [escaped(r.name), ...r.s.quantiles]), hovertemplate: "<b>%{customdata[0]}</b><br>tenth %{customdata[1]}, median %{customdata[2]}, nine tenths %{customdata[3]}, most %{customdata[4]}<extra></extra>" },
      { mode: "markers", y: rows.map((_, j) => j), x: rows.map((r) => r.s.quantiles[1]), marker: { symbol: "line-ns-open", size: 16, color: variable("--text"), line: { width: 2 } }, hoverinfo: "skip" },
      { mode: "markers", y: rows.map((_, j) => j), x: rows.map((r) => r.s.quantiles[3]), marker: { symbol: "circle-open", size: 7, color: variable("--soft") }, hoverinfo: "skip" },
    ], {
      height: 104 + 26 * rows.length, margin: { l: 10, r: 16, t: 30, b: 44 }, bargap: 0.35,
      yaxis: { tickvals: rows.map((_, j) => j), ticktext: rows.map((r) => escaped(short(r.name, room))), autorange: "reversed", showgrid: false, ticks: "", zeroline: false }, xaxis: { title: { text: "staleness, server steps" }, rangemode: "tozero" },
    }, () => [["run", "tenth", "median", "nine tenths", "most", "uploads"], ...all.map((r) => [r.name, ...r.s.quantiles, r.s.arrivals])]);
    plot.setAttribute("aria-label", `Staleness of ${rows.length} runs: range from the tenth to nine tenths of the uploads, with median and most.`);
  }
  if (has("late-figure", found && found.clients.length)) {
    const clients = [...found.clients].sort((a, b) => a[3] - b[3] || a[4] - b[4]);
    const tint = tints(late);
    const plot = chart("late-figure", [{
      mode: "markers", x: clients.map((_, j) => j), y: clients.map((c) => c[3]), marker: { size: 7, color: clients.map((c) => colour(tint(late.cluster[c[0]]))) },
      error_y: { type: "data", symmetric: false, array: clients.map((c) => c[4] - c[3]), arrayminus: clients.map((c) => c[3] - c[2]), thickness: 1, width: 0, color: variable("--soft") },
      customdata: clients.map((c) => c.map(number)), hovertemplate: "<b>client %{customdata[0]}</b>, %{customdata[1]} uploads<br>median %{customdata[3]}, tenth %{customdata[2]}, nine tenths %{customdata[4]}<extra></extra>",
    }], {
      height: 300, xaxis: { title: { text: "clients, by median" }, showticklabels: clients.length <= 30, tickvals: clients.map((_, j) => j), ticktext: clients.map((c) => c[0]), showgrid: false, zeroline: false, ticks: "" }, yaxis: { title: { text: "staleness, server steps" }, rangemode: "tozero" },
    }, () => [["client", "uploads", "tenth", "median", "nine tenths"], ...clients]);
    plot.setAttribute("aria-label", `Staleness of each of ${clients.length} clients: median, and the range from a tenth to nine tenths.`);
  }
}

// -- phases of ranks --------------------------------------------------------------------------------------

function drawPhases() {
  const bars = D.details.flatMap((d, i) => (d.phases || []).map((seconds, rank) => ({ i, name: d.phases.length > 1 ? `${d.name}, rank ${rank}` : d.name, rank, seconds })));
  const all = bars.length <= MAX_BARS;
  const rows = all ? bars : bars.filter((b) => b.i === Number(byId("run").value)).map((b) => ({ ...b, name: `rank ${b.rank}` }));
  if (!has("phases-figure", rows.length)) return;
  const total = rows.map((r) => r.seconds.reduce((a, b) => a + b, 0));
  const used = D.phases.map((name, p) => [name, p]).filter(([, p]) => rows.some((r) => r.seconds[p] > 0));
  const share = byId("shares").checked;
  const room = narrow() ? 22 : 44;
  const traces = used.map(([name, p]) => ({
    type: "bar", orientation: "h", name, y: rows.map((_, j) => j), x: rows.map((r, j) => (share ? (100 * r.seconds[p]) / (total[j] || 1) : r.seconds[p])),
    marker: { color: colour(p), line: { color: variable("--card"), width: 1 } },
    customdata: rows.map((r, j) => [escaped(r.name), r.seconds[p], (100 * r.seconds[p]) / (total[j] || 1)]), hovertemplate: `<b>%{customdata[0]}</b><br>${name}: %{customdata[1]:.3~g} s, %{customdata[2]:.3~g} %<extra></extra>`,
  }));
  const plot = chart("phases-figure", traces, {
    barmode: "stack", height: 94 + 26 * rows.length, bargap: 0.3, margin: { l: 10, r: 20, t: 30, b: 44 },
    yaxis: { tickvals: rows.map((_, j) => j), ticktext: rows.map((r) => escaped(short(r.name, room))), autorange: "reversed", showgrid: false, ticks: "", zeroline: false },
    xaxis: { title: { text: share ? "share of the time of all phases, %" : "seconds" }, rangemode: "tozero", ...(share ? { range: [0, 100] } : {}) },
  }, () => [["rank", ...used.map(([n]) => `${n}, s`), "all phases, s"], ...rows.map((r, j) => [r.name, ...used.map(([, p]) => r.seconds[p]), total[j]])]);
  key("phases-key", used.map(([name, p]) => [colour(p), name]));
  byId("phases-caption").textContent = all ? "Seconds of each phase of every rank, evaluation included." : `Seconds of each phase of every rank of ${run().name}.`;
  plot.setAttribute("aria-label", `Stacked bars: ${byId("phases-caption").textContent}`);
}

const FEW_CLIENTS = 40; // as many have room beside the matrix

function drawRun() {
  const { clients, matrices, silhouette } = run(), beside = matrices && !silhouette && clients && clients.client.length <= FEW_CLIENTS && !narrow();
  byId(beside ? "beside" : "below").append(byId("clients-figure"));
  [drawFlow, drawOver, drawConfusion, drawMatrix, drawClients, drawSilhouette].forEach((draw) => draw());
  if (byId("stale-run")) drawStaleness();
  drawPhases();
}

function chooseRun() {
  if (byId("stale-run") && run().staleness) byId("stale-run").value = byId("run").value; // a run in rounds leaves the one that is shown
  drawRun();
}

function startDetails() {
  options(byId("run"), D.details.map((d, i) => [i, d.name]));
  byId("run").value = D.start;
  byId("run").closest("label").hidden = D.details.length < 2;
  byId("run").addEventListener("change", chooseRun);
  const late = D.details.map((d, i) => [i, d.name]).filter(([i]) => D.details[i].staleness);
  if (byId("stale-run")) {
    options(byId("stale-run"), late);
    byId("stale-run").closest("label").hidden = late.length < 2;
    byId("stale-run").addEventListener("change", drawStaleness);
    if (run().staleness) byId("stale-run").value = D.start;
  }
  byId("matrix").addEventListener("change", drawMatrix);
  for (const id of ["score", "tint", "order"]) byId(id).addEventListener("change", drawClients);
  byId("shares").addEventListener("change", drawPhases);
  byId("logstale")?.addEventListener("change", drawStaleness);
  drawn(drawRun);
}
