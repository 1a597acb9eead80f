// The page's connection, with a WebSocket, a clock and a screen on paper.
import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, test } from "node:test";

class Socket {
  static OPEN = 1;
  static all = [];
  constructor(url) {
    this.url = url;
    this.readyState = 0;
    this.sent = [];
    Socket.all.push(this);
  }
  send(text) {
    this.sent.push(JSON.parse(text));
  }
  close() {
    this.readyState = 3;
    this.onclose?.();
  }
  opens() {
    this.readyState = 1;
    this.onopen();
  }
  says(...events) {
    this.onmessage({ data: JSON.stringify(events) });
  }
}

const page = Object.assign(new EventTarget(), { hidden: false });
let frames = [];
Object.assign(globalThis, {
  WebSocket: Socket,
  document: page,
  requestAnimationFrame: (draw) => frames.push(draw),
  cancelAnimationFrame: (id) => (frames[id - 1] = () => {}),
});
const { RERUN, live } = await import("../../assets/live/link.js");

const last = () => Socket.all[Socket.all.length - 1];
const screen = () => frames.splice(0).forEach((draw) => draw());
const hide = (hidden) => {
  page.hidden = hidden;
  page.dispatchEvent(new Event("visibilitychange"));
};
const hello = { type: "hello", seq: 1, epoch: "e", model: { name: "m" }, device: {}, block_size: 4, num_blocks: 8 };
const queued = (seq, request) => ({ type: "queued", seq, t: seq, request, id: `r${request}`, prompt_tokens: 3, max_tokens: 4 });
const step = (seq, number, more = {}) => ({ type: "step", seq, t: seq, step: number, ...more });

class View {
  drawn = [];
  update(state, since) {
    this.drawn.push([state.step, since]);
  }
}

let url = 0;
function connected() {
  const one = live(`ws://x/${++url}`), view = new View();
  one.on(view);
  last().opens();
  last().says(hello);
  screen();
  return { one, view, socket: last() };
}

beforeEach(() => {
  mock.timers.enable({ apis: ["setTimeout"] });
  mock.method(Math, "random", () => 0.5);
  Socket.all = [];
  frames = [];
  page.hidden = false;
});
afterEach(() => {
  for (const one of globalThis.__kvscope_live_1.values()) one.end();
  mock.reset();
});

test("all pictures of a page share one socket and one state", () => {
  const { one, view, socket } = connected();
  const other = new View();
  live(one.url).on(other);
  assert.equal(live(one.url), one);
  socket.says(queued(2, 1), step(3, 1));
  screen();
  assert.equal(Socket.all.length, 1);
  assert.deepEqual([view.drawn, other.drawn], [[[0, -1], [1, 0]], [[1, -1]]]);
  assert.equal(one.status, "live");
});

test("many arrays are one drawing", () => {
  const { view, socket, one } = connected();
  for (let i = 1; i <= 20; i++) socket.says(step(i + 1, i));
  assert.equal(frames.length, 1);
  screen();
  assert.deepEqual(view.drawn, [[0, -1], [20, 0]]);
  assert.equal(one.state.totals.steps, 20);
});

test("a new epoch is new to every picture", () => {
  const { view, socket } = connected();
  socket.says(step(2, 1));
  screen();
  socket.says({ ...hello, epoch: "f" });
  screen();
  assert.deepEqual(view.drawn, [[0, -1], [1, 0], [0, -1]]);
});

test("numbers of text events that are not sent are no gaps", () => {
  const { socket, one } = connected();
  socket.says(queued(2, 1), step(5, 1), step(9, 2));
  assert.equal(one.state.gaps, 0);
  assert.equal(one.state.totals.steps, 2);
});

