// The panels and the controls above them; a live page also asks for news.
let panels = [], clicked = 0;
function build() {
  const holder = byId("panels");
  panels.forEach((p) => p.chart?.destroy());
  holder.replaceChildren();
  panels = data.panels.map((p) => ({ ...p }));
  data.rows.forEach((title, row) => {
    const section = html("section", holder);
    if (title) html("h3", section, title);
    const grid = html("div", section, undefined, { class: "row" });
    for (const panel of panels.filter((p) => p.row === row)) addPanel(panel, grid);
  });
  const legend = byId("legend");
  legend.replaceChildren();
  data.entries.forEach((entry, i) => {
    if (entry.section && !data.entries[i - 1].section) html("span", legend, "Runs:", { class: "soft" });
    const button = html("button", legend, undefined, { type: "button" });
    button.innerHTML = pen(entry);
    html("span", button, entry.text);
    button.addEventListener("click", () => ((state.shown[i] = !state.shown[i]), update()));
  });
}

function addPanel(panel, grid) {
  const figure = (panel.figure = html("figure", grid, undefined, { "data-panel": panel.key }));
  const head = html("figcaption", figure), name = html("span", head, panel.title);
  const tools = html("span", head, undefined, { class: "tools" });
  for (const kind of ["png", "svg", "csv"])
    html("button", tools, kind.toUpperCase(), { type: "button", title: `Save this panel as ${kind.toUpperCase()}` }).addEventListener("click", () => savePanel(panel, kind));
  panel.grow = html("button", tools, "⤢", { type: "button", title: "Enlarge or shrink this panel", "aria-label": `Enlarge ${panel.title}` });
  const enlarge = () => ((state.large = state.large === panel.key ? null : panel.key), update());
  panel.grow.addEventListener("click", enlarge);
  panel.names = html("p", figure, undefined, { class: "names" }); // the legend is covered when a panel is large
  panel.root = html("div", figure, undefined, { class: "plot", role: "img", "aria-label": `${panel.title}; the final values are in the table below` });
  panel.readout = html("div", figure, undefined, { class: "readout", hidden: "" });
  panel.note = html("p", figure, undefined, { class: "outside" });
  // uPlot keeps the click that ends a drag to itself; the first click of two waits for the second, which zooms out.
  panel.root.addEventListener("click", () => {
    clearTimeout(clicked);
    clicked = setTimeout(enlarge, 250);
  });
}

function draw() {
  for (const panel of panels) {
    const large = state.large === panel.key;
    panel.figure.classList.toggle("large", large);
    panel.grow.textContent = large ? "×" : "⤢";
    panel.chart?.destroy();
    panel.names.replaceChildren();
    for (const { s } of large ? lines(panel) : []) {
      const name = html("span", panel.names);
      name.innerHTML = pen(s);
      name.append(s.name);
    }
    const width = Math.max(200, panel.root.clientWidth), height = large ? Math.max(240, panel.root.clientHeight) : Math.min(360, Math.max(260, width * 0.55));
    panel.chart = makeChart(panel, panel.root, width, height);
    const out = panel.lines.filter(({ s }) => panel.outside.includes(s.label)).map(({ s }) => s.name);
    panel.note.textContent = out.length && !state.high.has(panel.key) ? `Outside the panel: ${out.length > 3 ? `${out.length} curves` : out.join(", ")}` : "";
    panel.readout.hidden = true;
  }
  document.body.classList.toggle("covered", panels.some((p) => p.key === state.large));
}

