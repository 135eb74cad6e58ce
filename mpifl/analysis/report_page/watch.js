// Follows a run: asks for its state every two seconds and draws what has changed.

const PAUSE_MS = 2000;
const asked = new URLSearchParams(location.search).get("case") || "";
let drawnOf = ""; // the evaluations that are drawn
let last = null;

const percent = (values) => values.map((v) => (shown(v) ? 100 * v : null));
const megabytes = (values) => values.map((v) => (shown(v) ? v / 1e6 : null));
const moment = (seconds) => new Date(1000 * seconds).toLocaleString();

function inWords(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function inBytes(value) {
  const [size, unit] = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([s]) => value >= s) || [1, "bytes"];
  return `${Number((value / size).toPrecision(4))} ${unit}`;
}

const figure = (metric, value) => (!shown(value) ? "" : metric === "accuracy" ? `${(100 * value).toFixed(2)} %` : number(value));
const end = (curves, name) => curves[name]?.[curves[name].length - 1];

function tile(text, about) {
  return element("div", { class: "tile" }, element("b", {}, text), element("span", {}, about));
}

function table(id, head, rows) {
  const made = byId(id).querySelector("table");
  made.tHead.replaceChildren(element("tr", {}, ...head.map((h) => element("th", { scope: "col" }, h))));
  made.tBodies[0].replaceChildren(...rows.map((row) => element("tr", {}, ...row.map((cell, i) =>
    element(i ? "td" : "th", i ? {} : { scope: "row" }, cell instanceof Node ? cell : number2(cell))))));
}

