"""One token file for both themes, readable in both; the page's own theme agrees with it."""

import tomllib
from pathlib import Path

import pytest

from pages.widgets.theme import tokens

CONFIG = Path(__file__).parents[2] / ".streamlit" / "config.toml"


def contrast(a: str, b: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_both_themes_have_the_same_names():
    light, dark = tokens()["light"], tokens()["dark"]
    assert light.keys() == dark.keys()
    assert len(light["owners"]) == len(dark["owners"])


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_is_readable_on_page_and_panel(mode):
    colours = tokens()[mode]
    for name, colour in colours.items():
        if name in ("text", "muted", "good", "bad") or (name.endswith("Text") and name != "ownerText"):
            assert contrast(colour, colours["background"]) >= 4.5, name
            assert contrast(colour, colours["panel"]) >= 4.5, name
    assert contrast(colours["primary"], colours["background"]) >= 3  # rings and marks
    for owner in colours["owners"]:
        assert contrast(owner, colours["ownerText"]) >= 4.5
    for soft, text in (("sharedSoft", "sharedText"), ("cachedSoft", "cachedText")):
        assert contrast(colours[soft], colours[text]) >= 4.5


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_the_page_theme_agrees_with_the_tokens(mode):
    theme = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["theme"][mode]
    colours = tokens()[mode]
    names = {
        "backgroundColor": "background",
        "secondaryBackgroundColor": "panel",
        "textColor": "text",
        "primaryColor": "primary",
    }
    for option, token in names.items():
        assert theme[option].upper() == colours[token].upper(), option
