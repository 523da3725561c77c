// The values under the pointer, beside it.
const MOST = 14; // lines, where there are hundreds of curves

function read(panel, event) {
  const { own, x, y, from, to, right, bottom, width } = panel.view, key = state.axis.key, span = to - from;
  const box = panel.root.getBoundingClientRect(), at = from + ((event.clientX - box.left - LEFT) / (right - LEFT)) * span;
  leave(panel);
  if (at < from - 0.03 * span || at > to + 0.03 * span) return;
  const lines = [];
  for (const { s, curve } of own) {
    let near = -1;
    curve[key].forEach((v, i) => { if (isNumber(v) && (near < 0 || Math.abs(v - at) < Math.abs(curve[key][near] - at))) near = i; });
    if (near < 0 || curve[key][near] < from || curve[key][near] > to) continue;
    // A curve that ended long before the pointer has no value there.
    if (Math.abs(curve[key][near] - at) > 0.08 * span) continue;
    lines.push({ s, at: curve[key][near], mean: curve.mean[near], std: curve.std[near], n: curve.seeds[near] });
  }
  if (!lines.length) return;
  const height = event.clientY - box.top, far = (l) => (isNumber(l.mean) ? Math.abs(y(l.mean) - height) : Infinity);
  const left = lines.length - MOST;
  if (left > 0) lines.sort((p, q) => far(p) - far(q) || 0).splice(MOST); // those next to the pointer
  lines.sort((p, q) => (q.mean ?? -Infinity) - (p.mean ?? -Infinity) || 0);
  const centre = lines.reduce((p, q) => (Math.abs(q.at - at) < Math.abs(p.at - at) ? q : p)).at;
  svg("path", { class: "frame", d: `M${x(centre).toFixed(1)} ${TOP}V${bottom}`, "stroke-dasharray": "2 3" }, panel.cursor);
  html("p", panel.readout, `${state.axis.label}: ${short(centre, 4)}${state.smooth ? ", smoothed" : ""}`);
  for (const { s, at, mean, std } of lines) {
    const row = html("p", panel.readout);
    pen(s, row);
    html("span", row, s.label);
    html("b", row, isNumber(mean) ? spread(mean, std, panel.metric) : "diverged");
    if (isNumber(mean) && y(mean) >= TOP) svg("circle", { cx: x(at), cy: y(mean), r: 3.5, fill: s.colour }, panel.cursor);
  }
  if (left > 0) html("p", panel.readout, `and ${left} more`);
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
