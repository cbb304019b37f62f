// The charts, drawn by uPlot (vendor/uplot). Colours come from the style sheet, for both colour schemes.

/* global uPlot */
import { Series } from "./series.js";
import { $, list, make, setText } from "./dom.js";
import { count, duration, short } from "./words.js";

const HEIGHT = 150;
const MOST_POINTS = 400; // of a curve over time; above that, seconds are merged
const SMOOTH = 5; // values in the running mean (the line), as in roq report; the dots are single values

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

class Chart {
  constructor(figure, title, lines, { x = (v) => `v${v}`, y = short, right = null, steps = false, cut = false, over = "version" } = {}) {
    this.figure = figure;
    this.title = title;
    this.lines = lines; // { label, color, dash, right }: right for the second axis
    this.format = { x, y, right };
    this.over = over;
    this.steps = steps; // drawn as steps, without dots
    this.cut = cut; // outliers that would flatten the other values are cut off
    this.top = null;
    this.data = null;
    this.box = make("div", { class: "plot" });
    this.box.setAttribute("role", "img");
    this.note = make("small");
    figure.append(make("figcaption", { text: `${title} ` }, this.note), this.box);
    new ResizeObserver(() => this.#resize()).observe(this.box);
    this.restyle();
  }

  restyle() {
    this.plot?.destroy();
    const axis = { stroke: css("--faint"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false } };
    const font = "11px system-ui, sans-serif";
    const { x, y, right } = this.format;
    this.plot = new uPlot(
      {
        width: Math.max(120, this.box.clientWidth || 300),
        height: HEIGHT,
        padding: [8, 14, 0, 0],
        cursor: { drag: { x: false, y: false }, points: { size: 6 } },
        legend: { live: true },
        scales: { x: { time: false }, y: { range: (_plot, low, high) => atNought(low, this.top ?? high) }, right: { range: (_plot, low, high) => atNought(low, high) } },
        axes: [
          { ...axis, font, size: 26, space: 60, values: (_plot, marks) => marks.map((mark) => (mark === null ? "" : x(mark))) },
          { ...axis, font, size: 46, space: 28, values: (_plot, marks) => marks.map((mark) => (mark === null ? "" : y(mark))) },
          ...(right ? [{ ...axis, font, size: 40, space: 28, scale: "right", side: 1, grid: { show: false }, values: (_plot, marks) => marks.map(right) }] : []),
        ],
        series: [
          { label: this.over, value: (_plot, value) => (value === null ? "" : x(value)) },
          ...this.lines.map(({ label, color, dash, right: second }) => ({
            label,
            scale: second ? "right" : "y",
            stroke: css(color),
            ...(this.steps ? LINE : DOTS),
            dash: this.steps ? dash : undefined,
            value: (_plot, value) => (value === null || value === undefined ? "–" : y(value)),
          })),
          ...(this.steps ? [] : this.lines).map(({ color, dash, right: second }) => ({
            class: "smooth",
            scale: second ? "right" : "y",
            stroke: css(color),
            width: 2,
            dash,
            points: { show: false },
          })),
        ],
      },
      this.data ?? [[], ...this.lines.map(() => []), ...(this.steps ? [] : this.lines).map(() => [])],
      this.box,
    );
  }

  #resize() {
    const width = Math.max(120, this.box.clientWidth);
    if (width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  // `data`: the values of x, then those of each line.
  show(data) {
    const [, ...lines] = data;
    this.top = this.cut ? usualTop(lines) : null;
    this.data = this.steps ? data : [...data, ...lines.map((values) => smoothed(values, this.top ?? Infinity))];
    this.plot.setData(this.data);
    const cut = this.top === null ? "" : `, highest ${this.format.y(Math.round(Math.max(...lines.flat())))}`;
    setText(this.note, this.steps ? "" : `mean of ${SMOOTH}${cut}`);
    this.#describe(data);
  }

  #describe(data) {
    const said = this.lines.map(({ label }, i) => {
      const last = data[i + 1].findLast((value) => value !== null && value !== undefined);
      return `${label} ${last === undefined ? "unknown" : `now ${this.format.y(last)}`}`;
    });
    this.box.setAttribute("aria-label", `${this.title}: ${said.join(", ")}`);
  }
}

// A line of the values themselves, or dots if another line shows their mean.
const LINE = { width: 2, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) };
const DOTS = { alpha: 0.4, points: { show: true, size: 4, width: 0, space: 0 }, paths: () => null };

// The running mean; values beyond the axis count as its end.
function smoothed(values, top) {
  return values.map((value, i) => {
    if (value === null) return null;
    const known = values.slice(Math.max(0, i - SMOOTH + 1), i + 1).filter((one) => one !== null);
    return known.reduce((sum, one) => sum + Math.min(one, top), 0) / known.length;
  });
}

