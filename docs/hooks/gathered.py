"""What the site takes from the rest of the repository, so that nothing is written twice.

    <!-- README: Five lines -->    in a page: that section of the README, heading and all; under the
                                   README's own title, what stands above its first section
    module: attn_only_lens.viz     in the head of a page: an entry for every name in `__all__`
    first: [circuit_view]          beside it: the names to begin with; the others follow a rule
    notebooks/*.ipynb              a page each, with the outputs that they were saved with
    analyses/results/*             where they are in the repository, so that links to them hold
    CHANGELOG.md                   a page
    notebooks/*.md                 in `nav`: every such page, in order; no section if there is none

Links of a README section are relative to the root, without docs/: only pages directly under docs/
take sections.
"""

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
_SECTION = re.compile(r"^<!-- README: (.+) -->$", re.M)


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
    text = f"[This notebook]({path.name}){{: download }}\n\n{text}"
    files = {f"notebooks/{name}": data for name, data in resources["outputs"].items()}
    own = {f"notebooks/{path.stem}.md": text, f"notebooks/{path.name}": path.read_bytes()}
    return own | files


def _expanded(item: Any, pages: list[str]) -> list[Any]:
    """An entry of `nav` with its pattern resolved; nothing where no page has it."""
    if not isinstance(item, dict):
        return [item]
    [(title, inner)] = item.items()
    if isinstance(inner, str) and "*" in inner:
        found: list[Any] = [page for page in pages if Path(page).match(inner)]
        return [{title: found}] if found else []
    return [item]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Sections of the README, and entries of a module."""
    text = _SECTION.sub(lambda match: section(match[1]), markdown)
    module = page.meta.get("module")
    return f"{text}\n\n{entries(module, page.meta.get('first', ()))}" if module else text


def section(title: str) -> str:
    """A section of the README."""
    readme = (ROOT / "README.md").read_text("utf-8")
    parts = {part.split("\n", 1)[0]: part for part in re.split(r"^##? ", readme, flags=re.M)}
    if title not in parts:
        raise PluginError(f"got section {title!r}; the README has {sorted(parts)}")
    text = f"## {parts[title]}" if title != "attn_only_lens" else parts[title].split("\n", 1)[1]
    return text.replace("](docs/", "](")


def package(module: str) -> Path:
    """The file of a package of this name, whether there is one or not."""
    return ROOT / module.replace(".", "/") / "__init__.py"


def public(module: str) -> dict[str, str]:
    """The names of a package's `__all__`, each with where it is defined."""
    tree = ast.parse(package(module).read_text("utf-8"))
    where = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
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
    unknown = [name for name in first if name not in names]
    if unknown:
        raise PluginError(f"{module} has no {unknown[0]}, which its page puts first")
    parts = []
    for name in (*first, *(name for name in names if name not in first)):
        where, anchor = names[name], f'<a id="{module}.{name}"></a>'
        if where == f"{module}.{name}" and package(where).is_file():
            parts.append(f"## {name}\n\n{anchor}A module: [{where}]({name}.md).")
        elif module != "attn_only_lens" and root.get(name) == where:
            parts.append(f"## {name}\n\n{anchor}[attn_only_lens.{name}][{where}]")
        else:
            parts.append(f"{anchor}\n\n::: {where}")
    if 0 < len(first) < len(names):
        parts.insert(len(first), "---\n\n*The rest, in alphabetical order:*")
    return "\n\n".join(parts)
