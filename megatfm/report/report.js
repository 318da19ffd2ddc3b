// Axes to choose, and a reading line with the values of all curves under the pointer. The page works without it.
const axes = JSON.parse(document.querySelector("main").dataset.axes);
const units = ["step", "tokens", "hours"];
const form = document.querySelector(".controls");
const view = { x: 0, logx: false, y: "" };

// A step of a run as tokens or hours, between the knots by straight lines.
function along(run, step) {
  if (view.x === 0) return step;
  const [steps, values] = [axes[run][0], axes[run][view.x]];
  if (steps.length < 2) return step;
  let i = steps.findIndex((knot) => knot >= step);
  if (i < 1) i = i === 0 ? 1 : steps.length - 1;
  const share = (step - steps[i - 1]) / (steps[i] - steps[i - 1]);
  return values[i - 1] + share * (values[i] - values[i - 1]);
}

const short = (value) => value.toLocaleString("en", { notation: Math.abs(value) >= 1e4 ? "compact" : "standard", maximumSignificantDigits: 4 });

function ticks(low, high, about, log) {
  if (log) {
    const factors = high - low > 3 ? [1] : [1, 2, 5];
    const every = Math.max(1, Math.round((high - low) / 6));
    const found = [];
    for (let power = Math.floor(low); power <= Math.floor(high); power += every)
      for (const factor of factors) found.push(factor * 10 ** power);
    return found.filter((tick) => Math.log10(tick) >= low && Math.log10(tick) <= high);
  }
  const rough = (high - low) / about, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let i = Math.ceil(low / step); i <= Math.floor(high / step); i++) found.push(+(i * step).toPrecision(12));
  return found;
}

function recorded(path) {
  const [gaps, values] = [path.dataset.steps.split(" "), path.dataset.values.split(" ")];
  let step = 0;
  return [...path.getAttribute("d").matchAll(/[ML]/g)].map(([letter], i) => ({ down: letter === "L", step: (step += +gaps[i]), value: +values[i] }));
}

