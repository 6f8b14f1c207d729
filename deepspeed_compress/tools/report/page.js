const nearest = (steps, at) => {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < at) low = middle; else high = middle;
  }
  return at - steps[low] <= steps[high] - at ? low : high;
};
for (const figure of document.querySelectorAll("figure.chart")) {
  const { low, high, left, right, lines } = JSON.parse(figure.dataset.chart);
  const plot = figure.querySelector(".plot"), output = figure.querySelector("output");
  const pointer = figure.querySelector(".pointer"), width = plot.querySelector("svg").viewBox.baseVal.width;
  const show = (event) => {
    const box = plot.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    const at = low + (high - low) * Math.min(1, Math.max(0, (share - left) / (right - left)));
    const x = left + (right - left) * (at - low) / (high - low);
    const rows = lines.map((line) => {
      const index = nearest(line.steps, at);
      const elsewhere = line.steps[index] === Math.round(at) ? "" : ` (step ${line.steps[index]})`;
      return `${line.name}: ${line.values[index]}${elsewhere}`;
    });
    pointer.setAttribute("transform", `translate(${x * width} 0)`);
    pointer.style.display = "inline";
    output.textContent = [`step ${Math.round(at)}`, ...rows].join("\n");
    output.style.cssText = "display:block;" + (x > 0.5 ? `right:${(1 - x) * 100 + 2}%` : `left:${x * 100 + 2}%`);
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => {
    output.style.display = pointer.style.display = "none";
  });
}
