// The view of flash-decoding: workers that have a part of the keys each, their states, and the tree that merges them.

class Decoding {
  constructor(container, settings) {
    this.settings = settings;
    this.trace = traceOf(settings, true);
    this.unguarded = settings.masked ? traceOf(settings, false) : null;
    const count = 1 + Math.max(...this.trace.steps.map((step) => step.split));
    this.workers = Array.from({ length: count }, (_, split) => this.stepsOf(this.trace, split));
    this.parts = this.workers.map((steps) => [steps[0].keyLo, steps.at(-1).keyHi]);
    this.numTileFrames = Math.max(...this.workers.map((steps) => steps.length));
    this.numFrames = this.numTileFrames + this.trace.combinations.length;
    this.container = container;
    this.strips = this.trace.exact.map((_, query) => new Strip(this.trace, query, this.parts));
    this.buttons = this.strips.map((_, query) => queryButton(query));
    this.makeStrips();
    this.tree = h("div", { class: "tree", role: "group", "aria-label": "Workers and merges", style: `--workers: ${count}` });
    this.container.append(this.tree);
    this.cards = [];
    this.query = null;
  }

  stepsOf(trace, split) {
    return trace.steps.filter((step) => step.split === split);
  }

  makeStrips() {
    const rows = this.strips.map((strip, query) =>
      h("div", { class: "ledger-row", "data-query": query, role: "group", "aria-label": `Query ${query}` }, this.buttons[query], strip.element),
    );
    const owners = h(
      "div",
      { class: "owners", "aria-hidden": "true" },
      ...this.parts.map(([lo, hi], split) =>
        h("span", { "data-split": split, style: place(lo, hi, this.settings.keys), text: workerName(split) }),
      ),
    );
    owners.style.setProperty("--n", this.settings.keys);
    const header = h("div", { class: "ledger-row ledger-header", "aria-hidden": "true" }, h("span", { class: "corner", text: "keys" }), h("div", {}, owners, keyHeader(this.settings.keys, 0)));
    const readout = h("p", { class: "readout", "aria-hidden": "true" });
    const element = h("div", { class: "ledger split" }, header, ...rows);
    this.container.append(element, readout);
    readCells(element, this.strips, readout);
  }

  /** Cards of the chosen query: workers in the first line, then the merges, one line a level. */
  makeCards(query) {
    const exact = this.trace.exact[query];
    const scale = outputScale(this.trace);
    const card = (title, lo, hi, level, alpha, stems) => {
      const state = new StateView(exact, scale, { kind: "guarded", label: this.unguarded && "guarded", alpha });
      const other = this.unguarded && new StateView(exact, scale, { kind: "unguarded", label: "unguarded", alpha });
      const note = h("p", { class: "card-note" });
      const heading = h("h3", { text: title });
      const element = h(
        "section",
        { class: "card", "aria-label": title, "data-level": level, "data-split": level === 0 ? lo : null },
        heading, note, state.element, ...(other ? [other.element] : []),
      );
      const node = h("div", { class: "node", style: `grid-column: ${lo + 1} / ${hi + 1}; grid-row: ${level + 1}; ${stems ?? ""}` }, element);
      node.classList.toggle("merge", level > 0);
      return { node, element, state, other, note };
    };
    const made = new Map(); // "lo-hi" to [level, card]
    const keep = (lo, hi, level, made_card) => {
      made.set(`${lo}-${hi}`, [level, made_card]);
      return made_card;
    };
    this.cards = this.parts.map((_, split) => keep(split, split + 1, 0, card(`Worker ${workerName(split)}`, split, split + 1, 0, true)));
    for (const { lo, middle, rightLo, hi } of this.trace.combinations) {
      const sides = [made.get(`${lo}-${middle}`), made.get(`${rightLo}-${hi}`)];
      const level = 1 + Math.max(...sides.map(([below]) => below));
      // A side that waited reaches down to where it is merged.
      for (const [below, side] of sides) side.node.style.gridRow = `${below + 1} / ${level + 1}`;
      const at = (x) => `${(100 * (x - lo)) / (hi - lo)}%`;
      const stems = `--from: ${at((lo + middle) / 2)}; --to: ${at((rightLo + hi) / 2)}`;
      const last = hi - lo === this.workers.length;
      const title = last ? `${workersName(lo, hi)}: the answer` : workersName(lo, hi);
      this.cards.push(keep(lo, hi, level, card(title, lo, hi, level, false, stems)));
    }
    this.tree.replaceChildren(...this.cards.map(({ node }) => node));
    this.tree.setAttribute("aria-label", `Workers and merges of query ${query}`);
    this.query = query;
  }

