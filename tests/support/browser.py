"""Pages in a real browser: headless Chromium, controlled through its command line."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")

HARNESS = """<!doctype html><meta charset="utf-8"><style>body {{ margin: 0 }} iframe {{ border: 0 }}</style>
<iframe width="{width}" height="{height}"></iframe><pre id="result"></pre>
<script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {{
  const result = (({script}))(frame.contentWindow);
  document.getElementById("result").textContent = JSON.stringify(result);
}});
frame.srcdoc = {page};
</script>"""


def find_browser() -> str | None:
    """Return the path of a Chromium, or None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def look_at(browser: str, page: str, script: str, size: tuple[int, int], scratch: Path) -> tuple[Any, list[str]]:
    """Return the result of the JavaScript function `script` for the window of `page`, and the lines on the console.

    The window has the width and height `size`. It is a frame, because a window of Chromium cannot be as narrow as that
    of a phone.

    Raises:
        AssertionError: the page cannot be loaded, or the function throws.
    """
    harness = scratch / "harness.html"
    quoted = json.dumps(page).replace("</", "<\\/")
    harness.write_text(HARNESS.format(width=size[0], height=size[1], script=script, page=quoted), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    place = [f"--user-data-dir={scratch / 'profile'}", f"--window-size={max(size[0], 600)},{size[1] + 100}"]
    done = subprocess.run([*command, *place, harness.as_uri()], capture_output=True, text=True, check=True)
    console = re.findall(r":CONSOLE[^\]]*\] (.*)", done.stderr)
    found = re.search(r'<pre id="result">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, f"no result; console: {console}"
    return json.loads(html.unescape(found[1])), console