test("a lost connection is taken up again, a little later each time", () => {
  const { socket, one } = connected();
  const said = [];
  one.on("status", (status) => said.push(status));
  socket.close();
  assert.equal(one.status, "reconnecting");
  for (const wait of [250, 500, 1000, 2000, 4000, 5000, 5000]) {
    const before = Socket.all.length;
    mock.timers.tick(wait - 1);
    assert.equal(Socket.all.length, before, `not before ${wait} ms`);
    mock.timers.tick(1);
    assert.equal(Socket.all.length, before + 1, `after ${wait} ms`);
    last().close();
  }
  mock.timers.tick(5000);
  last().opens();
  last().says({ type: "snapshot", state: { ...one.state, seq: 40 } });
  assert.deepEqual(said, ["reconnecting", "live"]);
  assert.equal(one.state.seq, 40);
});

test("three failed first tries mean that there is no WebSocket here", () => {
  const one = live(`ws://x/${++url}`);
  let dead = 0;
  one.on("dead", () => dead++);
  one.on(new View());
  for (let i = 0; i < 3; i++) {
    assert.equal(dead, 0);
    last().close();
    mock.timers.tick(10_000);
  }
  assert.deepEqual([dead, one.status, Socket.all.length], [1, "dead", 3]);
  one.on(new View());
  assert.equal(Socket.all.length, 3);
});

test("a tab that nobody sees is disconnected after a while and back at once", () => {
  const { socket, one } = connected();
  hide(true);
  mock.timers.tick(14_999);
  assert.equal(socket.readyState, 1);
  hide(false);
  mock.timers.tick(60_000);
  assert.equal(socket.readyState, 1);
  hide(true);
  mock.timers.tick(15_000);
  assert.deepEqual([socket.readyState, one.status], [3, "paused"]);
  mock.timers.tick(600_000);
  assert.equal(Socket.all.length, 1);
  hide(false);
  assert.equal(Socket.all.length, 2);
  last().opens();
  last().says({ ...hello });
  assert.equal(one.status, "live");
});

test("nobody tries to reconnect a hidden tab", () => {
  const { socket } = connected();
  hide(true);
  socket.close();
  mock.timers.tick(60_000);
  assert.equal(Socket.all.length, 1);
  hide(false);
  assert.equal(Socket.all.length, 2);
});

test("the connection outlives a change of pages, not more", () => {
  const { one, view, socket } = connected();
  one.off(view);
  mock.timers.tick(2_999);
  one.on(view);
  mock.timers.tick(10_000);
  assert.equal(socket.readyState, 1);
  one.off(view);
  mock.timers.tick(3_000);
  assert.equal(socket.readyState, 3);
  mock.timers.tick(60_000);
  assert.equal(Socket.all.length, 1);
  assert.notEqual(live(one.url), one);
});

test("what is watched is asked for, told again to whoever comes later, and asked again after a reconnection", () => {
  const { one, socket } = connected();
  const told = [];
  one.on("text", ({ request, prompt, from, text }) => told.push([request, prompt, from, text]));
  one.watch([7]);
  assert.deepEqual(socket.sent, [{ watch: [7] }]);
  socket.says({ type: "text", request: 7, prompt: "p", from: 0, text: "one 🙂" }, { type: "text", request: 7, from: 6, text: " two" });
  socket.says({ type: "text", request: 7, from: 99, text: "lost" });
  assert.deepEqual(told, [[7, "p", 0, "one 🙂"], [7, undefined, 6, " two"]]);
  told.length = 0;
  one.watch(new Set([7, 8]));
  assert.deepEqual(told, [[7, "p", 0, "one 🙂 two"]]);
  socket.close();
  mock.timers.tick(250);
  last().opens();
  assert.deepEqual(last().sent, [{ watch: [7, 8] }]);
  last().says({ type: "text", request: 7, prompt: "p", from: 0, text: "one 🙂 two three" });
  assert.equal(one.texts.get(7).text, "one 🙂 two three");
});

test("blocks and tables are asked and answered", () => {
  const { one, socket } = connected();
  const told = [];
  const off = one.on("block", (answer) => told.push(answer.text));
  one.on("table", (answer) => told.push(answer.blocks));
  one.askBlock(3);
  one.askTable(1);
  assert.deepEqual(socket.sent, [{ block: 3 }, { table: 1 }]);
  socket.says({ type: "block", block: 3, text: "x" }, { type: "table", request: 1, blocks: [[3, "x"]] });
  off();
  socket.says({ type: "block", block: 3, text: "y" });
  assert.deepEqual(told, ["x", [[3, "x"]]]);
});

