// What all parts of the page use: data, theme, charts with a table behind each, tables that sort and filter.
"use strict";

const D = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

// -- small helpers ----------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children); // text stays text: labels of users cannot become markup
  return made;
}

const escaped = (text) =>
  String(text).replace(/[&<>"']/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c]);
const short = (text, most) => (text.length <= most ? text : `${text.slice(0, most - 1)}…`);
const number = (value) => (value === null || value === undefined ? "" : Number(Number(value).toPrecision(5)).toString());
const rounded = (value) => Number(Number(value).toPrecision(4));
const withUnit = (value, unit) => `${number(value)}${unit ? ` ${unit}` : ""}`;
const printing = () => "printing" in document.documentElement.dataset;
const narrow = () => printing() || window.innerWidth < 860;
const shown = (value) => value !== null && value !== undefined;

function options(select, items) {
  for (const [value, text, group] of items) {
    let parent = select;
    if (group) {
      parent = [...select.querySelectorAll("optgroup")].find((g) => g.label === group);
      if (!parent) select.append((parent = element("optgroup", { label: group })));
    }
    parent.append(element("option", { value }, text));
  }
}

// -- theme ------------------------------------------------------------------------------------------------

const media = window.matchMedia("(prefers-color-scheme: dark)");
const stored = () => { try { return localStorage.getItem("mpifl-theme"); } catch { return null; } };
const isDark = () => (document.documentElement.dataset.theme || (media.matches ? "dark" : "light")) === "dark";
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#b3478f", "#a97400", "#2f9fdc", "#5b4bb5", "#7a4a2b", "#5c6670", "#6b8e23"];
const DARK = ["#4da6e8", "#ff8c42", "#2fc79a", "#ec93c8", "#f0b533", "#8fd3f7", "#b0a1f2", "#c9a186", "#b4bcc5", "#b5d264"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const MARKS = ["circle", "square", "triangle-up", "diamond", "x", "cross", "star", "pentagon"];
const colour = (i) => (isDark() ? DARK : LIGHT)[((i % 10) + 10) % 10];
const dash = (i) => DASHES[Math.floor(i / 10) % 4];
const mark = (i) => MARKS[i % MARKS.length];
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function switchTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("mpifl-theme", document.documentElement.dataset.theme); } catch { /* a file without storage */ }
  themed();
}

function themed() {
  byId("theme").textContent = isDark() ? "Light" : "Dark";
  redraws.forEach((redraw) => redraw());
}

// On paper the page is light, and charts are as wide as the paper; afterwards it is as it was.
function toPaper() {
  if (printing()) return;
  document.documentElement.dataset.printing = document.documentElement.dataset.theme || "";
  document.documentElement.dataset.theme = "light";
  redraws.forEach((redraw) => redraw());
}

function fromPaper() {
  if (!printing()) return;
  const before = document.documentElement.dataset.printing;
  delete document.documentElement.dataset.printing;
  if (before) document.documentElement.dataset.theme = before;
  else delete document.documentElement.dataset.theme;
  redraws.forEach((redraw) => redraw());
}

const redraws = []; // functions that draw all of a section again
function drawn(redraw) {
  redraws.push(redraw);
  redraw();
}

// -- charts -----------------------------------------------------------------------------------------------

const CONFIG = {
  displaylogo: false,
  responsive: true,
  showTips: false,
  modeBarButtons: [["zoom2d", "pan2d", "resetScale2d"], [
    { name: "svg", title: "Save as SVG", icon: Plotly.Icons.disk, click: (plot) => Plotly.downloadImage(plot, { format: "svg", filename: plot.dataset.file }) },
    "toImage",
  ]],
};

function axisStyle() {
  const line = { gridcolor: variable("--grid"), linecolor: variable("--rule"), zerolinecolor: variable("--rule") };
  return { ...line, automargin: true, ticks: "outside", tickcolor: variable("--rule"), title: { font: { size: 13 }, standoff: 8 } };
}

// Draw a chart into the figure of that id, with its table; `rows` gives [header, ...rows] when it is opened.
function chart(id, traces, layout, rows) {
  const figure = byId(id);
  const plot = figure.querySelector(".plot");
  plot.dataset.file = `mpifl-${id}`;
  const style = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, autosize: true,
    font: { color: variable("--text"), family: getComputedStyle(document.body).fontFamily, size: 12 },
    margin: { l: 56, r: 16, t: 30, b: 46 }, height: 320, dragmode: "zoom",
    hoverlabel: { bgcolor: variable("--card"), bordercolor: variable("--soft"), font: { color: variable("--text"), size: 12 }, align: "left", namelength: -1 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: variable("--soft"), activecolor: variable("--accent") },
  };
  const whole = { ...style, ...layout };
  for (const key of Object.keys(whole).filter((k) => /^[xy]axis/.test(k)).concat(["xaxis", "yaxis"])) {
    const own = whole[key] || {};
    whole[key] = { ...axisStyle(), ...own, title: { ...axisStyle().title, ...own.title } };
  }
  plot.style.height = `${whole.height}px`; // a chart that adapts to the window takes the height of its element
  Plotly.react(plot, traces, whole, CONFIG);
  if (rows) tableBehind(figure, rows);
  return plot;
}

