"""`python -m attn_only_lens.cli`, for launchers that start several processes."""

from attn_only_lens.cli import app

if __name__ == "__main__":
    app()
