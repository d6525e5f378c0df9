// The body of a function that returns what the simulator shows, for the tests.

const number = (element) => element?.dataset.value ?? null;
const state = (element) => ({
  kind: element.dataset.kind,
  m: number(element.querySelector("[data-name=m]")),
  alpha: number(element.querySelector("[data-name=alpha]")),
  belowOne: element.querySelector("[data-name=alpha]")?.classList.contains("below-one") ?? false,
  nan: [...element.querySelectorAll(".is-nan[data-name]")].map((one) => one.dataset.name),
  l: number(element.querySelector("[data-name=l]")),
  text: Object.fromEntries([...element.querySelectorAll("[data-name]")].map((one) => [one.dataset.name, one.textContent])),
  error: number(element.querySelector("[data-name=error]")),
  out: [...element.querySelectorAll(".track")].map(number),
  arrived: [...element.querySelectorAll(".track")].map((track) => track.dataset.arrived),
  ticks: [...element.querySelectorAll(".track .tick")].map((tick) => tick.textContent),
  dots: [...element.querySelectorAll(".track")].map((track) => track.querySelector(".dot").hidden ? null : track.querySelector(".dot").style.left),
  targets: [...element.querySelectorAll(".track .target")].map((target) => target.style.left),
});
return {
  step: Number(document.getElementById("stage").dataset.step),
  steps: Number(document.getElementById("stage").dataset.steps),
  narration: document.getElementById("narration").textContent,
  hash: location.hash,
  rows: [...document.querySelectorAll("#view .strip")].map((strip) => ({
    label: strip.getAttribute("aria-label"),
    cells: [...strip.querySelectorAll(".cell")].map((cell) => ({
      state: cell.dataset.state,
      value: number(cell.querySelector(".number")),
      text: cell.querySelector(".number").textContent,
    })),
    lines: [...strip.querySelectorAll(".max-line")].map((line) => line.classList.contains("absent") ? null : line.style.bottom),
    bars: [...strip.querySelectorAll(".bar")].map((bar) => bar.style.height),
  })),
  states: [...document.querySelectorAll("#view .ledger-row[data-query] .states")].map((row) => [...row.querySelectorAll(".state")].map(state)),
  cards: [...document.querySelectorAll("#view .card")].map((card) => ({
    title: card.querySelector("h3").textContent,
    pending: card.classList.contains("pending"),
    active: card.classList.contains("active"),
    states: [...card.querySelectorAll(".state")].map(state),
  })),
  meters: {
    inMemory: number(document.querySelector("[data-name=in-memory]")),
    memoryText: document.querySelector("#meters .meter-text").textContent,
    rescaled: number(document.querySelector("[data-name=rescaled]")),
    error: number(document.querySelector("[data-name=total-error]")),
  },
  closeup: [...document.querySelectorAll("#closeup .closeup-column")].map((column) => ({
    figures: [...column.querySelectorAll(".figure")].map(number),
    ...Object.fromEntries(["o", "out", "exact"].map((name) => [name, [...column.querySelectorAll(`td[data-name=${name}]`)].map(number)])),
    ticks: [...column.querySelectorAll("td.tick")].map((tick) => tick.textContent),
  })),
  pages: {
    read: document.querySelector(".page-summary")?.dataset.pages ?? null,
    marked: [...document.querySelectorAll(".page[data-kind=physical]")].flatMap((page, i) => page.classList.contains("read") ? [i] : []),
    slots: [...document.querySelectorAll(".page[data-kind=physical]")].map((page) =>
      [...page.querySelectorAll(".slot")].map((slot) => slot.dataset.key === undefined ? null : [Number(slot.dataset.key), slot.dataset.state])),
  },
};
