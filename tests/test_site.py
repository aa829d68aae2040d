"""Tests that the site builds and makes no network requests, and that any fault stops the build."""

import base64
import importlib
import sys
import threading
from contextlib import ExitStack
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from browser import chromium, needs_browser

pytest.importorskip("mkdocs", reason="needs the extra [docs]: run `make test`")

import checked
import gathered
import mkdocs
import nbformat
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import PluginError

# The Makefile's .pth may expose another environment's packages, but not its data files.
pytestmark = [
    pytest.mark.both_versions,
    pytest.mark.skipif(
        not Path(mkdocs.__file__).is_relative_to(sys.prefix),
        reason="the site is built in the environment with the extra [docs]: run `make test`",
    ),
]
ROOT = Path(__file__).parents[1]
MODULES = [
    "attn_only_lens",
    *(f"attn_only_lens.{name}" for name in ("patching", "tasks", "circuits", "neurons", "viz")),
    *(f"attn_only_lens.{name}" for name in ("growth", "transcoders")),
    *(f"attn_only_lens.{name}" for name in ("errors", "pretrained")),
]
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
FRAME = """<iframe sandbox="allow-scripts" srcdoc="&lt;p class=&quot;own&quot;&gt;7 &amp;lt; 11

&lt;script&gt;const a = `x

    y`&lt;/script&gt;"></iframe>"""
FRAMED = '<p class="own">7 &lt; 11\n\n<script>const a = `x\n\n    y`</script>'


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    return load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path / "site"))


ANSWERS = {
    "patch one neuron": "patch-one-neuron-or-one-head",
    "use my own model": "use-my-own-model",
    "load to GPU": "load-a-model-to-the-gpu-or-in-half-precision",
    "steer": "steer-the-model-with-a-neuron",
    "which heads matter": "see-which-heads-matter-most",
    "save a sweep": "save-a-sweep-and-load-it-again",
}
"""Typical searches, and the section of the page of questions that answers each."""


def first_result(opened, address, question):
    """Return the section that a search for a question lists first, as a person types it."""
    opened.driver.get("about:blank")
    opened.driver.get(address)
    opened.js("document.querySelector('label[for=__search]').click()")
    field = opened.driver.find_element("css selector", ".md-search__input")
    field.send_keys(question)
    opened.wait("document.querySelector('.md-search-result__item a') !== null")
    first = "[...document.querySelector('.md-search-result__item').querySelectorAll('a')]"
    [page, section] = opened.js(f"return {first}.slice(0, 2).map(link => link.href)")
    assert page.endswith("/how_do_i.html")
    return section.partition("#")[2].partition("?")[0]


@pytest.fixture
def served():
    """Return a function that serves a folder on this machine, and returns its address."""
    with ExitStack() as stack:

        def serve(folder):
            handler = partial(Quiet, directory=str(folder))
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            stack.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            return f"http://127.0.0.1:{server.server_port}"

        yield serve


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        """Print nothing."""


def write_notebook(path, *outputs):
    new = nbformat.v4
    cells = [new.new_markdown_cell("# A story\n\n## Its end"), new.new_code_cell("one()\n\ntwo()")]
    cells[1].outputs = list(outputs)
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(
        new.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}}), path
    )
    return path


def shown(data):
    return nbformat.v4.new_output("display_data", data)


@needs_browser
@pytest.mark.filterwarnings("default")
def test_the_site_with_a_notebook_asks_no_other_machine(config, tmp_path, monkeypatch, served):
    """Every page opens without requests, and a notebook's outputs are shown as saved."""
    picture = shown({"image/png": base64.b64encode(PIXEL).decode()})
    printed = nbformat.v4.new_output("stream", name="stdout", text="a <b>\n")
    path = write_notebook(
        tmp_path / "notebooks" / "01_story.ipynb", printed, shown({"text/html": FRAME}), picture
    )
    monkeypatch.setattr(config.hooks["docs/hooks/gathered.py"], "NOTEBOOKS", path.parent)
    build(config)
    site = Path(config.site_dir)
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    with chromium(tmp_path / "profile") as opened:
        for path in pages:
            if path.name == "404.html":  # its links need a server
                continue
            opened.open(path)
            assert opened.texts("h1"), path
            assert opened.texts("article blockquote") == [], "an example is no code"
            assert opened.left_for() == [], path
            assert opened.console() == [], path
        opened.open(site / "notebooks" / "01_story.html")
        assert opened.texts("h1") == ["A story¶"]
        assert [text.strip() for text in opened.texts("pre code")] == ["one()\n\ntwo()", "a <b>"]
        assert opened.js("return document.querySelector('article iframe').srcdoc") == FRAMED
        assert opened.js("return document.querySelector('article img').naturalWidth") == 1
        for address in (site.as_uri(), served(site)):
            for question, answer in ANSWERS.items():
                assert first_result(opened, f"{address}/index.html", question) == answer


def test_a_notebook_opens_in_colab_once_the_repository_is_known(tmp_path):
    path = write_notebook(tmp_path / "02_story.ipynb")
    text = gathered.notebook(path, "https://github.com/someone/lens/")["notebooks/02_story.md"]
    tag = f"v{yaml.safe_load((ROOT / 'CITATION.cff').read_text())['version']}"
    colab = "https://colab.research.google.com/github/someone/lens/blob"
    assert f"({colab}/{tag}/notebooks/02_story.ipynb)" in text
    assert f"attn-only-lens[bridge,viz] @ git+https://github.com/someone/lens@{tag}" in text
    assert "colab" not in gathered.notebook(path)["notebooks/02_story.md"]


def page(folder, body, name="index.html"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<html><head></head><body>{body}</body></html>")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('<a href="gone.html">x</a>', "gone.html leads to no file on the site"),
        ('<a href="#gone">x</a>', "#gone leads to an anchor that does not exist"),
        (
            '<a href="sub/index.html#gone">x</a>',
            "sub/index.html#gone leads to an anchor that does not exist",
        ),
        ('<a href="//a.org">x</a>', "//a.org is not an https URL"),
        ('<img src="gone.png">', "loads gone.png, which does not exist"),
        ('<img src="https://a.org/x.png">', "loads https://a.org/x.png"),
        ('<p style="background: url(https://a.org/x)">', "loads https://a.org/x"),
        ("<script>import('https://a.org/x.mjs')</script>", "loads https://a.org/x.mjs"),
        (
            '<iframe srcdoc="&lt;script src=&quot;https://a.org/x.js&quot;&gt;"></iframe>',
            "loads https://a.org/x.js",
        ),
    ],
)
def test_a_fault_is_found(tmp_path, body, said):
    page(tmp_path, "x", "sub/index.html")
    page(tmp_path, body)
    (tmp_path / "x.png").write_bytes(PIXEL)
    assert checked.faults(tmp_path)[0] == [f"index.html: {said}"]


def test_a_name_without_an_entry_is_missing(tmp_path):
    names = [f"{module}.{n}" for module in MODULES for n in importlib.import_module(module).__all__]
    assert len(names) < 100  # few enough to remember
    entries = [f'<a id="{name}"></a>' for name in names]
    page(tmp_path, "".join(entries), "reference/all.html")
    assert list(checked.missing(tmp_path)) == []
    page(tmp_path, "".join(entries[:-1]), "reference/all.html")
    assert list(checked.missing(tmp_path)) == names[-1:]


def test_the_build_fails_on_a_fault(tmp_path):
    page(tmp_path, '<a href="gone.html">x</a>')
    with pytest.raises(PluginError, match=r"gone.html leads to no file on the site\n  - the ref"):
        checked.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))
