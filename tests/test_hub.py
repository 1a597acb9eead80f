"""The hub: cheap to publish to, the same state for every viewer however slow, and text for whoever asks."""

from __future__ import annotations

import asyncio
import json
import random
import threading

import msgspec
import pytest

from backend import events, fold
from backend.hub import Hub
from backend.texts import Heard, Texts
from tests.scripted_engine import ScriptedEngine


class Viewer:
    """A browser in Python: folds what a hub sends, as assets/live/link.js does."""

    def __init__(self):
        self.state = fold.State()
        self.cursor: int | None = None
        self.texts: dict[int, str] = {}
        self.snapshots = 0
        self.holes = 0

    def take(self, frame: str | bytes) -> None:
        for message in json.loads(frame or "[]"):
            if message["type"] == "text":
                self.texts[message["request"]] = (
                    self.texts.get(message["request"], "")[: message["from"]] + message["text"]
                )
            elif message["type"] == "since":
                self.holes += message["seq"] > self.state.seq
            else:
                self.snapshots += message["type"] == "snapshot"
                if message["type"] not in ("snapshot", "hello") and message["seq"] > self.state.seq:
                    self.state.seq = message["seq"] - 1  # text events in between are not sent
                fold.apply(self.state, events.decode(json.dumps(message)))


def state_of(hub: Hub) -> fold.State:
    """A copy, with the number of the last event that a viewer gets to see left open."""
    copy = msgspec.json.decode(hub.snapshot().state, type=fold.State)
    return without_seq(copy)


def without_seq(state: fold.State) -> fold.State:
    return msgspec.structs.replace(state, seq=0)


def scripted(hub: Hub, **options) -> ScriptedEngine:
    options = {"blocks": 40, "running": 5, "prompt": (5, 40), "output": (3, 20)} | options
    engine = ScriptedEngine(hub.publish, **options)
    engine.hello()
    return engine


class LoopOnPaper:
    """Counts what an event loop is asked to do."""

    def __init__(self):
        self.calls = []

    def call_soon_threadsafe(self, function, *args):
        self.calls.append(function)

    def call_later(self, delay, function, *args):
        self.calls.append(function)


def test_publishing_encodes_nothing_and_wakes_the_loop_once_for_a_whole_step(monkeypatch):
    hub, loop = Hub(), LoopOnPaper()
    hub.attach(loop)
    monkeypatch.setattr(events, "encode", lambda event: pytest.fail("encoded in the engine's thread"))
    engine = scripted(hub)
    engine.top_up(6)
    engine.step()
    assert len(loop.calls) == 1
    monkeypatch.undo()
    loop.calls.pop()()  # on the loop: ask for the pump
    loop.calls.pop()()  # a moment later: pump
    assert hub.read(lambda state: state.totals.steps) == 1
    engine.step()
    assert len(loop.calls) == 1


def test_it_works_without_an_event_loop():
    hub = Hub()
    engine = scripted(hub)
    thread = threading.Thread(target=lambda: [None for _ in engine.run(30)])
    thread.start()
    thread.join()
    assert hub.read(lambda state: state.totals.steps) == 30
    viewer = Viewer()
    viewer.take(hub.frame()[1])
    assert without_seq(viewer.state) == state_of(hub)


def test_a_closed_loop_is_as_good_as_none():
    hub, loop = Hub(), asyncio.new_event_loop()
    hub.attach(loop)
    loop.close()
    engine = scripted(hub)
    engine.top_up(3)
    engine.step()
    assert hub.read(lambda state: state.totals.steps) == 1


@pytest.mark.parametrize("seed", range(4))
def test_slow_and_fast_viewers_come_to_the_same_state(seed):
    lots = random.Random(seed)
    hub = Hub(max_lines=60)
    engine = scripted(hub, seed=seed)
    paces = {Viewer(): pace for pace in (1, 2, 7, 40)}
    late = Viewer()
    for step, _ in enumerate(engine.run(150)):
        for viewer, pace in paces.items():
            if step % pace == 0 and lots.random() < 0.8:
                viewer.cursor, frame = hub.delta(viewer.cursor)
                viewer.take(frame)
    for viewer in (*paces, late):
        viewer.cursor, frame = hub.delta(viewer.cursor)
        viewer.take(frame)
        assert without_seq(viewer.state) == state_of(hub)
        assert hub.delta(viewer.cursor) == (viewer.cursor, "")
    fast, *_, slow = paces
    assert fast.snapshots == 1
    assert slow.snapshots > 1  # fell out of a history of 60 lines