for (const plot of document.querySelectorAll(".plot")) {
  const svg = plot.querySelector("svg");
  const drawnLog = plot.dataset.log !== undefined;
  // Points of the paths as they were recorded; `down`: joined to the one before.
  const curves = [...svg.querySelectorAll("path[data-name], path.marks")].map((path) => ({
    path, name: path.dataset.name, colour: path.classList[1], run: +(path.dataset.run ?? 0),
    read: path.dataset.name !== undefined && !path.classList.contains("thin"),
    data: recorded(path),
    points: [],
  }));

  const draw = () => {
    const log = view.y === "" ? drawnLog : view.y === "log";
    const right = (run, step) => (view.logx ? Math.log10(along(run, step)) : along(run, step));
    const up = (value) => (log ? Math.log10(value) : value);
    for (const curve of curves)
      curve.points = curve.data.map((p) => ({ ...p, x: right(curve.run, p.step), y: up(p.value) }))
        .filter((p) => Number.isFinite(p.x) && Number.isFinite(p.y));
    const every = curves.flatMap((curve) => curve.points);
    if (!every.length) return;
    const levels = [...plot.querySelectorAll("[data-value]")].map((item) => up(+item.dataset.value)).filter(Number.isFinite);
    const extent = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    let [left, end] = extent(every.map((p) => p.x)), [bottom, top] = extent([...every.map((p) => p.y), ...levels]);
    if (plot.dataset.zero !== undefined && !log) bottom = Math.min(0, bottom);
    const margin = 0.05 * (top - bottom) || 0.5 * Math.abs(top) || 1;
    bottom -= plot.dataset.zero !== undefined && bottom === 0 ? 0 : margin;
    top += margin;
    if (end === left) end = left + 1;
    const px = (x) => (1000 * (x - left)) / (end - left), py = (y) => 1000 * (1 - (y - bottom) / (top - bottom));
    for (const curve of curves) {
      for (const p of curve.points) [p.px, p.py] = [px(p.x), py(p.y)];
      curve.path.setAttribute("d", curve.points.map((p, i) =>
        p.down && i ? `L${p.px.toFixed(1)},${p.py.toFixed(1)}` : `M${p.px.toFixed(1)},${p.py.toFixed(1)}h0`).join(""));
    }
    for (const mark of svg.querySelectorAll(".mark")) {
      const at = px(right(0, +mark.dataset.step));
      mark.setAttribute("d", at >= 0 && at <= 1000 ? `M${at.toFixed(1)},0v1000` : "");
    }
    for (const level of plot.querySelectorAll("[data-value]")) {
      const at = py(up(+level.dataset.value));
      if (level.tagName === "path") level.setAttribute("d", `M0,${at.toFixed(1)}h1000`);
      else level.style.top = `${at / 10}%`;
    }
    plot.querySelectorAll("span.x, span.y, path.grid").forEach((old) => old.remove());
    const label = (kind, side, at, text) => {
      const span = plot.appendChild(document.createElement("span"));
      [span.className, span.textContent, span.style[side]] = [kind, text, `${at / 10}%`];
    };
    for (const tick of ticks(bottom, top, 5, log)) {
      const grid = document.createElementNS("http://www.w3.org/2000/svg", "path");
      grid.setAttribute("class", "grid");
      grid.setAttribute("d", `M0,${py(up(tick)).toFixed(1)}h1000`);
      svg.prepend(grid);
      label("y", "top", py(up(tick)), short(tick));
    }
    ticks(left, end, 6, view.logx).forEach((tick, i) =>
      label("x", "left", px(view.logx ? Math.log10(tick) : tick), (i ? "" : `${units[view.x]} `) + short(tick)));
  };
  plot.redraw = draw;
  const asDrawn = () => {
    for (const curve of curves)
      curve.points = [...curve.path.getAttribute("d").matchAll(/[ML]([\d.-]+),([\d.-]+)/g)]
        .map((m, i) => ({ ...curve.data[i], px: +m[1], py: +m[2] }));
  };
  asDrawn();

  const line = plot.appendChild(document.createElement("div"));
  const box = plot.appendChild(document.createElement("output"));
  line.className = "cursor";
  plot.addEventListener("pointermove", (event) => {
    const edge = plot.getBoundingClientRect();
    const x = (1000 * (event.clientX - edge.left)) / edge.width;
    const shown = curves.filter((curve) => curve.read && curve.points.length);
    const near = shown.map(({ points }) =>
      points.reduce((best, p) => (Math.abs(p.px - x) < Math.abs(best.px - x) ? p : best)));
    if (!near.length) return;
    const at = near.reduce((best, p) => (Math.abs(p.px - x) < Math.abs(best.px - x) ? p : best));
    const run = shown[near.indexOf(at)].run;
    line.style.left = `${at.px / 10}%`;
    box.style[at.px > 500 ? "left" : "right"] = "auto";
    box.style[at.px > 500 ? "right" : "left"] = `calc(${at.px > 500 ? 100 - at.px / 10 : at.px / 10}% + .6rem)`;
    const where = view.x ? `, ${short(along(run, at.step))} ${units[view.x]}` : "";
    box.replaceChildren(`step ${Math.round(at.step).toLocaleString("en")}${where}`, ...shown.map(({ name, colour }, i) => {
      const row = document.createElement("span");
      row.className = colour;
      row.textContent = `${shown.length > 1 ? `${name} ` : ""}${near[i].value.toLocaleString("en", { maximumSignificantDigits: 6 })}`;
      return row;
    }));
    plot.classList.add("reading");
  });
  plot.addEventListener("pointerleave", () => plot.classList.remove("reading"));
}

if (form) {
  form.hidden = false;
  const choose = () => {
    [view.x, view.logx, view.y] = [+form.x.value, form.logx.checked, form.y.value];
    document.querySelectorAll(".plot").forEach((plot) => plot.redraw());
  };
  form.addEventListener("change", choose);
  if (location.hash.startsWith("#axes=")) { // #axes=tokens,logx,log: a link to a view
    const words = location.hash.slice(6).split(",");
    form.x.value = Math.max(0, units.findIndex((unit) => words.includes(unit)));
    [form.logx.checked, form.y.value] = [words.includes("logx"), words.includes("log") ? "log" : words.includes("linear") ? "linear" : ""];
    choose();
  }
}
