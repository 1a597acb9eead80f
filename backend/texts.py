"""What requests say and blocks mean: fed by the text channel, asked by whoever hovers or reads along."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from backend import events
from backend.fold import State

KEPT_FINISHED = 256

_decode_pieces = msgspec.json.Decoder(list[str]).decode


class Heard(NamedTuple):
    """How far a reader is in what a request says."""

    pieces: int = -1  # of the output; -1: not even the prompt
    characters: int = 0  # of the output, in UTF-16 units, as browsers count


# Of `events.Sealed`: block, its digest, its parent's, the request that filled it, position of its first token there.
Row = tuple[int, str, str, int, int]


@dataclass(slots=True)
class _Said:
    """One piece a token. A piece can be "" (half a character, text held back)."""

    pieces: list[str] | msgspec.Raw  # of the prompt
    output: list[str] = field(default_factory=list)
    sealed: list[Row] = field(default_factory=list)  # blocks that it filled, whoever has them now

    @property
    def prompt(self) -> list[str]:
        if type(self.pieces) is msgspec.Raw:
            try:
                self.pieces = _decode_pieces(self.pieces)
            except msgspec.DecodeError:  # broken: as if it had not come
                self.pieces = []
        return self.pieces

    @property
    def characters(self) -> int:
        """What it weighs: of a prompt that nobody looked at, with what JSON adds."""
        pieces = self.pieces
        return len("".join(self.output)) + len(memoryview(pieces) if type(pieces) is msgspec.Raw else "".join(pieces))

    def tokens(self, begin: int, end: int) -> str:
        """Text of its tokens begin … end - 1, counted from the start of the prompt."""
        length = len(self.prompt)
        return "".join(self.prompt[begin:end]) + "".join(self.output[max(0, begin - length) : max(0, end - length)])


class Texts:
    """Live requests, and of the finished ones the last within `max_characters`.

    Hearing is cheap, because it happens at every step; what a block's text is, is worked out when somebody asks, or
    when its request is about to be forgotten.
    """

    def __init__(self, max_characters: int):
        self.max_characters = max_characters
        self._said: dict[int, _Said] = {}
        self._finished: deque[tuple[int, int]] = deque()  # (request, characters)
        self._characters = 0  # of finished requests
        self._sealed: dict[int, Row] = {}
        self._texts: dict[int, tuple[Row, str]] = {}  # of blocks whose request is forgotten, or was never here
        self._block_of: dict[str, int] | None = {}  # by digest; None: to be made anew
        self._block_size = 0

    def clear(self) -> None:
        self._said.clear()
        self._finished.clear()
        self._characters = 0
        self.forget_blocks()

    def forget_blocks(self) -> None:
        """The prefix cache is empty, or the pool was made anew."""
        self._sealed.clear()
        self._texts.clear()
        self._block_of = {}
        for said in self._said.values():
            said.sealed.clear()

    # feeding

    def hear(self, event: events.Event, state: State) -> None:
        """Takes in an event of any kind; `state` is the state after it."""
        kind = type(event)
        if kind is events.Step:
            return
        if kind is events.Tokens:
            said = self._said
            for number, piece in event.texts:
                if number in said:
                    said[number].output.append(piece)
        elif kind is events.Sealed:
            self._block_size = state.block_size
            self._seal(event.blocks, event.texts)
        elif kind is events.Unread or kind is events.Prompt:
            self._said[event.request] = _Said(event.pieces)
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
        characters = said.characters
        self._finished.append((number, characters))
        self._characters += characters
        while self._characters > self.max_characters or len(self._finished) > KEPT_FINISHED:
            oldest, characters = self._finished.popleft()
            self._characters -= characters
            self._forget(self._said.pop(oldest, None))

    def _forget(self, said: _Said | None) -> None:
        """Blocks outlive the request that filled them, and so does what they hold."""
        for row in said.sealed if said else ():
            if self._sealed.get(row[0]) is row:
                self._texts[row[0]] = row, said.tokens(row[4], row[4] + self._block_size)

    def _seal(self, rows: list[Row], texts: list[str]) -> None:
        sealed, said = self._sealed, self._said
        for row in rows:
            sealed[row[0]] = row
            if row[3] in said:
                said[row[3]].sealed.append(row)
        for row, text in zip(rows, texts, strict=False):
            self._texts[row[0]] = row, text
        self._block_of = None

    def replay(self) -> list[events.Event]:
        """Unnumbered text events that tell a late joiner everything known here."""
        told: list[events.Event] = []
        for number, said in self._said.items():
            told.append(events.Prompt(request=number, pieces=said.prompt))
            if said.output:
                told.append(events.Tokens(step=0, texts=[(number, piece) for piece in said.output]))
        if self._sealed:
            told.append(events.Sealed(blocks=list(self._sealed.values())))
            known = [(row, text) for row, text in self._texts.values() if self._sealed.get(row[0]) is row]
            if known:
                told.append(events.Sealed(blocks=[row for row, _ in known], texts=[text for _, text in known]))
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
        row = self._sealed.get(block) if state.blocks.sealed[block] else None
        return {
            "type": "block",
            "block": block,
            "hash": row[1] if row else "",
            "chain": self._chain(row) if row else [],
            "text": self.text_of(block) if row else self._open_text(block, owners, state),
            "owners": owners,
        }

    def sealed(self) -> dict[int, Row]:
        """Rows of all blocks that were sealed, by block; not a copy. A block may have lost its hash since."""
        return self._sealed

    def text_of(self, block: int) -> str:
        """Text in a sealed block; "" where it is not known."""
        row = self._sealed.get(block)
        if row is None:
            return ""
        kept = self._texts.get(block)
        if kept is not None and kept[0] is row:
            return kept[1]
        said = self._said.get(row[3])
        return said.tokens(row[4], row[4] + self._block_size) if said else ""

    def _open_text(self, block: int, owners: list[int], state: State) -> str:
        """Text of a block that is not full, or whose meaning was not told: from its first holder's tokens."""
        for number in owners:
            request, said = state.requests.get(number), self._said.get(number)
            if request and said and block in request.table:
                begin = request.table.index(block) * state.block_size
                return said.tokens(begin, begin + state.blocks.fill[block])
        return ""

    def _chain(self, row: Row) -> list[str]:
        """From the root to this block, as far as the ancestors are still cached."""
        if self._block_of is None:
            self._block_of = {digest: block for block, digest, *_ in self._sealed.values()}
        chain = [row[1]]
        parent = row[2]
        while parent and len(chain) <= len(self._sealed):
            chain.append(parent)
            block = self._block_of.get(parent)
            parent = "" if block is None else self._sealed[block][2]
        return chain[::-1]

    def table(self, number: int, state: State, inferred: Sequence[int] | None = None) -> dict[str, Any] | None:
        """A request's block table with the text in each block; None: no such request.

        `inferred`: what must be its blocks, by somebody who concludes it from its content; then it is told as that.
        """
        request, said = state.requests.get(number), self._said.get(number)
        if request is None:
            return None
        if inferred is not None:
            rows = [[block, self.text_of(block)] for block in inferred]
            return {"type": "table", "request": number, "blocks": rows, "inferred": True}
        size = state.block_size
        rows = [
            [block, said.tokens(i * size, min((i + 1) * size, request.computed)) if said else ""]
            for i, block in enumerate(request.table)
        ]
        return {"type": "table", "request": number, "blocks": rows}


def _units(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2
