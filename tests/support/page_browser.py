"""A headless browser for tests of pages, and what every page must be: quiet, readable by everyone, at every width."""

from __future__ import annotations

import itertools
import json
import os
import re
import select
import subprocess
from pathlib import Path
from typing import Any

WIDE = 1200
# A page opens in a fraction of a second, a browser on a busy machine in some.
ANSWER_TIMEOUT_S = 120
# WCAG 2.1, 1.4.3 and 1.4.11: text, and everything else that has to be seen.
TEXT_CONTRAST, GRAPHIC_CONTRAST = 4.5, 3.0


class Browser:
    """A headless browser, driven over a pipe by its own protocol; what it complains about is collected."""

    def __init__(self, program: str, folder: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        options += ["--disable-background-networking", "--no-first-run", f"--user-data-dir={folder}"]
        # the protocol is spoken on descriptors 3 and 4
        command = ["bash", "-c", f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}', program, *options, "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], ANSWER_TIMEOUT_S)
            assert ready, f"the browser has not answered for {ANSWER_TIMEOUT_S} s"
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        if "id" not in message:
            self.events.append(message)
        return message

    def open(self, page: Path, width: int = WIDE, scheme: str = "light", media: str = "screen") -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", media=media, features=[feature])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._read()

    def logged(self, url: str) -> str:
        """The first line that a page writes to the console."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while True:
            for event in self.events:
                assert event["method"] != "Runtime.exceptionThrown", event
                if event["method"] == "Runtime.consoleAPICalled":
                    return str(event["params"]["args"][0]["value"])
            self._read()

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def close(self) -> None:
        self._session = None
        self.call("Browser.close")
        self._process.wait(timeout=30)
        os.close(self._out)
        os.close(self._in)


def complaints(browser: Browser) -> list[Any]:
    """Messages of the console, and requests for anything but the page itself."""
    found = [e["params"] for e in browser.events if e["method"] in ("Log.entryAdded", "Runtime.consoleAPICalled")]
    found += [e["params"] for e in browser.events if e["method"] == "Runtime.exceptionThrown"]
    requests = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    return found + requests[1:]


HEADINGS = "[...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(e => Number(e.tagName[1]))"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Elements that break a rule, by the rule.
RULES = {
    "a table has headers with a scope": "[...document.querySelectorAll('th')].filter(e => !e.scope)",
    "a table has headers": "[...document.querySelectorAll('table')].filter(e => !e.querySelector('th'))",
    "a plot is an image with a name": "[...document.querySelectorAll('svg:not([aria-hidden])')]"
    ".filter(e => e.getAttribute('role') !== 'img'"
    " || !e.getAttribute('aria-labelledby').split(' ').every(id => document.getElementById(id)?.textContent))",
    "ids are unique": "[...document.querySelectorAll('[id]')].filter(e => document.getElementById(e.id) !== e)",
    "links lead somewhere": "[...document.querySelectorAll('a')].filter(e => !document.querySelector(e.hash))",
    "summaries can be focused": "[...document.querySelectorAll('summary')].filter(e => e.tabIndex < 0)",
    "what scrolls can be reached by keyboard and has a name": "[...document.querySelectorAll('.scroll')]"
    ".filter(e => e.tabIndex !== 0 || !e.getAttribute('aria-label'))",
}
COLOURS = """(() => {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(%s.map(name => [name, style.getPropertyValue('--' + name).trim()]));
})()"""
TEXTS = ("ink", "soft", "passed", "failed", "other", "link")
GRAPHICS = ("s0", "s1", "s2", "s3", "s4", "s5", "baseline", "axis")


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, as WCAG defines it."""
    assert re.fullmatch("#[0-9a-f]{6}", colour), colour
    channels = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


RENDERED = """[...document.querySelectorAll('body *')].filter(e => e.checkVisibility()
  && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
  .map(e => getComputedStyle(e)[e.closest('svg') ? 'fill' : 'color'])"""


def weak_colours(browser: Browser, is_dark: bool) -> dict[tuple[str, str], float]:
    """Colours of the open page that stand out too little from what they are on, and their contrast."""
    colours = browser.evaluate(COLOURS % json.dumps([*TEXTS, *GRAPHICS, "page", "band"]))
    assert (luminance(colours["page"]) < 0.1) == is_dark
    texts = {(name, ground): contrast(colours[name], colours[ground]) for name in TEXTS for ground in ("page", "band")}
    graphics = {(name, "page"): contrast(colours[name], colours["page"]) for name in GRAPHICS}
    weak = {key: ratio for key, ratio in texts.items() if ratio < TEXT_CONTRAST}
    return weak | {key: ratio for key, ratio in graphics.items() if ratio < GRAPHIC_CONTRAST}


def foreign_text_colours(browser: Browser) -> set[str]:
    """Colours of text on the open page that are not among those that `weak_colours` judges."""
    known = browser.evaluate(COLOURS % json.dumps(TEXTS)).values()
    as_computed = {f"rgb({', '.join(str(int(colour[n : n + 2], 16)) for n in (1, 3, 5))})" for colour in known}
    return set(browser.evaluate(RENDERED)) - as_computed


def plots_with_clear_text(browser: Browser) -> int:
    """The number of plots in the open page; raises AssertionError for text that is cut off or overlaps."""
    boxes = browser.evaluate(
        "[...document.querySelectorAll('svg:not([aria-hidden])')]"
        ".map(s => [s.viewBox.baseVal.width, s.viewBox.baseVal.height,"
        " [...s.querySelectorAll('text')].map(t => { const b = t.getBBox(); return [b.x, b.y, b.width, b.height,"
        " t.textContent]; })])"
    )
    for width, height, texts in boxes:
        for x, y, w, h, text in texts:
            assert x >= 0, text
            assert y >= 0, text
            assert x + w <= width, text
            assert y + h <= height + 1, text
        for (ax, ay, aw, ah, a), (bx, by, bw, bh, b) in itertools.combinations(texts, 2):
            across, down = min(ax + aw, bx + bw) - max(ax, bx), min(ay + ah, by + bh) - max(ay, by)
            assert across <= 0 or down <= 3, (a, b)
    return len(boxes)
