"""`attn-only-lens demo`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from attn_only_lens.cli.common import app, clear_errors
from attn_only_lens.storage import write_text
from attn_only_lens.tl import require_hooked_transformer
from attn_only_lens.viz import demo_page
from attn_only_lens.viz.demo import PERIODIC, run

__all__ = ["demo"]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for the table and the picture")] = Path("out"),
) -> None:
    """Convert the shipped model, verify it, show what its neuron-heads attend to."""
    with clear_errors():
        require_hooked_transformer()
        found = run()
        console = Console()
        console.print("Addition modulo 113, one layer: its 512 neurons as attention heads.\n")
        typer.echo(f"{found.verification}\n")
        clearest = found.clearest()
        table = Table(title="Neuron-heads attend to themselves in waves over (a, b)")
        for heading in ("frequency", "period", "neuron-heads", "clearest", "explained", "self"):
            table.add_column(heading, justify="right")
        for row in clearest.to_dict("records"):
            table.add_row(
                str(row["frequency"]),
                f"{row['period']:.2f}",
                str(row["neuron_heads"]),
                row["name"],
                f"{row['explained']:.1%}",
                f"{row['lowest']:.2f} to {row['highest']:.2f}",
            )
        console.print(table)
        share = (found.neuron_heads["explained"] > PERIODIC).mean()
        control = (found.untrained["explained"] > PERIODIC).mean()
        typer.echo(
            f"{share:.1%} of neuron-heads have over {PERIODIC:.0%} of the variance of their self "
            f"weight in one frequency; with random weights, {control:.1%}.\n"
        )
        write_text(out / "neuron_heads.csv", found.neuron_heads.to_csv(index=False))
        write_text(out / "neuron_heads.html", demo_page(found))
        typer.echo(f"table:   {out / 'neuron_heads.csv'}\npicture: {out / 'neuron_heads.html'}")
