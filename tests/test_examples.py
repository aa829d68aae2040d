"""Tests that the Python examples of the README and of each page run, in order and together."""

import re
from pathlib import Path

import pytest
from examples import EXAMPLE, run

pytestmark = pytest.mark.numeric

ROOT = Path(__file__).parents[1]
# Paths, because a page of the guide and one of the reference may have one name.
PAGES = {
    path.relative_to(ROOT / "docs").as_posix(): path.read_text("utf-8")
    for path in sorted((ROOT / "docs").rglob("*.md"))
}
PAGES["README.md"] = (ROOT / "README.md").read_text("utf-8")


ELSEWHERE = {"scale.md"}  # test_many_contrasts.py runs its examples, in several processes


@pytest.mark.parametrize(
    "name", [name for name, text in PAGES.items() if "```python" in text and name not in ELSEWHERE]
)
def test_examples_of_a_page_run_with_either_transformer_lens(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(PAGES[name], name)


def test_no_page_and_no_fence_is_missed():
    assert len(PAGES) == len(list((ROOT / "docs").rglob("*.md"))) + 1
    for name, text in PAGES.items():
        assert text.count("```python") == len(EXAMPLE.findall(text)), name
        languages = re.findall(r"^ *```(.+)$", text, re.M)
        assert set(languages) <= {"python", "sh", "text"}, name


def test_commands_exist():
    from typer.testing import CliRunner

    from attn_only_lens.cli import app

    commands = {
        command
        for text in PAGES.values()
        for command in re.findall(r"^attn-only-lens (\w+)", text, re.M)
    }
    assert commands
    for command in commands:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
