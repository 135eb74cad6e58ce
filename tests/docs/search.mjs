// node search.mjs SITE QUERY...: what the search of a built site answers, as JSON: query -> [[address, title], ...], best first.
// It runs the worker of Material for MkDocs as a browser does. Answers are grouped by page.
import fs from "node:fs";
import path from "node:path";
import vm from "node:vm";

const SETUP = 0, QUERY = 2; // kinds of the worker's messages
const [site, ...queries] = process.argv.slice(2);
const folder = path.join(site, "assets/javascripts/workers");
const file = fs.readdirSync(folder).find((name) => /^search\..*\.min\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));

const listeners = [], waiting = [];
const worker = {
  console, TextEncoder, URL, setTimeout, clearTimeout, performance, importScripts() {}, location: { href: "http://site/" },
  postMessage: (message) => waiting.shift()?.(message),
  addEventListener: (kind, listener) => kind === "message" && listeners.push(listener),
};
worker.self = worker;
vm.createContext(worker);
vm.runInContext(fs.readFileSync(path.join(folder, file), "utf8"), worker);
const ask = (type, data) => new Promise((answer) => { waiting.push(answer); for (const tell of listeners) tell({ data: { type, data } }); });

await ask(SETUP, { ...index, options: { suggest: false } });
const answers = {};
for (const query of queries) {
  const { data } = await ask(QUERY, query);
  answers[query] = data.items.flatMap((page) => page.filter((hit) => hit.score > 0).map((hit) => [hit.location, hit.title.replace(/<[^>]*>/g, "")]));
}
console.log(JSON.stringify(answers));
