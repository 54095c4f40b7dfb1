// Elements of the page and of drawings, made without markup: data stays text.

export const byId = (id) => document.getElementById(id);

export function make(name, properties = {}, content = []) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...[content].flat().filter((part) => part !== null));
  return element;
}

export function draw(name, attributes = {}, content = []) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...[content].flat());
  return element;
}

/** One of the marks in index.html, "yes" to "odd"; text beside it says the same. */
export function mark(name) {
  const use = draw("use", { href: `#mark-${name}` });
  return draw("svg", { class: `mark ${name}`, "aria-hidden": "true" }, [use]);
}

export const unseen = (text) => make("span", { className: "unseen" }, text);
