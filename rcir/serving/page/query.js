// The query: a picture or a vector, given or taken at random.

import { byId } from "./elements.js";
import { Refused } from "./api.js";

/** A picture, with its label where that is known. */
class Picture {
  constructor(file, label) {
    this.file = file;
    this.label = label;
  }

  /** The body of a request with further fields. */
  with(fields) {
    const form = new FormData();
    form.append("picture", this.file, "query");
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
    Object.assign(this, { api, changed, refuse, given: null, takes: null });
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

  /** Offer what the server takes: "picture" or "vector". */
  take(kind) {
    this.takes = kind;
    byId("picture-query").hidden = kind !== "picture";
    byId("vector-query").hidden = kind !== "vector";
  }

  files(files) {
    if (files.length === 0) return;
    if (this.takes === "vector") this.refuse(wrong("This retriever takes vectors, not pictures."));
    else if (files.length > 1) this.refuse(wrong("Give one picture at a time."));
    else this.picture(files[0], null);
  }

  picture(file, label) {
    const preview = byId("preview");
    URL.revokeObjectURL(preview.src);
    preview.onload = () => {
      preview.classList.toggle("small", preview.naturalWidth < 64);
      preview.hidden = false;
    };
    preview.onerror = () => {
      preview.hidden = true;
    };
    preview.alt = "The query";
    preview.src = URL.createObjectURL(file);
    this.set(new Picture(file, label));
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
        this.picture(new Blob([bytes], { type: "image/png" }), found.label);
      } else {
        const { vector, uncertainty, label } = found;
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
