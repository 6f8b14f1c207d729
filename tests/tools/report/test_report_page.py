"""The page of a report in a real browser, with the widths of a phone and of a desktop."""

from typing import Any

import pytest

from deepspeed_compress.tools.report import load_runs
from deepspeed_compress.tools.report.page import page
from tests.support.browser import NAMES, find_browser, look_at
from tests.support.runs import KINDS, long_run

SIZES = {"phone": (390, 844), "desktop": (1440, 900)}

MEASURE = """(view) => {
  const page = view.document, all = (selector, within = page) => [...within.querySelectorAll(selector)];
  const box = (element) => element.getBoundingClientRect();
  const ahead = (a, b) => a.right <= b.left + 1 || a.bottom <= b.top + 1;
  const apart = (a, b) => ahead(a, b) || ahead(b, a);
  const clashes = (elements) => elements.flatMap((one, index) => elements.slice(index + 1)
    .filter((other) => !apart(box(one), box(other))).map((other) => `${one.textContent} / ${other.textContent}`));
  const texts = all("h1, h2, h3, p, .status li, .tile > *, .legend li, .bar > span, svg text")
    .filter((element) => box(element).width > 0);
  const plots = all(".plot"), captions = all("h1, h2, h3, .legend");
  const charts = all("figure.chart").map((figure) => {
    const svg = figure.querySelector("svg[role=img]"), whole = box(svg);
    return {
      title: figure.querySelector("h3").textContent, width: whole.width, height: whole.height,
      lines: all("path.line", svg).map((path) => path.getTotalLength()),
      inside: all("path.line", svg).map(box).every((path) => path.left >= whole.left && path.right <= whole.right
        && path.top >= whole.top && path.bottom <= whole.bottom),
      text: 11 * whole.width / svg.viewBox.baseVal.width, marks: all(".mark", svg).length,
    };
  });
  const plot = plots[0], at = box(plot), output = plot.querySelector("output");
  plot.dispatchEvent(new view.PointerEvent("pointermove", { clientX: at.left + at.width / 2, clientY: at.top + 50 }));
  const pointed = { text: output.textContent, shown: view.getComputedStyle(output).display, right: box(output).right,
    line: box(plot.querySelector(".pointer")).left - at.left - at.width / 2 };
  plot.dispatchEvent(new view.PointerEvent("pointerleave"));
  return {
    inner: view.innerWidth, scroll: page.scrollingElement.scrollWidth, charts, pointed,
    hidden: view.getComputedStyle(output).display,
    outside: texts.filter((element) => box(element).right > view.innerWidth).map((element) => element.textContent),
    clashes: clashes(texts.filter((element) => !texts.some((other) => other !== element && element.contains(other)))),
    covered: captions.filter((one) => plots.some((plot) => !apart(box(one), box(plot)))).map((one) => one.textContent),
    bars: all(".parts").map((parts) => all("i", parts).reduce((sum, part) => sum + box(part).width, 0)),
  };
}"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("runs")
    run = long_run(directory / "a-run-with-quite-a-long-name-of-topk-and-4-bits", compressed=True)
    return page(load_runs(run, long_run(directory / "uncompressed", compressed=False)))


@pytest.fixture(scope="module")
def browser() -> str:
    found = find_browser()
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    return found


@pytest.fixture(scope="module", params=SIZES)
def seen(request: pytest.FixtureRequest, browser: str, written: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Measurements of the browser, and the messages on its console."""
    found, console = look_at(browser, written, MEASURE, SIZES[request.param], tmp_path_factory.mktemp("browser"))
    assert found["inner"] == SIZES[request.param][0]
    return {**found, "console": console}


def test_nothing_is_written_to_the_console(seen: Any) -> None:
    assert seen["console"] == []


def test_the_page_does_not_scroll_sideways(seen: Any) -> None:
    assert seen["scroll"] <= seen["inner"]
    assert seen["outside"] == []


def test_every_chart_is_drawn(seen: Any) -> None:
    assert len(seen["charts"]) == 9
    for chart in seen["charts"]:
        assert chart["width"] > 300, chart
        assert chart["height"] > 150, chart
        assert chart["lines"], chart
        assert min(chart["lines"]) > 50, chart
        assert chart["inside"], chart
    assert [chart["marks"] for chart in seen["charts"]] == [len(KINDS)] + [0] * 8


def test_every_bar_is_drawn(seen: Any) -> None:
    assert len(seen["bars"]) == 6
    assert min(seen["bars"]) > 10


def test_texts_are_large_enough_and_do_not_overlap(seen: Any) -> None:
    assert min(chart["text"] for chart in seen["charts"]) > 9.5
    assert seen["clashes"] == []
    assert seen["covered"] == []


def test_a_pointer_shows_figures(seen: Any) -> None:
    lines = seen["pointed"]["text"].splitlines()
    assert lines[0].startswith("step ")
    assert len(lines) == 5
    assert seen["pointed"]["shown"] == "block"
    assert abs(seen["pointed"]["line"]) < 2
    assert seen["pointed"]["right"] <= seen["inner"]
    assert seen["hidden"] == "none"
