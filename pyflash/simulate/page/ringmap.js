// Which pairs of a query and a key are computed when, and by whom; and beside each query the states that its rank has.

const PAIR_WORDS = {
  now: "computed in this step",
  done: "computed before",
  later: "to be computed",
  skipped: "skipped in this step: a later key",
  hidden: "never computed: a later key",
};

class PairMap {
  constructor(container, ring, choose) {
    this.ring = ring;
    const queries = ring.owner.map((_, query) => query);
    this.meetings = queries.map((query) => queries.map((key) => meeting(ring, query, key)));
    this.rows = queries.map((query) => this.makeRow(query));
    this.stateRows = queries.map((query) => this.makeStateRow(query));
    const readout = h("p", { class: "readout", "aria-hidden": "true", text: PAIR_HINT });
    const map = h("div", { class: "pairs" }, this.makeHeader(), ...this.rows.map((row) => row.element), readout);
    const states = h("div", { class: "kept" }, this.makeStateHeader(), ...this.stateRows.map((row) => row.element));
    const element = h("div", { class: queries.length > 16 ? "pair-map many" : "pair-map", style: `--n: ${queries.length}; --ranks: ${ring.ranks.length}` }, map, states);
    container.append(element);
    const read = (event) => {
      const cell = event.target.closest(".pair");
      if (cell) readout.textContent = this.describe(Number(cell.parentElement.dataset.query), Number(cell.dataset.key));
    };
    map.addEventListener("pointerover", read);
    map.addEventListener("click", read);
    map.addEventListener("pointerleave", () => (readout.textContent = PAIR_HINT));
    map.addEventListener("click", (event) => {
      const row = event.target.closest(".pair-row[data-query]");
      if (row) choose(Number(row.dataset.query));
    });
  }

  makeHeader() {
    const heads = this.ring.owner.map(({ rank }, key) => h("span", { class: "key-head", "data-owner": rank, text: key }));
    return h("div", { class: "pair-row pair-header", "aria-hidden": "true" }, h("span", { class: "pair-name", text: "keys" }), h("div", { class: "pair-cells" }, ...heads));
  }

  makeRow(query) {
    const { rank } = this.ring.owner[query];
    const cells = this.ring.owner.map((_, key) => h("i", { class: "pair", "data-key": key }));
    const strip = h("div", { class: "pair-cells", role: "img", "data-query": query }, ...cells);
    const element = h("div", { class: "pair-row", "data-owner": rank, "data-query": query }, h("span", { class: "pair-name", "aria-hidden": "true", text: queryName(query) }), strip);
    return { element, strip, cells };
  }

  makeStateHeader() {
    const heads = this.ring.ranks.map((_, rank) => h("span", { class: "kept-head", "data-owner": rank }, h("span", {}, h("span", { class: "wide-only", text: "keys of " }), `rank ${rank}`)));
    return h("div", { class: "kept-row kept-header", "aria-hidden": "true" }, h("span"), h("div", { class: "kept-states" }, ...heads));
  }

  makeStateRow(query) {
    const { rank } = this.ring.owner[query];
    const button = queryButton(query);
    const states = h("div", { class: "kept-states" });
    const element = h("div", { class: "kept-row", role: "group", "aria-label": `States of query ${query}, on rank ${rank}`, "data-owner": rank, "data-query": query }, button, states);
    return { element, button, states };
  }

  /** What a pair is at a frame. */
  status(query, key, frame) {
    const { step, held, seen } = this.meetings[query][key];
    const now = frame - 1;
    if (step === now && held) return seen ? "now" : "skipped";
    if (!seen) return "hidden";
    return step < now ? "done" : "later";
  }

  show(frame, chosen) {
    this.rows.forEach(({ element, strip, cells }, query) => {
      const words = cells.map((cell, key) => {
        cell.dataset.state = this.status(query, key, frame);
        return [key, cell.dataset.state];
      });
      strip.setAttribute("aria-label", pairsAloud(query, this.ring.owner[query].rank, words));
      element.classList.toggle("chosen", query === chosen);
    });
    this.stateRows.forEach((row, query) => {
      this.showStates(row, query, frame);
      row.button.setAttribute("aria-pressed", query === chosen);
      row.element.classList.toggle("chosen", query === chosen);
    });
  }

  showStates({ states }, query, frame) {
    const { rank, row } = this.ring.owner[query];
    const made = statesMade(this.ring, rank, frame);
    const there = statesAfter(this.ring, rank, frame);
    const parts = there.map((known) => this.makeState(known, row, made.includes(known), frame > this.ring.numSteps ? this.ring.ranks[rank].result[row] : null));
    for (const { origin, at } of this.ring.ranks[rank].steps.map((step, at) => ({ origin: step.origin, at }))) {
      if (there.some(({ lo, hi }) => lo <= origin && origin < hi)) continue;
      const past = at < frame;
      parts.push(h("span", { class: "kept-state", "data-kind": past ? "nothing" : "waiting", style: `grid-column: ${origin + 1}`, text: past ? "sees none" : "" }));
    }
    states.replaceChildren(...parts);
  }

  makeState(known, row, fresh, result) {
    const { m, l } = known.rows[row];
    const figures = [["m", m], ["l", l]].map(([name, x]) => {
      const number = h("b", { "data-name": name });
      showNumber(number, x);
      return h("span", { class: `figure-${name}` }, h("small", { text: name }), number);
    });
    const mark = result ? [h("span", { class: "kept-tick", text: result.arrived.every(Boolean) ? "✓" : "" })] : [];
    const kind = result ? "result" : known.hi - known.lo > 1 ? "merged" : "single";
    return h(
      "span",
      { class: `kept-state ${fresh ? "fresh" : ""} ${m === -Infinity ? "blind" : ""}`, "data-kind": kind, "data-lo": known.lo, "data-hi": known.hi, style: `grid-column: ${known.lo + 1} / ${known.hi + 1}` },
      ...figures, ...mark,
    );
  }

  /** The words for one pair, when it is pointed at. */
  describe(query, key) {
    const state = this.rows[query].cells[key].dataset.state;
    const { step } = this.meetings[query][key];
    const when = state === "hidden" ? "" : ` (step ${step + 1})`;
    return `${queryName(query)} on rank ${this.ring.owner[query].rank}, key ${key} of rank ${this.ring.owner[key].rank}: ${PAIR_WORDS[state]}${when}`;
  }
}

/** A row of pairs in words: the keys of each kind. */
function pairsAloud(query, rank, words) {
  const kinds = Object.keys(PAIR_WORDS).flatMap((kind) => {
    const keys = words.filter(([, state]) => state === kind).map(([key]) => key);
    return keys.length ? [`${PAIR_WORDS[kind]}: ${keys.length === 1 ? "key" : "keys"} ${keys.join(" ")}`] : [];
  });
  return `Query ${query} on rank ${rank}. ${kinds.join("; ")}.`;
}

const PAIR_HINT = "Point at a pair, or tap it, to read it.";
