"""A key from a file: what is wrong with it is said, and never what it is."""

import pytest

from backend import key_file


def test_the_key_is_the_files_one_line(tmp_path):
    (tmp_path / "key").write_text(" abc def\n")
    assert key_file.read(tmp_path / "key", "the file") == "abc def"
    assert key_file.checked("", "the key") == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "--key x cannot be read: No such file"),
        (b"secret\xff", "--key x cannot be read: it is no text"),
        (b"\n", "--key x is empty"),
        (b"secret\ntwo", "--key x must be one line"),
        ("schlüssel".encode(), "printable ASCII"),
    ],
)
def test_what_is_wrong_is_said_without_the_key(tmp_path, content, words):
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(key_file.BadKey, match=words) as refused:
        key_file.read(tmp_path / "key", "--key x")
    assert "secret" not in str(refused.value) and "schl" not in str(refused.value)
