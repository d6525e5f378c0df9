// The view of ring attention: ranks with their keys, the map of pairs, the states of all queries, and how work is shared out.

class Ring {
  constructor(container, settings, choose) {
    this.settings = settings;
    this.ring = ringOf(settings);
    this.numFrames = this.ring.numSteps + 1; // the last merge is one more
    this.cards = new RankCards(container, this.ring);
    this.map = new PairMap(container, this.ring, choose);
    container.append(ringLegend());
    this.meters = new RingMeters(container, this.ring);
    this.numbers = h("div", { class: "closeup" });
    container.append(this.numbers);
  }

  show(frame, query) {
    this.cards.show(frame);
    this.map.show(frame, query);
    this.meters.show(frame);
    this.showNumbers(frame, query);
  }

  /** The chosen query in numbers: the states that its rank made in this step, those that wait, the answer. */
  showNumbers(frame, query) {
    const { rank, row } = this.ring.owner[query];
    const made = statesMade(this.ring, rank, frame);
    const lines = [...statesAfter(this.ring, rank, frame).filter((known) => !made.includes(known)), ...made];
    const done = frame === this.numFrames;
    this.numbers.replaceChildren(
      h("h3", { text: `Query ${queryName(query)}, on rank ${rank}, in numbers` }),
      stateTable(lines.map((known) => ({ known, row: known.rows[row], made: made.includes(known) })), this.ring.exact[query], done ? this.ring.ranks[rank].result[row] : null),
    );
  }

  measure() {
    return null;
  }

  closeup() {
    return null;
  }

  narrate(frame) {
    const { ring } = this;
    const size = ring.numSteps;
    if (frame === 0) {
      const hint = this.settings.causal ? "" : " Causal, it matters who has which tokens: press C.";
      return `${plural(ring.owner.length, "token")} on ${size} ranks. Each rank keeps its queries; keys and values will go round, so that all of them come past. Step, or press play.${hint}`;
    }
    if (frame > size) {
      return `The last merge, in the order of ranks whatever came first, and so the same bits every time. The largest error is ${formatNumber(ring.error)}.`;
    }
    return [this.narrateKeys(frame), ...this.narrateWork(frame), ...this.narrateMerges(frame)].join(" ");
  }

  narrateKeys(frame) {
    const size = this.ring.numSteps;
    const start = `Round ${frame} of ${size}:`;
    const onward = frame < size ? "while they travel on" : "and nothing travels any more";
    if (frame === 1) return `${start} each rank computes with its own keys, ${onward}.`;
    return `${start} each rank computes with the keys of the rank ${["", "one", "two", "three"][frame - 1]} before it, ${onward}.`;
  }

  narrateWork(frame) {
    const pairs = this.ring.ranks.map(({ steps }) => steps[frame - 1].pairs);
    const idle = pairs.flatMap((count, rank) => (count === 0 ? [rank] : []));
    const sentences = [];
    if (idle.length) sentences.push(`${capital(listRanks(idle))} ${idle.length > 1 ? "see" : "sees"} none of these keys, and ${idle.length > 1 ? "have" : "has"} nothing to do.`);
    else if (this.ring.unevenness[frame - 1] === 1) sentences.push(`All have the same work, ${plural(pairs[0], "pair")}.`);
    else sentences.push(`Work is ${formatNumber(Math.min(...pairs))} to ${plural(Math.max(...pairs), "pair")}.`);
    return sentences;
  }

  narrateMerges(frame) {
    const merges = this.ring.ranks.flatMap((_, rank) =>
      statesMade(this.ring, rank, frame).filter(({ lo, hi }) => hi - lo > 1).map((known) => [rank, overRanks(known)]),
    );
    const kinds = [...new Set(merges.map(([, over]) => over))];
    if (!kinds.length) return [];
    const clauses = kinds.map((over) => {
      const where = merges.filter(([, one]) => one === over).map(([rank]) => rank);
      return `${listRanks(where)} ${where.length > 1 ? "merge" : "merges"} ${over}`;
    });
    return [`${capital(clauses.join(", "))}.`];
  }
}

/** States as lines of a table, and below them, at the end, the exact answer. */
function stateTable(lines, exact, result) {
  const cell = (name, x) => {
    const element = h("td", { "data-name": name });
    showNumber(element, x);
    return element;
  };
  const head = ["m", "l", "log-sum-exp", ...Array.from(exact, (_, column) => `out ${column}`)];
  const body = lines.map(({ known, row, made }) =>
    h(
      "tr",
      { class: made ? "made" : null, "data-lo": known.lo, "data-hi": known.hi },
      h("th", { scope: "row", text: result ? "all keys: the answer" : `keys of ${whoseKeys(known)}${made ? ", new" : ""}` }),
      cell("m", row.m), cell("l", row.l), cell("lse", row.lse), ...Array.from(row.out, (x) => cell("out", x)),
    ),
  );
  const empty = () => h("td", {});
  body.push(h("tr", {}, h("th", { scope: "row", text: "exact" }), empty(), empty(), empty(), ...Array.from(exact, (x) => cell("exact", x))));
  if (result) {
    const ticks = result.arrived.map((one) => h("td", { class: "tick", text: one ? "✓" : "" }));
    body.push(h("tr", {}, h("th", { scope: "row", text: "arrived" }), empty(), empty(), empty(), ...ticks));
  }
  return h(
    "div",
    { class: "table-scroll", tabindex: "0", role: "region", "aria-label": "States of the query and the exact answer" },
    h("table", {}, h("tr", {}, h("th", { scope: "col", text: "state over" }), ...head.map((text) => h("th", { scope: "col", text }))), ...body),
  );
}

