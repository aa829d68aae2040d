"""Tests of a release: metadata of its owner, links, references, models with cards."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import yaml

from analyses.tools.export_pretrained import main as export

ROOT = Path(__file__).parents[1]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))


def metadata(root, version=CITATION["version"]):
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = {"version": version}
    module.CitationHook(str(root), {}).update(result)
    return result


def test_the_owner_is_read_from_one_file(tmp_path):
    assert "urls" in metadata(ROOT) or "repository-code" not in CITATION
    owner = {"given-names": "Ada", "family-names": "Lovelace", "orcid": "https://orcid.org/0"}
    source = "https://github.com/ada/attn_only_lens"
    filled = CITATION | {"authors": [owner], "repository-code": source}
    (tmp_path / "CITATION.cff").write_text(yaml.safe_dump(filled), encoding="utf-8")
    shutil.copy(ROOT / "README.md", tmp_path)
    result = metadata(tmp_path)
    assert result["authors"] == [{"name": "Ada Lovelace"}]
    assert result["urls"]["Issues"] == f"{source}/issues"
    assert result["urls"]["Documentation"] == "https://ada.github.io/attn_only_lens/"
    readme = result["readme"]["text"]  # PyPI shows it, without the files next to it
    assert f"]({source}/actions/workflows/tests.yml/badge.svg)" in readme
    assert "](https://ada.github.io/attn_only_lens/pictures/circuit.svg)" in readme
    assert f"]({source}/blob/main/docs/coming_from.md#which-tool-to-choose)" in readme
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]+)\)", readme))
    with pytest.raises(ValueError, match="expected 9"):
        metadata(tmp_path, "9.9.9")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_lead_to_files_and_badges_to_workflows(page):
    text = re.sub(r"`[^`]*`", "", (ROOT / page).read_text("utf-8"))
    for link in re.findall(r"\]\((?!https?:|#)([^)\s#]+)", text):
        badge = re.match(r"\.\./\.\./actions/(workflows/\w+\.yml)", link)
        path = ROOT / (f".github/{badge[1]}" if badge else link)
        assert path.exists(), link


def test_the_paper_cites_what_its_bibliography_has():
    cited = re.findall(r"@(\w+)", (ROOT / "paper" / "paper.md").read_text("utf-8"))
    entries = re.findall(r"^@\w+\{(\w+),", (ROOT / "paper" / "paper.bib").read_text("utf-8"), re.M)
    assert set(cited) == set(entries)
    assert len(entries) == len(set(entries))


def test_exported_models_have_cards(tmp_path):
    export(tmp_path)
    folders = sorted(tmp_path.iterdir())
    assert [folder.name for folder in folders] == ["modular_addition", "small_english"]
    for folder in folders:
        _, header, text = (folder / "README.md").read_text("utf-8").split("---\n", 2)
        assert {"license", "library_name", "tags"} <= yaml.safe_load(header).keys()
        assert "# " in text
        assert (folder / "model.safetensors").is_file()
