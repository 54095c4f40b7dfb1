// The explorer: what is asked, what came of it, and how it is shown.

import { Api } from "./api.js";
import { curve, histogram } from "./charts.js";
import { byId } from "./elements.js";
import { Feedback } from "./feedback.js";
import { Items } from "./items.js";
import { QueryField } from "./query.js";
import { askToken } from "./token.js";
import { chance, count, level, rank, share, trouble, unlike, wordsOf } from "./words.js";

const DELTAS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5];
const MOST = 0.5; // alphas above are of little use, and are shown where only they are certified
const REST = 250; // milliseconds without another change before the server is asked
const POLL = 10_000;
/** Guarantees that the server may offer: their name, what they mean, and what they request. */
const KINDS = {
  "": {
    name: "at all alphas",
    hint: "A query without a match counts as a miss, and every set holds an item.",
    options: () => ({}),
  },
  beta: {
    name: "no set if a match is unlikely",
    hint: "Queries that seem to have no match in the gallery get an empty set.",
    options: () => ({ beta: Number(byId("beta").value) }),
  },
  balance: {
    name: "equal risk",
    hint: "Alpha holds in each quarter of the uncertainty by itself; sets are larger.",
    options: () => ({ balance: "uncertainty" }),
  },
};
const EMPTY = "Probably no match in the gallery";

const api = new Api(askToken);
const items = new Items(byId("items"), api);
const query = new QueryField(api, ask, refuse);
const feedback = new Feedback(api, ask);

let server = null; // what GET /guarantees says
let shown = null; // what POST /explore answered last
let asking = null; // AbortController of the request under way
let waiting = 0;

const alpha = () => Number(byId("alpha").value);
const delta = () => DELTAS[Number(byId("delta").value)];
/** True if the levels are fixed: one set is asked for at a time, from another endpoint. */
const fixed = () => byId("kind").value !== "";
/** The place of alpha among the certified ones, or -1. */
const place = () =>
  shown.fixed ? 0 : shown.alphas.findIndex((each) => Math.abs(each - alpha()) < 1e-9);
const sized = (size) => (size === 0 ? EMPTY : count(size, "item"));

/** The guarantee that is asked for, apart from alpha. */
function terms() {
  const asked = { delta: delta(), ...KINDS[byId("kind").value].options() };
  if (byId("distinct").value) asked.distinct = byId("distinct").value;
  if (byId("group").value) asked.group = byId("group").value;
  if (server.keys.length > 0) asked.key = byId("key").value;
  if (server.encounters) asked.together = true;
  return asked;
}

/** Ask for the sets of the query; of several answers the newest counts. */
async function ask() {
  clearTimeout(waiting);
  if (query.given === null) return;
  asking?.abort();
  const own = (asking = new AbortController());
  byId("set").setAttribute("aria-busy", "true");
  try {
    server ??= await learn();
    const [given, asked] = [query.given, terms()];
    const answer = await (fixed() ? retrieved : explored)(given, asked, own.signal);
    if (own !== asking) return;
    if (answer.version !== server.version) server = await learn();
    if (own === asking) show({ ...answer, given, asked });
  } catch (error) {
    if (error.name !== "AbortError" && own === asking) refuse(error);
  } finally {
    if (own === asking) byId("set").setAttribute("aria-busy", "false");
  }
}

/** The sets at all alphas, whose guarantees hold together. */
async function explored(given, asked, signal) {
  const answer = await api.post("explore", given.with(asked), signal);
  return { ...answer, fixed: false, way: { simultaneous: true } };
}

/** The set at one alpha, of a guarantee that does not hold for all alphas together. */
async function retrieved(given, asked, signal) {
  const way = { monitored: false };
  const levels = { ...asked, ...way, alpha: alpha() };
  const answer = await api.post("retrieve", given.with(levels), signal);
  return {
    version: answer.version,
    fixed: true,
    way,
    alphas: [levels.alpha],
    sizes: [answer.size],
    match_probabilities: [answer.match_probability],
    sentences: [answer.sentence],
    uncertainty_rank: answer.uncertainty_rank,
    largest: answer,
  };
}