function ringLegend() {
  const sample = (state) => h("i", { class: "pair sample", "data-state": state, "data-owner": "0" });
  const items = [["now", "computed in this step, in the rank's colour"], ["done", "computed before"], ["later", "to be computed"], ["skipped", "keys are here, but later ones: skipped"], ["hidden", "never computed"]];
  return h("ul", { class: "legend", "aria-label": "What the pairs mean" }, ...items.map(([state, text]) => h("li", {}, sample(state), text)));
}

/** How work is shared out, in this step and in all; bytes; the error. */
class RingMeters {
  constructor(container, ring) {
    this.ring = ring;
    this.most = Math.max(...ring.ranks.flatMap(({ steps }) => steps.map((step) => step.pairs + step.skipped)));
    this.mostInAll = Math.max(...ring.ranks.map(({ pairs }) => pairs));
    this.now = ring.ranks.map((_, rank) => this.makeLine(rank));
    this.all = ring.ranks.map((_, rank) => this.makeLine(rank));
    this.nowText = h("p", { class: "meter-text" });
    this.allText = h("p", { class: "meter-text" });
    this.bytes = h("b", { class: "meter-number", "data-name": "bytes" });
    this.bytesText = h("p", { class: "meter-text" });
    this.error = h("b", { class: "meter-number", "data-name": "ring-error" });
    this.errorText = h("p", { class: "meter-text" });
    const meter = (title, ...content) => h("section", { class: "meter", "aria-label": title }, h("h3", { text: title }), ...content);
    container.append(
      h(
        "div",
        { class: "meters ring-meters" },
        meter("Work of each rank, this step", h("div", { class: "loads", "data-name": "now" }, ...this.now.map((line) => line.element)), this.nowText),
        meter("Work of each rank, all steps", h("div", { class: "loads", "data-name": "all" }, ...this.all.map((line) => line.element)), this.allText),
        meter("Bytes that travelled", this.bytes, this.bytesText),
        meter("Error against exact", this.error, this.errorText),
      ),
    );
  }

  makeLine(rank) {
    const bar = h("span", { class: "load-bar" });
    const count = h("span", { class: "load-count" });
    const element = h("p", { class: "load", "data-owner": rank }, h("span", { class: "load-name", text: `rank ${rank}` }), bar, count);
    return { element, bar, count };
  }

  show(frame) {
    const { ring } = this;
    const step = frame - 1;
    const within = step >= 0 && step < ring.numSteps;
    ring.ranks.forEach(({ steps, pairs }, rank) => {
      const count = within ? steps[step].pairs : 0;
      this.now[rank].bar.replaceChildren(h("i", { class: "load-part now", style: `width: ${(100 * count) / this.most}%` }));
      this.now[rank].count.textContent = this.now[rank].count.dataset.value = within ? count : "–";
      this.all[rank].bar.replaceChildren(
        ...steps.map((one, at) => h("i", { class: `load-part ${at === step ? "now" : at < step ? "done" : "later"}`, "data-pairs": one.pairs, style: `width: ${(100 * one.pairs) / this.mostInAll}%` })),
      );
      this.all[rank].count.textContent = this.all[rank].count.dataset.value = pairs;
    });
    this.nowText.textContent = within ? shareText(ring.unevenness[step]) : "pairs of a query and a key";
    this.allText.textContent = `${ring.allPairs} pairs in all; ${shareText(ring.allUnevenness)}`;
    const bytes = frame === 0 ? 0 : ring.bytes[Math.min(step, ring.numSteps - 1)];
    this.bytes.textContent = this.bytes.dataset.value = bytes;
    this.bytesText.textContent = `${within ? ring.bytesOfStep[step] : 0} in this step; ${ring.bytes.at(-1)} in all. A token's key and value are ${DATA.rings.bytesPerToken} B; queries and states never travel.`;
    const done = frame > ring.numSteps;
    showNumber(this.error, done ? ring.error : null);
    this.errorText.textContent = done ? "largest |out − exact|, of all queries" : "no answer yet: a part of the keys is none";
  }
}

/** How far the busiest rank is from an even share. */
function shareText(unevenness) {
  return unevenness === 1 ? "the same for all" : `the busiest has ${formatNumber(unevenness)} times an even share`;
}

addView({
  id: "ring",
  label: "Ring",
  note: "One sequence on several ranks: queries stay, keys and values go round, states are merged.",
  controls: ["ranks", "schedule", "tokens", "causal"],
  numQueries: (settings) => settings.tokens,
  hasLegend: true,
  build: (container, settings, choose) => new Ring(container, settings, choose),
});
