"""Examples in docstrings that need HookedTransformer are skipped where there is none."""

import re

import pytest

from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

# An example that converts a model, or builds a HookedTransformer of its own, needs one.
NEEDS_HOOKED = re.compile(r"\b(convert|HookedTransformer)\(")


def pytest_collection_modifyitems(items):
    """Mark them before they run."""
    if HAS_HOOKED_TRANSFORMER:
        return
    reason = "needs HookedTransformer: run with transformer-lens 3.9, `make test`"
    for item in items:
        if isinstance(item, pytest.DoctestItem) and any(
            NEEDS_HOOKED.search(example.source) for example in item.dtest.examples
        ):
            item.add_marker(pytest.mark.skip(reason=reason))
