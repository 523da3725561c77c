// The rows of panels, and the buttons above them.
const holder = document.getElementById("panels"), panels = [], grids = [];
data.rows.forEach((title, row) => {
  const section = html("section", holder);
  if (title) html("h3", section, title);
  let index = 0;
  for (const size of data.lines) {
    const grid = html("div", section);
    grid.className = "row";
    grids.push(grid);
    for (const last = index + size; index < last; index++) {
      const metric = data.metrics[index], name = title ? `${metric.name}, ${title}` : metric.name;
      const figure = html("figure", grid);
      html("figcaption", figure, metric.name);
      const root = svg("svg", { role: "img", "aria-label": `${name}; the final values are in the table below` }, figure);
      const readout = html("div", figure);
      readout.className = "readout";
      const panel = { metric, index, row, root, readout, id: `clip${row}-${index}` };
      listen(panel);
      panels.push(panel);
    }
  }
});

function redraw() {
  const room = holder.clientWidth, widest = Math.max(...data.lines);
  const columns = Math.min(room > 1150 ? 4 : room > 640 ? 2 : 1, widest);
  for (const grid of grids) {
    grid.style.setProperty("--columns", columns);
    grid.style.maxWidth = `${760 * columns}px`;
  }
  const span = extent(), shared = data.metrics.map((_, index) => column(index, span));
  for (const panel of panels) {
    draw(panel, shared[panel.index]);
    leave(panel);
  }
  showZoom(span);
  document.getElementById("cut").hidden = !shared.some((c) => c.range.cut);
  document.getElementById("smooth").hidden = !state.smooth;
}

// One of several buttons is pressed.
function choice(selector, act) {
  const buttons = [...document.querySelectorAll(selector)];
  for (const button of buttons) button.addEventListener("click", () => {
    for (const other of buttons) other.setAttribute("aria-pressed", other === button);
    act(button.dataset);
    redraw();
  });
}
choice("#axes button", ({ axis }) => {
  state.axis = data.axes.find((a) => a.key === axis);
  state.window = null; // another unit: the old ends mean nothing on it
});
choice("#smoothing button", ({ smooth }) => (state.smooth = Boolean(smooth)));

data.entries.forEach((entry, i) => {
  const legend = document.getElementById("legend");
  if (entry.section && !data.entries[i - 1].section) html("span", legend, "Runs:").className = "soft";
  const button = html("button", legend);
  button.type = "button";
  button.setAttribute("aria-pressed", "true");
  pen(entry, button);
  html("span", button, entry.text);
  button.addEventListener("click", () => {
    state.shown[i] = !state.shown[i];
    button.setAttribute("aria-pressed", state.shown[i]);
    redraw();
  });
});

// The files were written when the report was, and lie in the page packed.
async function unpacked(kind) {
  const bytes = Uint8Array.from(atob(data.files[kind]), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}
for (const button of document.querySelectorAll("#export button")) button.addEventListener("click", async () => {
  const kind = button.dataset.file, type = kind === "csv" ? "text/csv" : "application/x-tex";
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([await unpacked(kind)], { type: `${type};charset=utf-8` }));
  link.download = `${data.name}.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
});

document.getElementById("controls").hidden = false;
document.querySelector(".script").hidden = false;
let room = holder.clientWidth;
new ResizeObserver(() => {
  if (holder.clientWidth !== room) requestAnimationFrame(redraw);
  room = holder.clientWidth;
}).observe(holder);
redraw();
