from hypothesis import given
from hypothesis import strategies as st

from backend.engine.detokenize import IncrementalDecoder, StopStrings


def decode(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def stream(ids, prompt=()):
    decoder = IncrementalDecoder(decode, list(prompt))
    deltas = [decoder.add(token) for token in ids]
    return deltas, decoder.flush()


@given(st.text(max_size=40), st.text(max_size=10))
def test_deltas_never_break_a_character_and_join_to_the_whole(text, before):
    deltas, rest = stream(text.encode(), before.encode())
    assert "".join(deltas) + rest == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


def test_an_unfinished_character_is_held_back_and_shown_at_the_end():
    deltas, rest = stream("né".encode()[:-1])
    assert deltas == ["n", ""]
    assert rest == "\ufffd"


def test_bytes_that_never_become_a_character_do_not_hold_the_stream_for_ever():
    deltas, rest = stream([0x80] * 100)
    assert any(deltas)
    assert len("".join(deltas) + rest) == 100


def test_the_prompt_never_leaks():
    deltas, rest = stream(b"yz", b"secret")
    assert "".join(deltas) + rest == "yz"


def feed(stops, pieces, include=False):
    stop_strings = StopStrings(stops, include)
    shown = ""
    for piece in pieces:
        text, met = stop_strings.add(piece)
        shown += text
        if met:
            return shown, met
    return shown + stop_strings.flush(), None


def test_a_stop_string_over_several_tokens_is_never_shown():
    stop_strings = StopStrings(["STOP"])
    assert [stop_strings.add(piece)[0] for piece in ["ab S", "T", "O"]] == ["ab ", "", ""]
    assert stop_strings.add("P more") == ("", "STOP")


def test_the_earliest_match_wins():
    assert feed(["later", "ear"], ["an earlier and later"]) == ("an ", "ear")


def test_a_false_start_is_shown_after_all():
    assert feed(["STOP"], ["ST", "AND"]) == ("STAND", None)


def test_include_keeps_the_stop_string():
    assert feed(["\n\n"], ["a\n", "\nb"], include=True) == ("a\n\n", "\n\n")


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_streaming_shows_what_cutting_the_whole_text_would(stops, pieces):
    whole = "".join(pieces)
    positions = [whole.find(s) for s in stops if s in whole]
    shown, met = feed(stops, pieces)
    if not positions:
        assert (shown, met) == (whole, None)
    else:
        # Text that arrives in one piece can hold a later stop that would complete first; never more is shown than
        # up to the end of the first complete stop, and never a stop string itself.
        assert met in stops
        assert whole.startswith(shown)
        assert not any(s in shown for s in stops)