def test_viewers_at_the_same_place_share_one_encoding():
    hub = Hub()
    engine = scripted(hub)
    engine.top_up(4)
    cursor, _ = hub.delta(None)
    engine.step()
    hub.delta(cursor)
    first = hub._deltas[cursor]
    hub.delta(cursor)
    assert hub._deltas[cursor] is first


def test_a_step_costs_a_viewer_few_bytes():
    """64 requests decode; every 16th step each of them gets a block and fills one."""
    hub = Hub()
    engine = scripted(hub, blocks=4096, running=64, prompt=(64, 300), output=(900, 999), abort_share=0)
    cursor, sizes = None, []
    for _ in engine.run(200, keep=64):
        cursor, frame = hub.delta(cursor)
        sizes.append(len(frame))
    assert max(sizes[:10]) > 1000
    assert sorted(sizes[60:])[70] <= 275


def test_history_is_bounded_by_lines_and_by_bytes():
    by_lines, by_bytes = Hub(max_lines=50), Hub(max_bytes=20_000)
    for hub in (by_lines, by_bytes):
        for _ in scripted(hub).run(100):
            pass
        assert hub.lines_since(1) is None
    head = by_lines.read(lambda state: state.seq)
    assert len(by_lines.lines_since(head - 50)) == 50
    head = by_bytes.read(lambda state: state.seq)
    kept = next(lines for n in range(1, head) if (lines := by_bytes.lines_since(n)) is not None)
    assert 8_000 < sum(map(len, kept)) <= 20_000


def test_lines_that_come_twice_count_once():
    first, second = Hub(), Hub()
    engine = scripted(first)
    for _ in engine.run(10):
        pass
    lines = first.lines_since(0)
    second.ingest(*lines[:20])
    second.ingest(*lines[10:])
    second.ingest(*lines[1:])
    assert second.lines_since(0) == lines
    number = engine.running[0].number
    assert second.text(number) == first.text(number)


def test_lines_since_a_number():
    hub = Hub()
    for _ in scripted(hub).run(5):
        pass
    lines = hub.lines_since(0)
    assert [events.decode(line).seq for line in lines] == list(range(1, len(lines) + 1))
    assert hub.lines_since(7) == lines[7:]
    assert hub.lines_since(len(lines)) == []
    assert hub.lines_since(len(lines) + 1) is None  # a number of some other epoch
    assert hub.lines_since(7, epoch="another") is None
    assert hub.lines_since(7, epoch="scripted") == lines[7:]


def test_times_travel_in_microseconds():
    hub = Hub()
    scripted(hub)
    hub.publish(events.Queued(seq=2, t=1 / 3, request=1, id="r", prompt_tokens=1, max_tokens=1))
    hub.publish(events.Step(seq=3, t=2 / 3, step=1, step_s=1 / 7, forward_s=1 / 9))
    _, last = hub.lines_since(1)
    assert b'"t":0.666667' in last and b'"step_s":0.142857' in last
    assert hub.read(lambda state: state.series[0][1]) == 0.142857


# reruns


def test_a_viewer_that_is_shown_only_some_frames_still_follows():
    lots = random.Random(3)
    hub = Hub()
    engine = scripted(hub)
    viewer, cursor = Viewer(), None
    for step, _ in enumerate(engine.run(400)):
        if step % 10 == 0:  # 50 steps/s, 5 frames/s
            cursor, frame = hub.frame(cursor)
            if cursor is None or step == 0 or lots.random() < 0.6:
                viewer.take(frame)
    viewer.take(hub.frame(cursor)[1])
    assert viewer.snapshots == 1 and viewer.holes == 0
    assert without_seq(viewer.state) == state_of(hub)


def test_a_viewer_that_missed_too_much_is_told_so():
    hub = Hub()
    engine = scripted(hub)
    viewer = Viewer()
    cursor, frame = hub.frame()
    viewer.take(frame)
    for _ in engine.run(300):
        pass
    cursor, _missed = hub.frame(cursor)
    for _ in engine.run(300):
        pass
    viewer.take(hub.frame(cursor)[1])
    assert viewer.holes == 1
    viewer.take(hub.frame(None)[1])
    assert without_seq(viewer.state) == state_of(hub)


def test_frames_answer_what_was_asked():
    hub = Hub()
    engine = scripted(hub, fork_share=0)
    cursor, _ = hub.frame()
    for _ in engine.run(12):
        pass
    job = engine.running[0]
    _, frame = hub.frame(cursor, watch=[job.number], block=job.table[0], table=job.number)
    answers = {message["type"]: message for message in json.loads(frame)}
    assert answers["text"]["prompt"] == "".join(job.pieces[: job.prompt])
    assert (answers["text"]["from"], answers["text"]["text"]) == (0, "".join(job.pieces[job.prompt :]))
    assert answers["block"] == hub.block(job.table[0]) and answers["table"] == hub.table(job.number)


