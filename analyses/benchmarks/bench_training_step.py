"""Measure the cost of a training step: MLPs, exposed neuron-heads, and attention heads alone.

The whole models are the MLP transformer, the converted model, the exposed model, and the exposed
model with a hook that reads every neuron-head's pattern. The single layers are from
`attention_only_models.py`: the MLP; heads in narrow form, either with the MLP's number of
parameters or with one head per neuron; and the dense form from the paper, in which every token
scores every other token and the bias token, and all but two scores are discarded.

Calls alternate in one run, on one thread; times are processor time. Compare ratios. The bound is
the flops of matrix products at this machine's measured speed. The optimizer's step, which is the
same for equal parameters, is left out.

    python -m analyses.benchmarks.bench_training_step --out analyses/results
"""

import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import typer
from torch import Tensor, nn
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from analyses.benchmarks.bench_convert import forward_flops
from analyses.benchmarks.bench_peak_memory import model_of
from analyses.studies import attention_only_models as models
from analyses.tools.benching import conditions, leave, medians, page_name, speeds, table
from analyses.tools.options import Device, Out, Rounds, Smoke
from attn_only_lens import convert, expose_neuron_heads

LAYERS: dict[str, tuple[models.NeuronKind, float, bool]] = {
    "MLP": ("mlp", 1, False),
    "theorem's heads": ("theorem", 1, False),
    "heads without keys, ⅔ as many": ("keyless", 2 / 3, False),
    "bias token, half as many": ("bias token", 1 / 2, False),
    "persistent, half as many": ("persistent", 1 / 2, False),
    "bias token, as many": ("bias token", 1, False),
    "theorem's heads, dense": ("theorem", 1, True),
    "bias token, half as many, dense": ("bias token", 1 / 2, True),
}
"""The kind, the number of heads per neuron of the MLP, and whether the form is dense."""


def whole(model: Any, tokens: Tensor, *, reading: bool = False) -> Callable[[], None]:
    """Return a model's training step: its loss, and the gradients of all parameters."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens, return_type="loss").backward()

    if not reading:
        return step

    def read() -> None:
        seen: list[Tensor] = []

        def note(pattern: Tensor, hook: Any) -> None:
            seen.append(pattern)

        with model.hooks(fwd_hooks=[(lambda name: name.endswith("hook_neuron_probs"), note)]):
            step()
        assert len(seen) == model.cfg.n_layers

    return read


def wholes(device: str, smoke: bool, pos: int, rounds: int, speed: float) -> pd.DataFrame:
    """Time whole models, HookedTransformers and bridges, each against its source model."""
    sizes = {"act_fn": "silu", "n_layers": 2} | ({} if smoke else {"d_vocab": 1000})
    hooked = model_of(device, smoke=smoke, **sizes)
    cfg = hooked.cfg
    plain = models.in_package(
        models.text_model(
            "mlp",
            cfg.d_mlp,
            d_vocab=cfg.d_vocab,
            seed=0,
            n_layers=cfg.n_layers,
            d_model=cfg.d_model,
            heads=cfg.n_heads,
        )
    ).to(device)
    plain.set_attn_implementation("eager")
    bridge = build_bridge_from_module(plain, "GPT2LMHeadModel", hf_config=plain.config)
    tokens = torch.arange(pos, device=device)[None] % cfg.d_vocab
    kinds = {"HookedTransformer": hooked, "TransformerBridge": bridge}
    calls = {}
    for kind, source in kinds.items():
        calls[kind] = whole(source, tokens)
        if source is hooked:
            calls["converted"] = whole(convert(source), tokens)
        exposed = expose_neuron_heads(source, copy=True).model
        calls[f"{kind}, exposed"] = whole(exposed, tokens)
        calls[f"{kind}, patterns read"] = whole(exposed, tokens, reading=True)
    took = medians(calls, rounds, device)
    flops = 3 * forward_flops(cfg, pos)
    of = {name: "TransformerBridge" if "Bridge" in name else "HookedTransformer" for name in took}
    return pd.DataFrame(
        {
            "model": list(took),
            "ms": list(took.values()),
            "ratio": [ms / took[of[name]] for name, ms in took.items()],
            "Gflop": flops / 1e9,
            "bound ms": 1e3 * flops / speed,
        }
    )


def step_of(neurons: models.Neurons, x: Tensor, dense: bool) -> Callable[[], None]:
    """Return a layer's training step: its output, and the gradients of its input and weights."""
    run = neurons.dense if dense else neurons

    def step() -> None:
        neurons.zero_grad(set_to_none=True)
        x.grad = None
        run(x).square().sum().backward()

    return step


