"""What depends on the owner of the package is read from CITATION.cff, the one place for it."""

from pathlib import Path
from typing import Any

import yaml
from hatchling.metadata.plugin.interface import MetadataHookInterface


class CitationHook(MetadataHookInterface):
    """Add authors, and addresses once CITATION.cff has `repository-code`."""

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
        source = citation.get("repository-code", "").rstrip("/")
        if source:
            owner, name = source.split("/")[-2:]
            metadata["urls"] = {
                "Documentation": f"https://{owner}.github.io/{name}/",
                "Source": source,
                "Issues": f"{source}/issues",
                "Changelog": f"{source}/blob/main/CHANGELOG.md",
            }