# relay


async def _relay(first: Hub, second: Hub, *, until, since=None, epoch=""):
    lines = []
    async with asyncio.timeout(10):
        async for batch in first.follow(since, epoch):
            lines += batch
            second.ingest(*batch)
            if until():
                return lines


def test_a_relay_keeps_the_lines_and_comes_to_the_same_state():
    async def main():
        first, second = Hub(), Hub()
        engine = scripted(first)
        lines = await _relay(first, second, until=lambda: True)
        assert isinstance(events.decode(lines[0]), events.Snapshot)

        async def work():
            for _ in engine.run(40):
                await asyncio.sleep(0)

        worker = asyncio.create_task(work())
        seq = first.read(lambda state: state.seq)
        done = lambda: second.read(lambda s: s.totals.steps) == 40 and second.read(lambda s: s.seq) == engine.seq  # noqa: E731
        lines = await _relay(first, second, until=done, since=seq, epoch="scripted")
        await worker
        assert lines == first.lines_since(seq) == second.lines_since(seq)
        assert state_of(first) == state_of(second)

    asyncio.run(main())


@pytest.mark.parametrize("often", [1, 7, 1000])
def test_the_state_is_of_now_however_rarely_it_is_asked_for(often):
    heard: list[events.Event] = []
    engine = ScriptedEngine(heard.append, blocks=40, running=5, prompt=(5, 40), output=(3, 20))
    engine.hello()
    hub, eager, asked = Hub(), fold.State(), 0
    for step in range(400):
        engine.top_up(5)
        engine.step()
        for event in heard:
            line = events.encode(event)
            fold.apply(eager, events.decode(line))
            hub.ingest(line)
        heard.clear()
        if step % often == often - 1 or step == 399:
            asked += 1
            assert hub.read(msgspec.to_builtins) == msgspec.to_builtins(eager)
    assert asked and hub.gaps == 0


def test_a_late_relay_knows_what_was_said_before():
    async def main():
        first, second = Hub(), Hub()
        engine = scripted(first)
        for _ in engine.run(30):
            pass
        await _relay(first, second, until=lambda: True)
        for job in (*engine.running, *engine.waiting):
            assert second.text(job.number)[0] == first.text(job.number)[0]
            assert second.table(job.number) == first.table(job.number)
        for block in range(engine.num_blocks):
            a, b = first.block(block), second.block(block)
            assert (a["hash"], a["chain"], a["owners"]) == (b["hash"], b["chain"], b["owners"])
        engine.step()
        number = engine.running[0].number
        second.ingest(*first.lines_since(second.read(lambda state: state.seq)))
        assert second.text(number)[0] == first.text(number)[0]

    asyncio.run(main())


def test_a_follower_that_fell_out_gets_a_snapshot_first():
    async def main():
        hub = Hub(max_lines=10)
        engine = scripted(hub)
        for _ in engine.run(50):
            pass
        async for batch in hub.follow(since=3):
            assert isinstance(events.decode(batch[0]), events.Snapshot)
            break

    asyncio.run(main())


def test_a_new_epoch_voids_everything():
    hub = Hub()
    first = scripted(hub, seed=1)
    for _ in first.run(20):
        pass
    viewer, behind = Viewer(), Viewer()
    viewer.cursor, frame = hub.delta(None)
    viewer.take(frame)
    behind.cursor, frame = hub.delta(None)
    behind.take(frame)
    first.step()
    viewer.cursor, frame = hub.delta(viewer.cursor)
    viewer.take(frame)
    second = scripted(hub, seed=2, epoch="second", blocks=17)
    assert hub.read(lambda state: (state.epoch, state.num_blocks, len(state.requests))) == ("second", 17, 0)
    assert hub.text(1)[0] is None
    assert hub.lines_since(5) is None
    second.top_up(2)
    second.step()
    for one in (viewer, behind):
        one.cursor, frame = hub.delta(one.cursor)
        one.take(frame)
        assert without_seq(one.state) == state_of(hub)


def test_events_of_a_newer_engine_are_passed_on_and_do_no_harm():
    hub = Hub()
    for _ in scripted(hub).run(3):
        pass
    before = state_of(hub)
    seq = hub.read(lambda state: state.seq)
    line = b'{"type":"weather","seq":%d,"t":9.0,"sky":"clear"}' % (seq + 1)
    hub.ingest(line)
    assert hub.lines_since(seq) == [line]
    assert state_of(hub) == before
    hub.ingest(events.encode(events.Fault(seq=seq + 2, message="m")))
    assert hub.read(lambda state: (state.gaps, state.fault)) == (0, "m")


