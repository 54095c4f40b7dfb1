// The explorer: what is requested, what the server answers, and how it is shown.

import { Api } from "./api.js";
import { curve, histogram } from "./charts.js";
import { byId, mark } from "./elements.js";
import { Feedback } from "./feedback.js";
import { FIRST, Items } from "./items.js";
import { Pictures } from "./pictures.js";
import { QueryField } from "./query.js";
import { askToken } from "./token.js";
import * as words from "./words.js";

const DELTAS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5];
const MOST = 0.5; // alphas above are of little use, and are shown where only they are certified
const UNLIKE = 0.05; // p-values up to it are marked
const REST = 250; // milliseconds without another change before the server is asked
const POLL = 10_000;
const SLIDERS = ["alpha", "delta", "beta"];
const SWITCHES = ["balance", "empty"]; // of guarantees that exclude each other
const EMPTY = "Probably no match";
const ITSELF = 1e-3; // of the farthest distance; an item that is nearer is the query itself

const api = new Api(askToken);
const pictures = new Pictures(api, () => {
  document.body.classList.add("plain");
  byId("no-pictures").hidden = false;
});
const items = new Items(byId("items"), pictures);
const field = new QueryField(api, pictures, ask, refuse);
const feedback = new Feedback(api, ask);

let server = null; // what GET /guarantees says
let answer = null; // the newest one, with its query and terms
let request = null; // AbortController of the request in progress
let waiting = 0;

const value = (id) => Number(byId(id).value);
const delta = () => DELTAS[value("delta")];
const on = (id) => !byId(`${id}-field`).hidden && byId(id).checked;
/** True if levels are fixed: one set is requested at a time, from another route. */
const fixed = () => SWITCHES.some(on);
/** The place of alpha among the certified ones, or -1. */
const place = () =>
  answer.fixed ? 0 : answer.alphas.findIndex((each) => Math.abs(each - value("alpha")) < 1e-9);

function sized(size) {
  if (size === 0) return EMPTY;
  return words.count(size, document.body.classList.contains("plain") ? "item" : "image");
}

/** The requested guarantee, apart from alpha. */
function terms() {
  const chosen = { delta: delta() };
  if (on("balance")) chosen.balance = "uncertainty";
  if (on("empty")) chosen.beta = value("beta");
  if (byId("distinct").value) chosen.distinct = byId("distinct").value;
  if (byId("group").value) chosen.group = byId("group").value;
  if (server.keys.length > 0) chosen.key = byId("key").value;
  if (server.encounters) chosen.together = true;
  return chosen;
}

/** Request the sets of the query; of several answers the newest counts. */
async function ask() {
  clearTimeout(waiting);
  if (field.query === null) return;
  request?.abort();
  const own = (request = new AbortController());
  byId("set").setAttribute("aria-busy", "true");
  try {
    server ??= await learn();
    const [query, chosen] = [field.query, terms()];
    const body = await (fixed() ? retrieve : explore)(query, chosen, own.signal);
    if (own !== request) return;
    if (body.version !== server.version) server = await learn();
    if (own === request) show({ ...body, query, terms: chosen });
  } catch (error) {
    if (error.name !== "AbortError" && own === request) refuse(error);
  } finally {
    if (own === request) byId("set").setAttribute("aria-busy", "false");
  }
}

/** The sets at all alphas, whose guarantees hold together. */
async function explore(query, chosen, signal) {
  const body = await api.post("explore", query.with({ ...chosen, outside: FIRST }), signal);
  return { ...body, fixed: false, mode: { simultaneous: true } };
}

/** The set at one alpha, of a guarantee that does not hold for all alphas together. */
async function retrieve(query, chosen, signal) {
  const mode = { monitored: false };
  const fields = { ...chosen, ...mode, alpha: value("alpha") };
  const body = await api.post("retrieve", query.with({ ...fields, outside: FIRST }), signal);
  return {
    version: body.version,
    fixed: true,
    mode,
    alphas: [fields.alpha],
    sizes: [body.size],
    match_probabilities: [body.match_probability],
    sentences: [body.sentence],
    uncertainty_rank: body.uncertainty_rank,
    largest: body,
  };
}

function show(body) {
  const first = answer === null;
  answer = body;
  byId("error").hidden = true;
  byId("background").hidden = byId("unlike").hidden = false;
  byId("curve-section").hidden = answer.fixed;
  byId("fixed").hidden = !answer.fixed;
  const [least] = answer.alphas;
  const most = answer.fixed ? MOST : Math.max(MOST, Math.min(0.99, least + 0.1));
  byId("alpha").max = most.toFixed(2);
  if (first && place() < 0 && value("alpha") < least) byId("alpha").value = least;
  const { label } = answer.query;
  byId("truth").hidden = label === null;
  if (label !== null) byId("truth").textContent = `True label: ${words.readable(label)}`;
  items.put(answer.largest, label);
  const distances = items.candidates.map((item) => item.distance);
  byId("itself").hidden = !(Math.min(...distances) < ITSELF * Math.max(...distances));
  showUnlike(answer.largest.unlike);
  byId("rank").textContent = words.rank(answer.uncertainty_rank);
  choose();
}

