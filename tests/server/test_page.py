"""The built-in page: nothing from outside, usable without a mouse or a screen, the cache as it is, and no way around the key."""

import asyncio
import base64
import hashlib
import http.client
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

from optimized import LLM, AsyncLLM, SamplingParams
from optimized.checkpoint import Checkpoint
from optimized.cli.live_map import draw, live_map
from optimized.server.errors import RequestError
from optimized.server.front import Front
from optimized.server.limits import Limits
from optimized.server.page import MAX_VIEWERS, LiveMap, words
from spec.picture import FILLED, Block, Map, map_without_tokens, memory_map
from tests.server.conftest import RunningServer, running, waited_for


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text of styles and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, str] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        if self._open in ("style", "script"):
            self.raw[self._open] = self.raw.get(self._open, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.found if tag in tags]


@pytest.fixture(scope="module")
def server(tiny: Checkpoint) -> Iterator[RunningServer]:
    started = RunningServer(LLM(tiny, block_size=4, max_num_seqs=16), Limits(), front=Front(renderer=live_map()))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def page(server: RunningServer) -> Elements:
    answer = server.ask("GET", "/")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    return Elements(answer.body.decode())


class Viewer:
    """A browser that looks at the map, and puts it together as the page does."""

    def __init__(self, server: RunningServer, headers: dict[str, str] | None = None) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        self.connection.request("GET", "/map", headers=headers or {})
        self.response = self.connection.getresponse()
        self.pieces: list[str] = []
        self.first: dict[str, Any] = {}

    def next(self) -> dict[str, Any]:
        assert self.response.status == 200
        while not (line := self.response.readline()).startswith(b"data: "):
            assert line, "the stream has ended"
        news: dict[str, Any] = json.loads(line[6:])
        self.first = self.first or news
        self.pieces = [news["pieces"].get(str(i)) or self.pieces[i] for i in range(news["count"])]
        return news

    def close(self) -> None:
        self.response.close()
        self.connection.close()


@pytest.fixture
def look(server: RunningServer) -> Iterator[Callable[[], Viewer]]:
    """Look at the map. Who looked before has left a while before the server sees it, so that there is a place."""
    viewers: list[Viewer] = []

    def gets_in() -> bool:
        viewers.append(Viewer(server))
        return viewers[-1].response.status == 200

    def look() -> Viewer:
        assert waited_for(gets_in)
        return viewers[-1]

    yield look
    for viewer in viewers:
        viewer.close()


