// The view of tiles: a line for each query, its scores on the left and its state on the right. The paged view uses it too.

class Ledger {
  /** `groupSize` marks borders in the header: pages. */
  constructor(container, settings, { groupSize = 0 } = {}) {
    this.settings = settings;
    this.trace = traceOf(settings, true);
    this.unguarded = settings.masked ? traceOf(settings, false) : null;
    this.numFrames = this.trace.steps.length;
    const scale = outputScale(this.trace);
    this.rows = this.trace.exact.map((exact, query) => this.makeRow(exact, query, scale));
    const readout = h("p", { class: "readout", "aria-hidden": "true" });
    const element = h("div", { class: "ledger" }, this.makeHeader(groupSize), ...this.rows.map((row) => row.element));
    container.append(element, readout);
    readCells(element, this.rows.map((row) => row.strip), readout);
  }

  makeHeader(groupSize) {
    const names = ["m", "α", "l", "output o / l against exact", "error"];
    return h(
      "div",
      { class: "ledger-row ledger-header", "aria-hidden": "true" },
      h("span", { class: "corner", text: "keys" }),
      keyHeader(this.settings.keys, groupSize),
      h("div", { class: "state-header" }, ...names.map((text) => h("span", { text }))),
    );
  }

  makeRow(exact, query, scale) {
    const strip = new Strip(this.trace, query, [[0, this.settings.keys]]);
    const guarded = new StateView(exact, scale, { kind: "guarded", label: this.unguarded && "guarded" });
    const unguarded = this.unguarded && new StateView(exact, scale, { kind: "unguarded", label: "unguarded" });
    const button = queryButton(query);
    const states = h("div", { class: "states" }, guarded.element, ...(unguarded ? [unguarded.element] : []));
    const element = h("div", { class: "ledger-row", role: "group", "aria-label": `Query ${query}`, "data-query": query }, button, strip.element, states);
    return { element, strip, guarded, unguarded, button };
  }

  show(frame, query) {
    const step = this.trace.steps[frame - 1];
    const window = step ? [step.keyLo, step.keyHi] : null;
    this.rows.forEach((row, i) => {
      const state = step ? step.rows[i] : emptyRow();
      row.strip.show([{ window, doneTo: step ? step.keyLo : 0, m: state.m }]);
      row.guarded.show(state);
      row.unguarded?.show(step ? this.unguarded.steps[frame - 1].rows[i] : emptyRow());
      row.button.setAttribute("aria-pressed", i === query);
      row.element.classList.toggle("chosen", i === query);
    });
  }

  measure(frame) {
    const { steps } = this.trace;
    const held = steps.map((step) => this.rows.length * (step.keyHi - step.keyLo));
    return {
      inMemory: held[frame - 1] ?? 0,
      peak: Math.max(...held),
      naive: this.rows.length * this.settings.keys,
      rescaled: steps.slice(0, frame).reduce((sum, step) => sum + step.rescaled, 0),
      rescaledNow: steps[frame - 1]?.rescaled ?? 0,
      pips: steps.map((step) => step.rescaled),
      error: steps[frame - 1]?.error ?? null,
      errors: steps.map((step) => step.error),
      unguarded: this.unguarded?.steps[frame - 1]?.error,
      frame,
    };
  }

  narrate(frame) {
    const step = this.trace.steps[frame - 1];
    if (!step) return "Nothing is loaded yet: for every query m is −∞, l and o are 0. Step, or press play.";
    const sentences = [`Tile ${frame} of ${this.numFrames}: ${keyRange(step.keyLo, step.keyHi)}.`, ...narrateStep(step)];
    if (this.unguarded) sentences.push(...narrateUnguarded(this.unguarded.steps[frame - 1], step));
    if (frame === this.numFrames) sentences.push(`All keys are in: the largest error is ${formatNumber(step.error)}.`);
    return sentences.join(" ");
  }

  closeup(frame, query) {
    const column = (trace, label) => {
      const row = trace.steps[frame - 1]?.rows[query] ?? emptyRow();
      const before = trace.steps[frame - 2]?.rows[query] ?? emptyRow();
      return { label, row, before, exact: trace.exact[query] };
    };
    if (!this.unguarded) return [column(this.trace, null)];
    return [column(this.trace, "guarded"), column(this.unguarded, "unguarded")];
  }
}

/** The button that chooses a query for the close-up. */
function queryButton(query) {
  return h("button", {
    type: "button",
    class: "query",
    "data-query": query,
    "aria-label": `Query ${query}: show it close up`,
    text: queryName(query),
  });
}

const indicesWhere = (rows, test) => rows.flatMap((row, i) => (test(row) ? [i] : []));

/** What a step did, of the recurrence with its guard. */
function narrateStep(step) {
  const sentences = [];
  const shrunk = indicesWhere(step.rows, (row) => row.mBefore !== -Infinity && row.alpha < 1);
  const blind = indicesWhere(step.rows, (row) => row.m === -Infinity);
  const arrived = indicesWhere(step.rows, (row) => row.arrived.every(Boolean) && row.m !== -Infinity);
  if (shrunk.length) {
    sentences.push(`A larger score came for ${listQueries(shrunk)}: m rises, and α below 1 shrinks what was summed before.`);
  } else if (step.rows.every((row) => row.mBefore === -Infinity)) {
    sentences.push("Every m was −∞, so α, where it is 0, had nothing to shrink.");
  } else {
    sentences.push("No maximum changes: α is 1, and the tile is only added.");
  }
  if (blind.length) sentences.push(`${listQueries(blind)} may see none of these keys: m stays −∞ and the sums stay 0.`);
  if (arrived.length) sentences.push(`Arrived: ${listQueries(arrived)}.`);
  return sentences;
}

function narrateUnguarded(step, guarded) {
  const broken = indicesWhere(step.rows, (row) => Number.isNaN(row.l));
  if (!broken.length) return [];
  const first = guarded.rows.some((row, i) => broken.includes(i) && row.m === -Infinity);
  if (first) return [`Unguarded, ${listQueries(broken)} computed e^(−∞ − (−∞)), which is NaN.`];
  return [`Unguarded, ${listQueries(broken)} stay NaN for good.`];
}

addView({
  id: "tiles",
  label: "Tiles",
  note: "One tile of scores at a time; a state for each query.",
  ...OF_TRACES,
  build: (container, settings) => new Ledger(container, settings),
});