function tableBehind(figure, rows) {
  let details = figure.querySelector("details");
  if (!details) {
    details = element("details", {}, element("summary", {}, "Table of this figure"), element("div", { class: "scroll", tabindex: "0" }));
    figure.append(details);
    details.addEventListener("toggle", () => details.open && details.fill());
  }
  details.fill = () => {
    const [head, ...body] = rows();
    const table = element("table", {}, element("caption", { class: "hidden" }, figure.querySelector("figcaption")?.textContent || ""));
    table.append(element("thead", {}, element("tr", {}, ...head.map((h) => element("th", { scope: "col" }, h)))));
    table.append(element("tbody", {}, ...body.map((r) => element("tr", {}, ...r.map((c, i) => (i ? element("td", {}, number2(c)) : element("th", { scope: "row" }, number2(c))))))));
    const csv = () => save(`${figure.id}.csv`, [head, ...body].map((r) => r.map(quoted).join(",")).join("\n"));
    details.querySelector(".scroll").replaceChildren(element("button", { type: "button", onclick: csv }, "Save as CSV"), table);
  };
  if (details.open) details.fill();
}

const number2 = (value) => (typeof value === "number" ? number(value) : shown(value) ? String(value) : "");
const quoted = (value) => (/[",\n]/.test(number2(value)) ? `"${number2(value).replaceAll('"', '""')}"` : number2(value));

function save(name, text) {
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

// A list of colours and what they mean.
function key(id, items) {
  const list = byId(id);
  list.replaceChildren(...items.map(([tint, text]) => {
    const swatch = element("i");
    swatch.style.background = tint;
    return element("li", {}, swatch, text);
  }));
}

// -- tables that sort and filter --------------------------------------------------------------------------

function sortable(table) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const text = head.textContent;
    const sort = () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...body.rows].map((row) => [row, row.cells[column].textContent.trim()]);
      const numeric = !head.matches(".word, .text") && rows.some(([, t]) => t && !Number.isNaN(parseFloat(t))) && rows.every(([, t]) => !t || /^(never|∞)/.test(t) || !Number.isNaN(parseFloat(t)));
      rows.sort(([, a], [, b]) => {
        if (!numeric) return (up ? 1 : -1) * a.localeCompare(b, undefined, { numeric: true });
        const [x, y] = [parseFloat(a), parseFloat(b)];
        if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y); // empty cells last
        return (up ? 1 : -1) * (x - y);
      });
      body.append(...rows.map(([row]) => row));
    };
    head.replaceChildren(element("button", { type: "button", onclick: sort, title: `Sort by ${text}` }, text));
  });
}

// Hide columns that have no room, until the reader chooses: first those that say the same in all rows, then those
// with `data-later`, lowest first, then from the right.
function choosable(table) {
  const heads = [...table.tHead.rows[0].cells], rows = [...table.tBodies[0].rows], box = table.closest(".scroll");
  const show = (column, on) => { for (const row of table.rows) row.cells[column].hidden = !on; };
  const same = heads.map((_, c) => rows.length > 1 && rows.every((row) => row.cells[c].textContent === rows[0].cells[c].textContent));
  const rank = (c) => Number(heads[c].dataset.later ?? heads.length);
  const order = [...heads.keys()].slice(1).sort((a, b) => same[b] - same[a] || rank(a) - rank(b) || b - a);
  let chosen = false;
  const boxes = heads.map((head, c) => {
    const input = element("input", { type: "checkbox" });
    input.addEventListener("change", () => { chosen = true; show(c, input.checked); said(); });
    return input;
  });
  const every = (on) => () => { chosen = !on; heads.forEach((_, c) => c && show(c, true)); on ? fit() : said(); };
  const summary = element("summary");
  const labels = heads.map((head, c) => element("label", {}, boxes[c], head.textContent + (same[c] ? ` (${rows[0].cells[c].textContent || "empty"} in all)` : "")));
  const buttons = [["All", false], ["As many as fit", true]].map(([text, on]) => element("button", { type: "button", onclick: every(on) }, text));
  const chooser = element("details", { class: "chooser" }, summary, element("div", { class: "controls" }, ...labels.slice(1), ...buttons));
  box.before(chooser);
  const said = () => {
    boxes.forEach((input, c) => { input.checked = !heads[c].hidden; });
    const left = heads.filter((head) => !head.hidden).length;
    summary.textContent = `${left} of ${heads.length} columns: choose`;
    chooser.hidden = left === heads.length && !chosen;
  };
  const fit = () => {
    if (chosen) return;
    heads.forEach((_, c) => show(c, true));
    for (const c of order) {
      if (box.scrollWidth <= box.clientWidth) break;
      show(c, false);
    }
    said();
  };
  drawn(fit);
}

function filterable(input, table, count) {
  const filter = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      const keep = words.every((word) => text.includes(word));
      row.hidden = !keep;
      left += keep;
    }
    count.textContent = `${left} of ${table.tBodies[0].rows.length} rows`;
  };
  input.closest(".controls").hidden = table.tBodies[0].rows.length < 4; // few rows are seen at once
  input.addEventListener("input", filter);
  filter();
}
