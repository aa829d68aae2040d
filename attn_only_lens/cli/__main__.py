"""`python -m attn_only_lens.cli`, as launchers of several processes start it."""

from attn_only_lens.cli import app

if __name__ == "__main__":
    app()
