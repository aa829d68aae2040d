"""The models, gates and measures of `exactness_by_gate.py`.

KL(p ‖ q) = Σ p (log p - log q) loses all digits if p and q agree to 1e-8. Because Σ p = Σ q = 1, KL
is also Σ p (e^d - 1 - d) with d = log q - log p. No term of this sum is negative, so the sum keeps
its digits until d itself is a rounding error, near a KL of 1e-30.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from safetensors.torch import load_file
from torch import Tensor

from analyses.benchmarks.bench_peak_memory import TINY, model_of
from attn_only_lens import Bilinear, calibrate, convert, pretrained
from attn_only_lens.gates.gating import AnyGate
from attn_only_lens.models.source_folder import load_source
from attn_only_lens.models.two_blocks.config import neurons_block
from attn_only_lens.tl import HookedTransformer

PAPER = "slope 1.702"
EXACT = "exact"
REAL = {
    "char_gelu_4l": "characters of English, 4 layers, gelu",
    "sort_gelu_new_3l": "sorts six digits, 3 layers, gelu_new",
    "modular_addition_relu_1l": "(a + b) mod 113, all inputs, 1 layer, relu",
    "stories_swiglu_5l": "short stories, 5 layers, SwiGLU",
    "words_swiglu_4l": "English, 4 layers, SwiGLU",
}
GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def trained(
    folder: Path, lengths: Mapping[str, int], device: str, *, smoke: bool
) -> Iterator[tuple[str, HookedTransformer, Tensor]]:
    """Yield the shipped model and the real models in a folder, in float64, with prompts for each.

    Args:
        folder: the folder of the real models.
        lengths: prompt lengths by model; other models get 16 tokens.
        device: the device of models and prompts.
        smoke: whether to leave out the real models.
    """
    shipped = pretrained.modular_addition()
    shipped.to(torch.float64, print_details=False).to(device, print_details=False)
    yield "modular_addition", shipped, pretrained.modular_addition_tokens().to(device)
    for name in () if smoke else REAL:
        if (folder / name).is_dir():
            source = load_source(folder / name).eval()
            source.to(torch.float64, print_details=False).to(device, print_details=False)
            if source.cfg.n_key_value_heads is not None:
                source.set_ungroup_grouped_query_attention(True)
            tokens = load_file(folder / name / "tokens.safetensors")["tokens"].long()
            yield name, source, tokens[:, : lengths.get(name, 16)].to(device)


@dataclass(frozen=True)
class Subject:
    """A model in float32, the tokens for comparing it, and the tokens for calibrating its gates."""

    name: str
    about: str
    source: HookedTransformer
    tokens: Tensor
    calibration: Tensor | None = None

    @property
    def kind(self) -> str:
        """The kind of its neurons that determines its gates: gated, gelu, relu or silu."""
        cfg = self.source.cfg
        return "gated" if cfg.gated_mlp else "gelu" if cfg.act_fn in GELUS else cfg.act_fn

    def on(self, device: str) -> "Subject":
        """Return the same subject on a device."""
        calibration = None if self.calibration is None else self.calibration.to(device)
        source = self.source.to(device, print_details=False)
        return replace(self, source=source, tokens=self.tokens.to(device), calibration=calibration)


@dataclass(frozen=True)
class Setting:
    """One way to make the gates of a model."""

    label: str
    gate: Literal["exact"] | Bilinear = "exact"


def subjects(folder: Path, *, smoke: bool) -> Iterator[Subject]:
    """Yield the shipped model, the real models in the folder, and a random model like GPT-2."""
    shipped = pretrained.modular_addition()
    pairs = pretrained.modular_addition_tokens()
    about = "shipped: (a + b) mod 113, all inputs, 1 layer, silu"
    yield Subject("modular_addition", about, shipped, pairs[:101] if smoke else pairs)
    if smoke:
        yield from tiny()
        return
    for name, about in REAL.items():
        if (folder / name).is_dir():
            source = load_source(folder / name).eval()
            tokens = load_file(folder / name / "tokens.safetensors")["tokens"].long()
            yield split(Subject(name, about, source, tokens))
    tokens = torch.randint(50257, (1, 64), generator=torch.Generator().manual_seed(0))
    about = "random weights, 12 layers, d_model 768, d_mlp 3072, gelu_new, random tokens"
    yield Subject("gpt2_shape", about, model_of("cpu"), tokens)


def tiny() -> Iterator[Subject]:
    """Yield a random model of every kind, for `--smoke`."""
    for act_fn, gated in [("gelu", False), ("gelu_new", False), ("relu", False), ("silu", True)]:
        source = model_of("cpu", smoke=True, act_fn=act_fn, gated_mlp=gated)
        size = (6, TINY["n_ctx"])
        tokens = torch.randint(TINY["d_vocab"], size, generator=torch.Generator().manual_seed(0))
        name = f"tiny_{act_fn}" + "_gated" * gated
        yield split(Subject(name, "random weights", source, tokens))


def split(subject: Subject) -> Subject:
    """Use half of the sequences of a gated model for calibration, and the other half for tests."""
    if not subject.source.cfg.gated_mlp:
        return subject
    seen, held_out = subject.tokens.chunk(2)
    return replace(subject, tokens=held_out, calibration=seen)


def settings(subject: Subject) -> list[Setting]:
    """Return the gates to compare, from the coarsest to the exact gate."""
    if subject.kind == "gated":
        assert subject.calibration is not None
        calibration = calibrate(subject.source, subject.calibration)
        settings = [
            Setting(f"{m} heads", Bilinear(m, calibration=calibration)) for m in (4, 6, 8, 12)
        ]
    elif subject.kind == "gelu":
        heads = (1, 2, 4, 6, 8)
        settings = [Setting(f"m = {m}", Bilinear(m)) for m in heads]
        settings = [Setting(PAPER, Bilinear(slope="paper")), *settings]
    elif subject.kind == "relu":
        tolerances = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8)
        settings = [Setting(f"tolerance {t:.0e}", Bilinear(tolerance=t)) for t in tolerances]
    else:
        settings = [Setting("m = 1", Bilinear(1))]
    return [*settings, Setting(EXACT)]


@torch.no_grad()
def measure(subject: Subject, progress: Callable[[], Any] = lambda: None) -> pd.DataFrame:
    """Return a row for each dtype and gate."""
    return pd.DataFrame(rows(subject, progress))


def rows(subject: Subject, progress: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """Yield a model's errors in float64 and in float32, against the source in the same dtype."""
    for dtype in (torch.float64, torch.float32):
        source = copy.deepcopy(subject.source).to(dtype, print_details=False)
        hooks = [f"blocks.{layer}.mlp.hook_pre" for layer in range(source.cfg.n_layers)]
        expected, cache = source.run_with_cache(subject.tokens, names_filter=hooks)
        for setting in settings(replace(subject, source=source)):
            gates, got = gates_and_logits(source, setting, subject.tokens)
            yield {
                "model": subject.name,
                "kind": subject.kind,
                "dtype": str(dtype).removeprefix("torch."),
                "gate": setting.label,
                **activations(source, gates, [cache[hook] for hook in hooks]),
                **compare(expected, got),
            }
            progress()


