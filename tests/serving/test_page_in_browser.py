"""The page at ``/`` in a headless Chromium, where there is one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

import eecore
from browser import Page, browser, find_browser
from eecore.serving.settings import ServerSettings, service_of
from servers import listening

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium")

HOSTILE = """# Title <img src=x onerror="document.title='broken'">

Some **bold** text, [a link](https://example.org/a) and [none](javascript:alert(1)).

```python
print("<b>")
```
"""
FAKE = """
window.asked = [];
window.made = 0;
window.fetch = async (path, { body, signal }) => {
  asked.push(JSON.parse(body));
  const pieces = PIECES;
  const stream = new ReadableStream({
    async start(control) {
      signal.addEventListener("abort", () => control.error(new DOMException("", "AbortError")));
      const put = (data) => control.enqueue(new TextEncoder().encode(`data: ${data}\\n\\n`));
      for (const piece of pieces) {
        const delta = typeof piece === "string" ? { content: piece } : piece;
        put(JSON.stringify({ choices: [{ delta, tokens: Object.values(delta),
          exit_layers: [LAYER ?? (made += 1) % 2 * 12], confidences: [null],
          finish_reason: null }] }));
      }
      if (ENDS) {
        put(JSON.stringify({ choices: [], usage: USAGE }));
        put("[DONE]");
        control.close();
      }
    },
  });
  const sent = asked.at(-1);
  if (!sent.stream) return new Response(JSON.stringify({ usage: USAGE }));
  return STATUS === 200 ? new Response(stream)
    : new Response(JSON.stringify({ error: { message: "prompt: too long" } }), { status: STATUS });
};
"""
USAGE: dict[str, Any] = {
    "contract": "auto (at most 8 drafts): lossless",
    "num_layers": 12,
    "layers_per_token": 13.5,
    "tokens_per_s": 84.0,
    "full_depth_tokens_per_s": 40.0,
    "speedup": 2.1,
    "lossless": True,
    "drafted": 4,
    "accepted": 3,
    "full_passes": 17,
}
PHONE, DESKTOP = (390, 800), (1200, 850)
ENDED = "document.getElementById('stop').hidden"
LAST = "[...document.querySelectorAll('.answer')].at(-1)"


@pytest.fixture(scope="module")
def address(intent: eecore.Model) -> Iterator[str]:
    with listening(service_of(intent, ServerSettings())) as where:
        yield where


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(opened: Page, address: str) -> Page:
    """The page as a visitor finds it."""
    opened.said.clear()
    opened.size(*DESKTOP)
    opened.open("about:blank")
    opened.open(f"{address}/")
    opened.until("!!document.querySelector('#prompts button')")
    return opened


def fake(
    page: Page,
    pieces: list[Any],
    *,
    ends: bool = True,
    layer: int | None = 12,
    status: int = 200,
    **usage: Any,
) -> None:
    """Give the page other answers than the server's; without ``layer`` every other token is
    drafted.
    """
    said = {"completion_tokens": 21, "eecore": {**USAGE, **usage}}
    script = FAKE.replace("PIECES", json.dumps(pieces)).replace("USAGE", json.dumps(said))
    script = script.replace("ENDS", json.dumps(ends)).replace("LAYER", json.dumps(layer))
    page.run(script.replace("STATUS", str(status)))


def ask(page: Page, text: str) -> None:
    page.run("document.getElementById('prompt').focus()")
    page.type(text)
    page.press("Enter")


def text_of(page: Page, selector: str) -> str:
    return str(page.run(f"document.querySelector({json.dumps(selector)}).innerText"))


def answered(page: Page) -> None:
    """Wait for the end of an answer."""
    page.until(f"!!{LAST}?.querySelector('.told span') && {ENDED}")


def choose(page: Page, menu: str, mode: str) -> None:
    page.run(
        f"{{ const menu = document.getElementById({menu!r}); menu.value = {mode!r};"
        "menu.dispatchEvent(new Event('change')); }"
    )


def test_a_prompt_that_is_clicked_is_answered(page: Page, intent: eecore.Model) -> None:
    choose(page, "mode", "speculative:3,6")
    prompt = text_of(page, "#prompts button")
    page.run("document.querySelector('#prompts button').click()")
    answered(page)
    (expected,) = eecore.generate(intent, prompt, exit="full", max_tokens=64)
    assert text_of(page, ".text") == expected.text
    assert "tokens/s" in text_of(page, ".told:last-child")
    assert re.search(
        r"\d+ passes of all 12 layers for \d+ tokens", text_of(page, ".told:last-child")
    )
    assert page.run("document.querySelectorAll('.text .drafted').length") > 0
    assert text_of(page, "#legend") == "drafted, and verified by all 12 layers"
    assert "Answered" in page.run("document.getElementById('status').textContent")
    assert page.run("document.activeElement.id") == "prompt"
    assert page.said == []


def test_a_thought_is_folded_and_goes_back(page: Page) -> None:
    thought = [{"reasoning_content": "Which"}, {"reasoning_content": " <b>door?"}]
    fake(page, [*thought, "one", " two"], layer=None)
    ask(page, "hello")
    answered(page)
    assert page.run(f"{LAST}.querySelector('.thought').open") is False
    assert text_of(page, ".thought summary") == "Thought"
    assert page.run(f"{LAST}.querySelector('.thought div').textContent") == "Which <b>door?"
    assert text_of(page, ".text") == "one two"
    page.run("document.querySelector('.thought summary').click()")
    assert text_of(page, ".thought div") == "Which <b>door?"
    ask(page, "again")
    answered(page)
    remembered = page.run("asked.at(-1).messages.filter(m => m.reasoning_content).length")
    assert remembered == page.run("Number(asked.at(-1).messages.length > 1)")
    assert page.said == []


def test_an_answer_without_a_thought_has_no_fold(page: Page) -> None:
    fake(page, ["one"])
    ask(page, "hello")
    answered(page)
    assert page.run(f"{LAST}.querySelector('.thought').hidden")


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_a_race_has_a_winner_bars_and_a_difference(page: Page, size: tuple[int, int]) -> None:
    page.size(*size)
    page.run("document.getElementById('race').click()")
    ask(page, "turn the kitchen lights down to 20 percent")
    page.until(f"!!document.querySelector('.verdict') && {ENDED}")
    texts = page.run("[...document.querySelectorAll('.answer .text')].map(e => e.innerText)")
    assert len(texts) == 2
    assert texts[0] == texts[1] != ""
    assert text_of(page, ".verdict").endswith("Both wrote the same text.")
    names = page.run("[...document.querySelectorAll('.answer h3')].map(e => e.innerText)")
    assert names == ["Auto", "Full depth"]
    rows = page.run("[...document.querySelectorAll('.pace')].map(e => e.innerText.split('\\n'))")
    speeds = [int(row[-1].removesuffix(" tokens/s")) for row in rows]
    bars = page.run(
        "[...document.querySelectorAll('.bar i')].map(e => +e.style.getPropertyValue('--share'))"
    )
    assert max(bars) == 1
    assert min(bars) == pytest.approx(min(speeds) / max(speeds), rel=0.02)
    winners = page.run("[...document.querySelectorAll('.winner')].map(e => e.innerText)")
    if min(bars) < 0.95:
        fastest = names[speeds.index(max(speeds))]
        assert [text.split("\n")[0] for text in winners] == [fastest]
        assert text_of(page, ".verdict").startswith(f"{fastest} wins: ")
    assert page.run("document.documentElement.scrollWidth") <= size[0]
    assert page.said == []


def test_text_of_a_model_becomes_no_markup(page: Page) -> None:
    fake(page, [HOSTILE[i : i + 7] for i in range(0, len(HOSTILE), 7)])
    ask(page, "hello")
    answered(page)
    assert page.run(f"{LAST}.querySelector('.text').querySelectorAll('img, b, a').length") == 0
    assert text_of(page, ".text h3") == HOSTILE.splitlines()[0][2:]
    assert text_of(page, ".text strong") == "bold"
    assert "[none](javascript:alert(1))" in text_of(page, ".text")
    assert text_of(page, ".text pre") == 'print("<b>")'
    assert page.run("document.title") == "intent · eecore"


def test_an_answer_can_be_stopped(page: Page) -> None:
    fake(page, ["one", " two"], ends=False)
    ask(page, "hello")
    page.until(f"{LAST}?.querySelector('.text').innerText === 'one two'")
    assert page.run(
        "!document.getElementById('stop').hidden && document.getElementById('send').hidden"
    )
    page.press("Escape")
    page.until(ENDED)
    assert text_of(page, ".told span") == "Stopped"
    assert text_of(page, ".text") == "one two"


def test_the_settings_are_sent(page: Page) -> None:
    page.run("document.getElementById('adjust').click()")
    assert page.run("document.activeElement.id") == "system"
    page.type("be brief")
    page.run("document.getElementById('temperature').value = '0.5'")
    page.press("Escape")
    assert page.run("document.getElementById('settings').open") is False
    fake(page, ["yes"])
    ask(page, "hello")
    answered(page)
    (asked,) = page.run("asked")
    assert [each["role"] for each in asked["messages"]] == ["system", "user"]
    assert asked["messages"][0]["content"] == "be brief"
    assert (asked["temperature"], asked["exit"]) == (0.5, "auto")
    assert asked["max_completion_tokens"] == 128  # half of the context, where that is less than 512


def test_a_refusal_is_shown(page: Page) -> None:
    fake(page, [], status=400)
    ask(page, "hello")
    page.until(f"!!document.querySelector('.error') && {ENDED}")
    assert text_of(page, ".error") == "prompt: too long"
    limits = [each.get("max_completion_tokens") for each in page.run("asked")]
    assert limits == [128, None]  # there may be less room than the limit
