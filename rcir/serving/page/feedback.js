// What became known of a set, told to the server.

import { byId } from "./elements.js";
import { wordsOf } from "./words.js";

export class Feedback {
  /** `ask()` is called where what is shown is out of date. */
  constructor(api, ask) {
    Object.assign(this, { api, ask, shown: null, alpha: null, size: 0, said: new Map() });
    byId("match").addEventListener("click", () => this.give(true));
    byId("none").addEventListener("click", () => this.give(false));
  }

  /** What was answered last. */
  ready(shown) {
    this.shown = shown;
  }

  /** The alpha whose set is shown; null if there is none. */
  choose(alpha, size) {
    Object.assign(this, { alpha, size });
    byId("feedback").hidden = alpha === null;
    byId("match").hidden = size === 0;
    const said = this.said.get(this.key);
    this.enable(said === undefined);
    byId("feedback-words").textContent = this.refused ?? said ?? "";
  }

  /** Of one guarantee for one query: what is known of it counts once. */
  get key() {
    const { given, asked, version } = this.shown;
    given.number ??= Math.random();
    return JSON.stringify([given.number, version, asked, this.alpha]);
  }

  enable(on) {
    byId("match").disabled = byId("none").disabled = !on;
  }

  async give(match) {
    const { shown, alpha, size, key } = this;
    this.enable(false);
    let words;
    let unkept = false;
    try {
      const fields = shown.given.with({ ...shown.asked, ...shown.way, alpha });
      const answer = await this.api.post("retrieve", fields);
      if (answer.version !== shown.version || answer.size !== size) {
        this.ask();
        throw new Error("The retriever was replaced meanwhile. Look at the set again first.");
      }
      unkept = answer.answer === null;
      await this.api.post("feedback", { answer: answer.answer ?? "none", match });
      words = `Thank you. Noted for alpha ${alpha.toFixed(2)}: ${match ? "a true match" : "none"}.`;
      this.said.set(key, words);
    } catch (error) {
      words = error.status === undefined ? error.message : wordsOf(error);
      if (error.kind === "no-feedback") this.stop();
      else if (unkept) words = "The server could not keep this answer; its log says why.";
    }
    if (this.key !== key) return;
    this.enable(!this.said.has(key));
    byId("feedback-words").textContent = this.refused ?? words;
  }

  stop() {
    this.refused = "This server keeps no feedback.";
    for (const part of ["buttons", "title", "hint"]) byId(`feedback-${part}`).hidden = true;
  }
}
