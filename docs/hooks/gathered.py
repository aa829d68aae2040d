"""What the site takes from the rest of the repository, so that nothing is written twice.

module: attn_only_lens.viz     in the head of a page: an entry for every name in `__all__`
first: [circuit_view]          beside it: the names to begin with; the page opens with a table of
                               them, and the others follow a rule
notebooks/*.ipynb              a page each, with the outputs that they were saved with
analyses/results/*             where they are in the repository, so that links to them hold
CHANGELOG.md                   a page
notebooks/*.md                 in `nav`: every such page, in order; no section if there is none
"""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"


def on_files(files: Any, config: Any) -> Any:
    """Add what lies outside docs/."""
    added = {"changelog.md": (ROOT / "CHANGELOG.md").read_text("utf-8")}
    for path in sorted((ROOT / "analyses" / "results").glob("*.*")):
        added[f"analyses/results/{path.name}"] = path.read_bytes()
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        added |= notebook(path)
    for name, content in added.items():
        files.append(File.generated(config, name, content=content))
    config.nav = [entry for item in config.nav for entry in _expanded(item, sorted(files.src_uris))]
    return files


def notebook(path: Path) -> dict[str, Any]:
    """A notebook's page, its pictures, and itself, by where they are in the site."""
    exporter = MarkdownExporter()
    text, resources = exporter.from_filename(
        str(path), resources={"output_files_dir": f"{path.stem}_files"}
    )
    title, _, text = text.lstrip().partition("\n")  # first, or `nav` has the name of the file
    text = f"{title}\n\n[Download this notebook]({path.name}){{: download }}\n{text}"
    files = {f"notebooks/{name}": data for name, data in resources["outputs"].items()}
    own = {f"notebooks/{path.stem}.md": text, f"notebooks/{path.name}": path.read_bytes()}
    return own | files


def _expanded(item: Any, pages: list[str]) -> list[Any]:
    """An entry of `nav` with its pattern resolved; nothing where no page has it."""
    if not isinstance(item, dict):
        return [item]
    [(title, inner)] = item.items()
    if isinstance(inner, list):
        return [{title: [entry for each in inner for entry in _expanded(each, pages)]}]
    if isinstance(inner, str) and "*" in inner:
        found: list[Any] = [page for page in pages if Path(page).match(inner)]
        return [{title: found}] if found else []
    return [item]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add the entries of a module."""
    module = page.meta.get("module")
    return f"{markdown}\n\n{entries(module, page.meta.get('first', ()))}" if module else markdown


def package(module: str) -> Path:
    """The file of a package of this name, whether there is one or not."""
    return ROOT / module.replace(".", "/") / "__init__.py"


def public(module: str) -> dict[str, str]:
    """The names of a package's `__all__`, each with where it is defined."""
    stub = package(module).with_suffix(".pyi")  # where names are imported when they are first used
    tree = ast.parse((stub if stub.is_file() else package(module)).read_text("utf-8"))
    where = {
        alias.asname or alias.name: ".".join(
            [*[module] * node.level, *[node.module] * bool(node.module), alias.name]
        )
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    [names] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return {  # what comes out of the package itself is a module of it
        name: where[name] if where[name].rpartition(".")[0] == module else _defined(where[name])
        for name in names
    }


def _defined(where: str) -> str:
    """Where a name that a package may only pass on is defined."""
    module, _, name = where.rpartition(".")
    inner = public(module) if "." in module and package(module).is_file() else {}
    return inner.get(name, where)


def entries(module: str, first: Sequence[str] = ()) -> str:
    """Return an entry for each public name, at an anchor of that name, the first ones first.

    A name of the package itself is described there, and other modules refer to it. Submodules are
    pages of their own.
    """
    names, root = public(module), public("attn_only_lens")
    own = [name for name in first if "." not in name]
    unknown = [name for name in own if name not in names]
    if unknown:
        raise PluginError(f"{module} has no {unknown[0]}, which its page puts first")
    parts = [_table(module, first)] if first else []
    for name in (*own, *(name for name in names if name not in own)):
        where, anchor = names[name], f'<a id="{module}.{name}"></a>'
        if where == f"{module}.{name}" and package(where).is_file():
            parts.append(f"## {name}\n\n{anchor}A module: [{where}]({name}.md).")
        elif module != "attn_only_lens" and root.get(name) == where:
            parts.append(f"## {name}\n\n{anchor}[attn_only_lens.{name}][{where}]")
        else:
            parts.append(f"{anchor}\n\n::: {where}")
    if 0 < len(own) < len(names):
        parts.insert(len(own) + 1, "---\n\n*The rest, in alphabetical order:*")
    return "\n\n".join(parts)


def _table(module: str, first: Sequence[str]) -> str:
    """Return a table of names, of this module or of its modules, each with what is said of it."""
    rows = []
    for each in first:
        inner, _, name = each.rpartition(".")
        of = f"{module}.{inner}" if inner else module
        page = f"{inner}.md" if inner else ""
        rows.append(f"| [{each}]({page}#{of}.{name}) | {said(public(of)[name])} |")
    return "\n".join(["| name | |", "| --- | --- |", *rows])


def said(where: str) -> str:
    """Return the first sentence of the docstring of a function or class, or of a package."""
    if package(where).is_file():
        tree: Any = ast.parse(package(where).read_text("utf-8"))
    else:
        module, _, name = where.rpartition(".")
        path = ROOT / f"{module.replace('.', '/')}.py"
        found = ast.parse(path.read_text("utf-8")).body
        [tree] = [each for each in found if getattr(each, "name", None) == name]
    paragraph = (ast.get_docstring(tree) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).split(". ")[0].rstrip(".").replace("|", "\\|")
