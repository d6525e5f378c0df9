// The body of a function that returns what the view of the ring shows, for the tests.

const all = (root, selector) => [...root.querySelectorAll(selector)];
const number = (element) => element?.dataset.value ?? null;
const tokens = (place) => all(place, ".token[data-token]").map((token) => [Number(token.dataset.token), Number(token.dataset.owner)]);
return {
  step: Number(document.getElementById("stage").dataset.step),
  steps: Number(document.getElementById("stage").dataset.steps),
  narration: document.getElementById("narration").textContent,
  ranks: all(document, ".rank").map((rank) => ({
    owner: Number(rank.dataset.owner),
    idle: rank.classList.contains("idle"),
    sends: rank.classList.contains("sends"),
    pairs: rank.querySelector(".rank-work").dataset.pairs,
    skipped: rank.querySelector(".rank-work").dataset.skipped,
    work: rank.querySelector(".rank-work").textContent,
    call: rank.querySelector(".rank-call").textContent,
    sent: rank.querySelector(".rank-sends").textContent,
    places: Object.fromEntries(all(rank, ".place").map((place) => [place.dataset.buffer, { state: place.dataset.state ?? null, tokens: tokens(place) }])),
  })),
  heads: all(document, ".key-head").map((head) => Number(head.dataset.owner)),
  pairs: all(document, ".pair-row[data-query]").map((row) => all(row, ".pair").map((pair) => pair.dataset.state)),
  labels: all(document, ".pair-cells[role=img]").map((row) => row.getAttribute("aria-label")),
  owners: all(document, ".kept-row[data-query]").map((row) => Number(row.dataset.owner)),
  kept: all(document, ".kept-row[data-query]").map((row) => all(row, ".kept-state").map((state) => ({
    kind: state.dataset.kind,
    lo: Number(state.dataset.lo ?? getComputedStyle(state).gridColumnStart - 1),
    hi: Number(state.dataset.hi ?? getComputedStyle(state).gridColumnStart),
    fresh: state.classList.contains("fresh"),
    m: number(state.querySelector("[data-name=m]")),
    l: number(state.querySelector("[data-name=l]")),
    tick: state.querySelector(".kept-tick")?.textContent ?? null,
  }))),
  loads: Object.fromEntries(all(document, ".loads").map((loads) => [loads.dataset.name, all(loads, ".load").map((load) => ({
    count: load.querySelector(".load-count").textContent,
    parts: all(load, ".load-part").map((part) => [part.className.replace("load-part ", ""), part.style.width]),
  }))])),
  texts: all(document, ".ring-meters .meter-text").map((text) => text.textContent),
  bytes: number(document.querySelector("[data-name=bytes]")),
  error: number(document.querySelector("[data-name=ring-error]")),
  table: all(document, "#view .closeup tr").slice(1).map((row) => ({
    title: row.querySelector("th").textContent,
    made: row.classList.contains("made"),
    values: all(row, "td[data-name]").map(number),
    ticks: all(row, "td.tick").map((tick) => tick.textContent),
  })),
  chosen: all(document, "#view .query[aria-pressed=true]").map((query) => Number(query.dataset.query)),
  others: ["legend", "meters", "closeup"].filter((id) => !document.getElementById(id).hidden),
};
