"""`attn-only-lens circuit`: an attribution graph as a file or a page; the sites that suffice."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from attn_only_lens import circuits
from attn_only_lens.circuits.graph import HEADS, CircuitGraph
from attn_only_lens.cli.common import (
    METRICS,
    MODEL,
    app,
    clear_errors,
    given_prompts,
    metric_of,
    patchable,
    require_writable,
)
from attn_only_lens.viz import circuit_view, write_html

__all__ = ["circuit"]

_FORMS = (".html", ".json")


@app.command()
def circuit(
    model: Annotated[str, typer.Argument(help=f"{MODEL}; or a folder that `convert` wrote")],
    clean: Annotated[list[str], typer.Option(help="a prompt; give it again for more")],
    out: Annotated[Path, typer.Option(help="a .html file, a page, or .json, the graph itself")],
    corrupted: Annotated[
        list[str] | None,
        typer.Option(help="its pair, token for token: looks for the sites that suffice, too"),
    ] = None,
    answer: Annotated[str | None, typer.Option(help="the right answer, one token")] = None,
    wrong: Annotated[str | None, typer.Option(help="the wrong one, for logit_diff")] = None,
    metric: Annotated[str, typer.Option(help=", ".join(METRICS))] = "logit_diff",
    tokens: Annotated[
        bool, typer.Option("--tokens", help="prompts and answers are token numbers: 3,4,113")
    ] = False,
    nodes: Annotated[int, typer.Option(help="heads and neurons in the graph")] = 300,
    faithfulness: Annotated[
        float, typer.Option(help="of the sites that suffice, beside --corrupted")
    ] = 0.9,
    top: Annotated[int, typer.Option(help="rows to print")] = 20,
    dtype: Annotated[
        str, typer.Option(help="of a model that is not saved by `convert`")
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, mps")] = "cpu",
) -> None:
    """Draw what contributes to a metric, and by way of what; with --corrupted, find what suffices.

    The graph is of the clean prompts: exact for patterns and norm scales as they are there. The
    sites that suffice reach the faithfulness wanted when all others are taken from --corrupted.
    """
    with clear_errors():
        require_writable(out, _FORMS, top)
        measure = metric_of(metric, answer, wrong, tokens)
        prompts = given_prompts(clean, "--clean", tokens)
        loaded = patchable(model, dtype, device)
        found = None
        if corrupted:
            other = given_prompts(corrupted, "--corrupted", tokens)
            found = circuits.discover(loaded, prompts, other, measure, faithfulness=faithfulness)
        graph = circuits.attribution_graph(loaded, prompts, measure, top=nodes)
        if out.suffix == ".json":
            circuits.to_json(graph, out)
        else:
            write_html(circuit_view(graph, loaded, prompts), out)
        _show(graph, top)
        if found is not None:
            _tell(found, top)
        typer.echo(f"{out}: {graph!r}")


def _show(graph: CircuitGraph, top: int) -> None:
    heads = graph.nodes[graph.nodes["kind"].isin(HEADS)]
    strongest = heads.loc[heads["attribution"].abs().nlargest(top).index]
    rows = strongest[["name", "position", "value", "attribution"]].to_numpy().tolist()
    _print(f"{graph.metric} = {graph.value:.4g}: the largest attributions", "attribution", rows)


def _tell(found: circuits.Circuit, top: int) -> None:
    rows = found.frame[["name", "position", "effect"]].head(top).to_numpy().tolist()
    random = ", ".join(f"{each:.3f}" for each in found.random)
    _print(
        f"{len(found)} of {found.n_sites} sites: faithfulness {found.faithfulness:.3f}, of the "
        f"others {found.completeness:.3f}, of random ones {random}",
        "effect",
        rows,
    )


def _print(title: str, last: str, rows: list[list[Any]]) -> None:
    table = Table(title=title)
    for heading in ("name", "position", *(["value"] if last == "attribution" else []), last):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for name, position, *numbers in rows:
        table.add_row(str(name), str(position), *(f"{number:.4g}" for number in numbers))
    Console().print(table)
