"""The demo: see the shipped model's neurons as heads, verify that, draw what they attend to.

Nanda et al. (2023) found that the neurons of a network which has learnt addition modulo p are
periodic in both inputs, with a few key frequencies. Seen as heads, its neurons therefore attend to
themselves periodically: the weight that '=' gives to itself, rather than to the bias token, is a
wave over (a, b).
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.axes import SELF
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.models.convert import convert
from attn_only_lens.models.expose import expose_neuron_heads
from attn_only_lens.models.verify import Verification, verify
from attn_only_lens.pretrained import modular_addition, modular_addition_tokens
from attn_only_lens.pretrained.modular_addition import MODULUS
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER
from attn_only_lens.viz.checks import import_extra

PERIODIC = 0.85  # of the variance explained by one frequency: Nanda et al.'s criterion
_PANELS = 6


@dataclass(frozen=True)
class Demo:
    """The results of the demo.

    Attributes:
        verification: the model with its neurons as heads against its source, on every input of
            the task. It is converted; under transformer-lens 4, a copy has them exposed.
        neuron_heads: a row for each neuron-head: `name`, `frequency` k (waves over the 113
            numbers), `period` 113 / k, `explained` (fraction of the variance of its self weight
            over all (a, b) that frequency k carries), `lowest` and `highest` self weight.
        untrained: the same table for the model with random weights, as a control.
        grids: the self weight of every neuron-head at '=', over (a, b).
    """

    verification: Verification
    neuron_heads: pd.DataFrame
    untrained: pd.DataFrame
    grids: Float[Tensor, "neuron a b"]

    @property
    def key_frequencies(self) -> list[int]:
        """Frequencies of the periodic neuron-heads, the most frequent first."""
        periodic = self.neuron_heads.query("explained > @PERIODIC")
        return [int(k) for k in periodic["frequency"].value_counts().index]

    def clearest(self) -> pd.DataFrame:
        """For each key frequency, how many neuron-heads it has, and the one that shows it best."""
        periodic = self.neuron_heads.query("explained > @PERIODIC")
        best = periodic.loc[periodic.groupby("frequency")["explained"].idxmax()]
        best = best.assign(neuron_heads=best["frequency"].map(periodic["frequency"].value_counts()))
        return best.sort_values("neuron_heads", ascending=False, kind="stable", ignore_index=True)


def run_demo() -> Demo:
    """Verify the shipped model's heads and measure their self weights, in a few seconds."""
    source, tokens = modular_addition(), modular_addition_tokens()
    heads = _with_neuron_heads(source)
    grids = self_weights(heads)
    return Demo(
        verification=verify(source, heads, tokens),
        neuron_heads=periodicity(grids),
        untrained=periodicity(self_weights(_with_neuron_heads(_untrained()))),
        grids=grids,
    )


def _with_neuron_heads(model: Any) -> Any:
    if HAS_HOOKED_TRANSFORMER:
        return convert(model)
    return expose_neuron_heads(model, copy=True).model


def _untrained() -> Any:
    """Return the same architecture with random weights, as training began."""
    fresh = modular_addition()
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for parameter in fresh.parameters():
            if parameter.any():  # it was trained without biases, which are zero
                parameter.normal_(std=fresh.cfg.initializer_range, generator=generator)
    return fresh


@torch.no_grad()
def self_weights(model: Any) -> Float[Tensor, "neuron a b"]:
    """Return the weight of '=' on itself in every neuron-head of layer 0, for every (a, b).

    Args:
        model: the shipped model, converted or exposed.
    """
    hook = host_of(model).hook_name(0, "neuron", "pattern")
    _, cache = model.run_with_cache(modular_addition_tokens(), names_filter=hook)
    at_equals = cache[hook][:, :, -1, SELF]  # [batch, head_index]
    return at_equals.T.reshape(-1, MODULUS, MODULUS)


def periodicity(grids: Float[Tensor, "neuron a b"]) -> pd.DataFrame:
    """Return the frequency that explains most of each grid's variance, and its share.

    Frequency k is the span of the waves of a, of b, and of both at k: the nine entries
    (0 or ±k, 0 or ±k) of the 2-D Fourier transform, the constant left out.
    """
    centred = grids.double() - grids.double().mean(dim=(1, 2), keepdim=True)
    power = torch.fft.fft2(centred).abs() ** 2
    share = []
    for k in range(1, MODULUS // 2 + 1):
        entries = torch.tensor([0, k, MODULUS - k], device=power.device)
        share.append(power[:, entries[:, None], entries].sum(dim=(1, 2)))
    explained, best = (torch.stack(share) / power.sum(dim=(1, 2))).nan_to_num(0.0).max(dim=0)
    frequency = best + 1
    return pd.DataFrame(
        {
            "name": [str(HeadName(0, "neuron", i)) for i in range(len(grids))],
            "frequency": frequency.tolist(),
            "period": (MODULUS / frequency).tolist(),
            "explained": explained.tolist(),
            "lowest": grids.amin(dim=(1, 2)).tolist(),
            "highest": grids.amax(dim=(1, 2)).tolist(),
        }
    )


def demo_page(demo: Demo) -> str:
    """Draw a heatmap for each key frequency, and how periodic all neuron-heads are.

    Raises:
        ImportError: plotly is not installed.
    """
    clearest = demo.clearest().head(_PANELS)
    titles = [
        f"{row.name_} · frequency {row.frequency} ({row.neuron_heads} neuron-heads)"
        for row in clearest.rename(columns={"name": "name_"}).itertuples()
    ]
    columns = 3
    rows = -(-len(clearest) // columns) + 1
    figure = import_extra("plotly.subplots").make_subplots(
        rows=rows,
        cols=columns,
        specs=[[{}] * columns for _ in range(rows - 1)] + [[{"colspan": columns}, None, None]],
        subplot_titles=[*titles, "How much of a neuron-head's self weight one frequency explains"],
        vertical_spacing=0.26 / rows,
        horizontal_spacing=0.07,
    )
    for panel, name in enumerate(clearest["name"]):
        cell = {"row": panel // columns + 1, "col": panel % columns + 1}
        grid = demo.grids[HeadName.parse(name).index]
        figure.add_heatmap(
            z=grid.float().numpy().round(3),
            coloraxis="coloraxis",
            **cell,
            hovertemplate=f"{name}<br>a = %{{y}}, b = %{{x}}<br>self weight %{{z}}<extra></extra>",
        )
        figure.update_xaxes(title_text="b", **cell)
        figure.update_yaxes(title_text="a", **cell)
    for label, table in (("trained", demo.neuron_heads), ("untrained", demo.untrained)):
        bins = {"start": 0, "end": 1, "size": 0.02}
        figure.add_histogram(x=table["explained"], name=label, xbins=bins, row=rows, col=1)
    figure.update_xaxes(
        title_text="fraction of variance explained by its best frequency", range=[0, 1], row=rows
    )
    figure.update_yaxes(title_text="neuron-heads", row=rows, col=1)
    figure.update_layout(
        title="Addition modulo 113: where '=' attends to itself rather than to the bias token",
        coloraxis={"colorscale": "Viridis", "colorbar": {"title": "self weight"}},
        barmode="overlay",
        template="plotly_white",
        height=360 * rows,
        width=1150,
        legend={"x": 0.4, "y": 0.3 / rows},
    )
    figure.update_traces(opacity=0.7, selector={"type": "histogram"})
    return str(figure.to_html(include_plotlyjs=True, full_html=True))
