"""Check the built site; if it has faults, let the build fail with a list of all faults.

    internal links   every link within the site leads to an existing file and an existing anchor
    external links   every link to another site is a well-formed https address
    loaded files     no page or style sheet loads a script, style, font, image or frame from another
                     site
    names            every public name in the reference's modules has an entry

No network requests are made, so external links are only listed.
"""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from gathered import public
from mkdocs.exceptions import PluginError
from mkdocs.plugins import get_plugin_logger

from attn_only_lens.viz.page import unpacked

MODULES = (
    "",
    ".patching",
    ".tasks",
    ".circuits",
    ".neurons",
    ".viz",
    ".growth",
    ".transcoders",
    ".errors",
    ".pretrained",
)
_LOADING = {"src", "data", "poster", "background"}
# With these values of `rel`, a browser does not load the link's target.
_FOLLOWED = {"alternate", "author", "canonical", "help", "license", "next", "prev", "search"}
_WITHIN = ("data:", "about:", "blob:", "#")
_REMOTE = re.compile(r"(?:https?:)?//", re.I)
# These patterns match the addresses that a style sheet or a JavaScript module loads.
_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?\s*((?:https?:)?//[^\"')\s]+)", re.I)
_SCRIPT = re.compile(r"\bimport\b[^;\n]{0,200}?[\"'](https?://[^\"']+)")
_HOST = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+[a-z]{2,}", re.I)


class Page(HTMLParser):
    """The anchors, links and loaded files of an HTML page and its frames."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loads: list[str] = []
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the anchors, links and loaded files of one tag."""
        values = {name: value or "" for name, value in attrs}
        self._inside = tag
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        self.loads += [values[name] for name in _LOADING & values.keys() if values[name]]
        self.loads += _STYLE.findall(values.get("style", ""))
        if tag in ("a", "area") and "href" in values:
            self.links.append(values["href"])
        self.loads += re.findall(r"(?:^|,)\s*([^\s,]+)", values.get("srcset", ""))
        if tag == "link" and not _FOLLOWED & set(values.get("rel", "").lower().split()):
            self.loads.append(values.get("href", ""))
        if "srcdoc" in values:
            framed = Page(unpacked(values["srcdoc"]))
            self.loads += framed.loads
            self.links += [link for link in framed.links if not link.startswith("#")]

    def handle_data(self, data: str) -> None:
        """Collect the addresses that the content of a style or script element loads."""
        if self._inside == "style":
            self.loads += _STYLE.findall(data)
        if self._inside == "script":
            self.loads += _SCRIPT.findall(data)

    def handle_endtag(self, tag: str) -> None:
        """Note that a style or script element has ended."""
        self._inside = ""


def faults(site: Path) -> tuple[list[str], list[str]]:
    """Return the faults in a folder's pages, and the external links."""
    pages = {path: Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    wrong, out = [], set()
    for path, page in pages.items():
        name = path.relative_to(site)
        for link in page.links:
            if link.startswith("mailto:"):
                continue
            if _REMOTE.match(link) or ":" in link.split("/")[0]:
                out.add(link)
                wrong += [f"{name}: {link} is not an https URL"] if not well_formed(link) else []
            else:
                target, anchor = _target(site, path, link)
                if not target.is_file():
                    wrong.append(f"{name}: {link} leads to no file on the site")
                elif target in pages and anchor not in pages[target].anchors:
                    wrong.append(f"{name}: {link} leads to an anchor that does not exist")
        for load in page.loads:
            if _REMOTE.match(load):
                wrong.append(f"{name}: loads {load}")
            elif not (load.startswith(_WITHIN) or _target(site, path, load)[0].is_file()):
                wrong.append(f"{name}: loads {load}, which does not exist")
    for path in sorted(site.rglob("*.css")):
        remote = _STYLE.findall(path.read_text("utf-8"))
        wrong += [f"{path.relative_to(site)}: loads {address}" for address in remote]
    return sorted(set(wrong)), sorted(out)


def well_formed(link: str) -> bool:
    """Return whether a link is an https address with a host name and without whitespace."""
    parts = urlsplit(link)
    named = bool(_HOST.fullmatch(parts.hostname or ""))
    return parts.scheme == "https" and named and not re.search(r"\s", link)


def _target(site: Path, page: Path, link: str) -> tuple[Path, str]:
    parts = urlsplit(link)
    path = unquote(parts.path)
    start = site if path.startswith("/") else page.parent
    target = (start / path.lstrip("/")).resolve() if path else page
    return target / "index.html" if target.is_dir() else target, unquote(parts.fragment)


def missing(site: Path) -> Iterator[str]:
    """Yield the public names without an entry in the reference."""
    anchors = set()
    for path in (site / "reference").glob("*.html"):
        anchors |= Page(path.read_text("utf-8")).anchors
    for module in (f"attn_only_lens{name}" for name in MODULES):
        yield from (f"{module}.{n}" for n in public(module) if f"{module}.{n}" not in anchors)


def on_post_build(config: Any, **_: Any) -> None:
    """Check the built site; raise a PluginError that lists all faults."""
    site = Path(config.site_dir).resolve()
    wrong, out = faults(site)
    wrong += [f"the reference has no entry for {name}" for name in missing(site)]
    if wrong:
        raise PluginError("\n  - ".join([f"the site has {len(wrong)} faults:", *wrong]))
    listed = "".join(f"\n  {link}" for link in out)
    get_plugin_logger("checked").info(f"external links, which are not requested:{listed}")
