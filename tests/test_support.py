"""Tests that the tables of docs/support.md are right, and that every public function has a row."""

import importlib
from types import ModuleType

import pytest
import support

import attn_only_lens as lens
from attn_only_lens.cli import app

pytestmark = [
    pytest.mark.both_versions,
    pytest.mark.filterwarnings("ignore"),  # warnings from TransformerLens and transformers
]
ROWS = [(package, name) for package, names in support.ROWS.items() for name in names]


@pytest.fixture(scope="module", params=support.HERE)
def kit(request, tmp_path_factory):
    return support.Kit(request.param, tmp_path_factory.mktemp("kit"))


@pytest.mark.parametrize(("package", "name"), ROWS, ids=[".".join(row) for row in ROWS])
def test_a_function_does_what_is_stored(kit, package, name):
    now = support.measure(kit, support.ROWS[package][name])
    assert now == support.stored()[package, name][kit.kind], "`make support` stores it"


def test_what_is_no_answer_is_a_fault(kit):
    def refuse(kit):
        raise lens.errors.InputError([f"no {kit.folder}/x", "and more"], "a problem")

    assert support.measure(kit, refuse) == "no …; and more"
    with pytest.raises(AssertionError, match="not sensible"):
        support.measure(kit, lambda kit: [])
    with pytest.raises(AttributeError):
        support.measure(kit, lambda kit: kit.model.no_such_thing)


def test_every_public_function_and_command_has_a_row():
    *packages, commands = support.ROWS
    public = {
        name
        for package in map(importlib.import_module, packages)
        for name in package.__all__
        if not is_no_function(getattr(package, name))
    }
    rows = {name for package in packages for name in support.ROWS[package]}
    with_rows = {name for name in rows if "." not in name}  # results have rows for methods
    assert public - support.OF_NO_MODEL == with_rows
    of_the_shell = {command.callback.__name__ for command in app.registered_commands}
    assert of_the_shell - support.OF_NO_MODEL == set(support.ROWS[commands])


def is_no_function(public):
    """Return whether a public object is an error, or a package with its own rows."""
    if isinstance(public, ModuleType):
        return public.__name__ in support.ROWS
    return isinstance(public, type) and issubclass(public, Exception)


def test_the_page_shows_what_is_stored():
    cells = support.stored()
    assert support.PAGE.read_text("utf-8") == support.page(cells), "`make support` writes it"
    assert sorted(cells) == sorted(ROWS)
    assert all(cell for row in cells.values() for cell in row.values())