def test_what_is_no_event_is_refused_and_leaves_the_hub_whole():
    hub = Hub()
    for _ in scripted(hub).run(3):
        pass
    before = state_of(hub)
    broken = b'{"type":"fault","seq":%d,"message":"\xff"}' % (hub.read(lambda state: state.seq) + 1)
    for line in (b"", b"not json", b"[1]", b'{"seq":1}', broken):
        with pytest.raises(msgspec.DecodeError):
            hub.ingest(line)
    with pytest.raises(fold.NewerSchema):
        hub.ingest(b'{"type":"snapshot","schema":99,"state":{}}')
    with pytest.raises(msgspec.DecodeError):
        hub.ingest(b'{"type":"hello","seq":1}')  # says everything anew, and not what
    assert state_of(hub) == before


@pytest.mark.parametrize("content", [b'"finished","request":"seven"', b'"tokens","step":1,"texts":[[7,"\xff"]]'])
def test_an_event_whose_content_is_none_is_passed_over(content):
    """Lines are decoded late: that one of many is wrong must not lose the others."""
    hub = Hub()
    for _ in scripted(hub).run(3):
        pass
    before, seq = state_of(hub), hub.read(lambda state: state.seq)
    wrong = b'{"type":%b,"seq":%d}' % (content, seq + 1)
    right = events.encode(events.Fault(seq=seq + 2, message="m"))
    hub.ingest(wrong, right)
    assert hub.read(lambda state: (state.seq, state.gaps, state.fault)) == (seq + 2, 0, "m")
    assert state_of(hub).requests == before.requests


@pytest.mark.parametrize("pieces", [b'["\xff"]', b"[1, 2]", b"7"])
def test_a_prompt_that_says_nothing_readable_is_an_empty_one(pieces):
    """Prompts are read when somebody looks: then too, a wrong one must not lose the others, or raise."""
    hub = Hub(max_characters=60)
    for _ in scripted(hub).run(3):
        pass
    seq = hub.read(lambda state: state.seq)
    queued = events.encode(events.Queued(seq=seq + 1, request=900, id="r", prompt_tokens=1, max_tokens=4))
    hub.ingest(queued, b'{"type":"prompt","seq":%d,"request":900,"pieces":%b}' % (seq + 2, pieces))
    message, _ = hub.text(900)
    assert message == {"type": "text", "request": 900, "from": 0, "text": "", "prompt": ""}
    told = [event for event in map(events.decode, hub._story()) if isinstance(event, events.Prompt)]
    assert {event.request: event.pieces for event in told}[900] == []


def test_readers_in_threads_see_whole_steps():
    hub = Hub()
    engine = scripted(hub)
    stop = threading.Event()
    wrong = []

    def look():
        while not stop.is_set():
            pool, held = hub.read(
                lambda s: (msgspec.structs.replace(s.pool), sum(r.computed for r in s.requests.values()))
            )
            if pool.held_tokens != held:
                wrong.append((pool, held))

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in engine.run(150):
        pass
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


# meaning


def told(*more: events.Event, size: int = 4) -> Hub:
    hub = Hub()
    story = [
        events.Hello(
            epoch="e", model=events.ModelInfo(name="m"), device=events.DeviceInfo(), block_size=size, num_blocks=8
        ),
        events.Queued(request=1, id="a", prompt_tokens=5, max_tokens=9),
        events.Prompt(request=1, pieces=["The", " quick", " brown", " fox", " jumps"]),
        events.Step(step=1, ops=[["admit", 1], ["alloc", 1, 6, 2]], prefill=[(1, 5, 0)], sealed=[6]),
        events.Sealed(blocks=[(6, "aa", "", 1, 0)]),
        events.Tokens(step=1, texts=[(1, " over")]),
        *more,
    ]
    for seq, event in enumerate(story, start=1):
        event.seq = seq
        hub.publish(event)
    return hub


def test_text_is_told_piece_by_piece():
    hub = told()
    message, heard = hub.text(1)
    assert message == {"type": "text", "request": 1, "prompt": "The quick brown fox jumps", "from": 0, "text": " over"}
    assert hub.text(1, heard) == (None, heard)
    hub.publish(events.Tokens(seq=7, step=2, texts=[(1, " 🙂")]))
    message, heard = hub.text(1, heard)
    assert message == {"type": "text", "request": 1, "from": 5, "text": " 🙂"}
    hub.publish(events.Tokens(seq=8, step=3, texts=[(1, "")]))
    hub.publish(events.Tokens(seq=9, step=4, texts=[(1, "!")]))
    message, heard = hub.text(1, heard)
    assert (message["from"], message["text"]) == (8, "!")  # a browser counts the face as two
    assert hub.text(77) == (None, Heard())


