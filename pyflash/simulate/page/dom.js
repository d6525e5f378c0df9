// The two things that this page needs of the DOM: make elements, and put a number into one.

/** Make an element: attributes by name, `class` and `text` too, then children. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Show a number: short for the eye, whole in `data-value`, and marked where it is NaN. */
function showNumber(element, x, format = formatNumber) {
  element.textContent = format(x);
  element.dataset.value = exactText(x);
  element.classList.toggle("is-nan", Number.isNaN(x));
  if (x === null || Number.isNaN(x)) element.removeAttribute("title");
  else element.title = exactText(x);
}

const byId = (id) => document.getElementById(id);
