// Panels, legend and readout; scale.js stands before it in the same script.
const data = JSON.parse(document.getElementById("data").textContent);
const state = { axis: data.axes[0], shown: data.algorithms.map(() => true) };
const LEFT = 50, RIGHT = 12, TOP = 10, BOTTOM = 38, HEIGHT = 270;

function svg(name, attributes, parent, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

function html(name, parent, text) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function pen(algorithm, parent) {
  const icon = svg("svg", { class: "pen", width: 30, height: 8, "aria-hidden": "true" }, parent);
  svg("path", { d: "M1 4H29", stroke: algorithm.colour, "stroke-dasharray": algorithm.dash }, icon);
}

// Unbroken stretches of points: a null ends one.
function stretches(curve, x, y) {
  const found = [];
  let open = null;
  curve.mean.forEach((mean, i) => {
    const at = curve[state.axis.key][i];
    if (!isNumber(mean) || !isNumber(at)) return void (open = null);
    if (!open) found.push((open = []));
    const std = curve.std[i];
    open.push({ x: x(at), y: y(mean), top: y(mean + (std ?? 0)), bottom: y(mean - (std ?? 0)), band: isNumber(std) });
  });
  return found;
}

const line = (points, key) => points.map((p) => `${p.x.toFixed(1)} ${p[key].toFixed(1)}`).join("L");

function draw(panel) {
  const { root, metric, index } = panel, key = state.axis.key;
  root.replaceChildren();
  const width = Math.max(200, root.clientWidth), right = width - RIGHT, bottom = HEIGHT - BOTTOM;
  const own = data.algorithms.map((a, i) => ({ a, i, curve: a.curves[index] })).filter((o) => o.curve && state.shown[o.i]);
  const range = limits(own.map((o) => o.curve), metric);
  const end = own.flatMap((o) => o.curve[key].filter(isNumber)).reduce((a, b) => Math.max(a, b), 0) || 1;
  const f = range.log ? (v) => Math.log10(Math.max(v, 1e-320)) : (v) => v;
  const x = (v) => LEFT + (v / end) * (right - LEFT);
  const y = (v) => Math.min(5000, Math.max(-5000, bottom - ((f(v) - f(range.low)) / (f(range.high) - f(range.low))) * (bottom - TOP)));
  panel.cut = range.cut;

  const marks = range.log ? logTicks(range.low, range.high) : metric.percent
    ? ticks(100 * range.low, 100 * range.high, 5).map(([v, t]) => [v / 100, `${t} %`]) : ticks(range.low, range.high, 5);
  for (const [v, text] of marks) {
    svg("path", { class: "grid", d: `M${LEFT} ${y(v).toFixed(1)}H${right}` }, root);
    svg("text", { x: LEFT - 6, y: y(v) + 4, "text-anchor": "end" }, root, text);
  }
  for (const [v, text] of ticks(0, end, Math.max(2, Math.floor(width / 75)))) {
    svg("path", { class: "grid", d: `M${x(v).toFixed(1)} ${TOP}V${bottom}` }, root);
    svg("text", { x: x(v), y: bottom + 16, "text-anchor": "middle" }, root, text);
  }
  svg("path", { class: "frame", d: `M${LEFT} ${TOP}V${bottom}H${right}` }, root);
  svg("text", { x: (LEFT + right) / 2, y: HEIGHT - 5, "text-anchor": "middle", class: "label" }, root, state.axis.label);
  if (!own.length) svg("text", { x: (LEFT + right) / 2, y: bottom / 2, "text-anchor": "middle" }, root, "no curve shown");

  const clip = svg("clipPath", { id: `clip${index}` }, root);
  svg("rect", { x: LEFT - 3, y: TOP - 3, width: right - LEFT + 6, height: bottom - TOP + 6 }, clip);
  const layer = svg("g", { "clip-path": `url(#clip${index})` }, root);
  for (const { a, i, curve } of own) {
    const parts = stretches(curve, x, y);
    const bands = parts.map((p) => p.filter((q) => q.band)).filter((p) => p.length > 1);
    const area = bands.map((p) => `M${line(p, "top")}L${line([...p].reverse(), "bottom")}Z`).join("");
    if (area) svg("path", { class: "band", d: area, fill: a.colour, "data-algorithm": i }, layer);
    const d = parts.filter((p) => p.length > 1).map((p) => `M${line(p, "y")}`).join("");
    if (d) svg("path", { class: "curve", d, stroke: a.colour, "stroke-dasharray": a.dash, "data-algorithm": i }, layer);
    for (const [p] of parts.filter((p) => p.length === 1))
      svg("circle", { class: "dot", cx: p.x, cy: p.y, r: 3.5, fill: a.colour, "data-algorithm": i }, layer);
  }
  panel.cursor = svg("g", {}, root);
  panel.view = { own, x, y, end, right, bottom, width };
}

function read(panel, event) {
  const { own, x, y, end, right, bottom, width } = panel.view, key = state.axis.key;
  const box = panel.root.getBoundingClientRect(), at = ((event.clientX - box.left - LEFT) / (right - LEFT)) * end;
  leave(panel);
  if (at < -0.03 * end || at > 1.03 * end) return;
  const lines = [];
  for (const { a, curve } of own) {
    let near = -1;
    curve[key].forEach((v, i) => { if (isNumber(v) && (near < 0 || Math.abs(v - at) < Math.abs(curve[key][near] - at))) near = i; });
    // A curve that ended long before the pointer has no value there.
    if (near < 0 || Math.abs(curve[key][near] - at) > 0.08 * end) continue;
    lines.push({ a, at: curve[key][near], mean: curve.mean[near], std: curve.std[near], n: curve.seeds[near] });
  }
  if (!lines.length) return;
  lines.sort((p, q) => (q.mean ?? -Infinity) - (p.mean ?? -Infinity) || 0);
  const centre = lines.reduce((p, q) => (Math.abs(q.at - at) < Math.abs(p.at - at) ? q : p)).at;
  svg("path", { class: "frame", d: `M${x(centre).toFixed(1)} ${TOP}V${bottom}`, "stroke-dasharray": "2 3" }, panel.cursor);
  html("p", panel.readout, `${state.axis.label}: ${short(centre, 4)}`);
  for (const { a, at, mean, std } of lines) {
    const row = html("p", panel.readout);
    pen(a, row);
    html("span", row, a.label);
    html("b", row, isNumber(mean) ? spread(mean, std, panel.metric) : "diverged");
    if (isNumber(mean) && y(mean) >= TOP) svg("circle", { cx: x(at), cy: y(mean), r: 3.5, fill: a.colour }, panel.cursor);
  }
  panel.readout.hidden = false;
  // Beside the pointer, yet never outside the panel: on a phone that would widen the page.
  panel.readout.style.left = "0";
  const room = panel.readout.offsetWidth, beside = x(centre) < width / 2 ? x(centre) + 16 : x(centre) - 8 - room;
  panel.readout.style.left = `${Math.max(0, Math.min(beside, width - room))}px`;
}

function leave(panel) {
  panel.readout.hidden = true;
  panel.readout.replaceChildren();
  panel.cursor.replaceChildren();
}

const holder = document.getElementById("panels");
const panels = data.metrics.map((metric, index) => {
  const figure = html("figure", holder);
  html("figcaption", figure, metric.name);
  const root = svg("svg", { role: "img", "aria-label": `${metric.name}; the final values are in the table below` }, figure);
  const readout = html("div", figure);
  readout.className = "readout";
  const panel = { metric, index, root, readout };
  root.addEventListener("pointermove", (event) => read(panel, event));
  root.addEventListener("pointerdown", (event) => read(panel, event));
  root.addEventListener("pointerleave", () => leave(panel));
  return panel;
});

function redraw() {
  const room = holder.clientWidth, n = panels.length;
  const most = room > 1150 ? 4 : room > 640 ? 2 : 1;
  holder.style.maxWidth = `${760 * n}px`;
  holder.style.setProperty("--columns", Math.min(most, n > 4 && most === 4 ? 3 : n));
  for (const panel of panels) {
    draw(panel);
    leave(panel);
  }
  document.getElementById("cut").hidden = !panels.some((panel) => panel.cut);
}

for (const button of document.querySelectorAll("#axes button")) {
  button.addEventListener("click", () => {
    state.axis = data.axes.find((axis) => axis.key === button.dataset.axis);
    for (const other of document.querySelectorAll("#axes button")) other.setAttribute("aria-pressed", other === button);
    redraw();
  });
}
data.algorithms.forEach((algorithm, i) => {
  const button = html("button", document.getElementById("legend"));
  button.type = "button";
  button.setAttribute("aria-pressed", "true");
  pen(algorithm, button);
  html("span", button, algorithm.label);
  button.addEventListener("click", () => {
    state.shown[i] = !state.shown[i];
    button.setAttribute("aria-pressed", state.shown[i]);
    redraw();
  });
});
document.getElementById("controls").hidden = false;
document.querySelector(".script").hidden = false;
let room = holder.clientWidth;
new ResizeObserver(() => {
  if (holder.clientWidth !== room) requestAnimationFrame(redraw);
  room = holder.clientWidth;
}).observe(holder);
redraw();
