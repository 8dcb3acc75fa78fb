"""The page at ``/`` in a headless Chromium, where there is one."""

from __future__ import annotations

import json
from collections.abc import Iterator

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
window.fetch = async (path, { body, signal }) => {
  asked.push(JSON.parse(body));
  const pieces = PIECES;
  const stream = new ReadableStream({
    async start(control) {
      signal.addEventListener("abort", () => control.error(new DOMException("", "AbortError")));
      const put = (data) => control.enqueue(new TextEncoder().encode(`data: ${data}\\n\\n`));
      for (const piece of pieces) {
        put(JSON.stringify({ choices: [{ delta: { content: piece }, tokens: [piece],
          exit_layers: [LAYER], confidences: [null], finish_reason: null }] }));
      }
      if (ENDS) {
        put(JSON.stringify({ choices: [], usage: USAGE }));
        put("[DONE]");
        control.close();
      }
    },
  });
  return STATUS === 200 ? new Response(stream)
    : new Response(JSON.stringify({ error: { message: "prompt: too long" } }), { status: STATUS });
};
"""
USAGE = {
    "contract": "auto (at most 8 drafts): lossless",
    "num_layers": 12,
    "layers_per_token": 13.5,
    "tokens_per_s": 84.0,
    "full_depth_tokens_per_s": 40.0,
    "speedup": 2.1,
    "lossless": True,
    "drafted": 4,
    "accepted": 3,
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
    page: Page, pieces: list[str], *, ends: bool = True, layer: int = 12, status: int = 200
) -> None:
    """Give the page other answers than the server's."""
    script = FAKE.replace("PIECES", json.dumps(pieces)).replace(
        "USAGE", json.dumps({"eecore": USAGE})
    )
    script = script.replace("ENDS", json.dumps(ends)).replace("LAYER", str(layer))
    page.run(script.replace("STATUS", str(status)))


def ask(page: Page, text: str) -> None:
    page.run("document.getElementById('prompt').focus()")
    page.type(text)
    page.press("Enter")


def text_of(page: Page, selector: str) -> str:
    return str(page.run(f"document.querySelector({json.dumps(selector)}).innerText"))


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_greets_and_fits(page: Page, size: tuple[int, int], theme: str) -> None:
    page.size(*size, theme)
    assert text_of(page, "#hello") == "Tell a home what to do."
    assert page.run("document.querySelectorAll('#prompts button').length") == 3
    assert page.run("document.documentElement.scrollWidth") <= size[0]
    assert page.run("document.activeElement.id") == "prompt"
    legend = page.run("document.getElementById('legend').getBoundingClientRect().toJSON()")
    assert legend["right"] <= size[0]
    assert text_of(page, "#legend").split("\n") == [
        "drafted, and verified by all 12 layers",
        "computed by all 12 layers",
    ]
    bright = page.run("getComputedStyle(document.documentElement).backgroundColor")
    assert bright == ("rgb(252, 251, 248)" if theme == "light" else "rgb(27, 29, 34)")
    assert page.said == []


def test_a_prompt_that_is_clicked_is_answered(page: Page, intent: eecore.Model) -> None:
    prompt = text_of(page, "#prompts button")
    page.run("document.querySelector('#prompts button').click()")
    page.until(f"!!document.querySelector('.told button') && {ENDED}")
    (expected,) = eecore.generate(intent, prompt, exit="full", max_tokens=64)
    assert text_of(page, ".text") == expected.text
    assert "tokens/s" in text_of(page, ".told")
    assert "(full depth 12)" in text_of(page, ".told")
    classes = page.run(
        "[...new Set([...document.querySelectorAll('.text span')].map(s => s.className))]"
    )
    assert set(classes) <= {"drafted", "whole"}
    assert "Answered" in page.run("document.getElementById('status').textContent")
    assert page.run("document.activeElement.id") == "prompt"
    assert page.said == []


def test_a_mode_that_exits_early_has_a_scale(page: Page) -> None:
    page.run(
        "{ const menu = document.getElementById('mode'); menu.value = 'calibrated:softmax';"
        "menu.dispatchEvent(new Event('change')); }"
    )
    assert text_of(page, "#legend").split() == "left after layer 3 after all 12".split()
    ask(page, "turn off all the lights in the bedroom")
    page.until(f"!!document.querySelector('.told button') && {ENDED}")
    titles = page.run("[...document.querySelectorAll('.text span')].map(s => s.title)")
    assert any(title.startswith("left after layer") for title in titles)
    assert not any("drafted" in title for title in titles)


