// The mounted component, called the way Streamlit calls it: again and again, with cleanups that come early or late.
import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, test } from "node:test";

class Socket {
  static OPEN = 1;
  static all = [];
  constructor(url) {
    this.url = url;
    this.readyState = 0;
    Socket.all.push(this);
  }
  send() {}
  close() {
    this.readyState = 3;
    this.onclose?.();
  }
}

let frames = [];
Object.assign(globalThis, {
  WebSocket: Socket,
  document: Object.assign(new EventTarget(), { hidden: false }),
  requestAnimationFrame: (draw) => frames.push(draw),
  cancelAnimationFrame: () => {},
});
const { VIEWS, default: component } = await import("../../assets/live/component.js");

/** A picture that notes what is done to it. */
class Probe {
  static all = [];
  constructor(root, live) {
    Object.assign(this, { root, live, calls: [], updates: 0 });
    Probe.all.push(this);
  }
  theme(host) {
    this.calls.push(["theme", host]);
  }
  options(options) {
    this.calls.push(["options", options]);
  }
  update() {
    this.updates++;
  }
  end() {
    this.calls.push(["end"]);
  }
}
VIEWS.probe = Probe;

function place() {
  const root = { dataset: {}, textContent: "", replaceChildren() { this.cleared = true; } };
  return { root, host: {}, querySelector: () => root };
}
const states = [];
const setStateValue = (name, value) => states.push([name, value]);
const triggers = [];
const setTriggerValue = (name, value) => triggers.push([name, value]);
const call = (parentElement, data) => component({ data, parentElement, setStateValue, setTriggerValue });
const done = () => mock.timers.tick(1);
const ended = (probe) => probe.calls.filter(([what]) => what === "end").length;

beforeEach(() => {
  mock.timers.enable({ apis: ["setTimeout"] });
  Socket.all = [];
  Probe.all = [];
  frames = [];
  states.length = 0;
});
afterEach(() => {
  for (const one of globalThis.__kvscope_live_1.values()) one.end();
  mock.reset();
});

test("called again with the same data it keeps the picture and refreshes the theme", () => {
  const parent = place(), data = { view: "probe", url: "ws://a/1", options: { height: 3 } };
  call(parent, data);
  call(parent, { ...data, options: { height: 4 } });
  assert.equal(Probe.all.length, 1);
  assert.deepEqual(Probe.all[0].calls, [
    ["theme", parent.host], ["options", { height: 3 }], ["theme", parent.host], ["options", { height: 4 }],
  ]);
  assert.equal(Socket.all.length, 1);
});

test("the cleanup of a call that was overtaken tears nothing down", () => {
  const parent = place(), data = { view: "probe", url: "ws://a/2" };
  const first = call(parent, data);
  const second = call(parent, data);
  first();
  done();
  assert.equal(ended(Probe.all[0]), 0);
  second();
  done();
  assert.equal(ended(Probe.all[0]), 1);
  second();
  done();
  assert.equal(ended(Probe.all[0]), 1);
});

test("a cleanup that comes just before the next call tears nothing down", () => {
  const parent = place(), data = { view: "probe", url: "ws://a/3" };
  call(parent, data)();
  call(parent, data);
  done();
  assert.equal(ended(Probe.all[0]), 0);
  assert.equal(Probe.all.length, 1);
});

test("mounted again after it was torn down it is a new picture", () => {
  const parent = place(), data = { view: "probe", url: "ws://a/4" };
  call(parent, data)();
  done();
  call(parent, data);
  assert.equal(Probe.all.length, 2);
  assert.deepEqual([ended(Probe.all[0]), ended(Probe.all[1])], [1, 0]);
});

test("two places share one socket, another address gets its own", () => {
  const one = place();
  call(one, { view: "probe", url: "ws://a/5" });
  call(place(), { view: "probe", url: "ws://a/5" });
  assert.equal(Socket.all.length, 1);
  call(one, { view: "probe", url: "ws://a/6" });
  assert.equal(Socket.all.length, 2);
  assert.equal(ended(Probe.all[0]), 1);
  assert.ok(one.root.cleared);
});

test("without a WebSocket it says so, also to a picture that comes later", () => {
  const data = { view: "probe", url: "ws://a/7" };
  call(place(), data);
  for (let i = 0; i < 3; i++) {
    Socket.all[Socket.all.length - 1].close();
    mock.timers.tick(5_000);
  }
  assert.deepEqual(states, [["transport", "rerun"]]);
  call(place(), data);
  assert.deepEqual(states, [["transport", "rerun"], ["transport", "rerun"]]);
});

test("frames that come with reruns reach the pictures, and their questions come back in one", () => {
  const picture = place(), feeder = place();
  call(picture, { view: "probe" });
  const frame = (...events) => new TextEncoder().encode(JSON.stringify(events));
  call(feeder, frame({ type: "hello", seq: 1, epoch: "e", model: {}, device: {}, block_size: 4, num_blocks: 2 }));
  frames.splice(0).forEach((draw) => draw());
  assert.equal(Probe.all[0].updates, 1);
  assert.equal(Socket.all.length, 0);
  assert.equal(picture.root.dataset.live, "live");
  Probe.all[0].live.watch([3]);
  Probe.all[0].live.askBlock(1);
  Probe.all[0].live.askBlock(2);
  mock.timers.tick(100);
  assert.deepEqual(states, [["ask", { watch: [3], block: 2 }]]);
});

test("a picture that does not exist is named, not thrown", () => {
  const parent = place();
  call(parent, { view: "<b>nonesuch</b>", url: "ws://a/8" });
  assert.equal(parent.root.textContent, "No such picture: <b>nonesuch</b>");
  assert.equal(Socket.all.length, 0);
});

test("a page that was drawn from something that has changed is drawn again, and once for each change", () => {
  const here = place();
  triggers.length = 0;
  const mount = (pulse) => call(here, { view: "pulse", url: "ws://here/pulse", options: { pulse } });
  const say = (pulse) => Socket.all.at(-1).onmessage({ data: JSON.stringify([{ type: "pulse", pulse }]) });
  const end = mount("a");
  say("a");
  assert.deepEqual(triggers, []);
  say("b");
  say("b");
  assert.deepEqual(triggers, [["pulse", "b"]]);
  mount("b"); // what the rerun brings
  assert.equal(triggers.length, 1);
  say("c");
  mount("b"); // a rerun that came too early to know
  assert.deepEqual(triggers.slice(1), [["pulse", "c"], ["pulse", "c"]]);
  end();
  done();
});
