// Files that the page saves: a panel as SVG, PNG and CSV; everything as CSV and LaTeX.
function save(name, content, type) {
  const link = html("a", null, "", { download: name });
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

// The panel as it is seen, on white, with its legend below.
function panelSvg(panel) {
  const u = panel.chart, { offsetLeft: left, offsetTop: above, clientWidth: wide, clientHeight: tall } = u.over, log = isLog(panel);
  const top = above + 26, right = left + wide, bottom = top + tall, ink = "#1c1f23", soft = "#5b636d";
  const place = (v, scale, low, high) => Math.min(high + 1e4, Math.max(low - 1e4, u.valToPos(v, scale)));
  const x = (v) => (left + place(v, "x", 0, wide)).toFixed(2), y = (v) => (top + place(v, "y", 0, tall)).toFixed(2);
  const text = (px, py, words, more = "") => `<text x="${px}" y="${py}" fill="${soft}" ${more}>${escaped(words)}</text>`;
  const stretches = (xs, ys) => {
    const parts = [[]];
    xs.forEach((v, i) => (isNumber(ys[i]) && (!log || ys[i] > 0) ? parts.at(-1).push(`${x(v)} ${y(ys[i])}`) : parts.push([])));
    return parts.filter((p) => p.length);
  };
  const path = (xs, ys) => stretches(xs, ys).map((p) => `M${p.length > 1 ? p.join("L") : `${p[0]}h0.01`}`).join("");
  const out = [], metric = data.metrics[panel.metric], size = u.width;
  out.push(`<text x="${(left + right) / 2}" y="18" fill="${ink}" font-size="14" font-weight="600" text-anchor="middle">${escaped(panel.title)}</text>`);
  for (const [v, t] of panel.ticks.y) out.push(`<path d="M${left} ${y(v)}H${right}" stroke="#e4e4e4"/>`, text(left - 6, Number(y(v)) + 4, t, 'text-anchor="end"'));
  for (const [v, t] of panel.ticks.x) out.push(`<path d="M${x(v)} ${top}V${bottom}" stroke="#e4e4e4"/>`, text(x(v), bottom + 16, t, 'text-anchor="middle"'));
  out.push(`<path d="M${left} ${top}V${bottom}H${right}" stroke="${soft}" fill="none"/>`, text((left + right) / 2, bottom + 34, state.axis.label, 'text-anchor="middle"'));
  out.push(`<clipPath id="c"><rect x="${left}" y="${top - 2}" width="${wide + 2}" height="${tall + 4}"/></clipPath><g clip-path="url(#c)" fill="none" stroke-linejoin="round">`);
  for (const line of panel.lines) {
    const { colour, dash } = line.s;
    if (state.seeds) for (const one of line.seeds) out.push(`<path d="${path(line.x, one)}" stroke="${colour}" stroke-opacity="0.45"/>`);
    else {
      const [high, low] = band(line, log), kept = [...line.x.keys()].filter((i) => isNumber(high[i]) && isNumber(low[i]));
      const edge = (ys, order) => order.map((i) => `${x(line.x[i])} ${y(ys[i])}`).join("L");
      if (kept.length > 1) out.push(`<path d="M${edge(high, kept)}L${edge(low, kept.toReversed())}Z" fill="${colour}" fill-opacity="0.17"/>`);
    }
    out.push(`<path class="curve" d="${path(line.x, line.mean)}" stroke="${colour}" stroke-width="2" stroke-linecap="${dash.length ? "butt" : "round"}" stroke-dasharray="${dash.join(" ")}"/>`);
  }
  out.push("</g>");
  for (const [v, at, colour] of panel.crossed) {
    const up = Math.min(bottom, Math.max(top, Number(y(at))));
    out.push(`<path d="M${x(v)} ${up}m-5 -5l10 10m0 -10l-10 10" stroke="${colour}" stroke-width="2"/>`);
  }
  let row = bottom + 56, column = left;
  for (const { s } of panel.lines) {
    const width = 46 + 7 * s.name.length;
    if (column > left && column + width > size) (row += 20), (column = left);
    out.push(`<path d="M${column} ${row - 4}h28" stroke="${s.colour}" stroke-width="2.5" stroke-dasharray="${s.dash.join(" ")}"/>`, text(column + 34, row, s.name));
    column += width;
  }
  const height = row + 14;
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${size}" height="${height}" viewBox="0 0 ${size} ${height}" font-family="system-ui, sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>${out.join("")}</svg>`;
}

async function panelPng(panel) {
  const picture = new Image(), canvas = document.createElement("canvas"), scale = 3; // 300 dots per inch of a screen's 96
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(panelSvg(panel))}`;
  await picture.decode();
  [canvas.width, canvas.height] = [scale * picture.width, scale * picture.height];
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done));
}

// The points that the panel draws, not smoothed.
function panelCsv(panel) {
  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text), keys = data.axes.map((a) => a.key);
  const rows = [["algorithm", "metric", ...keys, "mean", "std", ...(data.sweep ? [] : ["by_seed"])]];
  for (const { s } of panel.lines) {
    const curve = s.curves[panel.metric], x = s.x[curve.x];
    curve.mean.forEach((mean, i) => rows.push([
      s.label, data.metrics[panel.metric].key, ...data.axes.map((a) => x[a.key][i] === null ? "" : x[a.key][i] * a.scale), mean ?? "", curve.std[i] ?? "",
      ...(data.sweep ? [] : [curve.seeds.map((one) => one[i] ?? "").join(" ")]),
    ]));
  }
  return rows.map((row) => row.map((v) => quoted(String(v))).join(",")).join("\n") + "\n";
}

async function savePanel(panel, kind) {
  const name = `${data.name}-${panel.key}.${kind}`;
  if (kind === "svg") save(name, panelSvg(panel), "image/svg+xml");
  if (kind === "png") save(name, await panelPng(panel));
  if (kind === "csv") save(name, panelCsv(panel), "text/csv;charset=utf-8");
}

for (const button of document.querySelectorAll("#export button")) button.addEventListener("click", async () => {
  const kind = button.dataset.file;
  save(`${data.name}.${kind}`, await unpack(data.files[kind]), `${kind === "csv" ? "text/csv" : "application/x-tex"};charset=utf-8`);
});
