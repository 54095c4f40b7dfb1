// Feedback: what a user knows of a set, sent to the server.

import { byId } from "./elements.js";
import { wordsOf } from "./words.js";

export class Feedback {
  /** `ask()` is called where what is shown is out of date. */
  constructor(api, ask) {
    Object.assign(this, { api, ask, answer: null, alpha: null, size: 0, words: new Map() });
    byId("match").addEventListener("click", () => this.send(true));
    byId("none").addEventListener("click", () => this.send(false));
  }

  /** Show the buttons for the set of an answer at alpha; null if there is none. */
  choose(answer, alpha, size) {
    Object.assign(this, { answer, alpha, size });
    byId("feedback").hidden = alpha === null;
    if (alpha === null) return;
    byId("match").hidden = size === 0;
    const words = this.words.get(this.key);
    this.enable(words === undefined);
    byId("feedback-words").textContent = words ?? "";
  }

  /** Identifies one guarantee for one query: feedback on it counts once. */
  get key() {
    const { query, terms, version } = this.answer;
    query.number ??= Math.random();
    return JSON.stringify([query.number, version, terms, this.alpha]);
  }

  enable(on) {
    byId("match").disabled = byId("none").disabled = !on;
  }

  async send(match) {
    const { answer, alpha, size, key } = this;
    this.enable(false);
    let words;
    try {
      const fields = answer.query.with({ ...answer.terms, ...answer.mode, alpha });
      const again = await this.api.post("retrieve", fields);
      if (again.version !== answer.version || again.size !== size) {
        this.ask();
        throw new Error("The retriever was replaced meanwhile. Look at the set again first.");
      }
      if (again.answer === null) {
        throw new Error("The server could not store this answer; its log says why.");
      }
      await this.api.post("feedback", { answer: again.answer, match });
      words = `Thank you. Noted for alpha ${alpha.toFixed(2)}: ${match ? "a true match" : "none"}.`;
      this.words.set(key, words);
    } catch (error) {
      words = error.status === undefined ? error.message : wordsOf(error);
    }
    if (this.key !== key) return;
    this.enable(!this.words.has(key));
    byId("feedback-words").textContent = words;
  }
}
