"""Numbers and data as words."""

import pytest

from pages.widgets.format import badge, figures, percent, plain, seconds, size


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.214, "3.21"), (32.14, "32.1"), (321.4, "321"), (3214, "3,214"), (0, "0.00"), (-12.34, "-12.3")],
)
def test_three_figures(value, text):
    assert figures(value) == text


def test_gib_and_gb_differ_and_are_named():
    assert size(2**30, "GiB") == "1.00 GiB"
    assert size(2**30, "GB") == "1.07 GB"
    assert size(23040, "GiB") == "22.5 KiB"
    assert size(512, "GB") == "512 B"


def test_times_below_a_second_are_milliseconds_and_none_is_no_zero():
    assert seconds(0.0042) == "4.2 ms"
    assert seconds(0.842) == "842 ms"
    assert seconds(12.3) == "12.3 s"
    assert seconds(None) == "No traffic"


def test_small_shares_keep_a_digit():
    assert [percent(x) for x in (0, 0.034, 0.5, 1)] == ["0 %", "3.4 %", "50 %", "100 %"]


def test_names_are_data_never_markup():
    assert plain("[x] **b** $m$ :red[c]") == r"\[x\] \*\*b\*\* \$m\$ \:red\[c\]"
    assert plain("<b>a</b>\n# b") == r"\<b\>a\</b\> \# b"


def test_brackets_of_a_badge_are_left_to_it():
    assert badge(r"[::1]:8000 a\]") == r"[\:\:1]\:8000 a\\]"  # it makes \[ and \] of them itself


def test_addresses_in_messages_do_not_become_links():
    for text in ("http://evil.example/x", "see www.evil.example", "mail a@evil.example"):
        assert "\u2060" in plain(text)
        assert plain(text).replace("\u2060", "").replace("\\", "") == text
