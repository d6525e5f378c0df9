// The state of one query: m, the correction factor, l, and the output on its way to the exact answer.

/** Positions for outputs: 0 to 1 over everything that the outputs and the exact answer of a trace reach. */
function outputScale(trace) {
  const moments = [...trace.steps, ...trace.combinations];
  const all = [...trace.exact, ...moments.flatMap((moment) => moment.rows.map((row) => row.out))];
  const finite = all.flatMap((row) => [...row]).filter(Number.isFinite);
  const lo = Math.min(...finite);
  const hi = Math.max(...finite);
  return (x) => (hi > lo ? (x - lo) / (hi - lo) : 0.5);
}

class StateView {
  /** `exact` is the exact answer of this query; `kind` is "guarded", "unguarded" or "merged" (no alpha). */
  constructor(exact, scale, { kind = "guarded", label = null, alpha = true } = {}) {
    this.exact = exact;
    this.scale = scale;
    this.m = h("dd", { "data-name": "m" });
    this.alpha = h("dd", { "data-name": "alpha" });
    this.l = h("dd", { "data-name": "l" });
    this.error = h("span", { class: "error-number", "data-name": "error" });
    this.arrived = h("span", { class: "arrived-word" });
    this.tracks = Array.from(exact, (_, column) => this.makeTrack(column));
    this.element = h(
      "div",
      { class: "state", "data-kind": kind },
      ...(label ? [h("p", { class: "state-label", text: label })] : []),
      h(
        "dl",
        { class: "stats" },
        h("div", { class: "stat stat-m" }, h("dt", { text: "m" }), this.m),
        ...(alpha ? [h("div", { class: "stat stat-alpha" }, h("dt", { text: "α" }), this.alpha)] : []),
        h("div", { class: "stat stat-l" }, h("dt", { text: "l" }), this.l),
      ),
      h("div", { class: "tracks" }, ...this.tracks.map((track) => track.element)),
      h("p", { class: "row-error" }, h("span", { class: "row-error-label", text: "error" }), this.error, this.arrived),
    );
  }

  makeTrack(column) {
    const gap = h("i", { class: "gap" });
    const dot = h("i", { class: "dot" });
    const target = h("i", { class: "target", style: `left: ${100 * this.scale(this.exact[column])}%` });
    const tick = h("span", { class: "tick", "aria-hidden": "true" });
    const element = h("div", { class: "track", role: "img", "data-column": column }, h("span", { class: "rail" }, gap, target, dot), tick);
    return { element, gap, dot, tick };
  }

  /** Show a row of a step or a combination; `null` where there is none yet. */
  show(row) {
    const shown = row ?? emptyRow();
    showNumber(this.m, row && shown.m);
    showNumber(this.alpha, shown.alpha);
    showNumber(this.l, row && shown.l);
    this.alpha.classList.toggle("below-one", shown.alpha !== null && shown.alpha < 1);
    showNumber(this.error, shown.error);
    const all = shown.out !== null && shown.arrived.every(Boolean);
    this.arrived.textContent = all ? "✓ arrived" : "";
    this.tracks.forEach((track, column) => this.showTrack(track, column, shown));
  }

  showTrack({ element, gap, dot, tick }, column, row) {
    const exact = this.exact[column];
    const out = row.out === null ? null : row.out[column];
    const drawn = out !== null && Number.isFinite(out);
    const arrived = out !== null && row.arrived[column];
    element.dataset.value = exactText(out);
    element.dataset.arrived = arrived;
    element.classList.toggle("is-nan", out !== null && Number.isNaN(out));
    dot.hidden = gap.hidden = !drawn;
    if (drawn) {
      const [from, to] = [this.scale(out), this.scale(exact)];
      dot.style.left = `${100 * from}%`;
      gap.style.cssText = `left: ${100 * Math.min(from, to)}%; width: ${100 * Math.abs(from - to)}%`;
    }
    tick.textContent = arrived ? "✓" : out !== null && Number.isNaN(out) ? "NaN" : "";
    const now = out === null ? "nothing yet" : formatNumber(out);
    element.setAttribute("aria-label", `Output ${column}: ${now}, exact ${formatNumber(exact)}${arrived ? ", arrived" : ""}`);
  }
}
