"""Headless Chromium for the tests of pages: what a page measures in it, without a driver or a network."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
NO_BROWSER = "no Chromium on this machine (`make browser` installs it)"
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip

_HARNESS = """<!doctype html><meta charset="utf-8"><title>waiting</title><script>
function ran() {{ const found = []; for (const frame of document.querySelectorAll("iframe")) {{
  const document = frame.contentDocument; found.push((function (window) {{ {probe} }})(frame.contentWindow)); }}
  document.querySelector("pre").textContent = JSON.stringify(found); }}
window.addEventListener("load", ran);
</script>{frames}<pre></pre>"""


def command(page: Path, profile: Path, *more: str) -> list[str]:
    """What starts the browser on a page, with an empty profile, so that no window opens and nothing is asked."""
    return [str(BROWSER), *OPTIONS, f"--user-data-dir={profile}", *more, page.resolve().as_uri()]


def evaluate(text: str, probe: str, widths: Sequence[int], folder: Path, *more: str) -> list[Any]:
    """What the body of a function of ``window`` and ``document`` returns for the page ``text`` at each width in pixels.

    Each page is a frame of that width: a window of a browser cannot be as narrow as a phone. ``more`` are options
    of the browser. Raises CalledProcessError or TimeoutExpired if the browser does not end well.
    """
    frames = "".join(f'<iframe width="{each}" height="900" srcdoc="{html.escape(text)}"></iframe>' for each in widths)
    page = folder / "harness.html"
    page.write_text(_HARNESS.format(probe=probe, frames=frames), "utf-8")
    line = command(page, folder / "profile", "--dump-dom", *more)
    dom = subprocess.run(line, capture_output=True, text=True, encoding="utf-8", timeout=120, check=True).stdout
    found = re.search(r"<pre>(.*?)</pre>", dom, flags=re.DOTALL)
    assert found is not None and found[1], dom[-2000:]
    return json.loads(html.unescape(found[1]))
