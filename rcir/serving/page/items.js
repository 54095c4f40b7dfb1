// The candidates in one grid: those in the set, a boundary, and those outside.

import { byId, make, mark, unseen } from "./elements.js";
import { load } from "./pictures.js";
import { labelName, percent } from "./words.js";

export const FIRST = 12; // candidates that are shown before others are requested by a button
const BEHIND = 3; // candidates behind a set that is shown as a whole

const rows = ({ ids, labels, distances, probabilities }) =>
  ids.map((id, place) => ({
    id,
    label: labels?.[place] ?? null,
    distance: distances[place],
    probability: probabilities[place],
  }));

export class Items {
  constructor(list, pictures) {
    Object.assign(this, { list, pictures, candidates: [], size: 0, expanded: false });
    list.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) this.compare(Number(button.dataset.place));
    });
    byId("further").addEventListener("click", () => {
      this.expanded = true;
      this.show(this.size);
      this.buttons[FIRST].focus();
    });
  }

  /** Put the candidates of an answer into the grid; `label` is the query's, or null. */
  put(answer, label) {
    this.pictures.watch.disconnect();
    this.expanded = false;
    this.candidates = [...rows(answer), ...(answer.outside ? rows(answer.outside) : [])];
    for (const item of this.candidates) {
      item.right = label === null || item.label === null ? null : String(item.label) === String(label);
    }
    this.list.replaceChildren(...this.candidates.map((item, place) => this.cell(item, place)));
  }

  cell(item, place) {
    const image = make("img", { alt: "", hidden: true });
    const picture = make("span", { className: "picture" }, [make("span", {}, item.id), image]);
    this.pictures.later(picture, item.id);
    const bar = make("i");
    bar.style.width = `${Math.max(item.probability * 100, 0.5)}%`;
    const name = item.label === null ? item.id : labelName(item.label);
    const button = make("button", { type: "button", title: item.id }, [
      picture,
      make("span", { className: "bar-track", ariaHidden: "true" }, bar),
      make("span", { className: "line" }, [
        make("span", { className: "name" }, [make("span", { className: "truth" }), name]),
        make("b", {}, percent(item.probability)),
      ]),
      make("span", { className: "soft id" }, item.label === null ? "" : item.id),
      make("span", { className: "soft place" }),
    ]);
    button.dataset.place = place;
    const cell = make("li", {}, button);
    cell.dataset.item = item.id;
    return cell;
  }

  get buttons() {
    return [...this.list.querySelectorAll("li:not([hidden]) button")];
  }

  /** Mark the first ones as the set, and the others as outside. */
  show(size) {
    this.size = size;
    const visible = this.expanded ? Math.max(FIRST, size + BEHIND) : FIRST;
    [...this.list.children].forEach((cell, place) => {
      const inside = place < size;
      const { right } = this.candidates[place];
      cell.hidden = place >= visible;
      cell.className = inside ? "in" : place === size ? "out first" : "out";
      cell.querySelector(".place").textContent = inside ? "" : "outside the set";
      const truth = right === null || !(inside || right) ? [] : verdict(right, inside);
      cell.querySelector(".truth").replaceChildren(...truth);
    });
    byId("further").hidden = size <= visible;
    byId("further").textContent = `${size - FIRST} more in the set`;
  }

  /** Move the focus to a neighbour of the focused item. */
  step(by) {
    const { buttons } = this;
    const place = buttons.indexOf(document.activeElement) + by;
    buttons[Math.min(buttons.length - 1, Math.max(0, place))]?.focus();
  }

  compare(place) {
    const { id, label, distance, probability, right } = this.candidates[place];
    const image = byId("compare-item");
    Object.assign(image, { hidden: true, alt: id });
    this.pictures.show(image, id);
    const query = document.querySelector("#query-pictures img");
    byId("compare-query").hidden = query === null;
    if (query !== null) load(byId("compare-query").firstElementChild, query.src);
    const inside = place < this.size;
    byId("compare-words").replaceChildren(
      ...(right === null ? [] : verdict(right, inside)),
      make("b", {}, label === null ? id : `${labelName(label)}, ${percent(probability)}`),
      make("br"),
      make("span", { className: "soft" }, [
        `${inside ? "In the set" : "Outside the set"}, rank ${place + 1}, `,
        `distance ${distance.toPrecision(3)}${label === null ? "" : `, ${id}`}`,
      ]),
    );
    byId("compare").showModal();
  }
}

function verdict(right, inside) {
  if (!right) return [mark("other"), unseen("not a match: ")];
  return [mark(inside ? "yes" : "ring"), unseen("true match: ")];
}
