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

// An exponential mean over about 3 % of the points, corrected for its start; a gap begins it anew.
function smoothed(curve) {
  const keep = 1 - 1 / Math.max(2, 0.03 * curve.mean.length), result = { ...curve };
  for (const key of ["mean", "std"]) {
    let sum = 0, weight = 0;
    result[key] = curve[key].map((v) => {
      if (!isNumber(v)) return (sum = weight = 0), null;
      sum = keep * sum + (1 - keep) * v;
      weight = keep * weight + (1 - keep);
      return sum / weight;
    });
  }
  return result;
}

// The part of a curve between two values of x, with the points where it enters and leaves.
function between(curve, key, from, to) {
  const found = { mean: [], std: [] }, at = curve[key];
  const add = (i, j, t) => {
    for (const field of ["mean", "std"]) {
      const a = curve[field][i], b = curve[field][j];
      found[field].push(isNumber(a) && isNumber(b) ? a + t * (b - a) : null);
    }
  };
  at.forEach((v, i) => {
    if (!isNumber(v)) return;
    if (v >= from && v <= to) add(i, i, 0);
    const next = at[i + 1];
    if (isNumber(next)) for (const edge of [from, to]) if (v < edge && edge < next) add(i, i + 1, (edge - v) / (next - v));
  });
  return found;
}

// Bottom, top and kind of the y axis over these curves; a diverging loss may leave the panel. `starts` are those of the
// whole curves, also where a part of each is shown.
function limits(curves, metric, starts) {
  const means = curves.map((c) => c.mean.filter(isNumber)).filter((m) => m.length);
  if (!means.length) return { low: 0, high: 1, log: false, cut: false };
  const all = means.flat();
  let low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
  const start = starts.reduce((a, b) => Math.max(a, b), -Infinity), loss = metric.better === "lower";
  const cap = loss && start > 0 && 10 * start > low ? 10 * start : Infinity, cut = high > cap;
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
  // Close together far from zero, short numbers would all be the same.
  if (Math.abs(high) >= 1e5 && step < 1e-3 * Math.abs(high)) return found.map((v) => [v, v.toFixed(decimals)]);
  return found.map((v) => [v, Math.abs(high) >= 1e5 || step < 1e-4 ? short(v) : v.toFixed(decimals)]);
}

function logTicks(low, high) {
  const first = Math.ceil(Math.log10(low)), last = Math.floor(Math.log10(high));
  const step = Math.max(1, Math.ceil((last - first + 1) / 6)), found = [];
  for (let p = first; p <= last; p += step) found.push([10 ** p, p >= -2 && p <= 3 ? String(Number((10 ** p).toPrecision(1))) : `1e${p}`]);
  return found;
}
