// The position of all controls, as one object, and as the part of the address behind `#`, so that it can be linked to.

/** What the page opens with, unless its address says otherwise. */
function defaultSettings() {
  return {
    view: "tiles", keys: DATA.maxKeys, tile: Math.min(4, DATA.maxKeys), causal: false, masked: false, step: 0, query: 0,
    tokens: DATA.maxKeys, ranks: DATA.rings.ranks.at(-1), schedule: DATA.rings.schedules[0],
  };
}

/** Bring everything into its bounds; a step of -1 is the last one and stays. */
function bounded(settings) {
  const within = (x, lo, hi) => Math.min(Math.max(Math.round(x) || lo, lo), hi);
  const oneOf = (x, choices, fallback) => (choices.includes(x) ? x : fallback);
  const keys = within(settings.keys, 1, DATA.maxKeys);
  const tokens = oneOf(settings.tokens, DATA.rings.lengths, DATA.maxKeys);
  const view = VIEWS.find(({ id }) => id === settings.view) ?? VIEWS[0];
  return {
    view: view.id,
    keys,
    tile: within(settings.tile, 1, keys),
    causal: Boolean(settings.causal),
    masked: Boolean(settings.masked),
    step: settings.step < 0 ? -1 : Math.round(settings.step) || 0,
    query: within(settings.query, 0, view.numQueries({ ...settings, tokens }) - 1),
    tokens,
    ranks: oneOf(settings.ranks, DATA.rings.ranks, DATA.rings.ranks.at(-1)),
    schedule: oneOf(settings.schedule, DATA.rings.schedules, DATA.rings.schedules[0]),
  };
}

function settingsOfAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const settings = defaultSettings();
  for (const name of ["keys", "tile", "step", "query", "tokens", "ranks"]) if (given.has(name)) settings[name] = Number(given.get(name));
  for (const name of ["causal", "masked"]) settings[name] = given.get(name) === "1";
  for (const name of ["view", "schedule"]) if (given.has(name)) settings[name] = given.get(name);
  return bounded(settings);
}

function writeAddress(settings) {
  const shown = ["view", ...viewOf(settings).controls, "step", "query"];
  const words = shown.map((name) => [name, typeof settings[name] === "boolean" ? Number(settings[name]) : settings[name]]);
  try {
    history.replaceState(null, "", `#${new URLSearchParams(words)}`);
  } catch {
    // Safari takes 100 in half a minute, which a quick hand on the slider exceeds; a later one will be written.
  }
}
