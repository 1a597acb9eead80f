"""The script behind the pages, without a browser."""

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from pages.widgets import service

SHELL = Path(__file__).parents[2] / "pages" / "shell.py"


@pytest.fixture
def no_service(monkeypatch):
    service.close()
    yield monkeypatch
    service.close()


def test_an_address_that_is_none_is_explained(no_service):
    no_service.setenv("KVSCOPE_ENGINE_URL", "nonsense")
    page = AppTest.from_file(SHELL).run(timeout=30)
    assert not page.exception
    assert "not 'nonsense'" in page.error[0].value


@pytest.mark.parametrize(
    "path, pictures",
    [("cockpit.py", 5), ("blocks.py", 5), ("phases.py", 5), ("hardware.py", 5), ("batching.py", 1), ("fleet.py", 1)],
)
def test_pages_are_drawn_while_no_engine_answers(no_service, path, pictures):
    no_service.setenv("KVSCOPE_ENGINE_URL", "http://127.0.0.1:9")  # nobody listens on the discard port
    page = AppTest.from_file(SHELL).run(timeout=30)
    page.switch_page(path).run(timeout=30)
    assert not page.exception
    views = [element.proto.component_name for element in page.get("bidi_component")]
    assert len(views) >= pictures