def layer_flops(name: str, d_model: int, d_mlp: int, pos: int) -> int:
    """Return the flops of a training step of one layer, for one text."""
    kind, share, dense = LAYERS[name]
    n_dense = pos + 1 if dense else 0
    return 3 * pos * models.flops(kind, d_model, round(share * d_mlp), n_dense)


def layer(name: str, d_model: int, d_mlp: int, device: str) -> models.Neurons:
    """Return the layer with this name, one of LAYERS."""
    kind, share, _ = LAYERS[name]
    bias = nn.Parameter(torch.zeros(d_model))
    std = d_model**-0.5
    return models.Neurons(kind, d_model, round(share * d_mlp), std, std, bias).to(device)


def layers(device: str, smoke: bool, pos: int, rounds: int, speed: float) -> pd.DataFrame:
    """Time one layer of each kind against the MLP."""
    d_model, d_mlp = (12, 30) if smoke else (768, 3072)
    x = torch.randn(1, pos, d_model, device=device, requires_grad=True)
    made = partial(layer, d_model=d_model, d_mlp=d_mlp, device=device)
    took = medians(
        {name: step_of(made(name), x, LAYERS[name][2]) for name in LAYERS}, rounds, device
    )
    flops = {name: layer_flops(name, d_model, d_mlp, pos) for name in LAYERS}
    return pd.DataFrame(
        {
            "layer": list(took),
            "heads": [round(share * d_mlp) for _, share, _ in LAYERS.values()],
            "parameters": [sum(p.numel() for p in made(name).parameters()) for name in LAYERS],
            "ms": list(took.values()),
            "ratio": [ms / took["MLP"] for ms in took.values()],
            "Gflop": [flop / 1e9 for flop in flops.values()],
            "ratio of flops": [flop / flops["MLP"] for flop in flops.values()],
            "bound ms": [1e3 * flop / speed for flop in flops.values()],
        }
    )


def report(smoke: bool, device: str, rounds: int) -> str:
    """Return the page with all tables."""
    about, pos = conditions(device), 7 if smoke else 128
    speed, _ = speeds(device, smoke)
    models_table = table(wholes(device, smoke, pos, rounds, speed))
    layers_table = table(layers(device, smoke, pos, rounds, speed))
    shape = "tiny (--smoke)" if smoke else "d_model 768, d_mlp 3072, 12 heads, SiLU"
    return f"""# What a step of training costs

Forward and backward, float32, one text of {pos} tokens, {rounds} rounds in turns; {shape}.
{about}
Matrix product {speed / 1e9:.0f} GFLOP/s.
Made by `python -m analyses.benchmarks.bench_training_step{" --smoke" if smoke else ""}`.

## Whole models of two layers

The ratio is to the model that each was made of.

{models_table}

## One layer

Narrow: for each head the two scores that are needed, as σ of their difference. Dense: {pos + 1}
scores for each head and token, masked, and softmax over them.

{layers_table}
"""


def main(
    out: Out = Path("out/bench"),
    device: Device = "cpu",
    rounds: Rounds = 15,
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write `bench_training_step.md`."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    text = report(smoke, device, 2 if smoke else rounds)
    typer.echo(text)
    settings = {"device": device, "smoke": smoke, "rounds": rounds}
    leave(__file__, out, {page_name(__file__, device): text}, started=started, **settings)


if __name__ == "__main__":
    typer.run(main)