test("a newer server is refused and left alone", () => {
  const { one, socket } = connected();
  socket.says({ type: "snapshot", schema: 99, state: {} });
  assert.equal(one.status, "refused");
  assert.match(one.reason, /schema 99/);
  mock.timers.tick(60_000);
  assert.deepEqual([Socket.all.length, socket.readyState], [1, 3]);
});

test("a picture that fails does not take the others with it", () => {
  const failed = mock.method(console, "error", () => {});
  const { one, socket, view } = connected();
  one.on({ update: () => { throw new Error("broken"); } });
  const after = new View();
  one.on(after);
  socket.says(step(2, 1));
  screen();
  assert.equal(failed.mock.callCount(), 1);
  assert.equal(after.drawn.length, 1);
  assert.equal(view.drawn.length, 2);
});

test("pushed frames: when the first one, a snapshot, was lost, it is asked for until it comes", () => {
  const one = live(RERUN), asked = [];
  one.asker = (question) => asked.push(question);
  one.on(new View());
  const push = (...events) => one.push(new TextEncoder().encode(JSON.stringify(events)));
  push({ type: "since", seq: 1 }, step(2, 1));
  push({ type: "since", seq: 1 }, step(2, 1), step(3, 2));
  assert.deepEqual(asked, [{ snapshot: 1 }, { snapshot: 2 }]); // a new number each time: an unchanged state is not sent
  assert.equal(one.state.totals.steps, 0);
});

test("pushed frames: overlaps are skipped, a hole asks for a snapshot, silence is noticed", () => {
  const one = live(RERUN), view = new View(), asked = [];
  const push = (...events) => one.push(new TextEncoder().encode(JSON.stringify(events)));
  one.asker = (question) => asked.push(question);
  one.on(view);
  assert.equal(Socket.all.length, 0);
  push(hello, step(2, 1));
  push({ type: "since", seq: 1 }, step(2, 1), step(4, 2));
  assert.equal(one.state.totals.steps, 2);
  assert.deepEqual(asked, []);
  push({ type: "since", seq: 8 }, step(9, 5));
  assert.deepEqual(asked, [{ snapshot: 1 }]);
  one.watch([1]);
  one.askBlock(2);
  assert.deepEqual(asked.slice(1), [{ watch: [1] }, { block: 2 }]);
  assert.equal(one.status, "live");
  mock.timers.tick(3_000);
  assert.equal(one.status, "reconnecting");
  push({ type: "snapshot", state: { ...one.state, seq: 30 } });
  assert.equal(one.status, "live");
});

test("what costs something is asked for by a lease: at once, again after a break, and not after its end", () => {
  mock.timers.reset();
  mock.timers.enable({ apis: ["setTimeout", "setInterval"] });
  const { one, socket } = connected();
  const end = one.lease({ phases: true });
  mock.timers.tick(4_000);
  assert.deepEqual(socket.sent, [{ phases: true }, { phases: true }]);
  socket.close();
  mock.timers.tick(1_000);
  last().opens();
  last().says(hello); // live again: whoever asked need not wait for the next turn
  assert.deepEqual(last().sent, [{ phases: true }]);
  hide(true);
  mock.timers.tick(4_000);
  assert.equal(last().sent.length, 1, "nobody looks");
  hide(false);
  end();
  mock.timers.tick(8_000);
  assert.equal(last().sent.length, 1);
});

test("the newest message of phases is kept for pictures that come later", () => {
  const { one, socket } = connected();
  const heard = [];
  one.on("phases", (message) => heard.push(message.t));
  socket.says({ type: "phases", t: 1 }, { type: "phases", t: 2 });
  assert.deepEqual([heard, one.phases.t], [[1, 2], 2]);
});
