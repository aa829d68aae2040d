"""Run the command line as `python -m attn_only_lens.cli`, for multi-process launchers."""

from attn_only_lens.cli import app

if __name__ == "__main__":
    app()
