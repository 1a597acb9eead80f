// One WebSocket a page, shared by all its pictures, and the one state that its events fold into.
//
// live(url) gives the same object to everybody on the page (it lives on globalThis: each mounted component may be a module
// of its own). A picture is put on it with on(view), is drawn by view.update(state, changedSince) at most once a frame, and
// taken off with off(view); the connection ends a moment after the last one is gone.
// on("text" | "block" | "table" | "tree" | "phases" | "fleet" | "pulse" | "status" | "dead", callback) gives a function that ends it.
//
// live(RERUN) has no WebSocket: frames are pushed, and questions go to whoever set `asker` (see component.js).
import { apply, empty } from "./fold.js";
import { selection } from "./views/select.js";

export const RERUN = "";
const KEY = "__kvscope_live_1";
const HIDDEN_MS = 15_000; // a tab that nobody sees is disconnected after this
const LINGER_MS = 3_000; // from the last picture to the end of the connection: pages change
const FIRST_TRIES = 3; // that may fail before a WebSocket counts as impossible here
const BACKOFF_MS = 250; // doubled with each try
const MAX_BACKOFF_MS = 5_000;
const STALE_MS = 3_000; // without a pushed frame
const MAX_WATCHED = 16;
const RENEW_MS = 4_000; // of what is asked for by lease; the server forgets it after 10 s

export function live(url) {
  const all = (globalThis[KEY] ??= new Map());
  if (!all.has(url)) all.set(url, new Live(url, () => all.delete(url)));
  return all.get(url);
}

class Live {
  constructor(url, forget) {
    this.url = url;
    this.forget = forget;
    this.state = empty();
    this.fleet = null; // the newest message of that type (backend/sources/attach/fleet_view.py)
    this.phases = null; // the newest message of that type (backend/phases.py)
    this.pulse = ""; // what the page around the pictures should have been drawn from
    this.texts = new Map(); // request -> {prompt, text}, of those that are or were watched
    this.status = "connecting"; // | live | reconnecting | paused | refused | dead
    this.reason = ""; // with "refused"
    this.watching = [];
    this.views = new Map(); // view -> step that it was drawn at last; -1: everything is new to it
    this.listeners = new Map();
    this.asker = null;
    this.socket = null;
    this.opened = false; // once at least
    this.tries = 0;
    this.holes = 0; // times that a pushed frame did not go on where we are
    this.frame = 0;
    this.timers = {};
    this.seen = () => this.visibility();
  }

  // pictures

  on(what, callback) {
    if (typeof what === "string") {
      if (!this.listeners.has(what)) this.listeners.set(what, new Set());
      this.listeners.get(what).add(callback);
      return () => this.listeners.get(what).delete(callback);
    }
    this.views.set(what, -1);
    clearTimeout(this.timers.linger);
    if (this.views.size === 1) this.begin();
    if (this.state.epoch) this.kick();
    return () => this.off(what);
  }

  off(view) {
    if (!this.views.delete(view) || this.views.size) return;
    this.timers.linger = setTimeout(() => this.end(), LINGER_MS);
  }

  get selection() {
    return selection;
  }

  select(request) {
    selection.pick(request);
  }

  // questions

  /** The requests whose text is wanted, at most 16. What is known of them already is told at once. */
  watch(requests) {
    this.watching = [...requests].slice(0, MAX_WATCHED);
    for (const request of this.texts.keys()) if (!this.watching.includes(request) && this.texts.size > MAX_WATCHED * 4) this.texts.delete(request);
    this.ask({ watch: this.watching });
    for (const request of this.watching) {
      const known = this.texts.get(request);
      if (known) this.tell("text", { type: "text", request, prompt: known.prompt, from: 0, text: known.text });
    }
  }

  askBlock(block) {
    this.ask({ block });
  }

  askTable(table) {
    this.ask({ table });
  }

  /** A new number each time: where questions go with reruns, the same one is answered once. */
  askTree() {
    this.ask({ tree: (this.trees = (this.trees ?? 0) + 1) });
  }

  /** Asks for what costs something, again and again until the function that this gives is called, or nobody looks. */
  lease(question) {
    const ask = () => document.hidden || this.ask(question);
    const timer = setInterval(ask, RENEW_MS);
    const stop = this.on("status", (status) => status === "live" && ask());
    ask();
    return () => {
      clearInterval(timer);
      stop();
    };
  }

