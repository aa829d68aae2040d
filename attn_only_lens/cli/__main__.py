"""Allow launchers such as torchrun to start a command as `python -m attn_only_lens.cli`."""

from attn_only_lens.cli import app

if __name__ == "__main__":
    app()
