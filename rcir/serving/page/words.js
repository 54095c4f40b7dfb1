// Numbers and errors in words.

/** A level as it is asked for. */
export const level = (value) => (value < 0.01 ? String(value) : value.toFixed(2));

/** "10 in 100", for shares that people weigh. */
export function share(value) {
  const of = value < 0.01 ? 1000 : 100;
  return `${Math.round(value * of)} in ${of}`;
}

/** A probability of a match, never as 0 or 1. */
export function chance(value) {
  if (value > 0.995) return "> 0.99";
  return value < 0.005 ? "< 0.01" : value.toFixed(2);
}

export const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

export function rank(value) {
  const percent = Math.round(value * 100);
  if (percent === 0) return "Less uncertain than nearly all calibration queries.";
  if (percent === 100) return "More uncertain than nearly all calibration queries.";
  return `More uncertain than ${percent} % of the calibration queries.`;
}

/** A conformal p-value of the query, or null where there is none. */
export function unlike(value) {
  if (value === null) return "";
  const number = value < 0.01 ? "fewer than 1 in 100" : `${Math.round(value * 100)} in 100`;
  return (
    `Of the calibration queries with a match, ${number} seem at least as unlikely to have one as ` +
    `this query (p = ${value.toPrecision(2)}). Nothing is guaranteed of this.`
  );
}

/** Rounded up: what is said to be possible has to be. */
export const atLeast = (alpha) => (Math.ceil(alpha * 10000) / 10000).toString();

const KINDS = {
  away: () => "The server does not answer. Check that it is running and can be reached.",
  unauthorized: () => "This server wants a token, and none was given.",
  "risk-unattainable": (error) =>
    `This cannot be certified${smallest(error)} Why: ${sentence(error.message)}`,
  "stale-calibration": (error) =>
    `The retriever changed since its calibration, so nothing is certified: ${sentence(error.message)}`,
  "too-large": (error) => `That is too large: ${sentence(error.message)}`,
  "invalid-image": (error) => `This file is no picture that can be read: ${sentence(error.message)}`,
  busy: () => "The server has more queries than it takes at a time. Ask again in a moment.",
  stopping: () => "The server is stopping. Ask again in a moment.",
};

function smallest(error) {
  if (error.minimumAlpha === null) return ".";
  return `: the smallest alpha possible is ${atLeast(error.minimumAlpha)}.`;
}

const sentence = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);

export function wordsOf(error) {
  const known = KINDS[error.kind];
  if (known) return known(error);
  if (error.status >= 500) return `The server failed: ${sentence(error.message)}`;
  return capital(sentence(error.message || "something went wrong"));
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** What the banner says of the server, or "" if all is well. */
export function trouble(ready) {
  const said = [];
  if (ready.alarm) {
    said.push(
      "Alarm: by the feedback, more sets lack a true match than the guarantee allows. Do not rely " +
        "on it until the retriever is calibrated again.",
    );
  }
  if (ready.drift_alarm) {
    said.push(
      "Queries have changed since the calibration. This does not show that more sets lack a true " +
        "match: check that with labelled queries.",
    );
  }
  if (ready.trouble) {
    said.push(`A new version of the retriever is not taken. ${sentence(ready.trouble)}`);
  }
  return said.join(" ");
}
