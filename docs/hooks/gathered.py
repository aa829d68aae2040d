"""Add files and docstrings from elsewhere in the repository to the site.

These metadata entries at the top of a page add content to it:
    module: attn_only_lens.viz   adds an entry for every name in the module's `__all__`
    first: [circuit_view]        puts these names first, with a table of them at the top of the
                                 page; the other names follow below a horizontal line
    results: [full.name.Of]      adds an entry for each class, which users get but do not import
These files become pages:
    notebooks/*.ipynb            one page for each notebook, with its stored outputs
    CHANGELOG.md                 one page
These files keep their paths from the repository, so that links to them work:
    analyses/results/*
A pattern in `nav` stands for all matching pages, in order. Without a match, its section is omitted:
    notebooks/*.md
"""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"


def on_files(files: Any, config: Any) -> Any:
    """Add the files that are outside docs/."""
    added = {"changelog.md": (ROOT / "CHANGELOG.md").read_text("utf-8")}
    for path in sorted((ROOT / "analyses" / "results").glob("*.*")):
        added[f"analyses/results/{path.name}"] = path.read_bytes()
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        added |= notebook(path, config.repo_url)
    for name, content in added.items():
        files.append(File.generated(config, name, content=content))
    config.nav = [entry for item in config.nav for entry in _expanded(item, sorted(files.src_uris))]
    return files


def notebook(path: Path, repo_url: str | None = None) -> dict[str, Any]:
    """Map paths in the site to the notebook's page, to its pictures and to the notebook itself."""
    exporter = MarkdownExporter()
    text, resources = exporter.from_filename(
        str(path), resources={"output_files_dir": f"{path.stem}_files"}
    )
    title, _, text = text.lstrip().partition("\n")  # `nav` shows the first line as the page's title
    links = [f"[Download this notebook]({path.name}){{: download }}"]
    if repo_url:
        links += _colab(path, repo_url.rstrip("/"))
    text = f"{title}\n\n{' · '.join(links)}\n{text}"
    pictures = {f"notebooks/{name}": data for name, data in resources["outputs"].items()}
    pages = {f"notebooks/{path.stem}.md": text, f"notebooks/{path.name}": path.read_bytes()}
    return pages | pictures


def _colab(path: Path, repo_url: str) -> list[str]:
    """Return a button that opens the released notebook in Colab, and the installation command."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    tag, (owner, name) = f"v{citation['version']}", repo_url.split("/")[-2:]
    address = f"https://colab.research.google.com/github/{owner}/{name}/blob/{tag}/notebooks"
    install = f'%pip install "attn-only-lens[bridge,viz] @ git+{repo_url}@{tag}"'
    badge = f"[Open in Colab]({address}/{path.name}){{: .md-button }}"
    return [badge, f"`{install}` installs this version"]


def _expanded(item: Any, pages: list[str]) -> list[Any]:
    """Expand the pattern in a `nav` entry to the matching pages; return [] if none match."""
    if not isinstance(item, dict):
        return [item]
    [(title, inner)] = item.items()
    if isinstance(inner, list):
        return [{title: [entry for section in inner for entry in _expanded(section, pages)]}]
    if isinstance(inner, str) and "*" in inner:
        matches: list[Any] = [page for page in pages if Path(page).match(inner)]
        return [{title: matches}] if matches else []
    return [item]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add the reference entries of the module, or of the results, in the page's metadata."""
    results = page.meta.get("results", ())
    for full in results:
        if not summary(full):
            raise PluginError(f"the page of results lists {full}, which has no docstring")
    markdown = "\n\n".join([markdown, *(f"::: {full}" for full in results)])
    module = page.meta.get("module")
    return f"{markdown}\n\n{entries(module, page.meta.get('first', ()))}" if module else markdown


def package(module: str) -> Path:
    """Return the path of a package's `__init__.py`, which may not exist."""
    return ROOT / module.replace(".", "/") / "__init__.py"


