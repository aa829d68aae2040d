"""Every Python example of the README runs, in order, as one session."""

import re
from pathlib import Path

from common import needs_hooked_transformer

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def run(text):
    """Run the examples in a text; how many there are."""
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    namespace = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, example {number}", "exec"), namespace)
    return len(blocks)


@needs_hooked_transformer
def test_examples_run():
    assert run(README) >= 3


def test_the_example_for_every_transformer_lens_runs():
    [section] = re.findall(r"^## Install\n(.*?)^## ", README, re.M | re.S)
    assert run(section) == 1


def test_commands_exist():
    from typer.testing import CliRunner

    from attn_only_lens.cli import app

    commands = re.findall(r"^attn-only-lens (\w+)", README, re.M)
    assert commands
    for command in commands:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
