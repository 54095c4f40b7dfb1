// Numbers, guarantees and errors in words.

/** A level as it is requested. */
export const level = (value) => (value < 0.01 ? String(value) : value.toFixed(2));

const base = (value) => (value < 0.01 ? 1000 : 100);

/** "10 of 100", for shares that people weigh. */
export const share = (value) => `${Math.round(value * base(value))} of ${base(value)}`;

/** A probability of a match, never as 0% or 100%. */
export function percent(value) {
  if (value > 0.995) return ">99%";
  return value < 0.005 ? "<1%" : `${Math.round(value * 100)}%`;
}

export const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

export const readable = (label) => String(label).replaceAll("_", " ");

/** The name of a label: a number alone would tell a reader nothing. */
export const labelName = (label) => (/^\d+$/.test(label) ? `label ${label}` : readable(label));

export function rank(value) {
  const rounded = Math.round(value * 100);
  if (rounded === 0) return "Less uncertain than nearly all calibration queries.";
  if (rounded === 100) return "More uncertain than nearly all calibration queries.";
  return `More uncertain than ${rounded}% of the calibration queries.`;
}

/** What a conformal p-value of the query says, after "Not clearly." or "It seems so." */
export function unlike(value, seems) {
  const number = value < 0.01 ? "Fewer than 1" : `${seems ? "Only " : ""}${Math.round(value * 100)}`;
  const like = `${number} of 100 calibration queries with a match are at least as unlike.`;
  return seems ? `${like} The guarantee is about queries like these.` : like;
}

/** The guarantee of the terms of a request, in short. */
export function promise(terms, alpha, { encounters, images, left_out: leftOut }) {
  const [of, missed] = [base(alpha), Math.round(alpha * base(alpha))];
  const queries = encounters ? "encounters" : "queries";
  const group = terms.group ? ` of ${terms.group}` : "";
  const sure = `With probability at least ${Number((1 - terms.delta).toFixed(3))}`;
  const where = terms.balance ? ", in each quarter of the uncertainty" : "";
  const matched = terms.beta ? " with a match" : "";
  const rest = terms.beta
    ? `, and at most ${share(terms.beta)} ${queries} without one get a set`
    : "";
  const right = images ? "a right image" : "a true match";
  const drawn = leftOut ? `${leftOut}s drawn from the gallery` : `${queries}${group}`;
  const estimate = leftOut ? " (for new pictures an estimate)" : "";
  return `${sure}${where}, at least ${of - missed} of ${of} ${drawn}${matched} get a set with ${right}${rest}${estimate}`;
}

/** Rounded up: what is said to be possible has to be. */
export const atLeast = (alpha) => (Math.ceil(alpha * 10000) / 10000).toString();

const KINDS = {
  away: () => "The server does not answer. Check that it is running and can be reached.",
  unauthorized: () => "This server requires a token, and none was given.",
  "risk-unattainable": (error) =>
    `This cannot be certified${smallest(error)} Why: ${sentence(error.message)}`,
  "stale-calibration": (error) =>
    `The retriever changed since its calibration, so nothing is certified: ${sentence(error.message)}`,
  "too-large": (error) => `That is too large: ${sentence(error.message)}`,
  "invalid-image": (error) => `This file is not a picture that can be read: ${sentence(error.message)}`,
  busy: () => "The server has more queries than it takes at a time. Try again in a moment.",
  stopping: () => "The server is stopping. Try again in a moment.",
};

function smallest(error) {
  if (error.minimumAlpha === null) return ".";
  return `: the smallest possible alpha is ${atLeast(error.minimumAlpha)}.`;
}

const sentence = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);

export function wordsOf(error) {
  const words = KINDS[error.kind];
  if (words) return words(error);
  if (error.status >= 500) return `The server failed: ${sentence(error.message)}`;
  return capital(sentence(error.message || "something went wrong"));
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** What the banner says of the server, or "" if all is well. */
export function trouble(ready) {
  const parts = [];
  if (ready.alarm) {
    parts.push(
      "Alarm: by the feedback, more sets lack a true match than the guarantee allows. Do not rely " +
        "on it until the retriever is calibrated again.",
    );
  }
  if (ready.drift_alarm) {
    parts.push(
      "Queries have changed since the calibration. This does not show that more sets lack a true " +
        "match: check that with labelled queries.",
    );
  }
  if (ready.trouble) {
    parts.push(`A new version of the retriever was refused. ${sentence(ready.trouble)}`);
  }
  return parts.join(" ");
}
