// Tables that sort, the table of what a target costs, and the button that copies a command.
function sortTable(table, column, down) {
  for (const [i, head] of [...table.tHead.rows[0].cells].entries())
    head.setAttribute("aria-sort", i !== column ? "none" : down ? "descending" : "ascending");
  for (const body of table.tBodies) {
    const value = (row) => {
      const cell = row.cells[column], number = cell.dataset.v;
      return number === undefined ? cell.textContent.trim().toLowerCase() : number === "" ? null : Number(number);
    };
    const rows = [...body.rows].filter((row) => !row.classList.contains("group"));
    rows.sort((p, q) => {
      const [a, b] = [value(p), value(q)];
      if (a === null || b === null) return (a === null) - (b === null); // what is missing stays last
      return (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
    });
    body.append(...rows);
  }
}

function makeSortable() {
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      if (!head.querySelector("button")) {
        const button = html("button", null, head.textContent, { type: "button" });
        head.replaceChildren(button);
        button.addEventListener("click", () => {
          const down = head.getAttribute("aria-sort") === "ascending";
          state.sort = [...state.sort.filter((s) => !s.startsWith(`${table.id}:`)), `${table.id}:${column}:${down ? "down" : "up"}`];
          sortTable(table, column, down);
          writeState();
        });
      }
    });
    const chosen = state.sort.find((s) => s.startsWith(`${table.id}:`))?.split(":");
    if (chosen) sortTable(table, Number(chosen[1]), chosen[2] === "down");
  }
}

// The first evaluation in which the mean over seeds has reached the target.
function showTargets() {
  const table = byId("targets");
  if (!table || !data.goals?.length) return;
  const goal = data.goals[state.goal] ?? data.goals[0], metric = data.metrics[goal.metric], scale = metric.percent ? 100 : 1;
  const target = state.target ?? goal.value, higher = metric.better === "higher";
  const slider = byId("target"), number = byId("target-number");
  for (const input of [slider, number]) {
    [input.min, input.max] = [scale * goal.low, scale * goal.high];
    input.step = metric.percent ? 0.1 : Number(((goal.high - goal.low) / 500).toPrecision(1)) || "any";
    if (document.activeElement !== input) input.value = Number((scale * target).toPrecision(4));
  }
  byId("target-unit").textContent = metric.percent ? "%" : "";
  table.tHead.rows[0].cells[0].textContent = `${metric.name} ${higher ? "at least" : "at most"} ${short(scale * target, 4)}${metric.percent ? " %" : ""}`;
  [...table.tBodies].forEach((b) => b.remove());
  for (const [title, members] of data.groups) {
    const body = html("tbody", table);
    if (title) html("th", html("tr", body, undefined, { class: "group" }), title, { colspan: 1 + data.axes.length, scope: "rowgroup" });
    for (const s of members.map((i) => data.series[i])) {
      const curve = s.curves[goal.metric];
      if (!curve) continue;
      const at = curve.mean.findIndex((v) => isNumber(v) && (higher ? v >= target : v <= target));
      const row = html("tr", body), name = html("div", html("th", row, undefined, { scope: "row" }), undefined, { class: "name" });
      name.innerHTML = pen(s);
      html("span", name, s.name);
      for (const axis of data.axes) {
        const v = at < 0 ? null : s.x[curve.x][axis.key][at];
        html("td", row, at < 0 ? "not reached" : isNumber(v) ? amount(v * axis.scale, axis.key) : "–", { "data-v": isNumber(v) ? v : "" });
      }
    }
  }
  const chosen = state.sort.find((s) => s.startsWith("targets:"))?.split(":") ?? ["", "1", "up"];
  sortTable(table, Number(chosen[1]), chosen[2] === "down");
}

function amount(value, key) {
  if (key === "bytes") {
    const [size, unit] = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]].find(([s]) => value >= s) ?? [1, "B"];
    return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  if (key === "seconds") {
    if (value < 0.01) return "< 0.01 s";
    if (value < 60) return `${value < 1 ? Number(value.toPrecision(2)) : value.toFixed(1)} s`;
    return value < 3600 ? `${Math.floor(value / 60)} min ${Math.round(value % 60)} s` : `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  }
  return Math.round(value).toLocaleString("en");
}

function wireTargets() {
  for (const id of ["target", "target-number"]) byId(id)?.addEventListener("input", (event) => {
    const goal = data.goals[state.goal] ?? data.goals[0], value = event.target.valueAsNumber;
    if (!Number.isFinite(value)) return;
    state.target = value / (data.metrics[goal.metric].percent ? 100 : 1);
    showTargets();
    writeState();
  });
  byId("goal")?.addEventListener("change", (event) => {
    [state.goal, state.target] = [event.target.selectedIndex, null];
    showTargets();
    writeState();
  });
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button.copy");
  if (!button) return;
  const text = document.querySelector(button.dataset.from).textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch { // without the permission the text is selected, ready to be copied
    getSelection().selectAllChildren(document.querySelector(button.dataset.from));
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
});