def test_nothing_said_yet_still_tells_the_prompt_once():
    hub = Hub()
    engine = scripted(hub)
    job = engine.submit()
    message, heard = hub.text(job.number)
    assert message["prompt"] and message["text"] == ""
    assert hub.text(job.number, heard)[0] is None


def test_a_block_tells_its_text_its_owners_and_its_chain():
    hub = told(
        events.Step(step=2),
        events.Tokens(step=2, texts=[(1, " the")]),
        events.Step(step=3),
        events.Tokens(step=3, texts=[(1, " lazy")]),
        events.Step(step=4, sealed=[2]),
        events.Sealed(blocks=[(2, "bb", "aa", 1, 4)]),
        events.Tokens(step=4, texts=[(1, " dog")]),
    )
    assert hub.block(6) == {
        "type": "block",
        "block": 6,
        "hash": "aa",
        "chain": ["aa"],
        "text": "The quick brown fox",
        "owners": [1],
    }
    assert hub.block(2) == {
        "type": "block",
        "block": 2,
        "hash": "bb",
        "chain": ["aa", "bb"],
        "text": " jumps over the lazy",
        "owners": [1],
    }
    assert hub.block(0) == {"type": "block", "block": 0, "hash": "", "chain": [], "text": "", "owners": []}
    assert hub.block(8) is None and hub.block(-1) is None
    hub.publish(events.Finished(seq=15, request=1, reason="stop"))
    assert hub.block(6)["text"] == "The quick brown fox" and hub.block(6)["owners"] == []
    hub.publish(events.Cleared(seq=16))
    assert hub.block(6)["hash"] == "" and hub.block(6)["text"] == ""


def test_a_block_that_is_not_full_tells_what_is_in_it():
    assert told().block(2)["text"] == " jumps"


def test_a_block_table_with_its_text():
    hub = told()
    assert hub.table(1) == {"type": "table", "request": 1, "blocks": [[6, "The quick brown fox"], [2, " jumps"]]}
    assert hub.table(2) is None


def test_the_chain_survives_reuse_of_blocks():
    """The parent's content moved to another block; its old block holds something else now."""
    hub = told(
        events.Finished(request=1, reason="stop"),
        events.Queued(request=2, id="b", prompt_tokens=9, max_tokens=1),
        events.Prompt(request=2, pieces=list("abcdefghi")),
        events.Step(step=2, ops=[["admit", 2], ["alloc", 2, 6, 3, 4]], prefill=[(2, 9, 0)], sealed=[6, 3]),
        events.Sealed(blocks=[(6, "cc", "", 2, 0), (3, "dd", "cc", 2, 4)]),
        events.Finished(request=2, reason="stop"),
    )
    assert hub.block(3)["chain"] == ["cc", "dd"] and hub.block(6)["text"] == "abcd"


def test_texts_are_bounded():
    state = fold.State()
    texts = Texts(max_characters=1000)
    for number in range(1, 40):
        state.requests[number] = fold.Request(request=number)
        texts.hear(events.Prompt(request=number, pieces=["x" * 50]), state)
        texts.hear(events.Tokens(step=1, texts=[(number, "y" * 50)]), state)
        texts.hear(events.Finished(request=number, reason="stop"), state)
    alive = [n for n in range(1, 40) if texts.tail(n, Heard())[0]]
    assert alive == list(range(30, 40))


def test_a_block_outlives_the_request_that_filled_it():
    """A shared prompt's blocks were filled by a request that nobody remembers any more."""
    state, texts = fold.State(block_size=4), Texts(max_characters=10**6)

    def one(number: int, block: int, words: str) -> None:
        state.requests[number] = fold.Request(request=number)
        texts.hear(events.Prompt(request=number, pieces=list(words)), state)
        texts.hear(events.Sealed(blocks=[(block, f"{number:x}", "", number, 0)]), state)
        texts.hear(events.Finished(request=number, reason="stop"), state)

    one(1, 7, "keep this")
    one(2, 8, "lose this")
    for number in range(3, 400):
        one(number, 8, "other words")
    assert texts.tail(1, Heard())[0] is None
    assert texts.text_of(7) == "keep" and texts.text_of(8) == "othe" and texts.text_of(9) == ""
