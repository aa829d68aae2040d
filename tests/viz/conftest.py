"""Fixtures: one browser for all tests of pictures."""

import pytest
from browser import chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def opened(browser, tmp_path):
    """Yield a function that opens a picture; then check for console messages and requests."""
    from attn_only_lens import viz

    def open_picture(picture):
        browser.open(viz.write(picture, tmp_path / "picture.html"))
        return browser

    yield open_picture
    assert browser.console() == []
    assert browser.left_for() == []
