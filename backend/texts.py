"""What requests say and blocks mean: fed by the text channel, asked by whoever hovers or reads along."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from backend import events
from backend.fold import State

KEPT_FINISHED = 256


class Heard(NamedTuple):
    """How far a reader is in what a request says."""

    pieces: int = -1  # of the output; -1: not even the prompt
    characters: int = 0  # of the output, in UTF-16 units, as browsers count


@dataclass(slots=True)
class _Said:
    """One piece a token. A piece can be "" (half a character, text held back)."""

    prompt: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)

    @property
    def characters(self) -> int:
        return sum(map(len, self.prompt)) + sum(map(len, self.output))

    def tokens(self, begin: int, end: int) -> str:
        """Text of its tokens begin … end - 1, counted from the start of the prompt."""
        length = len(self.prompt)
        return "".join(self.prompt[begin:end]) + "".join(self.output[max(0, begin - length) : max(0, end - length)])


class _Content(NamedTuple):
    """What a sealed block holds."""

    digest: str
    parent: str  # digest of the block before it, "" for the first
    request: int  # that filled it
    position: int  # of its first token in that request
    text: str


class Texts:
    """Live requests, and of the finished ones the last within `max_characters`."""

    def __init__(self, max_characters: int):
        self.max_characters = max_characters
        self._said: dict[int, _Said] = {}
        self._finished: deque[tuple[int, int]] = deque()  # (request, characters)
        self._characters = 0  # of finished requests
        self._contents: dict[int, _Content] = {}
        self._block_of: dict[str, int] = {}

    def clear(self) -> None:
        self._said.clear()
        self._finished.clear()
        self._characters = 0
        self.forget_blocks()

    def forget_blocks(self) -> None:
        """The prefix cache is empty, or the pool was made anew."""
        self._contents.clear()
        self._block_of.clear()

    # feeding

    def hear(self, event: events.Event, state: State) -> None:
        """Takes in an event of any kind; `state` is the state after it."""
        kind = type(event)
        if kind is events.Tokens:
            said = self._said
            for number, piece in event.texts:
                if number in said:
                    said[number].output.append(piece)
        elif kind is events.Sealed:
            for block, digest, parent, number, position in event.blocks:
                self._seal(block, digest, parent, number, position, state.block_size)
        elif kind is events.Prompt:
            self._said[event.request] = _Said(prompt=event.pieces)
            request = state.requests.get(event.request)
            if request is None or request.state == "finished":  # told again to a late joiner
                self._finish(event.request)
        elif kind is events.Finished:
            self._finish(event.request)
        elif kind is events.Hello or kind is events.Snapshot:
            self.clear()
        elif kind is events.Cleared or (kind is events.Configured and event.rebuilt):
            self.forget_blocks()

    def _finish(self, number: int) -> None:
        said = self._said.get(number)
        if said is None:
            return
        self._finished.append((number, said.characters))
        self._characters += said.characters
        while self._characters > self.max_characters or len(self._finished) > KEPT_FINISHED:
            oldest, characters = self._finished.popleft()
            self._said.pop(oldest, None)
            self._characters -= characters

    def _seal(self, block: int, digest: str, parent: str, number: int, position: int, block_size: int) -> None:
        old = self._contents.get(block)
        if old is not None and self._block_of.get(old.digest) == block:
            del self._block_of[old.digest]
        said = self._said.get(number)
        text = said.tokens(position, position + block_size) if said else ""
        self._contents[block] = _Content(digest, parent, number, position, text)
        self._block_of[digest] = block

    def replay(self) -> list[events.Event]:
        """Unnumbered text events that tell a late joiner everything known here."""
        told: list[events.Event] = []
        for number, said in self._said.items():
            told.append(events.Prompt(request=number, pieces=said.prompt))
            if said.output:
                told.append(events.Tokens(step=0, texts=[(number, piece) for piece in said.output]))
        if self._contents:
            sealed = [(b, c.digest, c.parent, c.request, c.position) for b, c in self._contents.items()]
            told.append(events.Sealed(blocks=sealed))
        return told

    # asking

    def tail(self, number: int, heard: Heard) -> tuple[dict[str, Any] | None, Heard]:
        """What a reader of request `number` has not heard yet, as the protocol's "text" object; None: nothing new."""
        said = self._said.get(number)
        if said is None:
            return None, heard
        first = heard.pieces < 0
        fresh = "".join(said.output[max(0, heard.pieces) :])
        now = Heard(len(said.output), heard.characters + _units(fresh))
        if not fresh and not first:
            return None, now
        message = {"type": "text", "request": number, "from": heard.characters, "text": fresh}
        if first:
            message["prompt"] = "".join(said.prompt)
        return message, now

    def block(self, block: int, state: State) -> dict[str, Any] | None:
        """A block's hash, the chain of hashes from the root to it, its text and its owners; None: no such block."""
        if not 0 <= block < state.num_blocks:
            return None
        owners = list(state.blocks.owners[block])
        content = self._contents.get(block) if state.blocks.sealed[block] else None
        return {
            "type": "block",
            "block": block,
            "hash": content.digest if content else "",
            "chain": self._chain(content) if content else [],
            "text": content.text if content else self._open_text(block, owners, state),
            "owners": owners,
        }

    def _open_text(self, block: int, owners: list[int], state: State) -> str:
        """Text of a block that is not full, or whose meaning was not told: from its first holder's tokens."""
        for number in owners:
            request, said = state.requests.get(number), self._said.get(number)
            if request and said and block in request.table:
                begin = request.table.index(block) * state.block_size
                return said.tokens(begin, begin + state.blocks.fill[block])
        return ""

    def _chain(self, content: _Content) -> list[str]:
        """From the root to this block, as far as the ancestors are still cached."""
        chain = [content.digest]
        parent = content.parent
        while parent and len(chain) <= len(self._contents):
            chain.append(parent)
            block = self._block_of.get(parent)
            parent = "" if block is None else self._contents[block].parent
        return chain[::-1]

    def table(self, number: int, state: State) -> dict[str, Any] | None:
        """A request's block table with the text in each block; None: no such request."""
        request, said = state.requests.get(number), self._said.get(number)
        if request is None:
            return None
        size = state.block_size
        rows = [
            [block, said.tokens(i * size, min((i + 1) * size, request.computed)) if said else ""]
            for i, block in enumerate(request.table)
        ]
        return {"type": "table", "request": number, "blocks": rows}


def _units(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2
