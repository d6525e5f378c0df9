// The views, in the order of their tabs. A view is an object with
//
//   id, label, note     its name in `runs`, its tab, one sentence about it
//   controls            names of the settings that it has, in the order of the address
//   numQueries(settings)   how many queries can be chosen
//   hasLegend           whether it has a legend of its own
//   build(container, settings, choose)   makes its elements and returns what plays; `choose` chooses a query:
//       numFrames       frames are 0, where nothing is loaded, to numFrames
//       show(frame, query)       draws a frame; `query` is the chosen one
//       measure(frame)           what the meters show, or null
//       narrate(frame)           one or two sentences
//       closeup(frame, query)    columns for the close-up, or null
//
// Another view is another file that calls `addView`.

const VIEWS = [];

function addView(view) {
  VIEWS.push(view);
}

/** Controls and queries of the views that show a trace. */
const OF_TRACES = { controls: ["keys", "tile", "causal", "masked"], numQueries: () => DATA.numQueries, hasLegend: false };

const viewOf = (settings) => VIEWS.find((view) => view.id === settings.view);