  /** The step that a worker is at, or the last one it has done. */
  stepOf(split, frame, steps = this.workers[split]) {
    return steps[Math.min(frame, steps.length) - 1];
  }

  show(frame, query) {
    if (query !== this.query) this.makeCards(query);
    const running = (split) => frame <= this.workers[split].length && frame > 0;
    this.strips.forEach((strip, i) => {
      strip.show(
        this.parts.map(([lo, hi], split) => {
          const step = this.stepOf(split, frame);
          if (!step) return { window: null, doneTo: lo, m: -Infinity };
          return { window: running(split) ? [step.keyLo, step.keyHi] : null, doneTo: running(split) ? step.keyLo : hi, m: step.rows[i].m };
        }),
      );
      this.buttons[i].setAttribute("aria-pressed", i === query);
      strip.element.parentElement.classList.toggle("chosen", i === query);
    });
    this.workers.forEach((_, split) => this.showWorker(split, frame, query, running(split)));
    this.trace.combinations.forEach((merge, i) => this.showMerge(i, frame, query));
  }

  showWorker(split, frame, query, running) {
    const card = this.cards[split];
    const step = this.stepOf(split, frame);
    const steps = this.workers[split];
    card.state.show(step ? step.rows[query] : emptyRow());
    card.other?.show(step ? this.stepOf(split, frame, this.stepsOf(this.unguarded, split)).rows[query] : emptyRow());
    const where = keyRange(...this.parts[split]);
    card.note.textContent = !step ? where : running ? `${where}; tile ${Math.min(frame, steps.length)} of ${steps.length}` : `${where}; done`;
    card.element.classList.toggle("active", running);
  }

  showMerge(index, frame, query) {
    const card = this.cards[this.workers.length + index];
    const done = frame - this.numTileFrames > index;
    card.state.show(done ? this.trace.combinations[index].rows[query] : null);
    card.other?.show(done ? this.unguarded.combinations[index].rows[query] : null);
    card.note.textContent = done ? "m is the larger one; l and o are scaled to it and added" : "waits for both";
    card.element.classList.toggle("active", frame - this.numTileFrames === index + 1);
    card.element.classList.toggle("pending", !done);
  }

  measure(frame) {
    const rows = this.strips.length;
    const stepsAt = (at) => this.workers.flatMap((steps) => steps.slice(at - 1, at));
    const held = Array.from({ length: this.numTileFrames }, (_, i) =>
      stepsAt(i + 1).reduce((sum, step) => sum + rows * (step.keyHi - step.keyLo), 0),
    );
    const pips = Array.from({ length: this.numTileFrames }, (_, i) => stepsAt(i + 1).reduce((sum, step) => sum + step.rescaled, 0));
    const error = this.errorOf(this.trace, frame);
    return {
      inMemory: held[frame - 1] ?? 0,
      peak: Math.max(...held),
      naive: rows * this.settings.keys,
      rescaled: pips.slice(0, frame).reduce((sum, count) => sum + count, 0),
      rescaledNow: pips[frame - 1] ?? 0,
      pips,
      error,
      errors: Array.from({ length: this.numFrames }, (_, i) => this.errorOf(this.trace, i + 1)),
      unguarded: this.unguarded && error !== null ? this.errorOf(this.unguarded, frame) : undefined,
      frame,
    };
  }

  /** The error of what holds all keys, or null: a part of the keys is no answer. */
  errorOf(trace, frame) {
    if (this.workers.length === 1) return trace.steps[frame - 1]?.error ?? null;
    return frame === this.numFrames ? trace.combinations.at(-1).error : null;
  }

  narrate(frame) {
    if (frame === 0) return `${plural(this.workers.length, "worker")} will run the recurrence at the same time, each on its own part of the keys. Step, or press play.`;
    if (frame <= this.numTileFrames) {
      const busy = this.workers.flatMap((steps, split) => (frame <= steps.length ? [workerName(split)] : []));
      return `Tile ${frame} of ${this.numTileFrames}, at the same time for ${busy.join(", ")}. Each has its own m, l and o, and knows nothing of the others' keys.`;
    }
    const merge = this.trace.combinations[frame - this.numTileFrames - 1];
    const names = `${workersName(merge.lo, merge.middle)} and ${workersName(merge.rightLo, merge.hi)}`;
    const end = frame === this.numFrames ? ` All keys are in: the largest error is ${formatNumber(merge.error)}.` : "";
    return `The states of ${names} become one: the larger m, l and o scaled to it and added. No score is read.${end}`;
  }

  closeup() {
    return null;
  }
}

addView({
  id: "decoding",
  label: "Flash-decoding",
  note: "Few queries and many keys: workers share the keys, and their states are merged along a tree.",
  ...OF_TRACES,
  build: (container, settings) => new Decoding(container, settings),
});
