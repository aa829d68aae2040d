"""Execute the notebooks, and store what they put out so that it can be read anywhere, offline.

    python notebooks/execute.py             # all of them; `make notebooks`
    python notebooks/execute.py 02 04

A figure of plotly needs a script of 5 MB, and a page with patterns one of 1.3 MB, so both are
stored as a picture that a headless Chromium takes (`make browser`); who runs a notebook has them
interactive. A smaller page, such as a circuit's, is stored as it is, in a frame.

With the outputs goes a digest of the code that made them: `tests/test_notebooks.py` holds the one
against the other, and executes the notebooks again.
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
from typing import Any

import nbformat
import plotly.io
from nbclient import NotebookClient
from nbformat import NotebookNode

from attn_only_lens.storage import write_text

FOLDER = Path(__file__).parent
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PLOTLY = "application/vnd.plotly.v1+json"
FIGURE = "a figure of plotly"
LARGEST_PAGE = 1_000_000
_WIDTH = 900
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "JUPYTER_PLATFORM_DIRS": "1",
    "OMP_NUM_THREADS": "1",
    "PLOTLY_RENDERER": "plotly_mimetype",  # the figure's data alone
    "PYTHONWARNINGS": "ignore:IProgress not found",  # no bars are shown
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # or the debugger of ipykernel writes to stderr
}


def executed(path: Path) -> NotebookNode:
    """A notebook with what its cells put out now, run in a folder that is thrown away.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised, with its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources)
        client.execute(env=os.environ | _ENVIRONMENT)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
    notebook.metadata.language_info = {"name": "python"}  # and not which
    notebook.metadata.attn_only_lens = {"sources": digest(notebook)}
    return notebook


def digest(notebook: NotebookNode) -> str:
    """A hash of the code of all cells."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def with_pictures(notebook: NotebookNode) -> NotebookNode:
    """The notebook with figures, and pages that are too large to be stored, as pictures."""
    with _camera() as photograph:
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                page = _page(output.get("data", {}))
                if page is not None:
                    text = output.data["text/plain"]
                    output.data = {"image/png": photograph(page), "text/plain": text}
    return notebook


def _page(data: dict[str, Any]) -> str | None:
    """The HTML of an output that is to become a picture."""
    if PLOTLY in data:
        figure = json.dumps(data[PLOTLY])
        data["text/plain"] = FIGURE
        return plotly.io.from_json(figure).to_html(config={"displayModeBar": False})
    html = data.get("text/html", "")
    frame = html.partition("<iframe")[2].partition('srcdoc="')[2].partition('"')[0]
    if frame and len(html) > LARGEST_PAGE:
        return unescape(frame)
    return None


@contextmanager
def _camera() -> Iterator[Callable[[str], str]]:
    """What takes a picture of a page: PNG in base64."""
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
            # A capture beyond the viewport would catch a chart while it draws itself anew.
            driver.set_window_size(_WIDTH, height + frame)
            driver.execute_async_script("setTimeout(arguments[0], 500)")
            return driver.get_screenshot_as_base64()

    try:
        yield photograph
    finally:
        driver.quit()


def main(wanted: list[str]) -> None:
    """Execute the notebooks whose names begin so, or all, and write each when it is done."""
    for path in NOTEBOOKS:
        if not wanted or path.name.startswith(tuple(wanted)):
            print(path.name, flush=True)
            text = nbformat.writes(with_pictures(executed(path)))
            write_text(path, text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
