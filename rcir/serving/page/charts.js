// The two drawings: a query among the calibration queries, and its sizes over alpha.

import { draw } from "./elements.js";

const HEIGHT = 220;
const MARGIN = { top: 32, right: 14, bottom: 40, left: 46 };

/** Round values from low to high, about `number` of them. */
export function ticks(low, high, number) {
  const rough = (high - low) / number || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough * 0.7);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) {
    found.push(Number((n * step).toPrecision(12)));
  }
  return found;
}

class Chart {
  constructor(host, words, x, y) {
    this.width = Math.max(240, host.clientWidth);
    this.svg = draw("svg", {
      viewBox: `0 0 ${this.width} ${HEIGHT}`,
      role: "img",
      "aria-label": words,
    });
    this.x = scale(x.low, x.high, MARGIN.left, this.width - MARGIN.right);
    this.y = scale(0, y.high, HEIGHT - MARGIN.bottom, MARGIN.top);
    this.axes(x, y);
    host.replaceChildren(this.svg);
  }

  add(name, attributes, content = []) {
    this.svg.append(draw(name, attributes, content));
  }

  axes(x, y) {
    const [bottom, left, right] = [HEIGHT - MARGIN.bottom, MARGIN.left, this.width - MARGIN.right];
    for (const value of ticks(0, y.high, 4)) {
      if (y.whole && !Number.isInteger(value)) continue;
      const at = this.y(value);
      this.add("line", { class: "grid-line", x1: left, x2: right, y1: at, y2: at });
      const words = value.toLocaleString("en");
      this.add("text", { x: left - 7, y: at + 4, "text-anchor": "end" }, words);
    }
    for (const value of ticks(x.low, x.high, this.width < 360 ? 4 : 5)) {
      const at = this.x(value);
      this.add("line", { class: "axis", x1: at, x2: at, y1: bottom, y2: bottom + 4 });
      this.add("text", { x: at, y: bottom + 17, "text-anchor": "middle" }, String(value));
    }
    this.add("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
    const middle = (left + right) / 2;
    this.add("text", { class: "name", x: middle, y: HEIGHT - 5, "text-anchor": "middle" }, x.name);
    this.add("text", { class: "name", x: 4, y: 12 }, y.name);
  }

  marker(at) {
    const [y1, y2] = [MARGIN.top, HEIGHT - MARGIN.bottom];
    this.add("line", { class: "marker", x1: at, x2: at, y1, y2 });
  }
}

function scale(low, high, from, to) {
  const unit = (to - from) / (high - low || 1);
  return (value) => from + (value - low) * unit;
}

/** The uncertainty of a query beside those of the calibration queries. */
export function histogram(host, { counts, edges }, value, words) {
  const [low, high] = [edges[0], edges.at(-1)];
  const x = { low, high, name: "uncertainty" };
  const y = { high: Math.max(...counts, 1), whole: true, name: "calibration queries" };
  const chart = new Chart(host, words, x, y);
  counts.forEach((count, bin) => {
    const [start, end] = [chart.x(edges[bin]), chart.x(edges[bin + 1])];
    chart.add("rect", {
      class: edges[bin + 1] <= value ? "bar-of-chart below" : "bar-of-chart",
      x: start + 0.5,
      width: Math.max(0.5, end - start - 1),
      y: chart.y(count),
      height: chart.y(0) - chart.y(count),
    });
  });
  const at = chart.x(Math.min(high, Math.max(low, value)));
  chart.marker(at);
  const outside = value > high ? ", beyond the right end" : value < low ? ", beyond the left end" : "";
  const anchor = at > chart.width * 0.6 ? "end" : "start";
  const place = { x: at, y: MARGIN.top - 4, "text-anchor": anchor, class: "of-marker" };
  chart.add("text", place, `this query${outside}`);
}

/** Sizes over alpha of a query, and the mean of those of the calibration queries. */
export function curve(host, { alphas, sizes, means, alpha, size, mean, most, words }) {
  const shown = alphas.filter((each) => each <= most + 1e-9).length;
  const largest = Math.max(...sizes.slice(0, shown), ...means.slice(0, shown), 1);
  const x = { low: 0, high: most, name: "alpha" };
  const chart = new Chart(host, words, x, { high: largest * 1.05, whole: true, name: "items" });
  if (alphas[0] > 0.011) {
    const [start, end] = [chart.x(0), chart.x(alphas[0])];
    const [y, height] = [MARGIN.top, HEIGHT - MARGIN.bottom - MARGIN.top];
    chart.add("rect", { class: "void", x: start, width: end - start, y, height });
  }
  let steps = "";
  for (let place = 0; place < shown; place += 1) {
    const [at, up] = [chart.x(alphas[place]), chart.y(sizes[place])];
    steps += place === 0 ? `M${at} ${up}` : `H${at}V${up}`;
  }
  const line = means.slice(0, shown).map((each, place) => `${chart.x(alphas[place])},${chart.y(each)}`);
  chart.add("path", { class: "of-query", d: steps });
  chart.add("polyline", { class: "of-mean", points: line.join(" ") });
  chart.marker(chart.x(alpha));
  if (size === null) return;
  chart.add("circle", { class: "of-mean", cx: chart.x(alpha), cy: chart.y(mean), r: 4 });
  chart.add("circle", { class: "of-query", cx: chart.x(alpha), cy: chart.y(size), r: 4.5 });
}
