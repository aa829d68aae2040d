"""Tests and examples that need HookedTransformer are marked, and skipped where there is none."""

import re

import pytest

from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

# An example that calls what there is for HookedTransformers alone, or builds one, needs it.
NEEDS_HOOKED = re.compile(r"\b(convert|save_pretrained|HookedTransformer)\(")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items):
    """Mark them one by one: pytest-xdist does not report a module that is skipped whole."""
    reason = "needs HookedTransformer: run with transformer-lens 3.9, `make test`"
    for item in items:
        if needs_hooked_transformer(item):
            item.add_marker(pytest.mark.hooked)
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.numeric)  # examples show rounded numbers
        if not HAS_HOOKED_TRANSFORMER and item.get_closest_marker("hooked"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def _a_tokenizer_for_examples(doctest_namespace):
    """Examples of prompts say `tokenizer` for that of any model."""
    from task_tokenizer import task_tokenizer

    doctest_namespace["tokenizer"] = task_tokenizer()


def needs_hooked_transformer(item):
    """Whether it is such an example, or of a test module that takes its models from `models`."""
    if isinstance(item, pytest.DoctestItem):
        return any(NEEDS_HOOKED.search(example.source) for example in item.dtest.examples)
    build = getattr(item.module, "build", None)
    return getattr(build, "__module__", None) == "models"
