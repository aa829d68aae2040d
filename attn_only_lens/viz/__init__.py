"""Pictures, each one self-contained HTML file that works offline."""

from attn_only_lens.viz.demo_page import demo_page

__all__ = ["demo_page"]