/** The query's place among the calibration queries with a match. */
function showUnlike(p) {
  const seems = p <= UNLIKE;
  byId("verdict").replaceChildren(
    ...(seems ? [mark("odd")] : []),
    document.createElement("b"),
    ` ${words.unlike(p, seems)}`,
  );
  byId("verdict").querySelector("b").textContent = seems ? "It seems so." : "Not clearly.";
  document.body.classList.toggle("odd", seems);
  byId("gauge").firstElementChild.style.left = `${p * 100}%`;
  byId("gauge").setAttribute("aria-label", words.unlike(p, seems));
  byId("gauge-queries").textContent = words.count(server.n_calibration, "calibration query", "calibration queries");
}

/** Show the set at the chosen alpha, of what was answered already. */
function choose() {
  const size = answer === null || place() < 0 ? null : answer.sizes[place()];
  showLevels(size);
  if (answer === null) return;
  const certified = size !== null;
  items.show(size ?? 0);
  byId("label-not-calibrated").hidden = !size || answer.largest.label_calibrated !== false;
  const alpha = certified ? answer.alphas[place()] : null;
  feedback.choose(answer, server.feedback ? alpha : null, size);
  byId("size").textContent = certified ? sized(size) : "Not certified";
  byId("chance").replaceChildren(...(certified ? chance(size) : []));
  byId("matches").replaceChildren(...(certified ? matches(size) : []));
  byId("promise").textContent = certified
    ? promise(alpha)
    : `Nothing certifies alpha = ${words.level(value("alpha"))} at delta = ${delta()}: of the ` +
      `alphas here, the smallest possible is ${words.level(answer.alphas[0])}.`;
  byId("sentence").textContent = certified ? answer.sentences[place()] : "";
  byId("simultaneous").hidden = answer.fixed || !certified;
  if (byId("background").open) drawCharts();
}

/** The probability that the set holds a true match. */
function chance(size) {
  if (size === 0) return ["The guarantee says how often an empty set is wrong."];
  const sure = document.createElement("b");
  sure.textContent = words.percent(answer.match_probabilities[place()]);
  const right = size === 1 ? "that it is right" : "that one of them is right";
  if (!document.body.classList.contains("odd")) return [sure, ` ${right}`];
  const match = answer.largest.labels === null ? "it has a match" : "its kind is";
  return [mark("odd"), sure, ` ${right}, if ${match} in the gallery`];
}

function promise(alpha) {
  const images = !document.body.classList.contains("plain");
  const short = words.promise(answer.terms, alpha, { images, ...server });
  const mean = answer.fixed ? "" : `; mean size ${answer.mean_sizes[place()].toFixed(2)}`;
  const odd = document.body.classList.contains("odd");
  return `${short}${mean}.${odd ? " Dashed bars: the probability if its kind were in the gallery." : ""}`;
}

/** How many items of the set are true matches, where that is known. */
function matches(size) {
  const inside = items.candidates.slice(0, size);
  if (size === 0 || inside[0].right === null) return [];
  const right = inside.filter((item) => item.right).length;
  if (right === 0) return [mark("no"), "Missed: no item of the set has this label."];
  return [mark("yes"), `${right} of ${sized(size)} with this label.`];
}

function showLevels(size) {
  const alpha = value("alpha");
  byId("alpha-value").textContent = words.level(alpha);
  byId("alpha-hint").textContent = `At most ${words.share(alpha)} missed`;
  const result = size === null ? "" : `: ${sized(size)}`;
  byId("alpha-size").textContent = result;
  byId("alpha").setAttribute("aria-valuetext", words.level(alpha) + result);
  byId("delta-value").textContent = String(delta());
  byId("delta").setAttribute("aria-valuetext", String(delta()));
  byId("delta-hint").textContent = `Chance that it fails: ${delta() * 100}%`;
  byId("beta-field").hidden = !on("empty");
  byId("beta-value").textContent = words.level(value("beta"));
  byId("beta-hint").textContent = `Without a match, ${words.share(value("beta"))} get a set`;
  for (const id of SLIDERS) {
    const { min, max } = byId(id);
    byId(id).style.setProperty("--filled", `${((value(id) - min) / (max - min)) * 100}%`);
  }
}

function drawCharts() {
  if (answer === null) return;
  histogram(
    byId("histogram"),
    server.histogram,
    answer.largest.uncertainty,
    `Histogram of the uncertainty of calibration queries. ${words.rank(answer.uncertainty_rank)}`,
  );
  if (answer.fixed) return;
  const [alpha, size] = [value("alpha"), place() < 0 ? null : answer.sizes[place()]];
  const mean = size === null ? null : answer.mean_sizes[place()];
  const text =
    size === null
      ? `At alpha ${words.level(alpha)} nothing is certified.`
      : `At alpha ${words.level(alpha)}: ${words.count(size, "item")}; the mean of calibration ` +
        `queries is ${mean.toFixed(2)}.`;
  byId("curve-words").textContent = text;
  const { alphas, sizes, mean_sizes: means } = answer;
  byId("uncertified").hidden = alphas[0] < 0.011;
  const most = Number(byId("alpha").max);
  curve(byId("curve"), { alphas, sizes, means, alpha, size, mean, most, words: text });
}

