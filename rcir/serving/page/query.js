// The query: a picture or a vector, given or taken at random.

import { byId } from "./elements.js";
import { Refused } from "./api.js";

/** Pictures of one query, with its label where that is known. */
class Pictures {
  constructor(files, label) {
    this.files = files;
    this.label = label;
  }

  /** The body of a request with further fields. */
  with(fields) {
    const form = new FormData();
    for (const file of this.files) form.append("picture", file, "query");
    for (const [name, value] of Object.entries(fields)) form.append(name, String(value));
    return form;
  }
}

class Vector {
  constructor(fields, label) {
    this.fields = fields;
    this.label = label;
  }

  with(fields) {
    return { ...this.fields, ...fields };
  }
}

const wrong = (message) => new Refused(400, { error: "query", message });

/** A vector as it is typed. */
function parsed(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw wrong("This is no JSON: give a list of numbers, such as [0.12, -0.56].");
  }
  const fields = Array.isArray(value) ? { vector: value } : value;
  if (!Array.isArray(fields?.vector)) {
    throw wrong('There is no vector: give a list of numbers, or {"vector": [0.12, -0.56]}.');
  }
  const { vector, uncertainty } = fields;
  return typeof uncertainty === "number" ? { vector, uncertainty } : { vector };
}

export class QueryField {
  /** `changed()` is called with every new query, `refuse(error)` where it is none. */
  constructor(api, changed, refuse) {
    Object.assign(this, { api, changed, refuse, given: null, takes: null, several: false });
    byId("sample").addEventListener("click", () => this.sample());
    byId("vector-query").addEventListener("submit", (event) => {
      event.preventDefault();
      this.vector(byId("vector").value);
    });
    byId("file").addEventListener("change", (event) => {
      this.files(event.target.files);
      event.target.value = ""; // the same file may be chosen again
    });
    addEventListener("paste", (event) => this.files(event.clipboardData.files));
    for (const name of ["dragenter", "dragover"]) {
      addEventListener(name, (event) => {
        event.preventDefault();
        byId("drop").classList.add("over");
      });
    }
    addEventListener("dragleave", (event) => {
      if (event.relatedTarget === null) byId("drop").classList.remove("over");
    });
    addEventListener("drop", (event) => {
      event.preventDefault();
      byId("drop").classList.remove("over");
      this.files(event.dataTransfer.files);
    });
  }

  /** Offer what the server takes: "picture" or "vector", or `several` pictures of one query. */
  take(kind, several) {
    Object.assign(this, { takes: kind, several });
    byId("file").multiple = several;
    byId("picture-query").hidden = kind !== "picture";
    byId("vector-query").hidden = kind !== "vector";
  }

  files(files) {
    if (files.length === 0) return;
    if (this.takes === "vector") this.refuse(wrong("This retriever takes vectors, not pictures."));
    else if (files.length > 1 && !this.several) this.refuse(wrong("Give one picture at a time."));
    else this.pictures([...files], null);
  }

  pictures(files, label) {
    const preview = byId("preview");
    URL.revokeObjectURL(preview.src);
    preview.onload = () => {
      preview.classList.toggle("small", preview.naturalWidth < 64);
      preview.hidden = false;
    };
    preview.onerror = () => {
      preview.hidden = true;
    };
    preview.alt = files.length > 1 ? `The first of ${files.length} pictures` : "The query";
    preview.src = URL.createObjectURL(files[0]);
    this.set(new Pictures(files, label));
  }

  vector(text) {
    try {
      this.set(new Vector(parsed(text), null));
    } catch (error) {
      this.given = null;
      this.refuse(error);
    }
  }

  async sample() {
    const before = this.given;
    byId("sample").disabled = true;
    try {
      const found = await this.api.json("sample");
      if (this.given !== before) return; // another one was given meanwhile
      if (found.picture !== undefined) {
        const bytes = Uint8Array.from(atob(found.picture), (letter) => letter.charCodeAt(0));
        this.pictures([new Blob([bytes], { type: "image/png" })], found.label);
      } else {
        const { vector, uncertainty, label, key } = found;
        if (key !== null) byId("key").value = key;
        const fields = uncertainty === null ? { vector } : { vector, uncertainty };
        byId("vector").value = JSON.stringify(uncertainty === null ? vector : fields);
        this.set(new Vector(fields, label));
      }
    } catch (error) {
      this.refuse(error);
    } finally {
      byId("sample").disabled = false;
    }
  }

  set(given) {
    this.given = given;
    byId("known").hidden = given.label === null;
    byId("known").textContent = `Its label: ${given.label}`;
    this.changed();
  }
}
