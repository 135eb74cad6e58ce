// Draws everything once the page is there.

byId("theme").addEventListener("click", switchTheme);
media.addEventListener("change", themed);
window.addEventListener("beforeprint", toPaper);
window.addEventListener("afterprint", fromPaper);
byId("theme").textContent = isDark() ? "Light" : "Dark";
document.querySelectorAll("table.sortable").forEach(sortable);
["final-table", "runs-table"].forEach((name) => choosable(byId(name)));
document.querySelectorAll("input[data-filters]").forEach((input) => filterable(input, byId(input.dataset.filters), input.parentElement.parentElement.querySelector("[role=status]")));
document.querySelectorAll(".command button").forEach((button) => button.addEventListener("click", () => {
  const done = () => { button.textContent = "Copied"; };
  const select = () => { getSelection().selectAllChildren(button.parentElement.querySelector("code")); };
  navigator.clipboard ? navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent).then(done, select) : select();
}));
startCurves();
startSeeds();
startDetails();
let lastWidth = window.innerWidth;
let waiting = 0;
window.addEventListener("resize", () => { // a change of width changes how much room names have
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    if (window.innerWidth !== lastWidth) redraws.forEach((redraw) => redraw());
    lastWidth = window.innerWidth;
  }, 150);
});
document.documentElement.dataset.ready = "true";