def test_the_page_asks_nobody_but_its_server(server: RunningServer, page: Elements) -> None:
    for _, attributes in page.found:
        for name in ("src", "href", "action", "data", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:,")), (name, value)
    assert "url(" not in page.raw["style"].replace("url(#", "") and "@import" not in page.raw["style"]
    assert re.findall(r"https?://[^\"'\s]+", page.raw["script"]) == ["http://www.w3.org/2000/svg"]
    policy = server.ask("GET", "/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.raw[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    # What a policy of hashes would not let run.
    assert not [a for _, attributes in page.found for a in attributes if a.startswith("on") or a == "style"]


def test_the_page_can_be_used_without_a_mouse_or_a_screen(page: Elements) -> None:
    assert page.all("html") == [{"lang": "en"}] and len(page.all("h1")) == 1
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    labelled = {label["for"] for label in page.all("label")}
    assert {control["id"] for control in page.all("input", "textarea")} == labelled
    for _, attributes in page.found:
        for name in ("aria-labelledby", "aria-describedby"):
            assert set((attributes.get(name) or "").split()) <= set(ids)
    roles = {attributes["role"] for _, attributes in page.found if "role" in attributes}
    assert roles == {"log", "status", "region", "img"} and page.all("main") and page.all("header")
    assert all("aria-labelledby" in section for section in page.all("section"))
    assert all(button.get("type") in ("submit", "button") for button in page.all("button"))
    assert page.all("a") == [{"class": "skip", "href": "#question"}]
    # What scrolls can be reached with the keyboard, and what is focused is seen.
    assert [a["id"] for _, a in page.found if a.get("tabindex") == "0"] == ["log", "frame"]
    assert ":focus-visible" in page.raw["style"] and "prefers-color-scheme: dark" in page.raw["style"]


def test_the_script_uses_what_the_page_has(page: Elements) -> None:
    ids = {attributes["id"] for _, attributes in page.found if "id" in attributes}
    assert set(re.findall(r'at\("([a-z-]+)"\)', page.raw["script"])) <= ids


def test_the_map_is_the_engine_and_only_what_changed_is_sent(server: RunningServer, look: Callable[[], Viewer]) -> None:
    viewer = look()
    assert viewer.response.headers["content-type"].startswith("text/event-stream")
    first = viewer.next()
    assert len(first["pieces"]) == first["count"] and "pattern" in first["defs"]
    assert "Requests that run: none" in first["words"]
    server.complete(prompt="hello hello", n=3, max_tokens=8)
    news = viewer.next()
    assert 0 < len(news["pieces"]) < news["count"] and "defs" not in news
    now = server.engine.llm.look()
    while now.state.running or news["words"] != words(now):
        news, now = viewer.next(), server.engine.llm.look()
    assert tuple(viewer.pieces) == draw(now.state).pieces
    assert sum(news["slots"].values()) == server.engine.llm.config.num_slots
    assert "cached and held by nobody: 0" not in news["words"]


def test_the_map_shows_who_shares_and_who_waits_and_nobodys_tokens(tiny: Checkpoint) -> None:
    llm = LLM(tiny, block_size=4, max_num_seqs=3, num_gpu_blocks_override=32)
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    llm.add_request("a", "a prompt of several blocks", params)
    llm.add_request("b", "again", SamplingParams(max_tokens=4))
    for _ in range(6):
        llm.step()
    look = llm.look()
    assert "Requests that wait: 1" in words(look) and "of these shared: 0" not in words(look)
    seen: Map = map_without_tokens(look.state)
    blocks: list[Block] = [block for block in seen.blocks if block.held]
    assert {look for block in blocks for look in block.slots} <= {FILLED, "_", "."}
    assert [block.label for block in seen.blocks] == [block.label for block in memory_map(look.state).blocks]
    assert "url(#kvfilm)" in "".join(draw(look.state).pieces)  # hatched: shared
    told = [line.text for line in seen.lines if line.name.startswith("seq")]
    assert told and all(re.fullmatch(r"computed \d+ of \d+   \d+ blocks", text) for text in told)


def test_only_so_many_look_and_who_leaves_makes_room(server: RunningServer, look: Callable[[], Viewer]) -> None:
    viewers = [look() for _ in range(MAX_VIEWERS)]
    assert {viewer.next()["count"] for viewer in viewers} == {viewers[0].first["count"]}
    refused = server.ask("GET", "/map")
    assert (refused.status, refused.json["error"]["code"]) == (503, "too_many_viewers")
    for viewer in viewers:
        viewer.close()
    assert look().next()["count"]


def test_viewers_of_one_moment_are_counted_too(tiny: Checkpoint) -> None:
    async def look() -> list[bool]:
        engine = AsyncLLM(LLM(tiny, block_size=4, max_num_seqs=4))
        live = LiveMap(engine, live_map())
        asked = [live.events(lambda: False) for _ in range(MAX_VIEWERS + 3)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        for each in found:
            if not isinstance(each, BaseException):
                await each.aclose()
        await (await live.events(lambda: False)).aclose()  # those who left have made room
        await engine.shutdown()
        return [isinstance(each, RequestError) for each in found]

    assert asyncio.run(look()) == [False] * MAX_VIEWERS + [True] * 3


def test_the_page_is_behind_the_key_and_a_browser_asks_for_it(tiny: Checkpoint) -> None:
    server = RunningServer(
        LLM(tiny, block_size=4, max_num_seqs=4), Limits(), ("secret",), front=Front(renderer=live_map())
    )
    try:
        for path in ("/", "/map"):
            refused = server.ask("GET", path)
            assert refused.status == 401 and refused.headers["www-authenticate"].startswith("Basic ")
            for wrong in ("eA==", "!", base64.b64encode(b"secret:x").decode(), base64.b64encode(b"x:").decode()):
                assert server.ask("GET", path, headers={"authorization": f"Basic {wrong}"}).status == 401
        known = {"authorization": f"Basic {base64.b64encode(b'me:secret').decode()}"}
        assert server.ask("GET", "/", headers=known).status == 200
        assert server.ask("GET", "/v1/models", headers=known).status == 200
        viewer = Viewer(server, known)
        assert viewer.next()["count"]
        viewer.close()
    finally:
        server.stop()


def test_a_viewer_does_not_hold_a_server_that_ends(tiny: Checkpoint) -> None:
    server = RunningServer(LLM(tiny, block_size=4, max_num_seqs=4), Limits(), front=Front(renderer=live_map()))
    viewer = Viewer(server)
    viewer.next()
    server.service.is_draining = True
    assert viewer.response.read() is not None  # it comes to its end
    server.stop()


def test_without_the_page_there_is_none(tiny: Checkpoint) -> None:
    server = running(tiny)
    assert [server.ask("GET", path).status for path in ("/", "/map")] == [404, 404]
    server.stop()
