"""Execute the notebooks, and store their outputs so that they can be read anywhere, offline.

    python notebooks/execute.py             # all of them; `make notebooks`
    python notebooks/execute.py 02 04

A page with patterns needs a 1.3 MB script, so it is stored as a screenshot from a headless Chromium
(`make browser`), and is interactive only if you run the notebook. The same holds for figures of
plotly without a picture. Other pages and figures are stored unchanged.

A digest of the code is stored with the outputs: `tests/test_notebooks.py` compares the digest with
the code, executes the notebooks again, and compares the outputs.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from shutil import which

import nbformat
import plotly.io
from nbclient import NotebookClient
from nbformat import NotebookNode

from attn_only_lens.storage import write_text
from attn_only_lens.viz.page import unpacked

FOLDER = Path(__file__).parent
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PLOTLY = "application/vnd.plotly.v1+json"
FIGURE = "a figure of plotly"
LARGEST_PAGE = 1_000_000  # characters of HTML
_WIDTH = 900
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "JUPYTER_PLATFORM_DIRS": "1",
    "OMP_NUM_THREADS": "1",
    "PLOTLY_RENDERER": "plotly_mimetype",  # only the figure's data
    "PYTHONWARNINGS": "ignore:IProgress not found",  # notebooks show no progress bars
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # otherwise, ipykernel's debugger writes to stderr
}


def executed(path: Path) -> NotebookNode:
    """Return a notebook with the new outputs of its cells, run in a temporary folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the message has the traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources)
        client.execute(env=os.environ | _ENVIRONMENT)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # execution times differ between runs
    notebook.metadata.language_info = {"name": "python"}  # omits Python's version
    notebook.metadata.attn_only_lens = {"sources": digest(notebook)}
    return notebook


def digest(notebook: NotebookNode) -> str:
    """Return a hash of the code in all cells."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def with_pictures(notebook: NotebookNode) -> NotebookNode:
    """Return the notebook with screenshots in place of pages that are too large to store."""
    with _camera() as photograph:
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                page = framed(data.get("text/html", ""))
                if PLOTLY in data:
                    data["text/plain"] = FIGURE
                    if "image/svg+xml" not in data:  # not a figure of this package
                        figure = plotly.io.from_json(json.dumps(data[PLOTLY]))
                        page = figure.to_html(config={"displayModeBar": False})
                if len(page) > LARGEST_PAGE:
                    text = data["text/plain"]
                    output.data = {"image/png": photograph(page), "text/plain": text}
    return notebook


def framed(html: str) -> str:
    """Return the page in an output's frame; "" if it has no frame."""
    frame = html.partition("<iframe")[2].partition('srcdoc="')[2].partition('"')[0]
    return unpacked(unescape(frame))


@contextmanager
def _camera() -> Iterator[Callable[[str], str]]:
    """Yield a function that renders an HTML page as a base64-encoded PNG."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = which("chromium")
    for flag in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "hide-scrollbars",
        f"window-size={_WIDTH},400",
    ):
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options=options, service=Service(which("chromedriver")))

    def photograph(page: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "page.html"
            file.write_text(page, encoding="utf-8")
            driver.set_window_size(_WIDTH, 400)
            driver.get(file.as_uri())
            height = driver.execute_script("return document.documentElement.scrollHeight")
            frame = driver.execute_script("return outerHeight - innerHeight")
            # A capture larger than the viewport would show a chart that is still being redrawn.
            driver.set_window_size(_WIDTH, height + frame)
            driver.execute_async_script("setTimeout(arguments[0], 500)")
            return driver.get_screenshot_as_base64()

    try:
        yield photograph
    finally:
        driver.quit()


def main(wanted: list[str]) -> None:
    """Execute all notebooks, or those whose names start with a prefix in `wanted`; save each."""
    for path in NOTEBOOKS:
        if not wanted or path.name.startswith(tuple(wanted)):
            print(path.name, flush=True)
            text = nbformat.writes(with_pictures(executed(path)))
            write_text(path, text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