  ask(question) {
    if (this.asker) this.asker(question);
    else if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(question));
  }

  // the connection

  begin() {
    if (this.url === RERUN || this.socket || this.status === "dead" || this.status === "refused") return;
    document.addEventListener("visibilitychange", this.seen);
    this.open();
  }

  end() {
    document.removeEventListener("visibilitychange", this.seen);
    for (const timer of Object.values(this.timers)) clearTimeout(timer);
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.close();
    this.forget();
  }

  open() {
    clearTimeout(this.timers.retry);
    const socket = (this.socket = new WebSocket(this.url));
    socket.onopen = () => {
      this.opened = true;
      this.tries = 0;
      if (this.watching.length) this.ask({ watch: this.watching });
    };
    socket.onmessage = (message) => this.receive(message.data);
    socket.onclose = () => {
      if (socket === this.socket) this.lost();
    };
  }

  close() {
    const socket = this.socket;
    this.socket = null; // so that its onclose is nobody's
    socket?.close();
  }

  lost() {
    this.socket = null;
    if (this.status === "refused" || this.status === "paused") return;
    if (!this.opened && ++this.tries >= FIRST_TRIES) {
      this.turn("dead");
      this.tell("dead");
      return;
    }
    if (this.opened) this.turn("reconnecting");
    if (document.hidden) return; // until somebody looks
    const wait = Math.min(MAX_BACKOFF_MS, BACKOFF_MS * 2 ** (this.opened ? this.tries++ : this.tries));
    this.timers.retry = setTimeout(() => this.open(), wait * (0.75 + Math.random() / 2));
  }

  visibility() {
    if (document.hidden) {
      this.timers.sleep = setTimeout(() => {
        clearTimeout(this.timers.retry);
        this.turn("paused");
        this.close();
      }, HIDDEN_MS);
      return;
    }
    clearTimeout(this.timers.sleep);
    if (!this.socket && this.status !== "dead" && this.status !== "refused") {
      if (this.opened) this.turn("reconnecting");
      this.open();
    }
  }

  // events

  /** A frame that came with a rerun. */
  push(bytes) {
    clearTimeout(this.timers.stale);
    this.timers.stale = setTimeout(() => this.turn("reconnecting"), STALE_MS);
    this.receive(new TextDecoder().decode(bytes));
  }

  receive(frame) {
    if (!frame) return;
    try {
      for (const event of JSON.parse(frame)) this.take(event);
    } catch (error) {
      this.reason = error.message;
      this.turn("refused"); // a newer schema, or no JSON at all: neither gets better by trying again
      this.close();
      return;
    }
    if (this.status !== "refused" && this.state.epoch) this.turn("live");
    this.kick();
  }

  take(event) {
    const { state } = this;
    switch (event.type) {
      case "text":
        return this.heard(event);
      case "phases":
      case "fleet":
        this[event.type] = event;
        return this.tell(event.type, event);
      case "pulse":
        this.pulse = event.pulse;
        return this.tell(event.type, event);
      case "block":
      case "table":
      case "tree":
        return this.tell(event.type, event);
      case "since": // of a pushed frame: everything after this number is in it
        if (!state.epoch || event.seq > state.seq) this.ask({ snapshot: (this.holes += 1) }); // a new number each time
        return undefined;
      case "hello":
      case "snapshot": {
        const { epoch } = state;
        apply(state, event);
        if (state.epoch !== epoch) {
          this.texts.clear();
          this.phases = null; // of another engine, as is the request that a person followed
          if (epoch) selection.clear();
        }
        for (const view of this.views.keys()) this.views.set(view, -1);
        return undefined;
      }
      default:
        // Text events are not sent to pictures: their numbers are passed over, not lost. Nothing else can be missing:
        // a WebSocket keeps the order, and a pushed frame says from where on it is whole.
        if (!state.epoch) return undefined; // nothing to fold into: the snapshot is on its way
        if (event.seq > state.seq) state.seq = event.seq - 1;
        return apply(state, event);
    }
  }

  heard(event) {
    const known = this.texts.get(event.request) ?? { prompt: "", text: "" };
    if (event.prompt !== undefined) known.prompt = event.prompt;
    if (event.from > known.text.length) return; // a hole: the server begins anew when it is asked again
    known.text = known.text.slice(0, event.from) + event.text;
    this.texts.set(event.request, known);
    this.tell("text", event);
  }

  tell(what, event) {
    for (const callback of this.listeners.get(what) ?? []) guarded(() => callback(event));
  }

  turn(status) {
    if (status === this.status) return;
    this.status = status;
    this.tell("status", status);
  }

  /** Many frames, one drawing. */
  kick() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      for (const [view, since] of this.views) {
        this.views.set(view, this.state.step);
        guarded(() => view.update(this.state, since));
      }
    });
  }
}

/** A picture that fails must not take the others with it. */
function guarded(call) {
  try {
    call();
  } catch (error) {
    console.error(error);
  }
}