def gates_and_logits(
    source: HookedTransformer, setting: Setting, tokens: Tensor
) -> tuple[list[AnyGate], Tensor]:
    """Return the gates of each layer, and the logits computed with patterns of all heads."""
    model = convert(source, gate=setting.gate)
    # This hook changes nothing. Without a hook, exact gates run the source's activation.
    look = [(lambda name: name.endswith("attn.hook_pattern"), lambda pattern, hook: None)]
    layers = range(source.cfg.n_layers)
    gates = [model.blocks[neurons_block(layer)].attn.gate for layer in layers]
    return gates, model.run_with_hooks(tokens, fwd_hooks=look)


def activations(
    source: HookedTransformer, gates: list[AnyGate], pre: list[Tensor]
) -> dict[str, float]:
    """Return the maximum over layers of the bound, the measured error, and |q| / the bound's range.

    The gate is evaluated in the dtype of the source's pre-activations, the activation in float64.
    """
    errors, bounds, reaches = [], [], []
    for block, gate, q in zip(source.blocks, gates, pre, strict=True):
        exact = block.mlp.act_fn(q.double())
        errors.append((gate.activation(q).double() - exact).abs().max().item())
        bounds.append(getattr(gate, "bound", 0.0))
        reaches.append(q.abs().max().item() / getattr(gate, "limit", math.inf))
    return {"bound": max(bounds), "activation": max(errors), "reach": max(reaches)}


def compare(expected: Tensor, got: Tensor) -> dict[str, float]:
    """Return logit errors, KL(expected ‖ got) in nats and top-1 agreement, over all positions."""
    expected, got = expected.double(), got.double()
    log_p = expected.log_softmax(-1)
    d = got.log_softmax(-1) - log_p
    kl = (log_p.exp() * (d.expm1() - d)).sum(-1)
    largest = (got - expected).abs().max().item()
    return {
        "logit": largest,
        "relative": largest / expected.abs().max().item(),
        "mean_kl": kl.mean().item(),
        "max_kl": kl.max().item(),
        "top1": (expected.argmax(-1) == got.argmax(-1)).double().mean().item(),
    }