// The controls as the state says, the panels, the tables, and the state into the URL.
function update() {
  for (const button of document.querySelectorAll("#axes button")) button.setAttribute("aria-pressed", button.dataset.axis === state.axis.key);
  for (const button of document.querySelectorAll("#scales button")) button.setAttribute("aria-pressed", button.dataset.scale === state.scale);
  [...byId("legend").querySelectorAll("button")].forEach((button, i) => button.setAttribute("aria-pressed", state.shown[i]));
  if (byId("smooth")) {
    byId("smooth").value = state.smooth;
    byId("smooth-value").textContent = state.smooth ? state.smooth.toFixed(2) : "off";
    byId("seeds").checked = state.seeds;
  }
  rangeX().forEach((v, i) => (byId(["from", "to"][i]).value = Number(v.toPrecision(5))));
  byId("reset").disabled = !state.window && !state.high.size;
  draw();
  showTargets();
  writeState();
}

function zoomOut() {
  state.window = null;
  state.high.clear();
  update();
}

for (const button of document.querySelectorAll("#axes button")) button.addEventListener("click", () => {
  state.axis = data.axes.find((a) => a.key === button.dataset.axis);
  state.window = null; // in another unit the old ends mean nothing
  update();
});
for (const button of document.querySelectorAll("#scales button")) button.addEventListener("click", () => {
  state.scale = button.dataset.scale;
  state.high.clear();
  update();
});
byId("smooth")?.addEventListener("input", (event) => ((state.smooth = event.target.valueAsNumber), update()));
byId("seeds")?.addEventListener("change", (event) => ((state.seeds = event.target.checked), update()));
for (const id of ["from", "to"]) byId(id).addEventListener("change", () => {
  const ends = ["from", "to"].map((one) => byId(one).valueAsNumber);
  if (ends.every(Number.isFinite) && ends[0] < ends[1] && ends[0] < state.axis.end && (!state.axis.log || ends[0] > 0)) state.window = ends;
  update(); // what cannot be shown is taken back
});
byId("reset").addEventListener("click", () => (zoomOut(), byId("from").focus())); // a disabled button loses the keyboard's place
byId("panels").addEventListener("dblclick", () => (clearTimeout(clicked), zoomOut()));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (state.large) (state.large = null), update();
  else if (state.window || state.high.size) zoomOut();
});
addEventListener("hashchange", () => (readState(), makeSortable(), update()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

readState();
build();
wireTargets();
byId("controls").hidden = false;
for (const node of document.querySelectorAll(".script")) node.hidden = false;
makeSortable();
update();
let room = byId("panels").clientWidth;
new ResizeObserver(() => {
  if (byId("panels").clientWidth !== room) requestAnimationFrame(draw);
  room = byId("panels").clientWidth;
}).observe(byId("panels"));

// A live page: when the folder has changed, its parts are replaced and the reader's choices stay.
const live = document.body.dataset.live;
if (live !== undefined) {
  let version = live;
  const status = byId("live");
  const ask = async () => {
    try {
      const news = await (await fetch("version", { cache: "no-store" })).json();
      status.textContent = news.state;
      status.className = "live on";
      if (news.version !== version) {
        const page = new DOMParser().parseFromString(await (await fetch("./", { cache: "no-store" })).text(), "text/html");
        const fresh = page.getElementById("data");
        if (!fresh) return location.reload(); // the run has begun
        data = JSON.parse(await unpack(fresh.textContent));
        for (const part of document.querySelectorAll("[data-part]")) {
          const other = page.querySelector(`[data-part="${part.dataset.part}"]`);
          if (other) {
            const open = [...part.querySelectorAll("details")].map((d) => d.open);
            part.replaceChildren(...other.childNodes);
            part.querySelectorAll("details").forEach((d, i) => (d.open = open[i] ?? d.open));
          }
        }
        version = news.version;
        const place = scrollY;
        readState();
        build();
        wireTargets();
        for (const node of document.querySelectorAll(".script")) node.hidden = false;
        makeSortable();
        update();
        scrollTo(0, place);
      }
    } catch {
      const done = status.textContent.startsWith("finished");
      status.textContent = done ? "finished; the server has ended" : "no answer: the run or its server has ended; this page waits for it";
      status.className = "live off";
    }
    setTimeout(ask, 1000);
  };
  ask();
}