// The top of an axis that ignores a few outliers (see usual_top in roq/observe/plots.py).
function usualTop(lines) {
  const ordered = lines.flat().filter((value) => value !== null).sort((a, b) => a - b);
  if (ordered.length === 0) return null;
  const usual = ordered[Math.floor(0.95 * (ordered.length - 1))];
  const highest = ordered.at(-1);
  return highest <= 2.5 * usual || usual === 0 ? null : 1.75 * usual;
}

function atNought(low, high) {
  if (low === null || high === null) return [0, 1];
  const bottom = Math.min(0, low);
  return [bottom, high > bottom ? high + (high - bottom) * 0.08 : bottom + 1];
}

export class Charts {
  constructor() {
    const time = { x: duration, over: "time" };
    const seconds = { y: (value) => `${short(value)} s` };
    const dashed = [6, 4];
    this.versions = new Chart($("#chart-versions"), "Version over time", [{ label: "version", color: "--blue" }], {
      ...time,
      steps: true,
    });
    this.reward = new Chart($("#chart-reward"), "Reward by version", [{ label: "mean reward", color: "--green" }]);
    this.rate = new Chart(
      $("#chart-rate"),
      "Throughput",
      [
        { label: "tokens/s", color: "--violet" },
        { label: "trajectories/s", color: "--blue", dash: dashed, right: true },
      ],
      { ...time, right: short },
    );
    this.wait = new Chart(
      $("#chart-wait"),
      "Trainer, by version",
      [
        { label: "waiting for the batch", color: "--red" },
        { label: "training", color: "--blue", dash: dashed },
      ],
      { ...seconds, cut: true },
    );
    this.idle = new Chart($("#chart-idle"), "Idle workers, by version", [{ label: "share of time", color: "--red" }], {
      y: (value) => `${Math.round(value * 100)} %`,
    });
    this.all = [this.versions, this.reward, this.rate, this.wait, this.idle];
    this.histogram = $("#staleness");
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.restyle());
  }

  restyle() {
    for (const chart of this.all) chart.restyle();
  }

  draw(series, position, now) {
    const steps = series.steps.slice(0, Series.upTo(series.steps, position));
    const origin = Math.min(series.origin ?? Infinity, steps[0]?.time ?? Infinity);
    const seconds = series.seconds.slice(0, Series.upTo(series.seconds, position));
    const taken = series.takes[Series.upTo(series.takes, position) - 1];
    const at = (time) => (time - origin) / 1000;
    const versions = steps.map((step) => step.version);

    const times = steps.map((step) => at(step.time));
    if (origin < Infinity) {
      const first = versions.length > 0 ? versions[0] - 1 : 0;
      this.versions.show([[0, ...times, at(Math.max(now, origin))], [first, ...versions, versions.at(-1) ?? 0]]);
    }
    this.reward.show([versions, steps.map((step) => step.reward)]);
    this.wait.show([versions, steps.map((step) => step.waitS), steps.map((step) => step.trainS)]);
    this.idle.show([versions, steps.map((step) => step.idleShare)]);
    const { x, trajectories, tokens } = perSecond(seconds, origin, now);
    this.rate.show([x, tokens, trajectories]);
    this.#staleness(taken?.staleness ?? []);
  }

  #staleness(counts) {
    const total = counts.reduce((sum, n) => sum + (n ?? 0), 0);
    const most = Math.max(1, ...counts);
    list(
      this.histogram,
      counts,
      () => make("li", {}, make("span", { class: "key" }), make("span", { class: "bar" }), make("span", { class: "number" })),
      (item, n) => {
        const [key, bar, number] = item.children;
        setText(key, String([...this.histogram.children].indexOf(item)));
        bar.style.setProperty("--share", n / most);
        setText(number, total > 0 ? `${count(n)} · ${Math.round((n / total) * 100)} %` : "0");
      },
    );
  }
}

// Rates from the seconds in which something completed; the seconds between count as 0.
function perSecond(seconds, origin, now) {
  if (seconds.length === 0) return { x: [], trajectories: [], tokens: [] };
  const start = Math.floor(origin / 1000) * 1000;
  const length = Math.max(1, Math.floor((Math.max(now, seconds.at(-1).time) - start) / 1000) + 1);
  const width = Math.max(1, Math.ceil(length / MOST_POINTS));
  const bins = Math.ceil(length / width);
  const trajectories = new Array(bins).fill(0);
  const tokens = new Array(bins).fill(0);
  for (const second of seconds) {
    const bin = Math.floor((second.time - start) / 1000 / width);
    trajectories[bin] += second.trajectories / width;
    tokens[bin] += second.tokens / width;
  }
  const whole = Math.max(1, bins - 1); // the last bin is incomplete
  const x = Array.from({ length: whole }, (_, i) => i * width);
  return { x, trajectories: trajectories.slice(0, whole), tokens: tokens.slice(0, whole) };
}
