// Zoom: drag across a panel, or type the ends; x is the same in all panels, y follows what is to be seen.
const ends = ["from", "to"].map((id) => document.getElementById(id)), reset = document.getElementById("reset");

function zoom(window) {
  state.window = window;
  redraw();
}

function showZoom([from, to]) {
  [from, to].forEach((v, i) => (ends[i].value = Number(v.toPrecision(5))));
  reset.disabled = !state.window;
}

// A finger scrolls and reads values; a mouse or a pen that is drawn across a panel zooms.
function listen(panel) {
  const { root } = panel;
  let begin = null, area = null;
  const place = (event) => {
    const { right } = panel.view;
    return Math.min(right, Math.max(LEFT, event.clientX - root.getBoundingClientRect().left));
  };
  const stop = () => {
    begin = null;
    area?.remove();
    area = null;
  };
  root.addEventListener("pointerdown", (event) => {
    read(panel, event);
    if (event.pointerType === "touch" || event.button !== 0) return;
    event.preventDefault(); // else the text of the panel is selected
    root.setPointerCapture(event.pointerId);
    begin = place(event);
  });
  root.addEventListener("pointermove", (event) => {
    if (begin === null) return read(panel, event);
    const now = place(event), { bottom } = panel.view;
    leave(panel);
    area ??= svg("rect", { class: "drag", y: TOP, height: bottom - TOP }, root);
    area.setAttribute("x", Math.min(begin, now));
    area.setAttribute("width", Math.abs(now - begin));
  });
  root.addEventListener("pointerup", (event) => {
    if (begin === null) return;
    const { from, to, right } = panel.view, now = place(event), first = begin;
    stop();
    if (Math.abs(now - first) < 8) return; // a click that shook
    const value = (px) => from + ((px - LEFT) / (right - LEFT)) * (to - from);
    const chosen = [value(Math.min(first, now)), value(Math.max(first, now))];
    if (chosen[1] - chosen[0] > 1e-6 * Math.abs(chosen[1])) zoom(chosen);
  });
  root.addEventListener("pointercancel", stop);
  root.addEventListener("pointerleave", () => leave(panel));
  root.addEventListener("dblclick", () => zoom(null));
}

for (const end of ends) end.addEventListener("change", () => {
  const chosen = ends.map((e) => e.valueAsNumber);
  if (chosen.every(Number.isFinite) && chosen[0] < chosen[1]) zoom(chosen);
  else showZoom(extent()); // what cannot be shown is taken back
});
reset.addEventListener("click", () => {
  zoom(null);
  ends[0].focus(); // a disabled button would lose the keyboard's place
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.window) zoom(null);
});
