// The embedded numbers, as `pyflash/simulate/_data.py` wrote them. Everything shown is looked up here.

const DATA = JSON.parse(document.getElementById("data").textContent);

const NUMBERS = (() => {
  const bytes = Uint8Array.from(atob(DATA.numbers), (character) => character.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Float64Array.from({ length: bytes.length / 8 }, (_, i) => view.getFloat64(8 * i, true));
})();

/** The state of one query, from the place where `_Writer._row` put it. */
function readRow(place, hasAlpha) {
  const width = DATA.headDimV;
  const bits = NUMBERS[place + 1];
  return {
    error: NUMBERS[place],
    arrived: Array.from({ length: width }, (_, column) => Boolean((bits >> column) & 1)),
    m: NUMBERS[place + 2],
    l: NUMBERS[place + 3],
    o: NUMBERS.subarray(place + 4, place + 4 + width),
    out: NUMBERS.subarray(place + 4 + width, place + 4 + 2 * width),
    alpha: hasAlpha ? NUMBERS[place + 4 + 2 * width] : null,
  };
}

/** What every query knows before its first tile: the start of the recurrence. */
function emptyRow() {
  return { error: null, arrived: [], m: -Infinity, l: 0, o: null, out: null, alpha: null, mBefore: null };
}

function readSteps(entry) {
  const before = new Map(); // the m of each split, for the next step of it
  return entry.steps.map(([split, keyLo, keyHi, rescaled, error, places]) => {
    const old = before.get(split) ?? places.map(() => -Infinity);
    const rows = places.map((place, i) => ({ ...readRow(place, true), mBefore: old[i] }));
    before.set(split, rows.map((row) => row.m));
    return { split, keyLo, keyHi, rescaled, error: NUMBERS[error], rows };
  });
}

function readCombinations(entry) {
  return entry.combinations.map(([lo, middle, rightLo, hi, error, places]) => ({
    lo, middle, rightLo, hi,
    error: NUMBERS[error],
    rows: places.map((place) => readRow(place, false)),
  }));
}

const decoded = new Map();

/** The trace behind a position of the controls. */
function traceOf(settings, guard) {
  // A worker has no tile larger than its part.
  const tile = Math.min(settings.tile, largestTile(settings));
  const name = [
    settings.view, settings.keys, tile,
    ...(settings.causal ? ["causal"] : []),
    ...(settings.masked ? ["masked"] : []),
    guard ? "guarded" : "unguarded",
  ].join("/");
  const index = DATA.runs[name];
  if (index === undefined) throw new Error(`no trace ${name}`);
  if (!decoded.has(index)) decoded.set(index, decode(DATA.traces[index], settings.keys));
  return decoded.get(index);
}

function decode(entry, numKeys) {
  const rows = DATA.numQueries;
  const matrix = (place, width) =>
    Array.from({ length: rows }, (_, i) => NUMBERS.subarray(place + i * width, place + (i + 1) * width));
  return {
    scores: matrix(entry.scores, numKeys),
    exact: matrix(entry.exact, DATA.headDimV),
    steps: readSteps(entry),
    combinations: readCombinations(entry),
  };
}

/** The largest tile that differs from a smaller one: all keys, or the longest part of a worker. */
function largestTile(settings) {
  return settings.view === "decoding" ? Math.ceil(settings.keys / DATA.workers) : settings.keys;
}

/** The physical pages that each step of the paged view reads. */
function pagesOf(settings) {
  return DATA.pages[`${settings.keys}/${settings.tile}`];
}
