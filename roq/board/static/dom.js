// Small helpers over the DOM. Text is always set as text.

export const $ = (selector) => document.querySelector(selector);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Set only changed values, which avoids layout work.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setData(element, name, value) {
  if (element.dataset[name] !== value) element.dataset[name] = value;
}

// Create or remove children to match the rows, then update each with `show(element, row)`.
export function list(parent, rows, create, show) {
  while (parent.children.length > rows.length) parent.lastElementChild.remove();
  while (parent.children.length < rows.length) parent.append(create());
  rows.forEach((row, i) => show(parent.children[i], row));
}
