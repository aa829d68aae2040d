"""`attn-only-lens demo`."""

from pathlib import Path
from typing import Annotated

import typer

from attn_only_lens.cli.common import clear_errors, command, print_table, require_folder, say_page
from attn_only_lens.storage import write_text
from attn_only_lens.viz import demo_page
from attn_only_lens.viz.checks import import_extra
from attn_only_lens.viz.demo import PERIODIC, run_demo


@command("Start here", "attn-only-lens demo --out out")
def demo(
    out: Annotated[Path, typer.Option(help="folder for the table and the picture")] = Path("out"),
) -> None:
    """Show what the neurons of the shipped model attend to."""
    with clear_errors():
        import_extra("plotly")
        require_folder(out)
        found = run_demo()
        typer.echo("Addition modulo 113, one layer: its 512 neurons as attention heads.\n")
        typer.echo(f"{found.verification}\n")
        print_table(
            "Neuron-heads attend to themselves in waves over (a, b)",
            ("frequency", "period", "neuron-heads", "clearest", "explained", "self"),
            [
                (
                    row["frequency"],
                    f"{row['period']:.2f}",
                    row["neuron_heads"],
                    row["name"],
                    f"{row['explained']:.1%}",
                    f"{row['lowest']:.2f} to {row['highest']:.2f}",
                )
                for row in found.clearest().to_dict("records")
            ],
        )
        share = (found.neuron_heads["explained"] > PERIODIC).mean()
        control = (found.untrained["explained"] > PERIODIC).mean()
        typer.echo(
            f"{share:.1%} of neuron-heads have over {PERIODIC:.0%} of the variance of their self "
            f"weight in one frequency; with random weights, {control:.1%}.\n"
        )
        write_text(out / "neuron_heads.csv", found.neuron_heads.to_csv(index=False))
        write_text(out / "neuron_heads.html", demo_page(found))
        typer.echo(f"{out / 'neuron_heads.csv'}: a row for each neuron-head")
        say_page(out / "neuron_heads.html", "what they attend to")
