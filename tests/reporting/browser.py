"""A headless browser that renders a page, where one is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

PROBE = """<script>
window.addEventListener("load", () => setTimeout(() => {
  const root = document.documentElement, sizes = root.dataset;
  sizes.overflow = String(root.scrollWidth - root.clientWidth);
  sizes.width = String(root.clientWidth);
  sizes.page = getComputedStyle(document.body).backgroundColor;
  sizes.scripts = String(document.scripts.length);
  sizes.images = String(document.images.length);
  const canvas = document.querySelector("canvas");
  if (canvas) {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let painted = 0;
    for (let at = 3; at < pixels.length; at += 4) if (pixels[at] > 200) painted++;
    sizes.painted = String(painted);
    const told = () => document.querySelector(".range").textContent, all = told();
    document.querySelector("button[aria-label='zoom in']").click();
    sizes.zoomed = told() + " | " + all;
  }
}, 100));
window.addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });
document.addEventListener("securitypolicyviolation", (event) => {
  document.documentElement.dataset.blocked = event.blockedURI;
});
</script>"""


def rendered(text: str, folder: Path, width: int, scheme: str) -> tuple[str, dict[str, str]]:
    """Render a page in a window of ``width`` pixels; return its elements as HTML, and what a probe in it found. ``scheme``:
    "light" or "dark". Skips where there is no browser."""
    browser = next((found for name in NAMES if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed")
    file = folder / "page.html"
    file.write_text(text.replace("<body>", "<body>" + PROBE, 1), encoding="utf-8")
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
            *(f"--window-size={width},1200", f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"),
            *(f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=10000", "--dump-dom", file.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    head = re.search(r"<html[^>]*>", done.stdout)
    assert head is not None, done.stderr[-2000:]
    return done.stdout, dict(re.findall(r'data-([a-z]+)="([^"]*)"', head.group()))
