// Numbers and small lists as a reader wants them. The full number is always beside it, in `data-value`.

const MINUS = "\u2212";

/** Three significant digits; whole numbers as they are, so that 1 is not 1.00; small ones as a power of ten. */
function formatNumber(x) {
  if (x === null) return "–";
  if (Number.isInteger(x) && Math.abs(x) < 1e4) return String(x).replace("-", MINUS);
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x < 0 ? `${MINUS}∞` : "∞";
  const size = Math.abs(x);
  const text = size < 1e-3 || size >= 1e4 ? x.toExponential(1) : x.toPrecision(3);
  return text.replaceAll("-", MINUS).replace("e+", "e");
}

/** Two decimals, for the little room of a cell. */
function formatCell(x) {
  return Number.isFinite(x) && Math.abs(x) < 100 ? x.toFixed(2).replace("-", MINUS) : formatNumber(x);
}

/** A number of JavaScript as Python's `float()` reads it: the shortest text that gives the same bits. */
function exactText(x) {
  if (x === null) return "";
  if (Number.isNaN(x)) return "nan";
  if (!Number.isFinite(x)) return x < 0 ? "-inf" : "inf";
  return Object.is(x, -0) ? "-0" : String(x);
}

function keyRange(lo, hi) {
  return hi - lo === 1 ? `key ${lo}` : `keys ${lo} to ${hi - 1}`;
}

function queryName(i) {
  return `q${i}`;
}

/** "q0", "q0 and q1", "q0, q1 and q2". */
function listQueries(indices) {
  const names = indices.map(queryName);
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}

function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

const workerName = (split) => "ABCDEFGH"[split];

function workersName(lo, hi) {
  return Array.from({ length: hi - lo }, (_, i) => workerName(lo + i)).join(" + ");
}
