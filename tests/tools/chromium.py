"""A real Chromium without a window, driven through its own driver; both are Debian's packages."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

BROWSER, DRIVER = "chromium", "chromedriver"
DEADLINE_S = 60.0
QUIET = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--lang=en-US"),
)
# The contrast of every text that is seen with what is behind it; those below the least are listed.
CONTRASTS = """
const parse = (text) => { const found = text.match(/[\\d.]+/g).map(Number);
  return { rgb: found.slice(0, 3), alpha: found[3] ?? 1 }; };
const light = (rgb) => { const [r, g, b] = rgb.map((one) => { const c = one / 255;
  return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = (element) => { for (let at = element; at; at = at.parentElement) {
  if (at instanceof SVGElement) continue;
  const { rgb, alpha } = parse(getComputedStyle(at).backgroundColor);
  if (alpha > 0.99) return rgb; } return [255, 255, 255]; };
const low = []; let seen = 0;
for (const element of document.querySelectorAll("body *")) {
  const text = [...element.childNodes].filter((one) => one.nodeType === 3)
    .map((one) => one.textContent.trim()).join("");
  const box = element.getBoundingClientRect();
  if (!text || !box.width || element.closest("title, option, .skip, dialog:not([open])")) continue;
  const style = getComputedStyle(element);
  const { rgb } = parse(element instanceof SVGElement ? style.fill : style.color);
  const [a, b] = [light(rgb), light(behind(element))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  seen += 1;
  if (ratio < arguments[0]) low.push([text.slice(0, 40), Number(ratio.toFixed(2))]);
}
return { seen, low };
"""


class Chromium:
    """One browser with one page. `checks`: how many things were looked at."""

    def __init__(self) -> None:
        """Fails where it is not installed: `.ci/run` installs it."""
        self.checks = 0
        self.views: set[str] = set()
        browser, driver = shutil.which(BROWSER), shutil.which(DRIVER)
        assert browser and driver, "install Debian's packages chromium and chromium-driver"
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for word in (*QUIET, f"--user-data-dir={self._profile}", "--window-size=1280,900"):
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = webdriver.ChromeService(executable_path=driver)
        try:
            self.driver = webdriver.Chrome(service=service, options=options)
        except BaseException:
            self._remove_profile()
            raise

    def close(self) -> None:
        try:
            self.driver.quit()
        finally:
            self._remove_profile()

    def _remove_profile(self) -> None:
        shutil.rmtree(self._profile, ignore_errors=True)

    # To look.

    def check(self, is_so: object, what: str) -> None:
        self.checks += 1
        assert is_so, what

    def until(self, condition: Callable[[], object], what: str) -> Any:
        """What it returns once that is true; counts as a check."""
        end = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
            time.sleep(0.1)
        self.checks += 1
        return found

    def script(self, text: str, *arguments: Any) -> Any:
        return self.driver.execute_script(text, *arguments)

    def text(self, selector: str) -> str:
        """All text there, hidden or not; nothing where there is no such element."""
        found = self.script("return document.querySelector(arguments[0])?.textContent", selector)
        return found or ""

    def texts(self, selector: str) -> list[str]:
        found = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
        return list(self.script(found, selector))

    def focused(self) -> str:
        """The id of what has the keyboard, or else its key, or else its name."""
        at = "document.activeElement"
        return str(self.script(f"return {at}.id || {at}.dataset?.key || {at}.tagName"))

    def is_open(self, dialog: str) -> bool:
        return bool(self.script("return document.getElementById(arguments[0]).open", dialog))

    def width(self) -> int:
        """How wide the page is, beside what a dialog over it needs."""
        wide = "return Math.max(document.documentElement.scrollWidth, "
        wide += "...[...document.querySelectorAll('dialog[open]')].map((one) => one.scrollWidth))"
        return int(self.script(wide))

    def low_contrasts(self, least: float = 4.5) -> tuple[int, list[Any]]:
        """How many texts were looked at, and those with less contrast."""
        found = self.script(CONTRASTS, least)
        return found["seen"], found["low"]

    # To act.

    def open(self, url: str) -> None:
        self.driver.get(url)

    def press(self, *keys: str) -> None:
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def click(self, selector: str) -> None:
        self.driver.find_element(By.CSS_SELECTOR, selector).click()

    def fill(self, selector: str, text: str) -> None:
        field = self.driver.find_element(By.CSS_SELECTOR, selector)
        field.clear()
        field.send_keys(text)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        """As the system would: light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def picture(self, path: Path) -> None:
        """What is seen, as a PNG of few colours."""
        self.driver.save_screenshot(str(path))
        from PIL import Image  # with matplotlib

        with Image.open(path) as image:
            image.convert("RGB").quantize(96).save(path, optimize=True)

    # What it logged since the last time.

    def errors(self) -> list[str]:
        """Messages of its own console, of warnings and worse."""
        found = self.driver.get_log("browser")
        return [one["message"] for one in found if one["level"] in ("SEVERE", "WARNING")]

    def requested(self) -> list[str]:
        """The URL of each request that the page sent."""
        messages = (
            json.loads(one["message"])["message"] for one in self.driver.get_log("performance")
        )
        sent = (one for one in messages if one["method"] == "Network.requestWillBeSent")
        return [str(one["params"]["request"]["url"]) for one in sent]


__all__ = ["Chromium", "Keys"]
