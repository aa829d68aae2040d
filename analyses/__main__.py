"""Run a study, or make its page again: python -m analyses --help."""

from pathlib import Path
from typing import Annotated

import typer

from analyses import study
from analyses.tools.options import Device, ModelsDir, Out, Runs, Smoke, SmolLM2

app = typer.Typer(no_args_is_help=True, add_completion=False)
Name = Annotated[str, typer.Argument(help="the study: `list` shows the names")]


def _known(name: str) -> str:
    """Return the name of a study."""
    if name not in study.names():
        raise typer.BadParameter(f"got {name!r}: expected one of {', '.join(study.names())}")
    return name


@app.command()
def run(
    name: Name,
    out: Out = Path("out/studies"),
    runs: Runs = Path("out/runs"),
    models_dir: ModelsDir = Path("shared/models"),
    smollm2: SmolLM2 = None,
    data: Annotated[Path | None, typer.Option(help="folder of texts that the study needs")] = None,
    n_seeds: Annotated[
        int | None, typer.Option(help="number of random seeds, for each arm of the study")
    ] = None,
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Run a study; write its page, tables, figures and record; print the page."""
    n_seeds = n_seeds or study.study(_known(name)).n_seeds
    setting = study.Setting(runs / name, models_dir, smollm2, data, n_seeds, device, smoke)
    typer.echo(study.run(name, setting, out))


@app.command()
def render(
    name: Name,
    folder: Annotated[Path, typer.Option(help="the folder of its files")] = study.RESULTS,
) -> None:
    """Make a study's page and figures again from its stored tables; nothing is measured."""
    study.render(_known(name), folder)


@app.command("list")
def list_studies() -> None:
    """List the studies."""
    typer.echo("\n".join(study.names()))


if __name__ == "__main__":
    app()