/** Say why there is no answer; what was shown before belongs to another query. */
function refuse(error) {
  request?.abort();
  request = answer = null;
  items.put({ ids: [], probabilities: [], distances: [] }, null);
  items.show(0);
  byId("size").textContent = "No set";
  byId("chance").textContent = byId("promise").textContent = "";
  byId("matches").textContent = byId("alpha-size").textContent = "";
  for (const id of ["unlike", "background", "feedback", "label-not-calibrated", "itself", "truth"]) {
    byId(id).hidden = true;
  }
  byId("error").hidden = false;
  byId("error-words").textContent = words.wordsOf(error);
  byId("again").hidden = !(error.retryAfter || error.status === 401);
  byId("set").setAttribute("aria-busy", "false");
}

/** Learn what the server can certify, and offer that. */
async function learn() {
  const offers = await api.json("guarantees");
  document.body.classList.remove("plain");
  byId("no-pictures").hidden = true;
  pictures.reset(offers.version, offers.pictures);
  field.offer(offers);
  const queries = words.count(offers.n_calibration, "calibration query", "calibration queries");
  byId("gallery").textContent = `${words.count(offers.n_items, "item")}, ${queries}`;
  byId("labels").textContent = offers.labels?.uncalibrated ? `${offers.labels.sentence}.` : "";
  byId("balance-field").hidden = !offers.balance;
  byId("empty-field").hidden = !offers.beta;
  byId("distinct-field").hidden = !offers.distinct.includes("label");
  offer("group", offers.groups, 1);
  offer("key", offers.keys, 0);
  byId("key-label").textContent = offers.key;
  return offers;
}

/** Offer names in a menu behind its first `kept` options; what was chosen stays chosen. */
function offer(id, names, kept) {
  const [menu, before] = [byId(id), byId(id).value];
  byId(`${id}-field`).hidden = names.length === 0;
  menu.length = kept;
  for (const name of names) menu.add(new Option(name, name));
  menu.value = names.includes(before) ? before : (menu.options[0]?.value ?? "");
}

async function watch() {
  try {
    const response = await fetch("ready");
    const ready = await response.json();
    if (response.ok) {
      banner(words.trouble(ready));
      byId("source").textContent = `${ready.source}, version ${ready.version.slice(0, 12)}`;
      byId("source").title = ready.version;
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

function banner(text) {
  if (byId("banner").textContent !== text) byId("banner").textContent = text;
  byId("banner").hidden = text === "";
}

/** Begin with a random query, or repeat the present one. */
async function start() {
  try {
    server ??= await learn();
    byId("error").hidden = true;
    if (field.query === null) await field.sample();
    else ask();
  } catch (error) {
    refuse(error);
  }
}

function soon() {
  if (fixed()) showLevels(null);
  else choose();
  clearTimeout(waiting);
  waiting = setTimeout(ask, REST);
}

const changeAlpha = () => (fixed() ? soon() : choose());
const KEYS = {
  r: () => byId("random").click(),
  o: () => byId("open").hidden || byId("open").click(),
  a: () => byId("add").hidden || byId("add").click(),
  "[": () => (byId("alpha").stepDown(), changeAlpha()),
  "]": () => (byId("alpha").stepUp(), changeAlpha()),
  ArrowLeft: (event) => items.list.contains(event.target) && items.step(-1),
  ArrowRight: (event) => items.list.contains(event.target) && items.step(1),
};

addEventListener("keydown", (event) => {
  const typing = event.target.matches("textarea, select, [type=password]");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (document.querySelector("dialog[open]") === null) KEYS[event.key]?.(event);
});
byId("alpha").addEventListener("input", changeAlpha);
byId("delta").addEventListener("input", soon);
byId("beta").addEventListener("input", soon);
for (const id of SWITCHES) {
  byId(id).addEventListener("change", () => {
    for (const other of SWITCHES) byId(other).checked &&= other === id;
    showLevels(null);
    ask();
  });
}
for (const id of ["distinct", "group", "key"]) byId(id).addEventListener("change", ask);
byId("guarantee").addEventListener("submit", (event) => event.preventDefault());
byId("again").addEventListener("click", start);
byId("background").addEventListener("toggle", drawCharts);
addEventListener("resize", () => byId("background").open && drawCharts());

const narrow = matchMedia("(max-width: 47.5rem)");
const fold = () => {
  byId("more").open = !narrow.matches;
};
narrow.addEventListener("change", fold);
fold();
showLevels(null);
start();
watch();
