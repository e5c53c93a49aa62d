"""The server's chat page in a real browser."""

import base64
import re
from pathlib import Path

import openai
import pytest

from megakernel.generation.serving import server as serving
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
        assert shown(page, "assistant") == []
        assert len(server.get("/v1/sessions")["data"]) == 1, "the session can be continued"


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


def text(page, name):
    return page.run(f"document.getElementById('{name}').textContent")


def width(page, name):
    return page.run(f"document.getElementById('{name}').getBoundingClientRect().width")


def test_the_page_shows_the_measured_state_beside_the_counted_softmax_cache_and_the_speed(tmp_path):
    with served(random_model(attention=FLURKA)) as server, browser(tmp_path) as page:
        page.open(server.url)
        page.until(READY)
        assert page.run("document.getElementById('measured').hidden"), "no session, no numbers"
        prompt = "x" * 2000
        fill(page, prompt=prompt, tokens="40", seed="1")
        click(page, "send")
        page.until(f"{READY}.includes('40 written')")
        (session,) = server.get("/v1/sessions")["data"]
        assert session["tokens"] == 2040
        # 2 layers of 2 key heads of size 8, keys and values, float32; the last token is not read yet.
        assert session["softmax_bytes"] == 2 * 2 * 8 * 2 * 4 * 2039
        assert text(page, "state-tokens") == "2,040"
        assert text(page, "state-bytes") == f"{session['bytes'] / 1024:.1f} KiB"
        assert text(page, "softmax-bytes") == "510 KiB"
        assert text(page, "softmax-million") == "244 MiB"
        speed = page.run(f"({session['tokens_per_second']}).toPrecision(3)")
        assert text(page, "speed") == f"{speed} tokens/s"
        ratio = width(page, "state-bar") / width(page, "softmax-bar")
        assert ratio == pytest.approx(session["bytes"] / session["softmax_bytes"], rel=0.05)

        fill(page, prompt=prompt, tokens="40")
        click(page, "send")
        page.until("document.getElementById('state-tokens').textContent === '4,080'")
        (longer,) = server.get("/v1/sessions")["data"]
        assert longer["bytes"] == session["bytes"], "a kernelized state does not grow"
        assert longer["softmax_bytes"] > 2 * session["softmax_bytes"] - 1024
        loaded = page.run("performance.getEntries().map((entry) => entry.name)")
        addresses = [name for name in loaded if "://" in name]
        assert addresses
        assert all(name.startswith(server.url) for name in addresses), "nothing is loaded from elsewhere"
        source = (Path(serving.__file__).with_name("page.html")).read_text()
        assert not re.search(r"https?://|//cdn|@import|url\(", source)


def test_a_saved_session_is_downloaded_deleted_loaded_again_and_continued(tmp_path):
    with served(chat_model()) as server, browser(tmp_path / "profile") as page:
        page.download_into(tmp_path)
        page.open(server.url)
        page.until(READY)
        fill(page, prompt="hello", tokens="12", seed="1")
        click(page, "send")
        page.until(f"{READY}.includes('12 written')")
        (session,) = server.get("/v1/sessions")["data"]
        assert text(page, "saved-count") == "1"
        cells = page.run(
            "[...document.querySelectorAll('#sessions td.number')].map((cell) => cell.textContent)"
        )
        assert cells == [str(session["tokens"]), text(page, "state-bytes"), text(page, "softmax-bytes")]
        button = "document.querySelector('#sessions [aria-label^={}]')"
        page.run(f"void {button.format('Save')}.click()")
        file = tmp_path / f"{session['id']}.safetensors"
        while not file.exists():
            pass
        kept = server.client.get(
            f"/sessions/{session['id']}/state", cast_to=openai.HttpxBinaryResponseContent
        ).content
        assert file.read_bytes() == kept

        page.run(f"void {button.format('Delete')}.click()")
        page.until("document.getElementById('saved-count').textContent === '0'")
        assert server.get("/v1/sessions")["data"] == []
        page.run(
            "{ const files = new DataTransfer(), input = document.getElementById('file');"
            f"files.items.add(new File([Uint8Array.from(atob('{base64.b64encode(kept).decode()}'),"
            "(c) => c.charCodeAt(0))], 'a.safetensors')); input.files = files.files;"
            "input.dispatchEvent(new Event('change')) }"
        )
        page.until("document.getElementById('saved-count').textContent === '1'")
        page.until("document.querySelector('.message.note')")
        assert f"goes on after {session['tokens']} tokens" in shown(page, "note")[0]
        assert text(page, "speed") == "—", "the file does not say how fast its text was written"
        fill(page, prompt="and now?", tokens="5")
        click(page, "send")
        page.until(f"{READY}.includes('5 written')")
        assert f"{session['tokens']} kept by the session" in page.run(READY)


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
def test_two_prompts_to_try_fit_the_model_and_fill_the_field(tmp_path, chat):
    opened = chat_model() if chat else random_model(attention=FLURKA)
    with served(opened) as server, browser(tmp_path) as page:
        page.open(server.url)
        page.until(READY)
        examples = "document.querySelectorAll('#examples button')"
        assert page.run(f"{examples}.length") == 2
        page.run(f"{examples}[0].click()")
        prompt = page.run("document.getElementById('prompt').value")
        assert prompt.endswith("?") if chat else prompt.startswith("import os\n")
        fill(page, tokens="3")
        click(page, "send")
        page.until(f"{READY}.includes('3 written')")
        assert shown(page, "user" if chat else "text")[0].startswith(prompt)
        assert page.run("document.getElementById('examples').hidden"), "a conversation has begun"
