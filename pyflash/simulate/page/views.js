// The views, in the order of their tabs. A view is an object with
//
//   id, label, note     its name in `runs`, its tab, one sentence about it
//   build(container, settings)   makes its elements and returns what plays: an object with
//       numFrames       frames are 0, where nothing is loaded, to numFrames
//       show(frame, query)       draws a frame; `query` is the chosen one
//       measure(frame)           what the meters show
//       narrate(frame)           one or two sentences
//       closeup(frame, query)    columns for the close-up, or null
//
// Another view is another file that calls `addView`.

const VIEWS = [];

function addView(view) {
  VIEWS.push(view);
}

const viewOf = (settings) => VIEWS.find((view) => view.id === settings.view);
