"""Every Python example of the README runs, in order, as one session."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_examples_run():
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.M | re.S)
    assert len(blocks) >= 3
    namespace = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, example {number}", "exec"), namespace)


def test_commands_exist():
    from typer.testing import CliRunner

    from attn_only_lens.cli import app

    commands = re.findall(r"^attn-only-lens (\w+)", README.read_text("utf-8"), re.M)
    assert commands
    for command in commands:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