function show(answer) {
  shown = answer;
  byId("error").hidden = byId("empty").hidden = true;
  byId("answer").hidden = byId("charts").hidden = false;
  byId("curve-section").hidden = byId("simultaneous").hidden = shown.fixed;
  byId("fixed").hidden = !shown.fixed;
  const [least] = shown.alphas;
  const most = shown.fixed ? MOST : Math.max(MOST, Math.min(0.99, least + 0.1));
  byId("alpha").max = most.toFixed(2);
  items.put(shown.largest, shown.given.label);
  byId("rank").textContent = rank(shown.uncertainty_rank);
  byId("unlike").textContent = unlike(shown.largest.unlike);
  byId("label-not-calibrated").hidden =
    shown.largest.label_calibrated !== false || shown.largest.size === 0;
  feedback.ready(shown);
  choose();
  drawHistogram();
  byId("status").textContent = `Answered: ${byId("size").textContent}`;
}

/** Show the set at the chosen alpha, of what was answered already. */
function choose() {
  const size = shown === null || place() < 0 ? null : shown.sizes[place()];
  sayLevels(size);
  if (shown === null) return;
  items.show(size ?? 0);
  feedback.choose(size === null ? null : shown.alphas[place()], size);
  byId("size").textContent = size === null ? "Not certified" : sized(size);
  byId("chance").textContent = likely(size);
  byId("matches").textContent = matches(size);
  byId("sentence").textContent =
    size === null
      ? `Nothing certifies alpha = ${level(alpha())} at delta = ${delta()}: of the alphas here, ` +
        `the smallest possible is ${level(shown.alphas[0])}.`
      : shown.sentences[place()];
  byId("sentence").classList.toggle("refused", size === null);
  if (shown.fixed) return;
  byId("simultaneous").hidden = size === null;
  drawCurve(size);
}

function likely(size) {
  if (size === null) return "";
  if (size === 0) return "The set is empty. The guarantee says how often that is wrong.";
  return `Holds a true match with probability ${chance(shown.match_probabilities[place()])}.`;
}

function sayLevels(size) {
  byId("alpha-value").textContent = level(alpha());
  const [kind, beta] = [byId("kind").value, Number(byId("beta").value)];
  byId("alpha-hint").textContent =
    `Share of queries ${kind === "beta" ? "with a match " : ""}whose set may hold no true match: ` +
    `${share(alpha())}.`;
  byId("kind-hint").textContent = KINDS[kind].hint;
  byId("beta-field").hidden = kind !== "beta";
  byId("beta-value").textContent = level(beta);
  byId("beta-hint").textContent =
    `Share of queries without a match in the gallery that may get a set: ${share(beta)}.`;
  const words = size === null ? "" : `, ${sized(size)}`;
  byId("alpha").setAttribute("aria-valuetext", level(alpha()) + words);
  byId("delta-value").textContent = String(delta());
  byId("delta").setAttribute("aria-valuetext", String(delta()));
  byId("delta-hint").textContent =
    `Chance that the guarantee fails, because the calibration queries misled: ${share(delta())}.`;
}

function matches(size) {
  const { label } = shown.given;
  if (label === null || !size || shown.largest.labels === null) return "";
  const found = shown.largest.labels.slice(0, size).filter((own) => String(own) === String(label));
  if (found.length === 0) return `No true match: no item has the query's label, ${label}.`;
  return `${found.length} of ${count(size, "item")} with the query's label, ${label}.`;
}

function drawCurve(size) {
  const mean = size === null ? null : shown.mean_sizes[place()];
  const words =
    size === null
      ? `At alpha ${level(alpha())} nothing is certified.`
      : `At alpha ${level(alpha())}: ${count(size, "item")}; the mean of calibration queries is ` +
        `${mean.toFixed(2)}.`;
  byId("curve-words").textContent = words;
  const { alphas, sizes, mean_sizes: means } = shown;
  const most = Number(byId("alpha").max);
  byId("uncertified").hidden = alphas[0] < 0.011;
  curve(byId("curve"), { alphas, sizes, means, alpha: alpha(), size, mean, most, words });
}

