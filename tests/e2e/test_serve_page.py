"""The server's chat page in a real browser."""

import pytest

from tests.browser import CHROMIUM, browser
from tests.serving import chat_model, random_model, served
from tests.unit.generation.small_models import FLURKA

pytestmark = [
    pytest.mark.second,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)"),
]

READY = "!document.getElementById('send').disabled && document.getElementById('facts').textContent"


def fill(page, **values):
    for name, value in values.items():
        page.run(f"void (document.getElementById('{name}').value = {value!r})")


def click(page, name):
    page.run(f"document.getElementById('{name}').click()")


def shown(page, kind):
    return page.run(f"[...document.querySelectorAll('.message.{kind}')].map((box) => box.textContent)")


def test_a_chat_can_be_stopped_and_continued_after_a_reload(tmp_path):
    with served(chat_model(), max_new_tokens=1_000_000) as server, browser(tmp_path) as page:
        page.open(server.url)
        page.until(READY)
        assert page.run("document.getElementById('model').textContent") == "small"
        fill(page, prompt="hello", tokens="12", seed="1")
        click(page, "send")
        page.until(f"{READY}.includes('12 written')")
        expected = server.client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "hello"}],
            seed=1,
            max_tokens=12,
            temperature=0.8,
        )
        first = expected.choices[0].message.content
        assert (shown(page, "user"), shown(page, "assistant")) == (["hello"], [first])

        fill(page, prompt="tell me all", tokens="1000000")
        click(page, "send")
        page.until("[...document.querySelectorAll('.message.assistant')].at(-1).textContent.length > 20")
        assert server.get("/health")["running"] == 1
        click(page, "stop")
        page.until(READY)
        assert shown(page, "error") == ["stopped; the session is where it was before"]
        while server.get("/health")["running"]:
            pass

        page.open(f"{server.url}/?again")
        page.until(READY)
        assert shown(page, "assistant")[0] == first, "a reload shows the conversation"
        fill(page, prompt="and now?", tokens="5")
        click(page, "send")
        page.until(f"{READY}.includes('5 written')")
        read = len(f"user: hello\nassistant: {first}")
        assert f"{read} kept by the session" in page.run(READY)
        click(page, "new-session")
        page.until(f"({READY}) === 'ready'")
        assert server.get("/v1/sessions")["data"] == []


def test_the_page_completes_texts_without_a_template_and_asks_for_the_key(tmp_path):
    opened = random_model(attention=FLURKA)
    with served(opened, api_key="right") as server, browser(tmp_path) as page:
        page.open(server.url)
        page.until(READY)
        assert page.run("document.getElementById('mode').value") == "completion"
        fill(page, prompt="Once <b>upon</b>", tokens="7", seed="3")
        click(page, "send")
        page.until(READY)
        assert shown(page, "error") == ["the API key is missing or wrong; send Authorization: Bearer KEY"]
        fill(page, prompt="Once <b>upon</b>", key="right")
        click(page, "send")
        page.until(f"{READY}.includes('7 written')")
        response = server.client.completions.create(
            model="small", prompt="Once <b>upon</b>", seed=3, max_tokens=7, temperature=0.8
        )
        assert shown(page, "text")[-1] == "Once <b>upon</b>" + response.choices[0].text
