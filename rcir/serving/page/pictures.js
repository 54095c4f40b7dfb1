// Pictures of gallery items, fetched by script: an image element could not send the token.

const TRIES = 2; // pictures that are missing before the server is taken to have none
const SMALL = 64; // pixels; smaller pictures are shown as they are, not blurred

/** Show a picture once it is loaded, without blurring small ones. */
export function load(image, url) {
  image.onload = () => {
    image.classList.toggle("small", image.naturalWidth < SMALL);
    image.hidden = false;
  };
  image.onerror = () => {
    image.hidden = true;
  };
  image.src = url;
}

export class Pictures {
  /** `none()` is called if there are none. */
  constructor(api, none) {
    Object.assign(this, { api, none, urls: new Map() });
    this.watch = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries) {
          if (!isIntersecting) continue;
          this.watch.unobserve(target);
          this.show(target.querySelector("img"), target.dataset.item);
        }
      },
      { rootMargin: "300px" },
    );
  }

  /** Forget those of another version; `expected` is false if there are none. */
  async reset(version, expected) {
    const before = [...this.urls.values()];
    Object.assign(this, { version, expected, urls: new Map(), missing: 0, found: 0 });
    if (!expected) this.none();
    for (const url of await Promise.all(before)) URL.revokeObjectURL(url);
  }

  /** Show the picture of an item when the element around its image comes into view. */
  later(element, item) {
    element.dataset.item = item;
    this.watch.observe(element);
  }

  async show(image, item) {
    if (!this.expected) return;
    if (!this.urls.has(item)) this.urls.set(item, this.fetch(item));
    const url = await this.urls.get(item);
    if (url !== null) load(image, url);
  }

  async fetch(item) {
    const version = encodeURIComponent(this.version);
    try {
      const path = `items/${encodeURIComponent(item)}/image?version=${version}`;
      const response = await this.api.send(path);
      if (response.ok) {
        this.found += 1;
        return URL.createObjectURL(await response.blob());
      }
      this.missing += 1;
      if (this.found === 0 && this.missing === TRIES) {
        this.expected = false;
        this.none();
      }
    } catch {
      this.urls.delete(item); // the server is away: it may come back
    }
    return null;
  }
}
