// The state of the page, and a panel drawn from it; scale.js stands before it in the same script.
const data = JSON.parse(document.getElementById("data").textContent);
const state = { axis: data.axes[0], shown: data.entries.map(() => true), smooth: false, window: null };
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

function pen({ colour, dash }, parent) {
  const icon = svg("svg", { class: "pen", width: 30, height: 8, "aria-hidden": "true" }, parent);
  svg("path", { d: "M1 4H29", stroke: colour || "currentColor", "stroke-dasharray": dash }, icon);
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

// The curves of a metric that are switched on, of every row: a column of panels has one scale.
function visible(index) {
  const own = data.series.map((s, i) => ({ s, i, curve: s.curves[index] }));
  return own.filter((o) => o.curve && o.s.entries.every((e) => state.shown[e]))
    .map((o) => (state.smooth ? { ...o, curve: smoothed(o.curve) } : o));
}

// From where to where x goes: the zoom, or everything.
function extent() {
  const ends = data.metrics.flatMap((_, i) => visible(i).map((o) => o.curve[state.axis.key].filter(isNumber).at(-1) ?? 0));
  return state.window ?? [0, ends.reduce((a, b) => Math.max(a, b), 0) || 1];
}

// What the panels of one metric share.
function column(index, [from, to]) {
  const metric = data.metrics[index], all = visible(index);
  const starts = all.map((o) => o.curve.mean.find(isNumber)).filter(isNumber);
  const parts = all.map((o) => (state.window ? between(o.curve, state.axis.key, from, to) : o.curve));
  const range = limits(parts, metric, starts);
  const marks = range.log ? logTicks(range.low, range.high) : metric.percent
    ? ticks(100 * range.low, 100 * range.high, 5).map(([v, t]) => [v / 100, `${t} %`]) : ticks(range.low, range.high, 5);
  return { all, from, to, range, marks };
}

function draw(panel, { all, from, to, range, marks }) {
  const { root, row } = panel, own = all.filter((o) => o.s.row === row);
  root.replaceChildren();
  const width = Math.max(200, root.clientWidth), right = width - RIGHT, bottom = HEIGHT - BOTTOM;
  const f = range.log ? (v) => Math.log10(Math.max(v, 1e-320)) : (v) => v;
  const bound = (v) => Math.min(1e5, Math.max(-1e5, v)); // far outside, yet with dashes that can be counted
  const x = (v) => bound(LEFT + ((v - from) / (to - from)) * (right - LEFT));
  const y = (v) => bound(bottom - ((f(v) - f(range.low)) / (f(range.high) - f(range.low))) * (bottom - TOP));

  for (const [v, text] of marks) {
    svg("path", { class: "grid", d: `M${LEFT} ${y(v).toFixed(1)}H${right}` }, root);
    svg("text", { x: LEFT - 6, y: y(v) + 4, "text-anchor": "end", class: "ytick" }, root, text);
  }
  for (const [v, text] of ticks(from, to, Math.max(2, Math.floor(width / 75)))) {
    svg("path", { class: "grid", d: `M${x(v).toFixed(1)} ${TOP}V${bottom}` }, root);
    svg("text", { x: x(v), y: bottom + 16, "text-anchor": "middle", class: "xtick" }, root, text);
  }
  svg("path", { class: "frame", d: `M${LEFT} ${TOP}V${bottom}H${right}` }, root);
  svg("text", { x: (LEFT + right) / 2, y: HEIGHT - 5, "text-anchor": "middle", class: "label" }, root, state.axis.label);
  if (!own.length) svg("text", { x: (LEFT + right) / 2, y: bottom / 2, "text-anchor": "middle" }, root, "no curve shown");

  const clip = svg("clipPath", { id: panel.id }, root), edge = state.window ? 0 : 3;
  svg("rect", { x: LEFT - edge, y: TOP - 3, width: right - LEFT + 2 * edge, height: bottom - TOP + 6 }, clip);
  const layer = svg("g", { "clip-path": `url(#${panel.id})` }, root);
  for (const { s, i, curve } of own) {
    const parts = stretches(curve, x, y);
    const bands = parts.map((p) => p.filter((q) => q.band)).filter((p) => p.length > 1);
    const area = bands.map((p) => `M${line(p, "top")}L${line([...p].reverse(), "bottom")}Z`).join("");
    if (area) svg("path", { class: "band", d: area, fill: s.colour, "data-series": i }, layer);
    const d = parts.filter((p) => p.length > 1).map((p) => `M${line(p, "y")}`).join("");
    if (d) svg("path", { class: "curve", d, stroke: s.colour, "stroke-dasharray": s.dash, "data-series": i }, layer);
    for (const [p] of parts.filter((p) => p.length === 1))
      svg("circle", { class: "dot", cx: p.x, cy: p.y, r: 3.5, fill: s.colour, "data-series": i }, layer);
  }
  panel.cursor = svg("g", {}, root);
  panel.view = { own, x, y, from, to, right, bottom, width };
}
