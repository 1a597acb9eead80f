"""The stand-in tokenizer: whatever goes in comes back, whatever comes out can be read."""

from hypothesis import given
from hypothesis import strategies as st

from backend.models.plain import PlainTokenizer

WORDS = PlainTokenizer(128_256)


@given(st.text() | st.from_regex(r"( ?[a-z]{1,6})*", fullmatch=True))
def test_text_survives(text):
    clean = text.encode(errors="replace").decode()
    ids = WORDS.encode(text)
    assert WORDS.decode(ids) == clean
    assert all(0 <= i < WORDS.vocab_size for i in ids)


@given(st.integers(256, 128_255))
def test_each_word_is_one_id_and_can_be_read(token):
    text = WORDS.decode([token])
    assert text[0] == " " and text[1:].isalpha()
    assert WORDS.encode(text) == [token]


def test_no_two_ids_read_alike():
    vocabulary = PlainTokenizer(9000).get_vocab()
    assert len(vocabulary) == 9000
    assert sorted(vocabulary.values()) == list(range(9000))


def test_a_character_of_several_bytes_is_incomplete_until_its_last():
    ids = WORDS.encode("€")
    assert len(ids) == 3
    assert "�" in WORDS.decode(ids[:2])
    assert WORDS.decode(ids) == "€"


def test_tokens_are_named_as_transformers_names_them():
    assert WORDS.convert_ids_to_tokens(65) == "A"
    assert WORDS.convert_ids_to_tokens([65, 256]) == ["A", " ba"]


def test_a_vocabulary_smaller_than_the_bytes_still_gives_valid_ids():
    assert all(i < 96 for i in PlainTokenizer(96).encode("hello, wörld"))
