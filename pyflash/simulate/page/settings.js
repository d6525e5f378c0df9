// The position of all controls, as one object, and as the part of the address behind `#`, so that it can be linked to.

/** What the page opens with, unless its address says otherwise. */
function defaultSettings() {
  return { view: "tiles", keys: DATA.maxKeys, tile: Math.min(4, DATA.maxKeys), causal: false, masked: false, step: 0, query: 0 };
}

/** Bring everything into its bounds; a step of -1 is the last one and stays. */
function bounded(settings) {
  const within = (x, lo, hi) => Math.min(Math.max(Math.round(x) || lo, lo), hi);
  const keys = within(settings.keys, 1, DATA.maxKeys);
  return {
    view: VIEWS.some((view) => view.id === settings.view) ? settings.view : "tiles",
    keys,
    tile: within(settings.tile, 1, keys),
    causal: Boolean(settings.causal),
    masked: Boolean(settings.masked),
    step: settings.step < 0 ? -1 : Math.round(settings.step) || 0,
    query: within(settings.query, 0, DATA.numQueries - 1),
  };
}

function settingsOfAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const settings = defaultSettings();
  for (const name of ["keys", "tile", "step", "query"]) if (given.has(name)) settings[name] = Number(given.get(name));
  for (const name of ["causal", "masked"]) settings[name] = given.get(name) === "1";
  if (given.has("view")) settings.view = given.get("view");
  return bounded(settings);
}

function writeAddress(settings) {
  const words = { ...settings, causal: Number(settings.causal), masked: Number(settings.masked) };
  try {
    history.replaceState(null, "", `#${new URLSearchParams(words)}`);
  } catch {
    // Safari takes 100 in half a minute, which a quick hand on the slider exceeds; a later one will be written.
  }
}