function drawHistogram() {
  histogram(
    byId("histogram"),
    server.histogram,
    shown.largest.uncertainty,
    `Histogram of the uncertainty of calibration queries. ${rank(shown.uncertainty_rank)}`,
  );
}

/** Say why there is no answer; what was shown before answers something else. */
function refuse(error) {
  asking?.abort();
  asking = shown = null;
  byId("answer").hidden = byId("charts").hidden = true;
  byId("status").textContent = "";
  byId("empty").textContent = "There is no set to show.";
  byId("empty").hidden = false;
  byId("error").hidden = false;
  byId("error-words").textContent = wordsOf(error);
  byId("again").hidden = !(error.retryAfter || error.status === 401);
  byId("set").setAttribute("aria-busy", "false");
}

/** Ask what the server can certify, and offer that. */
async function learn() {
  const known = await api.json("guarantees");
  items.forget(known.version);
  query.take(known.takes, known.encounters);
  const queries = count(known.n_calibration, "calibration query", "calibration queries");
  byId("gallery").textContent =
    `· ${count(known.n_items, "item")} · calibrated on ${queries}`;
  byId("labels").textContent = known.labels?.uncalibrated ? `${known.labels.sentence}.` : "";
  const kind = byId("kind").value;
  const kinds = Object.keys(KINDS).filter((name) => name === "" || known[name]);
  byId("kind").replaceChildren(...kinds.map((name) => new Option(KINDS[name].name, name)));
  byId("kind").value = kinds.includes(kind) ? kind : "";
  byId("kind-field").hidden = kinds.length === 1;
  byId("distinct-field").hidden = !known.distinct.includes("label");
  offer("group", known.groups, 1);
  offer("key", known.keys, 0);
  byId("key-label").textContent = known.key;
  return known;
}

/** Offer names in a menu behind its first `fixed` options; what was chosen stays chosen. */
function offer(id, names, fixed) {
  const [menu, before] = [byId(id), byId(id).value];
  byId(`${id}-field`).hidden = names.length === 0;
  menu.length = fixed;
  for (const name of names) menu.add(new Option(name, name));
  menu.value = names.includes(before) ? before : (menu.options[0]?.value ?? "");
}

async function watch() {
  try {
    const response = await fetch("ready");
    const ready = await response.json();
    if (response.ok) {
      banner(trouble(ready));
      byId("source").textContent = `${ready.source}, version ${ready.version}`;
      if (server !== null && server.version !== ready.version) {
        server = await learn();
        ask();
      }
    } else {
      banner(ready.message ?? "The server is not ready.");
    }
  } catch {
    banner("The server does not answer. What is shown may be out of date.");
  }
  setTimeout(watch, POLL);
}

function banner(words) {
  if (byId("banner").textContent !== words) byId("banner").textContent = words;
  byId("banner").hidden = words === "";
}

async function start() {
  try {
    server ??= await learn();
    byId("error").hidden = true;
    ask();
  } catch (error) {
    refuse(error);
  }
}

function soon() {
  if (fixed()) sayLevels(null);
  else choose();
  clearTimeout(waiting);
  waiting = setTimeout(ask, REST);
}

byId("alpha").addEventListener("input", () => (fixed() ? soon() : choose()));
byId("delta").addEventListener("input", soon);
byId("beta").addEventListener("input", soon);
byId("kind").addEventListener("change", () => {
  sayLevels(null);
  ask();
});
byId("distinct").addEventListener("change", ask);
byId("group").addEventListener("change", ask);
byId("key").addEventListener("change", ask);
byId("again").addEventListener("click", start);
addEventListener("resize", () => {
  if (shown === null) return;
  choose();
  drawHistogram();
});
sayLevels(null);
start();
watch();
