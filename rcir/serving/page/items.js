// The items of a set, with their pictures where there are any.

import { make } from "./elements.js";
import { chance } from "./words.js";

const TRIES = 2; // pictures that are missing before the items are taken to have none
const SMALL = 64; // pixels; smaller pictures are shown as they are, not blurred

/** Pictures of items, fetched when they come into view: also with a token, which img has not. */
class Pictures {
  /** `none()` is called if there are none. */
  constructor(api, none) {
    this.api = api;
    this.none = none;
    this.forget();
    this.watch = new IntersectionObserver(
      (seen) => {
        for (const { target, isIntersecting } of seen) {
          if (!isIntersecting) continue;
          this.watch.unobserve(target);
          this.fill(target);
        }
      },
      { rootMargin: "200px" },
    );
  }

  /** Those of another version may be others. */
  forget(version = null) {
    this.version = version;
    for (const url of this.urls ?? []) URL.revokeObjectURL(url);
    this.urls = [];
    this.known = new Map();
    this.missing = 0;
    this.last = Promise.resolve();
  }

  async fill(picture) {
    const url = await this.url(picture.dataset.item);
    if (url === null) return;
    const image = picture.querySelector("img");
    image.onload = () => {
      image.classList.toggle("small", image.naturalWidth < SMALL);
      image.hidden = false;
    };
    image.src = url;
  }

  url(item) {
    if (!this.known.has(item)) {
      // One after the other, until there is one: a gallery without pictures is not asked for all.
      const found = this.urls.length ? this.fetched(item) : this.last.then(() => this.fetched(item));
      this.last = found;
      this.known.set(item, found);
    }
    return this.known.get(item);
  }

  async fetched(item) {
    if (!this.urls.length && this.missing >= TRIES) return null;
    try {
      const place = `items/${encodeURIComponent(item)}/image`;
      const response = await this.api.send(`${place}?version=${encodeURIComponent(this.version)}`);
      if (response.ok) {
        this.urls.push(URL.createObjectURL(await response.blob()));
        return this.urls.at(-1);
      }
      this.missing += 1;
      if (!this.urls.length && this.missing >= TRIES) this.none();
    } catch {
      this.known.delete(item); // the server is away: it may come back
    }
    return null;
  }
}

/** The grid of items. */
export class Items {
  constructor(list, api) {
    this.list = list;
    this.pictures = new Pictures(api, () => list.classList.add("plain"));
  }

  /** Put all items of the largest set there; `label` is the query's, or null. */
  put(answer, label) {
    this.pictures.watch.disconnect();
    const distances = answer.distances.map((distance) => distance.toPrecision(3));
    const items = answer.ids.map((id, place) => {
      const own = answer.labels?.[place] ?? null;
      const image = make("img", { alt: "", hidden: true });
      const picture = make("div", { className: "picture" }, [make("span", {}, id), image]);
      picture.dataset.item = id;
      this.pictures.watch.observe(picture);
      const match = label === null ? null : String(own) === String(label);
      return make("li", { hidden: true }, [
        picture,
        make("p", { className: "rank" }, `#${place + 1}`),
        own === null ? null : make("p", { className: "label" }, `label ${own}`),
        make("p", { className: "quiet id", title: id }, id),
        make("p", { className: "chance" }, `probability ${chance(answer.probabilities[place])}`),
        make("p", { className: "quiet" }, `distance ${distances[place]}`),
        match === null ? null : make("p", { className: match ? "yes" : "no" }, truth(match)),
      ]);
    });
    this.list.replaceChildren(...items);
  }

  /** Of another version, look for pictures anew. */
  forget(version) {
    this.pictures.forget(version);
    this.list.classList.remove("plain");
  }

  /** Show the first ones only. */
  show(size) {
    [...this.list.children].forEach((item, place) => {
      item.hidden = place >= size;
    });
    const { scrollHeight, clientHeight } = this.list;
    this.list.tabIndex = scrollHeight > clientHeight ? 0 : -1; // what scrolls is reached by keys
  }
}

const truth = (match) => (match ? "✓ true match" : "✗ no match");
