// Settings of which there are a few values: a row of radio buttons each.

const CHOICES = { ranks: DATA.rings.ranks, schedule: DATA.rings.schedules, tokens: DATA.rings.lengths };

const SCHEDULE_NOTES = {
  zigzag: "a stretch from the beginning and one from the end",
  contiguous: "one stretch each",
  stripe: "one after the other, in turn",
};

function makeChoice(name, values, choose) {
  const fieldset = byId(name);
  fieldset.dataset.choices = values.length;
  const buttons = values.map((value) => {
    const input = h("input", { type: "radio", name, id: `${name}-${value}`, value });
    input.addEventListener("change", () => choose(value));
    return h("label", { for: `${name}-${value}` }, input, h("span", { text: value }));
  });
  fieldset.querySelector(".choice-buttons").replaceChildren(...buttons);
}

function checkChoice(name, value) {
  const input = byId(`${name}-${value}`);
  if (input) input.checked = true;
  if (name === "schedule") byId("schedule-note").textContent = SCHEDULE_NOTES[value];
}
