// Draws the charts from their data along chosen axes, and shows the values under the pointer.
const main = document.querySelector("main");
const axes = JSON.parse(main.dataset.axes);
const units = ["step", "tokens", "hours"];
const form = document.querySelector(".controls");
const view = { x: 0, logx: false, y: "" };

// Converts a step of a run to tokens or hours, by linear interpolation between samples.
function fromStep(run, step) {
  if (view.x === 0) return step;
  const [steps, values] = [axes[run][0], axes[run][view.x]];
  if (steps.length < 2) return step;
  let i = steps.findIndex((sample) => sample >= step);
  if (i < 1) i = i === 0 ? 1 : steps.length - 1;
  const fraction = (step - steps[i - 1]) / (steps[i] - steps[i - 1]);
  return values[i - 1] + fraction * (values[i] - values[i - 1]);
}

const format = (value) => {
  const size = Math.abs(value);
  if (size && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return value.toLocaleString("en", { notation: size >= 1e4 ? "compact" : "standard", maximumSignificantDigits: 4 });
};

// Returns about `count` round numbers between two limits, 1, 2 or 5 times a power of ten apart. log: the limits are
// logarithms.
function ticks(low, high, count, log) {
  if (log) {
    const factors = high - low > 3 ? [1] : [1, 2, 5];
    const every = Math.max(1, Math.round((high - low) / 6));
    const result = [];
    for (let power = Math.floor(low); power <= Math.floor(high); power += every)
      for (const factor of factors) result.push(factor * 10 ** power);
    return result.filter((tick) => Math.log10(tick) >= low && Math.log10(tick) <= high);
  }
  const minStep = (high - low) / count, power = 10 ** Math.floor(Math.log10(minStep));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= minStep);
  const result = [];
  for (let i = Math.ceil(low / step); i <= Math.floor(high / step); i++) result.push(+(i * step).toPrecision(12));
  return result;
}

const MAX_MARKED = 100; // points of a curve that are marked; more would hide it

const extent = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);

class Plot {
  constructor(element) {
    this.element = element;
    this.svg = element.querySelector("svg");
    this.chart = JSON.parse(element.dataset.chart);
    this.curves = this.chart.lines.map((line) => this.curve(line));
    this.cursor = element.appendChild(document.createElement("div"));
    this.output = element.appendChild(document.createElement("output"));
    this.cursor.className = "cursor";
    element.addEventListener("pointermove", (event) => this.read(event));
    element.addEventListener("pointerleave", () => element.classList.remove("reading"));
    this.draw();
  }

  path(name, d) {
    const path = this.svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
    path.setAttribute("class", name);
    if (d) path.setAttribute("d", d);
    return path;
  }

  label(name, side, at, text) {
    const span = this.element.appendChild(document.createElement("span"));
    [span.className, span.textContent, span.style[side]] = [name, text, `${at / 10}%`];
  }

  curve({ name, colour, kind, run, steps, values }) {
    let step = 0;
    const data = values.map((value, i) => ({ step: (step += steps[i]), value }));
    return { name, colour: `c${colour}`, kind, run, data, points: [] };
  }

