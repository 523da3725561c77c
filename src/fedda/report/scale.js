// Numbers and axes: pure functions, no page.
const isNumber = (v) => v !== null && Number.isFinite(v);

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

// Bottom, top and kind of the y axis over the visible curves; a diverging loss may leave the panel.
function limits(curves, metric) {
  const means = curves.map((c) => c.mean.filter(isNumber)).filter((m) => m.length);
  if (!means.length) return { low: 0, high: 1, log: false, cut: false };
  const all = means.flat();
  let low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
  const start = Math.max(...means.map((m) => m[0])), loss = metric.better === "lower";
  const cap = loss && start > 0 ? 10 * start : Infinity, cut = high > cap;
  if (loss && low > 0 && Math.min(high, cap) > 100 * low) {
    const margin = (Math.min(high, cap) / low) ** 0.04;
    return { low: low / margin, high: Math.min(high, cap) * margin, log: true, cut };
  }
  for (const c of curves) c.mean.forEach((m, i) => {
    if (!isNumber(m)) return;
    low = Math.min(low, m - (c.std[i] ?? 0));
    high = Math.max(high, m + (c.std[i] ?? 0));
  });
  high = Math.min(high, cap);
  low = Math.max(low, -cap);
  const margin = 0.04 * (high - low) || 0.1 * Math.abs(high) || 1;
  low -= margin;
  high += margin;
  return metric.percent
    ? { low: Math.max(low, -0.02), high: Math.min(high, 1.02), log: false, cut }
    : { low, high, log: false, cut };
}

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find((m) => m * power >= 0.75 * raw) || 10);
  const found = [];
  for (let i = Math.ceil(low / step); i <= Math.floor(high / step) && found.length < 12; i++) found.push(i * step);
  const decimals = Math.min(12, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  return found.map((v) => [v, Math.abs(high) >= 1e5 || step < 1e-4 ? short(v) : v.toFixed(decimals)]);
}

function logTicks(low, high) {
  const first = Math.ceil(Math.log10(low)), last = Math.floor(Math.log10(high));
  const step = Math.max(1, Math.ceil((last - first + 1) / 6)), found = [];
  for (let p = first; p <= last; p += step) found.push([10 ** p, p >= -2 && p <= 3 ? String(Number((10 ** p).toPrecision(1))) : `1e${p}`]);
  return found;
}