def test_a_race(page: Page) -> None:
    page.run("document.getElementById('race').click()")
    ask(page, "turn the kitchen lights down to 20 percent")
    page.until(f"!!document.querySelector('.verdict') && {ENDED}")
    texts = page.run("[...document.querySelectorAll('.answer .text')].map(e => e.innerText)")
    assert len(texts) == 2
    assert texts[0] == texts[1] != ""
    assert text_of(page, ".verdict").endswith("Both wrote the same text.")
    names = page.run("[...document.querySelectorAll('.lane h3')].map(e => e.innerText)")
    assert names == ["Auto", "Full depth"]
    page.size(*PHONE)
    assert page.run("document.documentElement.scrollWidth") <= PHONE[0]
    assert page.said == []


def test_text_of_a_model_becomes_no_markup(page: Page) -> None:
    fake(page, [HOSTILE[i : i + 7] for i in range(0, len(HOSTILE), 7)])
    ask(page, "hello")
    page.until(f"!!document.querySelector('.told button') && {ENDED}")
    assert page.run(f"{LAST}.querySelector('.text').querySelectorAll('img, b').length") == 0
    assert text_of(page, ".text h1") == HOSTILE.splitlines()[0][2:]
    assert text_of(page, ".text strong") == "bold"
    assert page.run("[...document.querySelectorAll('.text a')].map(a => a.href)") == [
        "https://example.org/a"
    ]
    assert text_of(page, ".text pre") == 'print("<b>")'
    assert text_of(page, ".code .bar").split() == ["python", "Copy"]
    assert page.run("document.title") == "intent · eecore"


def test_what_was_saved_is_said(page: Page) -> None:
    fake(page, ["one", " two"], layer=0)
    ask(page, "hello")
    page.until(f"!!document.querySelector('.told button') && {ENDED}")
    told = text_of(page, ".told")
    assert "2.1× full depth, same text" in told
    assert "84 tokens/s (full depth 40)" in told
    assert "13.5 layers a token (full depth 12)" in told
    assert "3 of 4 drafts accepted" in told
    title = page.run("document.querySelector('.text span').title")
    assert title == "drafted, and verified by all 12 layers"


def test_an_answer_can_be_stopped(page: Page) -> None:
    fake(page, ["one", " two"], ends=False)
    ask(page, "hello")
    page.until(f"{LAST}?.querySelector('.text').innerText === 'one two'")
    assert page.run(
        "!document.getElementById('stop').hidden && document.getElementById('send').hidden"
    )
    page.press("Escape")
    page.until(ENDED)
    assert text_of(page, ".told b") == "Stopped"
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
    page.until(f"!!document.querySelector('.told button') && {ENDED}")
    (asked,) = page.run("asked")
    assert [each["role"] for each in asked["messages"]] == ["system", "user"]
    assert asked["messages"][0]["content"] == "be brief"
    assert (asked["temperature"], asked["exit"]) == (0.5, "auto")
    assert asked["max_completion_tokens"] == 128  # half of the context, where that is less than 512


def own(page: Page, mode: str) -> None:
    page.run(
        f"{{ const own = document.getElementById('own'); own.value = {json.dumps(mode)};"
        "own.dispatchEvent(new Event('change')); }"
    )


def test_another_mode_is_checked_and_offered(page: Page) -> None:
    page.run("document.getElementById('adjust').click()")
    own(page, "confident:7")
    page.until("!!document.getElementById('own-error').textContent")
    assert "7" in text_of(page, "#own-error")
    own(page, "lookup:4")
    page.until("document.getElementById('mode').value === 'lookup:4'")
    assert text_of(page, "#own-error") == ""
    assert text_of(page, ".pick span") == "Text lookup"
    assert "drafted, and verified by all 12 layers" in text_of(page, "#legend")


def test_a_refusal_is_shown(page: Page) -> None:
    fake(page, [], status=400)
    ask(page, "hello")
    page.until(f"!!document.querySelector('.error') && {ENDED}")
    assert text_of(page, ".error") == "prompt: too long"
    limits = [each.get("max_completion_tokens") for each in page.run("asked")]
    assert limits == [128, None]  # there may be less room than the limit
