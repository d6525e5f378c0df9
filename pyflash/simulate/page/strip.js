// The scores of one query, a cell for each key: which are in memory, and the running maximum as a line over them.

/** Where a score is: "masked", "current", "done" or "later". A part is a run of keys with a state of its own. */
function cellState(score, key, part) {
  if (score === -Infinity) return "masked";
  if (part.window && key >= part.window[0] && key < part.window[1]) return "current";
  return key < part.doneTo ? "done" : "later";
}

const STATE_WORDS = {
  current: "in memory",
  done: "done, no longer in memory",
  later: "not yet loaded",
  masked: "masked",
};

/** Heights for scores: 0 to 1 between the smallest and the largest of a trace. */
function scoreScale(trace) {
  const finite = trace.scores.flatMap((row) => [...row]).filter(Number.isFinite);
  const lo = Math.min(...finite);
  const hi = Math.max(...finite);
  return (score) => (hi > lo ? (score - lo) / (hi - lo) : 0.5);
}

class Strip {
  /** `parts` are the runs of keys, [lo, hi): one, or one for each worker. */
  constructor(trace, query, parts) {
    this.scores = trace.scores[query];
    this.query = query;
    this.scale = scoreScale(trace);
    this.parts = parts;
    const numKeys = this.scores.length;
    this.element = h("div", { class: "strip", role: "img", style: `--n: ${numKeys}`, "data-query": query });
    this.cells = Array.from(this.scores, (score, key) => this.makeCell(score, key));
    this.windows = parts.map((_, split) => h("div", { class: "window", "data-split": split }));
    this.lines = parts.map(([lo, hi], split) =>
      h("div", { class: "max-line", "data-split": split, style: place(lo, hi, numKeys) }, h("span", { text: "m" })),
    );
    this.element.append(...this.cells.map((cell) => cell.element), ...this.lines, ...this.windows);
  }

  makeCell(score, key) {
    const bar = h("i", { class: "bar" });
    const text = h("span", { class: "number" });
    if (score !== -Infinity) bar.style.height = `${this.height(score)}%`;
    const element = h("div", { class: "cell", "data-key": key }, bar, text);
    if (key > 0 && this.parts.some(([lo]) => lo === key)) element.classList.add("part-border");
    return { element, text };
  }

  height(score) {
    return 5 + 67 * this.scale(score); // above it is room for the number
  }

  /** Show a moment: for each part its window, the keys that are done, and m. */
  show(moment) {
    const words = [];
    moment.forEach((part, split) => {
      const [lo, hi] = this.parts[split];
      for (let key = lo; key < hi; key++) words.push(this.showCell(key, part));
      const shown = part.window ?? [part.doneTo, part.doneTo];
      this.windows[split].style.cssText = place(...shown, this.scores.length);
      this.windows[split].classList.toggle("closed", !part.window);
      const line = this.lines[split];
      line.classList.toggle("absent", !Number.isFinite(part.m));
      if (Number.isFinite(part.m)) line.style.bottom = `${this.height(part.m)}%`;
    });
    this.element.setAttribute("aria-label", `Scores of query ${this.query}. ${words.join("; ")}.`);
  }

  showCell(key, part) {
    const score = this.scores[key];
    const { element, text } = this.cells[key];
    const state = cellState(score, key, part);
    element.dataset.state = state;
    const inWindow = part.window && key >= part.window[0] && key < part.window[1];
    if (inWindow) showNumber(text, score, formatCell);
    else {
      text.textContent = "";
      delete text.dataset.value;
    }
    return `key ${key} ${state === "current" ? formatNumber(score) : STATE_WORDS[state]}`;
  }

  /** The words for one cell, when it is pointed at. */
  describe(key) {
    const state = this.cells[key].element.dataset.state;
    const score = this.scores[key];
    const value = state === "masked" ? "masked, counts as −∞" : STATE_WORDS[state];
    const number = state === "current" || state === "done" ? `score ${formatNumber(score)}, ` : "";
    return `${queryName(this.query)}, key ${key}: ${number}${value}`;
  }
}

function place(lo, hi, count) {
  return `left: ${(100 * lo) / count}%; width: ${(100 * (hi - lo)) / count}%`;
}

/** The line of key numbers above strips. */
function keyHeader(numKeys, groupSize) {
  const cells = Array.from({ length: numKeys }, (_, key) =>
    h("span", { text: key, class: groupSize && key > 0 && key % groupSize === 0 ? "group-border" : null }),
  );
  return h("div", { class: numKeys > 16 ? "key-header dense" : "key-header", style: `--n: ${numKeys}`, "aria-hidden": "true" }, ...cells);
}

/** Let a pointer read single cells of the strips in `container`; the words go to a line below them. */
function readCells(container, strips, output) {
  const read = (event) => {
    const cell = event.target.closest(".cell[data-key]");
    const strip = cell && strips.find((one) => one.element.contains(cell));
    if (strip) output.textContent = strip.describe(Number(cell.dataset.key));
  };
  container.addEventListener("pointerover", read);
  container.addEventListener("click", read);
  container.addEventListener("pointerleave", () => (output.textContent = READ_HINT));
  output.textContent = READ_HINT;
}

const READ_HINT = "Point at a score, or tap it, to read it.";
