"""Tests of the project's rules that no linter checks."""

import ast
import importlib
import re
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest
from torch.utils._device import _device_constructors

from attn_only_lens import tl

ROOT = Path(__file__).parents[1]
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8"))
    for path in sorted((ROOT / "attn_only_lens").rglob("*.py"))
}

LAZY_STUBS = sorted((ROOT / "attn_only_lens").rglob("*.pyi"))
LAZY = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in LAZY_STUBS}

# The public names of the modules with a page in the reference, and the types of results.
REFERENCE = [path.read_text("utf-8") for path in (ROOT / "docs" / "reference").glob("*.md")]
RESULTS = [full for page in REFERENCE for full in re.findall(r"^  - ([\w.]+)$", page, re.M)]

LOADERS = {"import_module", "__import__", "exec_module", "load_module"}

# Names below `transformer_lens` that 3.9.0 has and 4.3.0 lacks.
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


def imported(tree):
    """Yield the dotted name of everything that a file imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def modules():
    """Return the dotted names of all modules and folders of the package."""
    return {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in TREES}


def calls(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def exists(dotted):
    """Return whether a module, or a name in a module, is installed."""
    parent, _, name = dotted.rpartition(".")
    try:
        return hasattr(importlib.import_module(parent), name) or bool(find_spec(dotted))
    except ImportError:
        return False


def test_no_module_reads_a_pickle():
    for path, tree in TREES.items():
        assert not [name for name in imported(tree) if "pickle" in name], path
        assert "torch.load" not in [ast.unparse(call.func) for call in calls(tree)], path


def test_tl_alone_imports_what_one_version_of_transformer_lens_has():
    gone = tuple(f"transformer_lens.{name}." for name in GONE)
    for path, tree in TREES.items():
        if path != "attn_only_lens/tl.py":
            imports = [name for name in imported(tree) if name.split(".")[0] == "transformer_lens"]
            assert "transformer_lens" not in imports, f"{path}: import its names, to be checked"
            assert not [name for name in imports if f"{name}.".startswith(gone)], path
            assert not [name for name in imports if not exists(name)], path


def hidden_imports(tree, *, lazy_names=False, loads_extras=False):
    """Yield what import-linter cannot see: it reads statements, and takes lazy names for stubs'."""
    own = modules()
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    yield from strings & own - {"attn_only_lens"}
    if not loads_extras:
        yield from {ast.unparse(call.func).split(".")[-1] for call in calls(tree)} & LOADERS
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    yield from (node.module for node in statements if node.level)
    if not lazy_names:
        names = [name for name in imported(tree) if name.split(".")[0] == "attn_only_lens"]
        yield from {name for name in names if name not in own and name.rpartition(".")[0] in LAZY}
        yield from {"attn_only_lens"} & set(names)


def test_the_contracts_see_every_import():
    for path, tree in TREES.items():
        # Nothing imports the command line; `import_extra` imports plotly and circuitsvis.
        lazy_names = path.startswith("attn_only_lens/cli/")
        extras = path == "attn_only_lens/viz/page.py"
        assert not [*hidden_imports(tree, lazy_names=lazy_names, loads_extras=extras)], path


@pytest.mark.parametrize(
    "statement",
    [
        'import_module("attn_only_lens.viz")',
        'importlib.import_module(f"attn_only_lens.{name}")',
        'sys.modules["attn_only_lens.viz"]',
        "import attn_only_lens",
        "from attn_only_lens import explain",
        "from attn_only_lens.models import ExposedNeurons",
        "from ..viz import Page",
    ],
)
def test_a_hidden_import_is_seen(statement):
    assert [*hidden_imports(ast.parse(f"def late():\n    {statement}"))]
    assert not [*hidden_imports(ast.parse("from attn_only_lens.viz import Page"))]


def test_every_new_tensor_and_generator_names_its_device():
    """A tensor without a device would be made on the user's `torch.set_default_device`."""
    constructors = {f"torch.{function.__name__}" for function in _device_constructors()}
    for path, tree in TREES.items():
        for call in calls(tree):
            called = ast.unparse(call.func)
            if called in constructors:
                assert any(keyword.arg == "device" for keyword in call.keywords), (
                    path,
                    call.lineno,
                )
            if called == "torch.Generator":
                assert call.args, (path, call.lineno)


@pytest.mark.parametrize("name", GONE)
def test_what_is_gone_is_gone(name):
    assert exists(f"transformer_lens.{name}") is tl.HAS_HOOKED_TRANSFORMER


def test_the_wheel_holds_every_file_of_the_package_and_no_path_of_a_machine(tmp_path):
    """The wheel includes weights, tables, scripts, styles and `py.typed`."""
    from hatchling.builders.wheel import WheelBuilder

    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with ZipFile(wheel) as held:
        texts = {name: held.read(name) for name in held.namelist()}
    held = {name for name in texts if name.startswith("attn_only_lens/")}
    package = ROOT / "attn_only_lens"
    files = {path.relative_to(ROOT).as_posix() for path in package.rglob("*") if path.is_file()}
    files = {name for name in files if not name.endswith(".pyc")}
    kinds = {Path(name).suffix for name in files}
    assert kinds >= {".css", ".html", ".js", ".json", ".md", ".py", ".safetensors", ".typed"}
    assert held == files
    for name, text in texts.items():
        assert not re.search(rb"/(tmp|home|root|Users)/\w|site-packages/", text), name


def test_the_tests_of_public_reports_exist():
    page = (ROOT / "tests" / "public_reports.md").read_text("utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page)
    assert len(named) == page.count("\n| ") - 2  # without the head of the table and the line below
    for path, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / path).read_text("utf-8"), re.M), (path, test)
