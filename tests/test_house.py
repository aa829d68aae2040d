"""The rules of the house that no linter checks."""

import ast
import importlib
import pkgutil
import re
import types
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

import attn_only_lens
from attn_only_lens import tl

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "attn_only_lens").rglob("*.py"))
OTHERS = [path for path in MODULES if path.name != "tl.py"]

# What transformer-lens 3.9.0 has and 4.3.0 has not, below `transformer_lens`.
GONE = (
    "BertNextSentencePrediction",
    "HookedAudioEncoder",
    "HookedEncoder",
    "HookedEncoderDecoder",
    "HookedTransformer",
    "HookedTransformerConfig",
    "components",
    "config.HookedTransformerConfig",
    "config.hooked_transformer_config",
    "factories.mlp_factory",
    "loading_from_pretrained",
    "pretrained",
    "train",
    "utils",
)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_its_idea_and_reads_no_pickle(path):
    text = path.read_text("utf-8")
    assert ast.get_docstring(ast.parse(text))
    assert not re.search(r"\bpickle\b.*import|import pickle|torch\.load\(", text)


@pytest.mark.parametrize("name", attn_only_lens.__all__)
def test_what_is_public_is_explained(name):
    found = getattr(attn_only_lens, name)
    if isinstance(found, dict):
        return
    assert found.__doc__
    if callable(found) and not isinstance(found, type):
        assert ">>>" in found.__doc__, f"{name} has no example"
        for section in ("Args:", "Returns:", "Raises:"):
            assert section in found.__doc__, f"{name} does not say {section}"


def test_the_api_is_flat_and_sorted():
    names = attn_only_lens.__all__
    upper = [n for n in names if n.isupper()]
    classes = [n for n in names if not n.isupper() and n[0].isupper()]
    assert names == upper + sorted(classes) + sorted(n for n in names if n[0].islower())


def test_every_module_says_what_it_offers():
    for path in MODULES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = importlib.import_module(".".join(p for p in parts if p != "__init__"))
        missing = [n for n in getattr(module, "__all__", []) if not hasattr(module, n)]
        assert not missing, (path, missing)


def imported(path):
    """The dotted name of everything that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def exists(dotted):
    """Whether the installed packages have it: a module, or a name in one."""
    parent, _, name = dotted.rpartition(".")
    try:
        return hasattr(importlib.import_module(parent), name) or bool(find_spec(dotted))
    except ImportError:
        return False


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_one_version_of_transformer_lens_has_alone_is_imported_in_tl_only(path):
    theirs = [name for name in imported(path) if name.split(".")[0] == "transformer_lens"]
    assert "transformer_lens" not in theirs, "import its names, so that they can be checked"
    gone = tuple(f"transformer_lens.{name}." for name in GONE)
    assert not [name for name in theirs if f"{name}.".startswith(gone)]
    assert not [name for name in theirs if not exists(name)]


@pytest.mark.parametrize("name", GONE)
def test_what_is_gone_is_gone(name):
    assert exists(f"transformer_lens.{name}") is tl.HAS_HOOKED_TRANSFORMER


def test_every_name_of_tl_is_used():
    used = {name for path in OTHERS for name in imported(path)}
    assert not [name for name in tl.__all__ if f"attn_only_lens.tl.{name}" not in used]


@pytest.mark.parametrize(
    "package",
    ["circuits", "comparison", "expansion", "gates", "growth", "heads", "patching", "viz"],
)
def test_no_function_hides_the_module_that_it_is_in(package):
    """`import attn_only_lens.circuits.x` is a module, whatever the package exports."""
    found = importlib.import_module(f"attn_only_lens.{package}")
    names = [each.name for each in pkgutil.iter_modules(found.__path__)]
    assert len(names) > 3
    hidden = [n for n in names if not isinstance(getattr(found, n, tl), types.ModuleType)]
    assert hidden == []


def test_the_wheel_holds_every_file_of_the_package(tmp_path):
    """Weights, tables, scripts, styles and `py.typed`, too."""
    from hatchling.builders.wheel import WheelBuilder

    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    held = {name for name in ZipFile(wheel).namelist() if name.startswith("attn_only_lens/")}
    package = ROOT / "attn_only_lens"
    files = {path.relative_to(ROOT).as_posix() for path in package.rglob("*") if path.is_file()}
    files = {name for name in files if not name.endswith(".pyc")}
    kinds = {Path(name).suffix for name in files}
    assert kinds >= {".css", ".html", ".js", ".json", ".md", ".py", ".safetensors", ".typed"}
    assert held == files
