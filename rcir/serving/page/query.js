// The query: pictures, a gallery item or a vector, opened or drawn at random.

import { byId, make } from "./elements.js";
import { Refused } from "./api.js";
import { load } from "./pictures.js";

/** Pictures of one query. */
class PictureQuery {
  constructor(files, label = null) {
    Object.assign(this, { files, label });
  }

  /** The body of a request with further fields. */
  with(fields) {
    const form = new FormData();
    for (const file of this.files) form.append("picture", file, "query");
    for (const [name, value] of Object.entries(fields)) form.append(name, String(value));
    return form;
  }
}

/** A vector, or a gallery item by its id. */
class JsonQuery {
  constructor(fields, label = null) {
    Object.assign(this, { fields, label });
  }

  with(fields) {
    return { ...this.fields, ...fields };
  }
}

const wrong = (message) => new Refused(400, { error: "query", message });

/** The fields of a vector as it is typed. */
function parse(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw wrong("This is not JSON: enter a list of numbers, such as [0.12, -0.56].");
  }
  const fields = Array.isArray(value) ? { vector: value } : value;
  if (!Array.isArray(fields?.vector)) {
    throw wrong('There is no vector: enter a list of numbers, or {"vector": [0.12, -0.56]}.');
  }
  const { vector, uncertainty } = fields;
  return typeof uncertainty === "number" ? { vector, uncertainty } : { vector };
}

export class QueryField {
  /** `changed()` is called with every new query, `refuse(error)` where there is none. */
  constructor(api, pictures, changed, refuse) {
    Object.assign(this, { api, pictures, changed, refuse, query: null, adding: false });
    byId("random").addEventListener("click", () => this.sample());
    byId("open").addEventListener("click", () => this.choose(false));
    byId("add").addEventListener("click", () => this.choose(true));
    byId("vector-query").addEventListener("submit", (event) => {
      event.preventDefault();
      this.vector(byId("vector").value);
    });
    byId("file").addEventListener("change", (event) => {
      this.files([...event.target.files], this.adding);
      event.target.value = ""; // the same file may be chosen again
    });
    addEventListener("paste", (event) => this.files([...event.clipboardData.files], false));
    for (const name of ["dragenter", "dragover"]) {
      addEventListener(name, (event) => {
        event.preventDefault();
        document.body.classList.add("over");
      });
    }
    addEventListener("dragleave", (event) => {
      if (event.relatedTarget === null) document.body.classList.remove("over");
    });
    addEventListener("drop", (event) => {
      event.preventDefault();
      document.body.classList.remove("over");
      this.files([...event.dataTransfer.files], false);
    });
  }

  /** Offer what the server takes: pictures or vectors, or several pictures of one query. */
  offer({ takes, takes_vectors: vectors, encounters }) {
    const images = takes === "picture";
    const several = images && encounters;
    Object.assign(this, { images, several });
    byId("file").multiple = several;
    for (const id of ["open", "drop-hint", "key-open"]) byId(id).hidden = !images;
    for (const id of ["add", "key-add"]) byId(id).hidden = !several;
    byId("vector-input").hidden = !vectors;
    byId("drop-hint").textContent = "Drop or paste a picture anywhere.";
    if (several) byId("drop-hint").textContent += " Open all pictures of an encounter at once: one that is added because of its set makes it an example.";
  }

  /** Open the dialog of the browser for files. */
  choose(adding) {
    this.adding = adding;
    byId("file").click();
  }

  files(files, adding) {
    if (files.length === 0) return;
    const before = adding && this.query instanceof PictureQuery ? this.query.files : [];
    const all = [...before, ...files];
    if (!this.images) this.refuse(wrong("This retriever takes vectors, not pictures."));
    else if (all.length > 1 && !this.several) this.refuse(wrong("Open one picture at a time."));
    else this.set(new PictureQuery(all), all.length > 1 ? `${all.length} pictures` : "your picture");
  }

  vector(text) {
    try {
      this.set(new JsonQuery(parse(text)), "your vector");
    } catch (error) {
      this.query = null;
      this.refuse(error);
    }
  }

  async sample() {
    const before = this.query;
    byId("random").disabled = true;
    try {
      const sample = await this.api.json("sample");
      if (this.query !== before) return; // another one was opened meanwhile
      const { picture, item, vector, uncertainty, label, key } = sample;
      if (key !== null) byId("key").value = key;
      if (picture !== undefined) {
        const bytes = Uint8Array.from(atob(picture), (letter) => letter.charCodeAt(0));
        this.set(new PictureQuery([new Blob([bytes], { type: "image/png" })], label), "a test picture");
      } else if (item !== undefined) {
        const itself = sample.left_out === "item" ? "itself" : `its ${sample.left_out}`;
        const note = sample.new ? "" : ": an example, not counted, because it calibrated";
        this.set(new JsonQuery({ item }, label), `a gallery item, searched without ${itself}${note}`);
      } else {
        const fields = uncertainty === null ? { vector } : { vector, uncertainty };
        byId("vector").value = JSON.stringify(uncertainty === null ? vector : fields);
        this.set(new JsonQuery(fields, label), "a calibration query: an example, not counted");
      }
    } catch (error) {
      const none = "This server has no test pictures for a random query. Open a picture.";
      this.refuse(error.kind === "not-found" ? wrong(none) : error);
    } finally {
      byId("random").disabled = false;
    }
  }

  set(query, note) {
    this.query = query;
    byId("query-note").textContent = note;
    this.show(query.files ?? [], query.fields?.item);
    this.changed();
  }

  /** Show the pictures of the query, if it has any. */
  show(files, item) {
    const host = byId("query-pictures");
    for (const image of host.children) URL.revokeObjectURL(image.dataset.url ?? "");
    host.hidden = files.length === 0 && !(item !== undefined && this.pictures.expected);
    host.classList.toggle("several", files.length > 1);
    const images = files.map((file, place) => {
      const image = make("img", { alt: files.length > 1 ? `Query picture ${place + 1}` : "Query" });
      image.dataset.url = URL.createObjectURL(file);
      load(image, image.dataset.url);
      return image;
    });
    if (item !== undefined) {
      images.push(make("img", { alt: "Query", hidden: true }));
      this.pictures.show(images[0], item);
    }
    host.replaceChildren(...images);
  }
}
