"""The page's feed: what it says, and that it costs nothing when nobody looks; the page itself in a real browser."""

import json
import os
import threading
from pathlib import Path

import browser
import pytest
from server_fixture import make_llm, serving

from scheduler import Sequence, Step
from serving.live import ranges, step_row

LONG = {"prompt": "the", "max_tokens": 150, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def server():
    llm = make_llm(num_blocks=60, max_num_seqs=4, max_num_batched_tokens=24, max_model_len=320)
    with serving({"tiny": llm}) as running:
        yield running


def test_ranges_keep_the_order_of_use():
    assert ranges([4, 5, 6, 9, 3, 4]) == [[4, 3], [9, 1], [3, 2]] and ranges([]) == []


def test_a_step_as_a_row():
    prompt, decoding, several = (Sequence([1] * 8, 9, id=name) for name in "abc")
    decoding.num_computed, several.num_computed = 8, 9
    row = step_row(Step(5, [(prompt, 8), (decoding, 1), (several, 3)], copies=[(1, 2)], preempted=[prompt]), 17)
    assert row["entries"] == [["a", "prefill", 8], ["b", "decode", 1], ["c", "several", 3]]
    assert (row["number"], row["copies"], row["preempted"]) == (17, 1, ["a"])


class Watcher(threading.Thread):
    """Reads /live/events until told to stop."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.snapshots, self.stop, self.first = server, [], threading.Event(), threading.Event()
        self.start()
        assert self.first.wait(20)

    def run(self) -> None:
        with self.server.http.stream("GET", "/live/events") as answer:
            for line in answer.iter_lines():
                if line:
                    self.snapshots.append(json.loads(line.removeprefix("data: ")))
                    self.first.set()
                if self.stop.is_set():
                    return


def test_watchers_see_every_step_and_leave_nothing_behind(server):
    watched = server.in_engine(lambda: vars(server.llm().scheduler).get("schedule"))
    assert watched is None
    watchers = [Watcher(server), Watcher(server)]
    server.complete(**LONG, n=3)
    server.wait_idle()
    for watcher in watchers:
        seen = len(watcher.snapshots)
        for _ in range(2000):  # one more, with everybody gone
            if len(watcher.snapshots) > seen + 1:
                break
            threading.Event().wait(0.005)
        watcher.stop.set()
        watcher.join(20)
        check(watcher.snapshots)
    for _ in range(2000):
        if not (watchers := server.in_engine(lambda: server.app.state.live.recorders["tiny"].watchers)):
            break
        threading.Event().wait(0.005)
    assert watchers == 0
    assert server.in_engine(lambda: "schedule" not in vars(server.llm().scheduler))


def check(snapshots: list[dict]) -> None:
    rows = [row for snapshot in snapshots for row in snapshot["steps"]]
    assert [row["number"] for row in rows] == list(range(1, len(rows) + 1))
    assert sum(n for row in rows for _, kind, n in row["entries"] if kind != "prefill") >= 3 * 149
    assert any(row["preempted"] for row in rows), "three long answers do not fit this pool"
    for snapshot in snapshots:
        stats, refs = snapshot["stats"], snapshot["refs"]
        held = {b for s in snapshot["sequences"] for first, n in s["blocks"] for b in range(first, first + n)}
        kept = {b for node in snapshot["tree"] for first, n in node["blocks"] for b in range(first, first + n)}
        assert len(refs) == stats["total"] + 1 and refs[1:].count("0") == stats["free"]
        assert all(refs[block] != "0" for block in held | kept)
        assert len(held) == stats["live"] and len(kept - held) == stats["cached"]
    last = snapshots[-1]
    assert not last["sequences"] and last["tree"][0]["label"] == "root" and len(last["tree"]) > 1


def test_an_unknown_model_is_not_watched(server):
    assert server.http.get("/live/events", params={"model": "no"}).status_code == 404


def test_the_page_is_one_file_that_asks_nobody_else(server):
    answer = server.http.get("/")
    assert (
        answer.headers["content-type"].startswith("text/html") and "'self'" in answer.headers["content-security-policy"]
    )
    for sign in ("http://", "https://", "<script src", "@import", "url("):
        assert sign not in answer.text


@pytest.mark.skipif(browser.BINARY is None, reason="needs a browser: install chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_chats_and_sees_blocks_change(server, tmp_path, dark):
    page = browser.Browser(tmp_path)
    try:
        page.open(server.url + "/", dark)
        page.wait_for("document.getElementById('figures').children.length > 5")
        page.run("document.getElementById('limit').value = 40; document.getElementById('crowd').click()")
        page.wait_for("document.querySelectorAll('#sequences tr').length > 0")
        owned = "latest.sequences.length && latest.stats.live > 0 && steps.length > 3"
        page.wait_for(owned)
        page.wait_for("latest.sequences.length === 0 && document.querySelectorAll('#tree li').length > 1")
        page.run("document.getElementById('text').value = 'hello'; send()")
        page.wait_for("document.querySelectorAll('#log p').length === 10 && running.size === 0")
        said = page.run("[...document.querySelectorAll('#log p span')].map((span) => span.textContent)")
        assert said[8] == "hello" and all(said)
        page.run("document.getElementById('blocks').focus()")
        for kind in ("rawKeyDown", "keyUp"):
            page.send(
                "Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39
            )
        assert page.run("document.getElementById('blocks-said').textContent").startswith("Block 1:")
        background = page.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 3 * 128) == dark
        names = page.run("[...document.querySelectorAll('button, input, textarea, select')].filter((e) => "
                         "!e.labels?.length && !e.textContent.trim()).map((e) => e.id)")  # fmt: skip
        assert names == [], "controls without a name for a screen reader"
        if folder := os.environ.get("VITRINE_SCREENSHOTS"):
            page.screenshot(Path(folder) / f"live-{'dark' if dark else 'light'}.png")
        errors = [text for text in page.complaints() if '"level": "verbose"' not in text]
        assert not errors and all(url.startswith((server.url, "data:")) for url in page.requested())
    finally:
        page.close()
