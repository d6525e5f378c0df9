// Starts the page: controls, keys, touch.

function startControls(player) {
  byId("views").replaceChildren(
    ...VIEWS.map((view) =>
      h("button", {
        type: "button",
        role: "tab",
        id: `view-${view.id}`,
        "data-view": view.id,
        "aria-controls": "view",
        text: view.label,
        onclick: () => player.set({ view: view.id }),
      }),
    ),
  );
  for (const name of ["tile", "keys"]) byId(name).addEventListener("input", (event) => player.set({ [name]: Number(event.target.value) }));
  for (const name of ["causal", "masked"]) byId(name).addEventListener("change", (event) => player.set({ [name]: event.target.checked }));
  for (const [name, values] of Object.entries(CHOICES)) makeChoice(name, values, (value) => player.set({ [name]: value }));
  byId("first").addEventListener("click", () => player.move(0));
  byId("back").addEventListener("click", () => player.move(player.settings.step - 1));
  byId("play").addEventListener("click", () => player.toggle());
  byId("step").addEventListener("click", () => player.move(player.settings.step + 1));
  byId("last").addEventListener("click", () => player.move(player.view.numFrames));
  byId("scrub").addEventListener("input", (event) => player.move(Number(event.target.value)));
  byId("view").addEventListener("click", (event) => {
    const button = event.target.closest("button.query");
    if (button) player.choose(Number(button.dataset.query));
  });
}

/** Keys that work anywhere on the page: what they do, by `event.key`. */
function shortcuts(player) {
  const { settings } = player;
  const { controls } = viewOf(settings);
  const set = (changes) => (Object.keys(changes).every((name) => controls.includes(name)) ? () => player.set(changes) : null);
  /** One further along a list of choices; `step` 0 is the next one, and behind the last the first. */
  const choice = (name, step) => {
    const values = CHOICES[name];
    const at = values.indexOf(settings[name]);
    return set({ [name]: step ? (values[at + step] ?? settings[name]) : values[(at + 1) % values.length] });
  };
  return {
    " ": () => player.toggle(),
    ArrowLeft: () => player.move(settings.step - 1),
    ArrowRight: () => player.move(settings.step + 1),
    Home: () => player.move(0),
    End: () => player.move(player.view.numFrames),
    ArrowUp: () => player.choose(settings.query - 1),
    ArrowDown: () => player.choose(settings.query + 1),
    "[": set({ tile: settings.tile - 1 }) ?? choice("ranks", -1),
    "]": set({ tile: settings.tile + 1 }) ?? choice("ranks", 1),
    "-": set({ keys: settings.keys - 1 }) ?? choice("tokens", -1),
    "+": set({ keys: settings.keys + 1 }) ?? choice("tokens", 1),
    "=": set({ keys: settings.keys + 1 }) ?? choice("tokens", 1),
    s: choice("schedule", 0),
    c: set({ causal: !settings.causal }),
    m: set({ masked: !settings.masked }),
    t: toggleTheme,
    ...Object.fromEntries(VIEWS.map((view, i) => [String(i + 1), () => player.set({ view: view.id })])),
  };
}

/** Whether a key means something to the element that has the focus. */
function isTakenBy(element, key) {
  if (element.matches(".choice input")) return key.startsWith("Arrow") || key === " ";
  if (element.matches("select, textarea, input:not([type=range], [role=switch])")) return true;
  if (element.matches("input[type=range]")) return key.startsWith("Arrow") || key === "Home" || key === "End";
  if (element.matches("[role=tab]")) return key.startsWith("Arrow") || key === "Home" || key === "End" || key === " ";
  if (element.matches("button, summary, [role=switch]")) return key === " ";
  return false;
}

function isInSight(element) {
  const { top, bottom } = element.getBoundingClientRect();
  return bottom > 0 && top < innerHeight;
}

function startKeyboard(player) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTakenBy(event.target, event.key)) return;
    // These scroll the page, unless the reader is in the simulator.
    const scrolls = ["ArrowUp", "ArrowDown", "Home", "End"].includes(event.key);
    if (scrolls && !byId("stage").contains(event.target)) return;
    if (event.key === " " && !isInSight(byId("play"))) return; // the reader is elsewhere, and scrolls
    const action = shortcuts(player)[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  byId("views").addEventListener("keydown", (event) => {
    const tabs = [...byId("views").children];
    const at = tabs.indexOf(event.target);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const tab = tabs[(next + tabs.length) % tabs.length];
    player.set({ view: tab.dataset.view });
    tab.focus();
  });
}

/** A swipe over the scores is a step. Scrolling up and down stays the browser's. */
function startTouch(player) {
  let start = null;
  byId("view").addEventListener("touchstart", (event) => {
    start = event.touches.length === 1 ? event.touches[0] : null;
  }, { passive: true });
  byId("view").addEventListener("touchend", (event) => {
    if (!start) return;
    const [dx, dy] = [event.changedTouches[0].clientX - start.clientX, event.changedTouches[0].clientY - start.clientY];
    start = null;
    if (Math.abs(dx) > 40 && Math.abs(dx) > 2 * Math.abs(dy)) player.move(player.settings.step + (dx < 0 ? 1 : -1));
  }, { passive: true });
}

function showSource() {
  const shapes = `${DATA.numQueries} queries, ${DATA.maxKeys} keys, head_dim ${DATA.headDim}, head_dim_v ${DATA.headDimV}`;
  byId("source").textContent =
    `Arrays: ${DATA.source} (${DATA.dtype}; ${shapes}). An output has arrived (✓) when it differs from the exact one ` +
    `by at most ${formatNumber(DATA.tolerance)} times the largest value.` +
    (DATA.rings.ownQueries ? "" : " In the ring every key has a query: these, in turn.");
}

startTheme();
showSource();
const player = new Player(settingsOfAddress());
startControls(player);
player.showControls();
startKeyboard(player);
startTouch(player);
startQuiz((place) => {
  player.set({ ...defaultSettings(), query: player.settings.query, ...place });
  byId("stage").scrollIntoView();
  byId("stage").focus({ preventScroll: true });
});
addEventListener("hashchange", () => player.set(settingsOfAddress()));
