// A panel, drawn by uPlot. Its limits were computed when the page was written; here they are only chosen.
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const faint = (colour, share) => colour + Math.round(255 * share).toString(16).padStart(2, "0");

// An exponential mean that keeps the share `state.smooth`, corrected for its start; a gap begins it anew.
function smoothed(values) {
  const keep = state.smooth;
  if (!keep) return values;
  let sum = 0, weight = 0;
  return values.map((v) => {
    if (!isNumber(v)) return (sum = weight = 0), null;
    sum = keep * sum + (1 - keep) * v;
    weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}

// The curves of a panel that are switched on, each with its x values.
function lines(panel) {
  const found = [];
  for (const s of data.series) {
    const curve = s.curves[panel.metric];
    if (!curve || s.row !== panel.row || !s.entries.every((e) => state.shown[e])) continue;
    const x = s.x[curve.x][state.axis.key], kept = [...x.keys()].filter((i) => isNumber(x[i]));
    const pick = (values) => smoothed(kept.map((i) => values[i]));
    found.push({ s, x: kept.map((i) => x[i]), mean: pick(curve.mean), std: pick(curve.std), seeds: curve.seeds.map(pick) });
  }
  return found;
}

const isLog = (panel) => Boolean(panel.log) && (state.scale === "log" || (state.scale === "auto" && panel.preferLog));
const wholeX = () => (state.axis.log ? [state.axis.begin / 1.25, state.axis.end * 1.25] : [0, state.axis.end]);
const rangeX = () => state.window ?? wholeX();
const rangeY = (panel) => state.high.get(panel.key) ?? (isLog(panel) ? panel.log : panel.linear);

// A band of one standard deviation; on a log axis the mean over and times the same factor, which never reaches zero.
function band(line, log) {
  const ends = (sign) => line.mean.map((m, i) => {
    const std = line.std[i];
    if (!isNumber(m) || !isNumber(std)) return null;
    return log ? (m > 0 ? m * (1 + std / m) ** sign : null) : m + sign * std;
  });
  return [ends(1), ends(-1)];
}

// Points that no line joins, and all points of a short curve.
function alone(u, i) {
  const y = u.data[i], own = [...y.keys()].filter((k) => y[k] !== undefined);
  if (own.length <= 12) return own.filter((k) => y[k] !== null);
  return own.filter((k, j) => y[k] !== null && (y[own[j - 1]] ?? null) === null && (y[own[j + 1]] ?? null) === null);
}

function makeChart(panel, parent, width, height) {
  const metric = data.metrics[panel.metric], own = lines(panel), log = isLog(panel);
  const tables = [], series = [{}], bands = [], positive = (values) => (log ? values.map((v) => (v > 0 ? v : null)) : values);
  own.forEach((line) => {
    const { colour, dash } = line.s, columns = [];
    if (state.seeds) for (const values of line.seeds) {
      columns.push(positive(values));
      series.push({ stroke: faint(colour, 0.45), width: 1, points: { show: false } });
    } else if (line.std.some(isNumber)) {
      const first = series.length;
      columns.push(...band(line, log));
      for (let i = 0; i < 2; i++) series.push({ stroke: "transparent", width: 0, points: { show: false } });
      bands.push({ series: [first, first + 1], fill: faint(colour, 0.17) });
    }
    columns.push(positive(line.mean));
    line.index = series.length;
    series.push({ stroke: colour, width: 2, dash, points: { show: true, filter: alone, size: 6, fill: colour, stroke: colour } });
    tables.push([line.x, ...columns]);
  });
  const soft = css("--soft"), grid = { stroke: css("--line"), width: 1 }, ticks = { show: false };
  const font = "12px system-ui, sans-serif", write = (v) => (metric.percent ? `${short(100 * v)} %` : short(v));
  panel.ticks = { x: [], y: [] };
  const values = (kind, text) => (u, splits) => {
    const texts = splits.map((v) => (v === null ? "" : text(v)));
    panel.ticks[kind] = splits.map((v, i) => [v, texts[i]]).filter(([, t]) => t);
    return texts;
  };
  const crossed = own.flatMap(({ s, x, mean }) => {
    const last = mean.findLastIndex(isNumber);
    return last >= 0 && last < mean.length - 1 ? [[x[last], mean[last], s.colour]] : [];
  });
  panel.crossed = crossed;
  const u = new uPlot({
    width, height, series, bands,
    padding: [8, 14, 0, 0],
    legend: { show: false },
    scales: {
      x: { time: false, range: rangeX, distr: state.axis.log ? 3 : 1 },
      y: { range: () => rangeY(panel), distr: log ? 3 : 1 },
    },
    axes: [
      { stroke: soft, grid, ticks, font, labelFont: font, label: state.axis.label, labelSize: 18, size: 28, gap: 4, values: values("x", (v) => short(v, 4)), space: 60 },
      { stroke: soft, grid, ticks, font, size: 58, gap: 4, values: values("y", write), space: 34 },
    ],
    cursor: {
      drag: { x: true, y: true, uni: 40, dist: 8, setScale: false },
      points: { show: false },
      y: false,
      bind: { dblclick: () => () => null },
      sync: { key: "panels", scales: ["x", null], filters: { pub: (type) => type !== "mouseup" && type !== "mousedown", sub: () => true } },
    },
    hooks: {
      setCursor: [(u) => readOut(panel, u)],
      setSelect: [(u) => select(panel, u)],
      draw: [(u) => {
        for (const [x, y, colour] of crossed) {
          const at = u.valToPos(x, "x", true), size = 5 * devicePixelRatio, { top, height: tall } = u.bbox;
          const up = Math.min(top + tall, Math.max(top, u.valToPos(y, "y", true)));
          u.ctx.strokeStyle = colour;
          u.ctx.lineWidth = 2 * devicePixelRatio;
          u.ctx.setLineDash([]);
          u.ctx.beginPath();
          for (const sign of [-1, 1]) u.ctx.moveTo(at - size, up - sign * size), u.ctx.lineTo(at + size, up + sign * size);
          u.ctx.stroke();
        }
      }],
    },
  }, tables.length ? uPlot.join(tables) : [[], ...series.slice(1).map(() => [])], parent);
  panel.lines = own;
  return u;
}

// A drag zooms: x in all panels, y in this one.
function select(panel, u) {
  const { left, top, width, height } = u.select;
  if (width < 8 && height < 8) return;
  const { clientWidth: wide, clientHeight: tall } = u.over; // the side that was not dragged is selected whole
  if (width >= 8 && width < wide - 1) state.window = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
  if (height >= 8 && height < tall - 1) state.high.set(panel.key, [u.posToVal(top + height, "y"), u.posToVal(top, "y")]);
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  update();
}

const MOST = 16; // lines of a readout, where there are hundreds of curves
function readOut(panel, u) {
  const box = panel.readout, { left, top } = u.cursor;
  box.hidden = true;
  if (left < 0 || !u.over.matches(":hover")) return;
  const at = u.posToVal(left, "x"), [from, to] = rangeX(), metric = data.metrics[panel.metric], found = [];
  const span = state.axis.log ? Infinity : 0.08 * (to - from), far = (a, b) => (state.axis.log ? Math.abs(Math.log(a / b)) : Math.abs(a - b));
  for (const { s, x, mean, std } of panel.lines) {
    let near = -1;
    x.forEach((v, i) => { if (near < 0 || far(v, at) < far(x[near], at)) near = i; });
    // A curve that ended long before the pointer has no value there.
    if (near >= 0 && far(x[near], at) <= span) found.push({ s, x: x[near], mean: mean[near], std: std[near] });
  }
  if (!found.length) return;
  const distance = (l) => (isNumber(l.mean) ? Math.abs(u.valToPos(l.mean, "y") - top) : Infinity), left_off = found.length - MOST;
  if (left_off > 0) found.sort((p, q) => distance(p) - distance(q) || 0).splice(MOST);
  found.sort((p, q) => (q.mean ?? -Infinity) - (p.mean ?? -Infinity) || 0);
  const nearest = found.reduce((p, q) => (far(q.x, at) < far(p.x, at) ? q : p)).x;
  box.replaceChildren(html("p", null, `${state.axis.label}: ${short(nearest, 4)}${state.smooth ? ", smoothed" : ""}`));
  for (const { s, mean, std } of found) {
    const row = html("p", box);
    row.innerHTML = pen(s);
    html("span", row, s.name);
    html("b", row, isNumber(mean) ? spread(mean, std, metric) : data.sweep ? "no value" : "diverged");
  }
  if (left_off > 0) html("p", box, `and ${left_off} more`);
  box.hidden = false;
  // Beside the pointer, yet never outside the panel: on a phone that would widen the page.
  box.style.left = "0";
  const room = box.offsetWidth, edge = u.over.offsetLeft + left, width = panel.figure.clientWidth;
  box.style.left = `${Math.max(0, Math.min(edge < width / 2 ? edge + 16 : edge - 12 - room, width - room))}px`;
}
