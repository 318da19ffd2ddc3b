// A reading line: shows the values of all curves at the step under the pointer. The page works without it.
for (const plot of document.querySelectorAll(".plot")) {
  const [firstStep, lastStep] = plot.dataset.x.split(" ").map(Number);
  const [low, high] = plot.dataset.y.split(" ").map(Number);
  const curves = [...plot.querySelectorAll("path[data-name]:not(.thin)")].map((path) => ({
    name: path.dataset.name,
    colour: path.classList[1],
    points: [...path.getAttribute("d").matchAll(/[ML]([\d.-]+),([\d.-]+)/g)].map((m) => [+m[1], +m[2]]),
  }));
  const value = (y) => {
    const v = high - (y / 1000) * (high - low);
    return (plot.dataset.log === undefined ? v : 10 ** v).toLocaleString("en", { maximumSignificantDigits: 4 });
  };
  const line = plot.appendChild(document.createElement("div"));
  const box = plot.appendChild(document.createElement("output"));
  line.className = "cursor";
  plot.addEventListener("pointermove", (event) => {
    const frame = plot.getBoundingClientRect();
    const x = (1000 * (event.clientX - frame.left)) / frame.width;
    const nearest = curves.map(({ points }) =>
      points.reduce((best, p) => (Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best)));
    const at = nearest.reduce((best, p) => (Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best))[0];
    const step = Math.round(firstStep + (at / 1000) * (lastStep - firstStep));
    line.style.left = `${at / 10}%`;
    box.style[at > 500 ? "left" : "right"] = "auto";
    box.style[at > 500 ? "right" : "left"] = `calc(${at > 500 ? 100 - at / 10 : at / 10}% + .6rem)`;
    box.replaceChildren(`step ${step.toLocaleString("en")}`, ...curves.map(({ name, colour }, i) => {
      const row = document.createElement("span");
      row.className = colour;
      row.textContent = `${curves.length > 1 ? `${name} ` : ""}${value(nearest[i][1])}`;
      return row;
    }));
    plot.classList.add("reading");
  });
  plot.addEventListener("pointerleave", () => plot.classList.remove("reading"));
}
