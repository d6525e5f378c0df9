// The simulator as a whole: settings in, a view built, frames shown, played and stepped.

const STEP_MILLISECONDS = 1400;

class Player {
  constructor(settings) {
    this.settings = settings;
    this.meters = new Meters(byId("meters"));
    this.closeup = new Closeup(byId("closeup"));
    this.timer = null;
    this.build();
  }

  /** Make the view anew, because a setting other than the step or the query has changed. */
  build() {
    const container = byId("view");
    container.replaceChildren();
    const view = viewOf(this.settings);
    container.dataset.view = view.id;
    byId("view-note").textContent = view.note;
    byId("legend").hidden = view.hasLegend;
    this.view = view.build(container, this.settings, (query) => this.choose(query));
    const { step } = this.settings;
    this.settings.step = step < 0 ? this.view.numFrames : Math.min(step, this.view.numFrames);
    byId("scrub").max = this.view.numFrames;
    this.show();
  }

  /** Change settings. Who looks at the end stays there; else other tiles start again, and other masks do not. */
  set(changes) {
    this.pause();
    const { step } = this.settings;
    const otherSteps = ["view", "keys", "tile", "ranks", "tokens"].some((name) => name in changes && changes[name] !== this.settings[name]);
    const atEnd = step > 0 && step === this.view.numFrames;
    this.settings = bounded({ ...this.settings, step: atEnd ? -1 : otherSteps ? 0 : step, ...changes });
    this.build();
  }

  show() {
    const { step, query } = this.settings;
    this.view.show(step, query);
    const measures = this.view.measure(step);
    byId("meters").hidden = measures === null;
    if (measures) this.meters.show(measures);
    const columns = this.view.closeup(step, query);
    if (columns) this.closeup.show(query, columns);
    else this.closeup.hide();
    byId("narration").textContent = this.view.narrate(step);
    this.showControls();
    writeAddress(this.settings);
  }

  showControls() {
    const { view, keys, tile, causal, masked, step } = this.settings;
    const last = this.view.numFrames;
    const { controls } = viewOf(this.settings);
    for (const element of document.querySelectorAll("[data-control]")) {
      element.hidden = !controls.includes(element.dataset.control) || element.dataset.choices === "1";
    }
    for (const name of Object.keys(CHOICES)) checkChoice(name, this.settings[name]);
    document.querySelectorAll("#views [role=tab]").forEach((tab) => {
      tab.setAttribute("aria-selected", tab.dataset.view === view);
      tab.tabIndex = tab.dataset.view === view ? 0 : -1;
    });
    byId("view").setAttribute("aria-labelledby", `view-${view}`);
    showRange("tile", tile, keys);
    showRange("keys", keys, DATA.maxKeys);
    byId("tile-note").textContent = this.tileNote();
    byId("keys-note").textContent = `${DATA.numQueries} queries, ${DATA.numQueries} × ${keys} scores`;
    byId("causal").checked = causal;
    byId("masked").checked = masked;
    byId("scrub").value = step;
    byId("scrub").setAttribute("aria-valuetext", `${step} of ${last}`);
    byId("position").textContent = `Step ${step} of ${last}`;
    byId("first").disabled = byId("back").disabled = step === 0;
    byId("last").disabled = byId("step").disabled = step === last;
    byId("stage").dataset.step = step;
    byId("stage").dataset.steps = last;
  }

  tileNote() {
    const most = largestTile(this.settings);
    if (this.settings.tile > most) return `a worker has only ${plural(most, "key")}`;
    return this.settings.tile === this.settings.keys ? "one tile: as naive attention" : "keys a step";
  }

  goTo(step) {
    const next = Math.min(Math.max(step, 0), this.view.numFrames);
    if (next === this.settings.step) return;
    this.settings.step = next;
    this.show();
  }

  /** A step by hand: it also ends playing. */
  move(step) {
    this.pause();
    this.goTo(step);
  }

  choose(query) {
    this.settings.query = Math.min(Math.max(query, 0), viewOf(this.settings).numQueries(this.settings) - 1);
    this.show();
  }

  get playing() {
    return this.timer !== null;
  }

  play() {
    if (this.settings.step === this.view.numFrames) this.goTo(0);
    this.schedule();
    this.showPlaying();
  }

  schedule() {
    this.timer = setTimeout(() => {
      this.goTo(this.settings.step + 1);
      if (this.settings.step < this.view.numFrames) this.schedule();
      else this.pause();
    }, STEP_MILLISECONDS / Number(byId("speed").value));
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.showPlaying();
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  showPlaying() {
    byId("play").setAttribute("aria-label", this.playing ? "Pause" : "Play");
    byId("play").classList.toggle("playing", this.playing);
    // What is said aloud at each step of a fast sequence would never end.
    byId("narration").setAttribute("aria-live", this.playing ? "off" : "polite");
  }
}

function showRange(id, value, max) {
  byId(id).max = max;
  byId(id).value = value;
  byId(`${id}-value`).textContent = value;
}
