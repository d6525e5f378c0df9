// The paged view: the same recurrence, and above it where its keys lie: logical pages, block table, pool.

class Paged {
  constructor(container, settings) {
    this.settings = settings;
    this.steps = pagesOf(settings);
    this.numLogical = Math.ceil(settings.keys / DATA.pageSize);
    this.table = DATA.blockTable.slice(0, this.numLogical);
    this.logical = this.table.map((physical, page) => this.makePage(`page ${page}`, page, "logical"));
    this.physical = Array.from({ length: DATA.numPages }, (_, physical) =>
      this.makePage(`P${physical}`, this.table.indexOf(physical), "physical"),
    );
    this.links = this.makeLinks();
    this.summary = h("p", { class: "page-summary", role: "status" });
    container.append(
      h(
        "div",
        { class: "paging", role: "group", "aria-label": "Pages" },
        h("p", { class: "paging-title", text: "Logical pages: the sequence as the recurrence walks it" }),
        h("div", { class: "page-line" }, ...this.logical.map((page) => page.element)),
        this.links.element,
        h("div", { class: "page-line" }, ...this.physical.map((page) => page.element)),
        h("p", { class: "paging-title", text: `Physical pages: the pool in memory, ${DATA.pageSize} places a page` }),
        this.summary,
      ),
    );
    this.ledger = new Ledger(container, settings, { groupSize: DATA.pageSize });
    this.numFrames = this.ledger.numFrames;
  }

  /** A page with its places; `logical` is the logical page that lies there, -1 for none. */
  makePage(name, logical, kind) {
    const slots = Array.from({ length: DATA.pageSize }, (_, place) => {
      const key = logical * DATA.pageSize + place;
      const used = logical >= 0 && key < this.settings.keys;
      return h("span", { class: used ? "slot" : "slot empty", "data-key": used ? key : null, text: used ? key : "" });
    });
    const caption = h("span", { class: "page-name", text: name });
    const element = h("div", { class: logical < 0 ? "page free" : "page", "data-kind": kind }, caption, h("div", { class: "slots" }, ...slots));
    return { element, slots, logical };
  }

  /** A curve from each logical page to its physical one. Pages of a line are equally wide, so percentages do. */
  makeLinks() {
    const curve = (physical, page) => {
      const from = (100 * (page + 0.5)) / this.numLogical;
      const to = (100 * (physical + 0.5)) / DATA.numPages;
      return `<path d="M${from} 0C${from} 24 ${to} 16 ${to} 40" vector-effect="non-scaling-stroke"/>`;
    };
    const element = h("div", { class: "page-links", "aria-hidden": "true" });
    element.innerHTML = `<svg viewBox="0 0 100 40" preserveAspectRatio="none">${this.table.map(curve).join("")}</svg>`;
    return { element, paths: [...element.querySelectorAll("path")] };
  }

  show(frame, query) {
    const step = this.ledger.trace.steps[frame - 1];
    const read = step ? this.steps[frame - 1] : [];
    const state = (key) => (step && key >= step.keyLo && key < step.keyHi ? "current" : step && key < step.keyLo ? "done" : "later");
    for (const page of [...this.logical, ...this.physical]) {
      for (const slot of page.slots) if (slot.dataset.key) slot.dataset.state = state(Number(slot.dataset.key));
    }
    this.physical.forEach((page, physical) => page.element.classList.toggle("read", read.includes(physical)));
    this.logical.forEach((page, i) => page.element.classList.toggle("read", read.includes(this.table[i])));
    this.links.paths.forEach((path, i) => path.classList.toggle("read", read.includes(this.table[i])));
    const entries = this.table.map((physical, page) => `${page} → P${physical}`).join(", ");
    this.summary.textContent = step
      ? `Block table: ${entries}. This tile reads ${read.map((page) => `P${page}`).join(" and ")}.`
      : `Block table: ${entries}.`;
    this.summary.dataset.pages = read.join(" ");
    this.ledger.show(frame, query);
  }

  measure(frame) {
    return this.ledger.measure(frame);
  }

  narrate(frame) {
    return this.ledger.narrate(frame);
  }

  closeup(frame, query) {
    return this.ledger.closeup(frame, query);
  }
}

addView({
  id: "pages",
  label: "Pages",
  note: "The same keys behind a block table: where they lie changes no bit of the result.",
  ...OF_TRACES,
  build: (container, settings) => new Paged(container, settings),
});
