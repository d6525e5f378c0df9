// The rings, as `pyflash/simulate/_ring_data.py` wrote them: what every rank held, computed, merged and sent.

const decodedRings = new Map();

/** The ring behind a position of the controls. */
function ringOf({ tokens, ranks, schedule, causal }) {
  const flags = causal ? ["causal"] : [];
  const name = [tokens, ranks, schedule, ...flags].join("/");
  const run = DATA.rings.runs[name];
  if (run === undefined) throw new Error(`no ring ${name}`);
  if (!decodedRings.has(name)) decodedRings.set(name, decodeRing(run, tokens, DATA.rings.exact[[tokens, ...flags].join("/")]));
  return decodedRings.get(name);
}

function decodeRing(run, numTokens, exact) {
  const width = DATA.headDimV;
  const ranks = run.ranks.map(readRank);
  const owner = Array(numTokens); // of each position: its rank, and which of the rank's rows it is
  ranks.forEach(({ positions }, rank) => positions.forEach((position, row) => (owner[position] = { rank, row })));
  return {
    ...run,
    ranks,
    owner,
    numSteps: ranks.length,
    error: NUMBERS[run.error],
    exact: owner.map((_, position) => NUMBERS.subarray(exact + position * width, exact + (position + 1) * width)),
  };
}

function readRank({ positions, known, steps, pairs, result }) {
  return {
    positions,
    pairs,
    known: known.map(([lo, hi, places]) => ({ lo, hi, rows: places.map(readKnown) })),
    steps: steps.map(([origin, held, buffer, call, mask, seen, ...rest]) => {
      const [pairsOfStep, skipped, bytes, made, states] = rest;
      return { origin, held, buffer, call, mask, seen, pairs: pairsOfStep, skipped, bytes, made, known: states };
    }),
    result: result.map((place) => ({
      error: NUMBERS[place],
      arrived: Array.from({ length: DATA.headDimV }, (_, column) => Boolean((NUMBERS[place + 1] >> column) & 1)),
    })),
  };
}

function readKnown(place) {
  return { m: NUMBERS[place], l: NUMBERS[place + 1], lse: NUMBERS[place + 2], out: NUMBERS.subarray(place + 3, place + 3 + DATA.headDimV) };
}

/** In which step the keys of a rank are at another, and whether a row there sees one of them. */
function meeting(ring, query, key) {
  const { rank, row } = ring.owner[query];
  const index = ring.ranks[rank].steps.findIndex((step) => step.origin === ring.owner[key].rank);
  const step = ring.ranks[rank].steps[index];
  const place = step.held.indexOf(key);
  return { step: index, held: place >= 0, seen: place >= 0 && Boolean((step.seen[row] >> place) & 1) };
}

/** The states of a rank after so many steps; behind the last step is the last merge, which leaves the result. */
function statesAfter(ring, rank, frame) {
  const { known, steps } = ring.ranks[rank];
  if (frame === 0) return [];
  if (frame > ring.numSteps) return [known.at(-1)];
  return steps[frame - 1].known.map((index) => known[index]);
}

/** The states that a rank made in a step, in their order: that of the keys that it held, then merges. */
function statesMade(ring, rank, frame) {
  const { known, steps } = ring.ranks[rank];
  if (frame === 0) return [];
  if (frame > ring.numSteps) return [known.at(-1)];
  return steps[frame - 1].made.map((index) => known[index]);
}

const rankName = (rank) => `rank ${rank}`;

/** "rank 0", "ranks 0 and 1", "ranks 0, 1 and 2". */
function listRanks(ranks) {
  if (ranks.length === 1) return rankName(ranks[0]);
  return `ranks ${ranks.slice(0, -1).join(", ")} and ${ranks.at(-1)}`;
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

/** Whose keys a state is over, in words: "rank 0", "ranks 0 + 1". */
const whoseKeys = (known) => `${known.hi - known.lo > 1 ? "ranks" : "rank"} ${overRanks(known)}`;

/** "0", "0 + 1". */
const overRanks = ({ lo, hi }) => Array.from({ length: hi - lo }, (_, i) => lo + i).join(" + ");
