// One query in numbers: what the step did to m, l and o, and the output beside the exact answer.

class Closeup {
  constructor(container) {
    this.container = container;
  }

  hide() {
    this.container.replaceChildren();
    this.container.hidden = true;
  }

  /** `columns` are the recurrences to show, [{label, row, before, exact}]: one, or guarded and unguarded. */
  show(query, columns) {
    this.container.hidden = false;
    this.container.replaceChildren(
      h("h3", { text: `Query ${queryName(query)} in numbers` }),
      h("div", { class: "closeup-columns" }, ...columns.map((column) => this.column(column))),
    );
  }

  column({ label, row, before, exact }) {
    return h(
      "div",
      { class: "closeup-column", "data-kind": label || "guarded" },
      ...(label ? [h("p", { class: "state-label", text: label })] : []),
      h(
        "div",
        { class: "work" },
        this.line("m", this.change(before.m, row.m)),
        this.line("α", this.factor(before, row)),
        this.line("l", this.change(before.l, row.l)),
      ),
      this.table(row, exact),
    );
  }

  line(name, ...content) {
    return h("p", {}, h("b", { text: name }), h("span", {}, ...content));
  }

  change(from, to) {
    return h("span", {}, this.number(from), h("span", { class: "arrow", text: " → ", "aria-label": "becomes" }), this.number(to));
  }

  factor(before, row) {
    if (row.alpha === null) return h("span", { text: "no step yet" });
    // Where both are −∞, the guard has put the lowest finite number in the place of each; without it α is NaN.
    const held = row.m === -Infinity && !Number.isNaN(row.alpha);
    const power = h("sup", { text: held ? "lowest − lowest" : `${formatNumber(before.m)} − ${bracketed(row.m)}` });
    return h("span", {}, "e", power, " = ", this.number(row.alpha));
  }

  number(x) {
    const element = h("span", { class: "figure" });
    showNumber(element, x);
    return element;
  }

  table(row, exact) {
    const width = exact.length;
    const cells = (values, name) =>
      Array.from({ length: width }, (_, i) => {
        const cell = h("td", { "data-name": name, "data-column": i });
        if (values === null) cell.textContent = "–";
        else showNumber(cell, values[i]);
        return cell;
      });
    const arrived = Array.from({ length: width }, (_, i) => h("td", { class: "tick", text: row.out !== null && row.arrived[i] ? "✓" : "" }));
    const line = (name, content) => h("tr", {}, h("th", { scope: "row", text: name }), ...content);
    return h(
      "div",
      { class: "table-scroll", tabindex: "0", role: "region", "aria-label": "Accumulator, output and exact answer" },
      h(
        "table",
        {},
        h("tr", {}, h("th", { scope: "col", text: "column" }), ...Array.from({ length: width }, (_, i) => h("th", { scope: "col", text: i }))),
        line("o", cells(row.o, "o")),
        line("o / l", cells(row.out, "out")),
        line("exact", cells(exact, "exact")),
        line("arrived", arrived),
      ),
    );
  }
}

/** A negative number or −∞ in brackets, for the right of a minus. */
function bracketed(x) {
  const text = formatNumber(x);
  return text.startsWith(MINUS) ? `(${text})` : text;
}
