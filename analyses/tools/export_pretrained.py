"""Export the package's models to folders that can be pushed to the Hugging Face hub.

    python -m analyses.tools.export_pretrained --out out/hub
    hf upload OWNER/small-english out/hub/small_english

Each folder holds weights, configuration, tokenizer and a model card.
"""

import shutil
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

_DATA = files("attn_only_lens.pretrained") / "data"


def main(
    out: Annotated[Path, typer.Option("--out", help="folder for the models")] = Path("out/hub"),
) -> None:
    """Export the models of the package to folders that can be pushed to the hub."""
    with as_file(_DATA) as data:
        for source in sorted(path for path in data.iterdir() if path.is_dir()):
            shutil.copytree(source, out / source.name, dirs_exist_ok=True)
            typer.echo(
                f"{out / source.name}: {', '.join(sorted(x.name for x in source.iterdir()))}"
            )


if __name__ == "__main__":
    typer.run(main)