  draw() {
    const { chart, curves } = this, log = view.y === "" ? chart.log : view.y === "log";
    const toX = (run, step) => (view.logx ? Math.log10(fromStep(run, step)) : fromStep(run, step));
    const toY = (value) => (value === null ? NaN : log ? Math.log10(value) : value);
    for (const curve of curves) {
      curve.points = [];
      let isJoined = false; // to the previous point
      for (const { step, value } of curve.data) {
        const point = { step, value, x: toX(curve.run, step), y: toY(value), isJoined };
        isJoined = Number.isFinite(point.x) && Number.isFinite(point.y);
        if (isJoined) curve.points.push(point);
      }
    }
    const points = curves.flatMap((curve) => curve.points);
    this.svg.replaceChildren();
    this.element.querySelectorAll("span").forEach((old) => old.remove());
    if (!points.length) return;
    const levels = chart.levels.map(([name, value, text]) => ({ name, text, y: toY(value) })).filter((level) => Number.isFinite(level.y));
    const [lowest, highest] = extent([...points, ...levels].map((p) => p.y));
    let [left, right] = extent(points.map((p) => p.x)), [bottom, top] = [lowest, highest];
    if (chart.zero && !log) bottom = Math.min(0, bottom);
    const margin = 0.05 * (top - bottom) || 0.5 * Math.abs(top) || 1;
    bottom -= chart.zero && bottom === 0 ? 0 : margin;
    top += margin;
    if (chart.bounds && !log) { // an accuracy's axis ends at 1
      bottom = Math.max(bottom, Math.min(chart.bounds[0] ?? -Infinity, lowest));
      top = Math.min(top, Math.max(chart.bounds[1], highest));
    }
    if (right === left) right = left + 1;
    const px = (x) => (1000 * (x - left)) / (right - left), py = (y) => 1000 * (1 - (y - bottom) / (top - bottom));
    for (const tick of ticks(bottom, top, 5, log)) {
      this.path("grid", `M0,${py(toY(tick)).toFixed(1)}h1000`);
      this.label("y", "top", py(toY(tick)), format(tick));
    }
    ticks(left, right, 6, view.logx).filter((tick) => view.x || Number.isInteger(tick)).forEach((tick, i) =>
      this.label("x", "left", px(view.logx ? Math.log10(tick) : tick), (i ? "" : `${units[view.x]} `) + format(tick)));
    this.drawLevels(levels.map((level) => ({ ...level, at: py(level.y) })));
    for (const [step, kind, text] of chart.events) {
      const at = px(toX(0, step));
      if (!(at >= 0 && at <= 1000)) continue;
      const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
      title.textContent = `${kind} at step ${step.toLocaleString("en")}: ${text}`;
      this.path(`mark ${kind.replace(" ", "-")}`, `M${at.toFixed(1)},0v1000`).append(title);
    }
    for (const curve of [...curves].sort((a, b) => (b.kind === "other") - (a.kind === "other"))) {
      for (const p of curve.points) [p.px, p.py] = [px(p.x), py(p.y)];
      const dot = (p) => `M${p.px.toFixed(1)},${p.py.toFixed(1)}h0`; // under round caps a dot, also for a lone point
      const d = curve.points.map((p) => (p.isJoined ? `L${p.px.toFixed(1)},${p.py.toFixed(1)}` : dot(p))).join("");
      this.path(`${curve.kind} ${curve.colour}`, d).dataset.name = curve.name;
      if (curve.kind === "dots" && curve.points.length <= MAX_MARKED) this.path(`marks ${curve.colour}`, curve.points.map(dot).join(""));
    }
  }

  // Levels closer than a line of text share a label.
  drawLevels(levels) {
    const groups = [];
    for (const level of levels.sort((a, b) => a.at - b.at)) {
      this.path("level", `M0,${level.at.toFixed(1)}h1000`);
      if (groups.length && level.at - groups.at(-1)[0].at < 100) groups.at(-1).push(level);
      else groups.push([level]);
    }
    for (const group of groups)
      this.label("level", "top", group[0].at, group.map(({ name, text }) => `${name} ${text}`).join(" · "));
  }

  read(event) {
    const edge = this.element.getBoundingClientRect();
    const x = (1000 * (event.clientX - edge.left)) / edge.width;
    const visible = this.curves.filter((curve) => curve.kind !== "raw" && curve.points.length);
    if (!visible.length) return;
    const nearest = (points) => points.reduce((best, p) => (Math.abs(p.px - x) < Math.abs(best.px - x) ? p : best));
    const candidates = visible.map(({ points }) => nearest(points)), point = nearest(candidates);
    const run = visible[candidates.indexOf(point)].run;
    const isLeft = point.px > 500, offset = `calc(${(isLeft ? 1000 - point.px : point.px) / 10}% + .6rem)`;
    this.cursor.style.left = `${point.px / 10}%`;
    [this.output.style.left, this.output.style.right] = isLeft ? ["auto", offset] : [offset, "auto"];
    const position = view.x ? `, ${format(fromStep(run, point.step))} ${units[view.x]}` : "";
    this.output.replaceChildren(`step ${Math.round(point.step).toLocaleString("en")}${position}`, ...visible.map(({ name, colour }, i) => {
      const row = document.createElement("b");
      row.className = colour;
      row.textContent = `${visible.length > 1 ? `${name} ` : ""}${candidates[i].value.toLocaleString("en", { maximumSignificantDigits: 6 })}`;
      return row;
    }));
    this.element.classList.add("reading");
  }
}

const plots = [...document.querySelectorAll(".plot")].map((element) => new Plot(element));

if (form) {
  form.hidden = false;
  const redraw = () => {
    [view.x, view.logx, view.y] = [+form.x.value, form.logx.checked, form.y.value];
    for (const plot of plots) plot.draw();
  };
  form.addEventListener("change", redraw);
  if (location.hash.startsWith("#axes=")) { // #axes=tokens,logx,log: a link to a view
    const words = location.hash.slice(6).split(",");
    form.x.value = Math.max(0, units.findIndex((unit) => words.includes(unit)));
    [form.logx.checked, form.y.value] = [words.includes("logx"), words.includes("log") ? "log" : words.includes("linear") ? "linear" : ""];
    redraw();
  }
}
