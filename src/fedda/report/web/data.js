// The page's data, the state that its URL holds, and numbers as text.
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}
const byId = (id) => document.getElementById(id);
const isNumber = (v) => v !== null && Number.isFinite(v);
let data = JSON.parse(await unpack(byId("data").textContent));

function html(name, parent, text, attributes = {}) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  parent?.append(node);
  return node;
}

const pen = ({ colour, dash }) =>
  `<svg class="pen" width="30" height="8" aria-hidden="true"><path d="M1 4H29" stroke="${colour || "currentColor"}" stroke-dasharray="${dash.join(" ")}"/></svg>`;

function short(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(digits - 1).replace(/\.?0*e\+?/, "e");
  return String(Number(value.toPrecision(digits)));
}

function spread(mean, std, metric) {
  const write = (value, digits) => (metric.percent ? (100 * value).toFixed(1) : short(value, digits));
  return write(mean, 4) + (isNumber(std) ? ` ± ${write(std, 2)}` : "") + (metric.percent ? " %" : "");
}

// What a reader has chosen. It stands in the URL, so that a link shows the same page.
const state = {};
function readState() {
  const given = new URLSearchParams(location.hash.slice(1)), hidden = new Set(given.getAll("hide"));
  const pair = (text) => {
    const ends = (text ?? "").split(",").map(Number);
    return ends.length === 2 && ends.every(Number.isFinite) && ends[0] < ends[1] ? ends : null;
  };
  Object.assign(state, {
    axis: data.axes.find((a) => a.key === given.get("x")) ?? data.axes[0],
    scale: ["linear", "log"].includes(given.get("y")) ? given.get("y") : "auto",
    smooth: Math.min(0.99, Math.max(0, Number(given.get("smooth")) || 0)),
    seeds: given.get("seeds") === "1",
    window: pair(given.get("zoom")),
    high: new Map(given.getAll("box").map((t) => t.split(":")).map(([k, v]) => [k, pair(v)]).filter(([, v]) => v)),
    shown: data.entries.map((e) => !hidden.has(e.text)),
    large: given.get("panel"),
    goal: Number(given.get("goal")) || 0,
    target: given.has("target") ? Number(given.get("target")) : null,
    sort: given.getAll("sort"),
  });
}
function writeState() {
  const words = new URLSearchParams();
  if (state.axis !== data.axes[0]) words.set("x", state.axis.key);
  if (state.scale !== "auto") words.set("y", state.scale);
  if (state.smooth) words.set("smooth", state.smooth);
  if (state.seeds) words.set("seeds", "1");
  if (state.window) words.set("zoom", state.window.map((v) => Number(v.toPrecision(5))).join(","));
  for (const [key, ends] of state.high) words.append("box", `${key}:${ends.map((v) => Number(v.toPrecision(5))).join(",")}`);
  data.entries.forEach((e, i) => state.shown[i] || words.append("hide", e.text));
  if (state.large) words.set("panel", state.large);
  if (state.goal) words.set("goal", state.goal);
  if (state.target !== null) words.set("target", Number(state.target.toPrecision(6)));
  for (const one of state.sort) words.append("sort", one);
  history.replaceState(null, "", `#${words}`);
}
