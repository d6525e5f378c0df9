// "Check yourself": every choice gets its reason, right or wrong, and the simulator can show it.

function startQuiz(goTo) {
  const questions = JSON.parse(byId("questions").textContent);
  const results = questions.map(() => null);
  const score = () => {
    const answered = results.filter((result) => result !== null).length;
    const right = results.filter(Boolean).length;
    byId("score").textContent = answered ? `${right} of ${questions.length} right${answered < questions.length ? `, ${questions.length - answered} to go` : ""}` : "";
  };
  byId("quiz").replaceChildren(
    ...questions.map((question, i) =>
      makeQuestion(question, i, goTo, (right) => {
        results[i] = right;
        score();
      }),
    ),
  );
}

function makeQuestion({ question, options, show }, index, goTo, answered) {
  const why = h("p", { class: "why", "aria-live": "polite" });
  const showMe = h("button", { type: "button", class: "show-me", hidden: true, text: "Show me", onclick: () => goTo(show) });
  const labels = options.map((option, i) => {
    const input = h("input", { type: "radio", name: `question-${index}`, value: i });
    const mark = h("span", { class: "mark", "aria-hidden": "true" });
    const label = h("label", {}, input, h("span", { text: option.text }), mark);
    input.addEventListener("change", () => {
      const right = Boolean(option.right);
      labels.forEach((one) => one.classList.remove("right", "wrong"));
      for (const one of labels) one.querySelector(".mark").textContent = "";
      label.classList.add(right ? "right" : "wrong");
      mark.textContent = right ? "✓" : "✗";
      why.replaceChildren(h("b", { text: right ? "Yes. " : "No. " }), option.why);
      showMe.hidden = false;
      answered(right);
    });
    return label;
  });
  return h("li", {}, h("fieldset", {}, h("legend", { text: question }), ...labels, why, showMe));
}
