// Three measures of the moment: scores in memory against the naive number, rescalings, error against exact.

class Meters {
  constructor(container) {
    this.memory = h("b", { class: "meter-number", "data-name": "in-memory" });
    this.memoryText = h("p", { class: "meter-text" });
    this.memoryBar = h("i", { class: "meter-fill" });
    this.memoryPeak = h("i", { class: "meter-peak" });
    this.rescaled = h("b", { class: "meter-number", "data-name": "rescaled" });
    this.rescaledText = h("p", { class: "meter-text" });
    this.pips = h("div", { class: "pips", "aria-hidden": "true" });
    this.error = h("b", { class: "meter-number", "data-name": "total-error" });
    this.errorText = h("p", { class: "meter-text" });
    this.chart = h("div", { class: "chart", role: "img" });
    container.replaceChildren(
      this.meter("Scores in memory", this.memory, h("div", { class: "meter-bar", "aria-hidden": "true" }, this.memoryBar, this.memoryPeak), this.memoryText),
      this.meter("Rescalings so far", this.rescaled, this.pips, this.rescaledText),
      this.meter("Error against exact", this.error, this.chart, this.errorText),
    );
  }

  meter(title, ...content) {
    return h("section", { class: "meter", "aria-label": title }, h("h3", { text: title }), ...content);
  }

  /** Show what a view says of a frame; the fields are those that its `measure` returns. */
  show({ inMemory, peak, naive, rescaled, rescaledNow, pips, error, errors, frame, unguarded }) {
    this.memory.textContent = inMemory;
    this.memory.dataset.value = inMemory;
    this.memoryBar.style.width = `${(100 * inMemory) / naive}%`;
    this.memoryPeak.style.left = `${(100 * peak) / naive}%`;
    this.memoryText.textContent = `never more than ${peak} here; naive attention would hold ${naive}`;
    this.rescaled.textContent = rescaled;
    this.rescaled.dataset.value = rescaled;
    this.rescaledText.textContent = `${rescaledNow} in this step: earlier sums of a query multiplied by an α other than 1`;
    this.pips.replaceChildren(
      ...pips.map((count, i) => h("span", { class: i < frame ? "pip past" : "pip", text: count, "data-count": count })),
    );
    showNumber(this.error, error);
    this.showErrors(errors, frame, unguarded, error);
  }

  /** One column for each step, on a logarithmic scale from the last place of a float64 to 10. */
  showErrors(errors, frame, unguarded, error) {
    const [lowest, highest] = [-17, 1];
    this.chart.replaceChildren(
      ...errors.map((value, i) => {
        const known = i < frame && value !== null;
        const power = Number.isNaN(value) ? highest : Math.log10(Math.max(value, 10 ** lowest));
        const height = Math.max(4, (100 * (power - lowest)) / (highest - lowest));
        return h("i", { class: `column ${known ? "known" : ""} ${i === frame - 1 ? "now" : ""}`, style: `height: ${known ? height : 4}%` });
      }),
    );
    this.chart.setAttribute("aria-label", `Error after each step, logarithmic: ${errors.slice(0, frame).map(formatNumber).join(", ") || "no step yet"}`);
    const more = unguarded === undefined ? "" : `; unguarded: ${formatNumber(unguarded)}`;
    this.errorText.textContent = (error === null ? "no answer yet" : "largest |out − exact|, one column a step, logarithmic") + more;
  }
}