function drawRun(seen) {
  const { curves } = seen;
  byId("run").hidden = seen.state === "waiting";
  byId("bar").value = seen.rounds ? seen.step / seen.rounds : 0;
  byId("doing").textContent = seen.doing && !seen.over ? `now: ${seen.doing}` : "";
  const tiles = [[`${seen.step}/${seen.rounds || "?"}`, "rounds"]];
  if (shown(seen.left_s)) tiles.push([inWords(seen.left_s), "left, about"]);
  if (shown(end(curves, "accuracy"))) tiles.push([figure(seen.metric, end(curves, "accuracy")), `mean ${seen.metric}`]);
  if (shown(end(curves, "worst"))) tiles.push([figure(seen.metric, end(curves, "worst")), "worst client"]);
  if (shown(end(curves, "clusters"))) tiles.push([number(end(curves, "clusters")), "clusters"]);
  if (shown(end(curves, "ari"))) tiles.push([end(curves, "ari").toFixed(2), "ARI"]);
  if (shown(end(curves, "bytes_up"))) tiles.push([inBytes(end(curves, "bytes_up") + (end(curves, "bytes_down") || 0)), "bytes, up and down"]);
  byId("tiles").replaceChildren(...tiles.map(([text, about]) => tile(text, about)));
  const facts = Object.entries(seen.facts);
  if (seen.started) facts.push(["started", moment(seen.started)]);
  if (seen.written) facts.push(["last written", `${moment(seen.written)}, ${inWords(Math.max(0, seen.now - seen.written))} ago`]);
  if (shown(seen.checkpoint)) facts.push(["checkpoint", `after step ${seen.checkpoint}`]);
  byId("facts").replaceChildren(...facts.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
  const known = JSON.stringify([curves.round?.length, seen.clusters, byId("axis").value, document.documentElement.dataset.theme]);
  if (curves.round?.length && known !== drawnOf) drawCharts(seen);
  drawnOf = known;
  const phases = [...new Set(seen.ranks.flatMap((r) => Object.entries(r.seconds || {}).filter(([, v]) => v).map(([k]) => k)))];
  byId("ranks").hidden = !seen.ranks.length;
  table("ranks", ["rank", "host", "device", "visits", ...phases.map((p) => `${p}, s`)],
    seen.ranks.map((r, i) => [String(i), r.host, r.device, r.visits, ...phases.map((p) => r.seconds?.[p])]));
  const logs = Object.entries(seen.logs);
  byId("logs").hidden = !logs.length;
  byId("logs").lastElementChild.replaceChildren(...logs.flatMap(([name, lines]) => [element("h3", {}, name), element("pre", { class: "scroll" }, lines.join("\n"))]));
}

function drawCharts(seen) {
  const { curves } = seen;
  const axes = [["round", "round"], ["seconds", "wall time, s"], ["virtual_seconds", "virtual time, s"]].filter(([name]) => curves[name]);
  if (byId("axis").options.length !== axes.length) { byId("axis").replaceChildren(); options(byId("axis"), axes); }
  byId("curves").hidden = false;
  const axis = byId("axis").value;
  const title = axes.find(([name]) => name === axis)[1];
  const line = (name, values, i, more = {}) => ({
    x: curves[axis], y: values, name, mode: values.length > 40 ? "lines" : "lines+markers", line: { color: colour(i), dash: dash(10 * i) }, marker: { size: 5 }, ...more });
  const draw = (id, pairs, layout = {}) => {
    const there = pairs.filter(([name]) => curves[name]);
    byId(id).hidden = !there.length;
    if (there.length) chart(id, there.map(([name, values, more], i) => line(name, values(curves[name]), i, more)), { height: 260, xaxis: { title: { text: title } }, ...layout });
  };
  const same = (values) => values;
  const scale = seen.metric === "accuracy" ? percent : same;
  byId("accuracy-figure").querySelector("figcaption").textContent = `${seen.metric === "accuracy" ? "accuracy, %" : seen.metric}: mean over clients, and the worst client (dashes).`;
  draw("accuracy-figure", [["accuracy", scale], ["worst", scale]]);
  draw("loss-figure", [["loss", same], ["train_loss", same]]);
  draw("clusters-figure", [["clusters", same], ["ari", same, { yaxis: "y2" }]], { margin: { l: 56, r: 46, t: 30, b: 46 }, yaxis: { rangemode: "tozero" }, yaxis2: { overlaying: "y", side: "right", range: [0, 1.05], dtick: 0.25, automargin: false, showgrid: false } });
  draw("bytes-figure", [["bytes_up", megabytes], ["bytes_down", megabytes]]);
  byId("sizes").hidden = seen.clusters.length < 2; // one bar tells nothing
  byId("sizes").querySelector("h2").textContent = `Clients by cluster${seen.sample ? `, of ${seen.sample} clients` : ""}`;
  if (seen.clusters.length > 1) {
    const names = seen.clusters.map(([label]) => `cluster ${label}`);
    chart("sizes-figure", [{ type: "bar", x: names, y: seen.clusters.map(([, n]) => n), marker: { color: colour(0) } }],
      { height: 220, yaxis: { title: { text: "clients" } }, xaxis: { type: "category" } }, () => [["cluster", "clients"], ...seen.clusters]);
  }
}

function drawCases(seen) {
  byId("cases").hidden = false;
  byId("cases-title").textContent = seen.cases.length === 1 ? "1 run" : `${seen.cases.length} runs`;
  table("cases", ["run", "state", "round", "mean", "worst", "ARI", "left", ""], seen.cases.map((c) => [
    element("a", { href: `/?case=${encodeURIComponent(c.title)}` }, c.title), c.state, c.rounds ? `${c.step}/${c.rounds}` : "",
    figure(c.metric, c.accuracy), figure(c.metric, c.worst), shown(c.ari) ? c.ari.toFixed(2) : "", shown(c.left_s) ? inWords(c.left_s) : "",
    ["running", "complete", "waiting"].includes(c.state) ? "" : c.text]));
}

function draw(seen) {
  last = seen;
  byId("title").textContent = asked || seen.folder;
  if (byId("text").textContent !== seen.text) byId("text").textContent = seen.text;
  document.title = `${seen.kind === "run" && seen.rounds ? `${seen.step}/${seen.rounds} ` : ""}${asked || seen.folder} - mpifl watch`;
  (seen.kind === "run" ? drawRun : drawCases)(seen);
  document.documentElement.dataset.ready = "true";
}

async function poll() {
  try {
    const answer = await fetch(`/data.json?case=${encodeURIComponent(asked)}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    draw(await answer.json());
  } catch (error) {
    byId("text").textContent = `mpifl watch does not answer any more (${error.message}); what follows is the last that it said.`;
  }
  setTimeout(poll, PAUSE_MS);
}

byId("theme").addEventListener("click", switchTheme);
media.addEventListener("change", themed);
byId("theme").textContent = isDark() ? "Light" : "Dark";
byId("axis").addEventListener("change", () => last && draw(last));
redraws.push(() => { drawnOf = ""; if (last) draw(last); });
if (asked) byId("place").append(element("a", { href: "/" }, "All runs"));
poll();
