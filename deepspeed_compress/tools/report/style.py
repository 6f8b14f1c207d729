"""Appearance of a report: colors, the page skeleton, and the script that shows figures under the pointer."""

from collections.abc import Mapping
from types import MappingProxyType

COLOURS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "paper": ("#ffffff", "#0d1117"),
        "card": ("#f6f8fa", "#161b22"),
        "ink": ("#1f2328", "#e6edf3"),
        "muted": ("#59636e", "#9198a1"),
        "rule": ("#d8dee4", "#30363d"),
        "run": ("#1f6feb", "#58a6ff"),
        "baseline": ("#a3adb8", "#6e7681"),
        "run-soft": ("#a5c8ff", "#1f4e8c"),
        "green": ("#2da44e", "#3fb950"),
        "yellow": ("#d4a72c", "#d29922"),
        "orange": ("#e16f24", "#db6d28"),
        "purple": ("#8250df", "#a371f7"),
        "cyan": ("#1b7c83", "#39c5cf"),
        "brown": ("#953800", "#bc6c25"),
        "red": ("#cf222e", "#f85149"),
    }
)


def light(name: str) -> str:
    """Return the color for a white background, as used in the picture."""
    return COLOURS[name][0]


def css_variables(dark: bool) -> str:
    """Return all colors as CSS variables named `--NAME`."""
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in COLOURS.items())


STYLE = (
    f":root {{ color-scheme: light dark; {css_variables(dark=False)} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {css_variables(dark=True)} }} }}\n"
    """\
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 88rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 1.45rem; font-weight: 650; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; font-weight: 600; margin: 2.4rem 0 .8rem; }
h3 { font-size: .92rem; font-weight: 600; line-height: 1.3; margin: 0; }
p, .status { color: var(--muted); margin: 0 0 .4rem; }
.status { list-style: none; padding: 0; }
.status li::before { content: ""; display: inline-block; width: .7rem; height: .7rem; border-radius: 3px;
  margin-right: .5rem; background: var(--colour); }
.tiles, .charts { display: grid; gap: 1rem; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(min(100%, 11rem), 1fr)); margin-top: 1.3rem; }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); }
.charts.bars { grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
.tile, figure { border: 1px solid var(--rule); border-radius: 8px; margin: 0; min-width: 0; }
.tile { background: var(--card); padding: .7rem .9rem; }
.tile span, .tile small { display: block; color: var(--muted); font-size: .82rem; line-height: 1.35; }
.tile strong { display: block; font-size: 1.45rem; font-weight: 600; line-height: 1.4; }
figure { padding: .8rem .8rem .6rem; display: flex; flex-direction: column; gap: .4rem; }
.plot { position: relative; margin-top: auto; touch-action: pan-y; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 11px; fill: var(--muted); }
.rule, .axis { stroke: var(--rule); stroke-width: 1; }
.rule { opacity: .65; }
.line { fill: none; stroke-width: 1.7; stroke-linejoin: round; stroke-linecap: round; }
.line.wide { stroke-width: 3; }
.line.faint { opacity: .38; stroke-width: 1.2; }
.line.dashed { stroke-dasharray: 4 4; }
.mark { fill: var(--colour); }
.mark .hair { stroke: var(--colour); opacity: .4; stroke-width: 1; }
.pointer { display: none; stroke: var(--muted); stroke-width: 1; stroke-dasharray: 2 2; }
.legend { display: flex; flex-wrap: wrap; gap: 0 .9rem; list-style: none; margin: .2rem 0 0; padding: 0;
  font-size: .8rem; color: var(--muted); }
.legend li { display: flex; align-items: center; gap: .35rem; overflow-wrap: anywhere; }
.swatch { width: 16px; height: 12px; flex: none; }
output { position: absolute; top: 6%; display: none; padding: .3rem .5rem; border: 1px solid var(--rule);
  border-radius: 6px; background: var(--paper); font-size: .78rem; line-height: 1.4; white-space: pre;
  pointer-events: none; max-width: 60%; overflow: hidden; z-index: 1; }
.bar { display: grid; grid-template-columns: minmax(0, 6rem) 1fr 5rem; gap: .6rem; align-items: center;
  margin: .35rem 0; font-size: .85rem; }
.bar span:first-child { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.bar span:last-child { text-align: right; }
.parts { display: flex; height: 1.5rem; border-radius: 4px; overflow: hidden; }
.parts i { background: var(--colour); min-width: 0; }
.strip i { border-right: 1px solid var(--paper); }
.settings .legend { flex-direction: column; gap: .1rem; margin: .1rem 0 .7rem; }
.wide { overflow-x: auto; border: 1px solid var(--rule); border-radius: 8px; }
.events { max-height: 28rem; }
section:has(.figures) { max-width: 58rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: .4rem .8rem; text-align: right; border-bottom: 1px solid var(--rule); }
.figures td:not(:first-child) { white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
th { font-weight: 600; background: var(--card); position: sticky; top: 0; }
th:first-child, td:first-child, .events th, .events td { text-align: left; }
.events td:first-child { font-variant-numeric: tabular-nums; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--muted); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); padding: .8rem; border-radius: 8px;
  font-size: .82rem; }
.missing { font-size: .85rem; margin-top: 1.2rem; }
@media (max-width: 34rem) {
  body { padding: 1rem .75rem 2rem; }
  .tiles { grid-template-columns: 1fr 1fr; gap: .6rem; }
  .tile strong { font-size: 1.15rem; }
  th, td { padding: .4rem .45rem; font-size: .8rem; }
  .bar { grid-template-columns: minmax(0, 4.5rem) 1fr 4.2rem; gap: .4rem; font-size: .78rem; }
}
@media print { figure, .tile { break-inside: avoid; } .events { max-height: none; } }
"""
)

SCRIPT = """\
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
    output.textContent = [`step ${Math.round(at)}`, ...rows].join("\\n");
    output.style.cssText = "display:block;" + (x > 0.5 ? `right:${(1 - x) * 100 + 2}%` : `left:${x * 100 + 2}%`);
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => {
    output.style.display = pointer.style.display = "none";
  });
}
"""

PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
{style}</style></head><body>
<header><h1>{title}</h1>{status}</header>
{sections}
<script>
{script}</script></body></html>
"""
