"""What depends on the owner of the package is read from CITATION.cff, the one place for it."""

import re
from pathlib import Path
from typing import Any

import yaml
from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")


class CitationHook(MetadataHookInterface):
    """Add authors and the README, and addresses once CITATION.cff has `repository-code`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add them to the metadata of the project."""
        citation = yaml.safe_load(Path(self.root, "CITATION.cff").read_text(encoding="utf-8"))
        if citation["version"] != metadata["version"]:
            raise ValueError(
                f"CITATION.cff has version {citation['version']}; expected {metadata['version']}"
            )
        names = ("given-names", "family-names", "name")
        metadata["authors"] = [
            {"name": " ".join(author[key] for key in names if key in author)}
            for author in citation["authors"]
        ]
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        source = citation.get("repository-code", "").rstrip("/")
        if source:
            owner, name = source.split("/")[-2:]
            site = f"https://{owner}.github.io/{name}/"
            readme = _RELATIVE.sub(lambda link: f"]({_address(link[1], source, site)})", readme)
            metadata["urls"] = {
                "Documentation": site,
                "Source": source,
                "Issues": f"{source}/issues",
                "Changelog": f"{source}/blob/main/CHANGELOG.md",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def _address(path: str, source: str, site: str) -> str:
    """Return the address of a file that README.md links to; PyPI has no files next to it."""
    if path.startswith("../../"):  # from .../blob/main/README.md, as in the badges
        return f"{source}/{path.removeprefix('../../')}"
    if path.endswith((".svg", ".png")):
        return site + path.removeprefix("docs/")
    return f"{source}/blob/main/{path}"