def is_module(name: str) -> bool:
    """Return whether a full name denotes a package or a module."""
    return package(name).is_file() or source(name).is_file()


def source(module: str) -> Path:
    """Return the source file of a module or package."""
    file = ROOT / f"{module.replace('.', '/')}.py"
    return file if file.is_file() else package(module)


def public(module: str) -> dict[str, str]:
    """Map each name in a module's `__all__` to the full name of its definition."""
    tree, definitions = _tree(module), _imported(module)
    [names] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return {  # a name that is imported from the package itself is a submodule
        name: full if full.rpartition(".")[0] == module else _definition(full)
        for name, full in ((name, definitions.get(name, f"{module}.{name}")) for name in names)
    }


def _tree(module: str) -> ast.Module:
    stub = source(module).with_suffix(".pyi")  # lazily imported names are listed in a stub
    return ast.parse((stub if stub.is_file() else source(module)).read_text("utf-8"))


def _imported(module: str) -> dict[str, str]:
    """Map each name that a module imports from another module to its full name there."""
    return {
        alias.asname or alias.name: ".".join(
            [*[module] * node.level, *[node.module] * bool(node.module), alias.name]
        )
        for node in _tree(module).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _definition(full: str) -> str:
    """Return the full name of a definition; follow the import if a package re-exports the name."""
    module, _, name = full.rpartition(".")
    passed_on = _imported(module) if "." in module and package(module).is_file() else {}
    return _definition(passed_on[name]) if name in passed_on else full


def entries(module: str, first: Sequence[str] = ()) -> str:
    """Return an entry with an anchor for each public name; the names in `first` come first.

    A name that `attn_only_lens` itself exports is described on that package's page, and other pages
    link to it. Submodules have their own pages.
    """
    names, root = public(module), public("attn_only_lens")
    leading = [name for name in first if "." not in name]
    unknown = [name for name in leading if name not in names]
    if unknown:
        raise PluginError(f"{module} has no {unknown[0]}, which its page lists under `first`")
    parts = [_table(module, first)] if first else []
    for name in (*leading, *(name for name in names if name not in leading)):
        full, anchor = names[name], f'<a id="{module}.{name}"></a>'
        if full == f"{module}.{name}" and is_module(full):
            parts.append(f"## {name}\n\n{anchor}A module: [{full}]({name}.md).")
        elif module != "attn_only_lens" and root.get(name) == full:
            parts.append(f"## {name}\n\n{anchor}[attn_only_lens.{name}][{full}]")
        else:
            parts.append(f"{anchor}\n\n::: {full}")
    if 0 < len(leading) < len(names):
        parts.insert(len(leading) + 1, "---\n\n*The rest, in alphabetical order:*")
    return "\n\n".join(parts)


def _table(module: str, first: Sequence[str]) -> str:
    """Return a table of names in this module or its submodules, with one sentence about each."""
    rows = []
    for entry in first:
        inner, _, name = entry.rpartition(".")
        full = f"{module}.{inner}" if inner else module
        page = f"{inner}.md" if inner else ""
        rows.append(f"| [{entry}]({page}#{full}.{name}) | {summary(public(full)[name])} |")
    return "\n".join(["| name | |", "| --- | --- |", *rows])


def summary(full: str) -> str:
    """Return the first sentence of a function's, class's, module's or package's docstring."""
    if is_module(full):
        tree: Any = ast.parse(source(full).read_text("utf-8"))
    else:
        module, _, name = full.rpartition(".")
        path = ROOT / f"{module.replace('.', '/')}.py"
        definitions = ast.parse(path.read_text("utf-8")).body
        trees = [node for node in definitions if getattr(node, "name", None) == name]
        if len(trees) != 1:
            raise PluginError(f"a page lists {full}, which {path.name} does not define")
        [tree] = trees
    paragraph = (ast.get_docstring(tree) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).split(". ")[0].rstrip(".").replace("|", "\\|")
