// The ranks of the ring: what each has, which keys lie in which of its buffers, what it computes and sends on.

class RankCards {
  constructor(container, ring) {
    this.ring = ring;
    this.room = Math.max(...ring.ranks.map(({ positions }) => positions.length)); // so that a card keeps its height
    this.cards = ring.ranks.map((rank, i) => this.makeCard(rank, i));
    const size = ring.ranks.length;
    this.element = h("div", { class: "ranks", role: "group", "aria-label": "Ranks", style: `--ranks: ${size}`, "data-ranks": size }, ...this.cards.map((card) => card.element));
    this.back = h("div", { class: "way-back", "aria-hidden": "true", style: `--ranks: ${size}` }, h("span"));
    container.append(this.element, this.back);
  }

  makeCard({ positions }, rank) {
    const places = [["own", "own"], ["0", "buffer a"], ["1", "buffer b"]].map(([buffer, label]) => {
      const tokens = h("span", { class: "tokens" });
      const note = h("span", { class: "place-note" });
      const element = h("div", { class: "place", "data-buffer": buffer }, h("span", { class: "place-name", text: label }), tokens, note);
      return { element, tokens, note };
    });
    const work = h("p", { class: "rank-work" });
    const call = h("p", { class: "rank-call" });
    const sends = h("p", { class: "rank-sends" });
    const queries = h("span", { class: "tokens" }, ...positions.map((position) => tokenChip(position, rank, "query-token")));
    const element = h(
      "section",
      { class: "rank", "data-owner": rank, "aria-label": `Rank ${rank}` },
      h("h3", { text: `Rank ${rank}` }),
      work,
      h("div", { class: "place", "data-buffer": "queries" }, h("span", { class: "place-name", text: "queries" }), queries, h("span", { class: "place-note", text: "stay" })),
      h("p", { class: "rank-heading", text: "keys and values" }),
      ...places.map((place) => place.element),
      call,
      sends,
    );
    return { element, places, work, call, sends };
  }

  show(frame) {
    this.cards.forEach((card, rank) => this.showCard(card, rank, frame));
    this.back.firstChild.textContent = this.cards.at(-1).sends.dataset.bytes === "0" ? "" : "back to rank 0";
    this.back.classList.toggle("idle", this.cards.at(-1).sends.dataset.bytes === "0");
  }

  showCard({ element, places, work, call, sends }, rank, frame) {
    const { steps, positions } = this.ring.ranks[rank];
    const step = steps[frame - 1];
    const coming = frame > 0 && step ? steps[frame] : undefined;
    places.forEach((place, i) => {
      const buffer = i - 1;
      const isHeld = step !== undefined && step.held.length > 0 && step.buffer === buffer;
      const comes = coming !== undefined && coming.held.length > 0 && coming.buffer === buffer;
      const tokens = isHeld ? [step.held, step.origin] : comes ? [coming.held, coming.origin] : buffer < 0 ? [positions, rank] : [[], rank];
      const room = Array.from({ length: this.room - tokens[0].length }, () => h("span", { class: "token room", text: "0" }));
      place.tokens.replaceChildren(...tokens[0].map((token) => tokenChip(token, tokens[1])), ...room);
      place.element.dataset.state = isHeld ? "used" : comes ? "coming" : "idle";
      place.note.textContent = isHeld ? "in use" : comes ? "arriving" : "";
    });
    const idle = step !== undefined && step.pairs === 0;
    element.classList.toggle("idle", idle);
    work.textContent = !step ? (frame ? "done" : "") : idle ? "nothing to compute" : `${plural(step.pairs, "pair")}${step.skipped ? `, ${step.skipped} skipped` : ""}`;
    work.dataset.pairs = step ? step.pairs : "";
    work.dataset.skipped = step ? step.skipped : "";
    call.textContent = step ? callText(step) : frame ? "the last merge" : "";
    const bytes = step ? step.bytes : 0;
    sends.dataset.bytes = bytes;
    const next = (rank + 1) % this.ring.ranks.length;
    const gone = bytes ? this.ring.ranks[next].steps[frame].held.length : 0;
    sends.textContent = bytes ? `→ rank ${next}: ${plural(gone, "token")}, ${bytes} B` : step ? "sends nothing" : "";
    element.classList.toggle("sends", bytes > 0);
    element.dataset.sent = step ? step.origin : "";
  }
}

/** A token, in the colour of the rank that it belongs to. */
function tokenChip(position, owner, kind = "") {
  return h("span", { class: `token ${kind}`, "data-owner": owner, "data-token": position, text: position });
}

/** The call of a kernel: which of the rank's rows, against which of the keys that it holds, told what. */
function callText({ call, mask, held }) {
  if (!call) return held.length ? "no row sees these keys" : "no keys came";
  const [rowLo, rowHi, keyLo, keyHi] = call;
  return `q[${rowLo}:${rowHi}] × k[${keyLo}:${keyHi}], ${mask || "no mask"}`;
}
