"""Train the transcoders that ship with Small English: one JumpReLU transcoder for each MLP.

The transcoders learn from texts of `small_english_grammar.py`, in two phases:

1. Each transcoder learns to imitate its MLP in runs of the original model. The loss is the fraction
   of variance unexplained (FVU).
2. All transcoders replace the MLPs together. The loss is a multiple of KL(original ‖ replaced) plus
   the FVU in runs of the original model.

A feature is active if its pre-activation is above a threshold. All features of a layer share this
threshold, which is adjusted so that the mean number of active features per token (L0) comes close
to a target. In phase 1, features that are never active (dead features) get new weights: they are
active at tokens with large errors, and their rows of W_dec have the directions of these errors.
After training, dead features are removed.

The metrics are computed with the stored float16 weights, on `pretrained.small_english_texts()`.

Sources: Bussmann et al., "BatchTopK Sparse Autoencoders" (2024); Bricken et al., "Towards
Monosemanticity" (2023), for dead features; Karvonen, "Revisiting End-To-End Sparse Autoencoder
Training: A Short Finetune Is All You Need" (2025), for phase 2.

    python -m analyses.tools.train_transcoders --out runs/transcoders
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

from analyses.tools import train_small_english as language
from analyses.tools.benching import leave
from analyses.tools.options import Device, Out, Seed, Smoke
from analyses.tools.small_english_grammar import Grammar
from attn_only_lens import pretrained
from attn_only_lens.heads.transcoder import Transcoder
from attn_only_lens.transcoders import save

DATA = Path(str(files("attn_only_lens.pretrained") / "data" / "small_english"))
EOS = language.vocabulary()[language.EOS]
N_CTX = language.Recipe.n_ctx
FIRST_POOL = 5_000_000  # the seed of the first grammar; the model was trained with smaller seeds
START = 1 / 16  # the share of features that are active at a token when training starts
DEAD = 50  # a feature is dead if it is inactive in this many batches (about 45,000 tokens)
ALIKE = 0.999  # copies have a larger cosine similarity, in W_enc and in W_dec


@dataclass(frozen=True)
class Recipe:
    """The settings that determine the weights."""

    d_features: int = 1_024
    l0: tuple[float, ...] = (24, 12, 16, 20)  # the target for each layer
    seed: int = 0
    steps: tuple[int, int] = (1_500, 400)  # the number of steps in each phase
    rates: tuple[float, float] = (5e-3, 1e-3)  # the learning rates of each phase
    kl_weight: float = 4.0  # in phase 2; the weight of each layer's FVU is 1
    rows: int = 32  # texts in a batch


def read_model(device: str) -> LlamaForCausalLM:
    """Return Small English as a model of transformers, without TransformerLens."""
    model = LlamaForCausalLM.from_pretrained(DATA).to(device)
    return model.eval().requires_grad_(False)


def batches(recipe: Recipe, device: str) -> Iterator[Tensor]:
    """Yield batches of tokens [batch, pos], without held-out texts and without tasks' prompts."""
    held_out = {tuple(row) for row in _rows(pretrained.small_english_texts())}
    never, pool = language.held_out(language.Recipe.prompts), FIRST_POOL * (1 + recipe.seed)
    while True:
        texts = language.texts_of(Grammar(pool, never), 32 * recipe.rows)
        texts = [text for text in texts if tuple(text[:-1]) not in held_out]
        for start in range(0, len(texts), recipe.rows):
            yield _padded(texts[start : start + recipe.rows])[0].to(device)
        pool += 1


def _rows(texts: Sequence[str]) -> list[list[int]]:
    tokenizer = language.tokenizer()
    return [tokenizer(text)["input_ids"] for text in texts]


def _padded(rows: list[list[int]], batch: int = 64) -> list[Tensor]:
    return language.by_length(rows, batch, N_CTX)


Watcher = Callable[[int, Tensor, Tensor], Tensor | None]
"""Takes an MLP's layer, input and output; returns a new output, or None to keep the output."""


@contextmanager
def at_mlps(model: LlamaForCausalLM, watch: Watcher) -> Iterator[None]:
    """Call a function after each MLP; if it returns a tensor, this replaces the MLP's output."""

    def hook(layer: int) -> Callable[[Any, tuple[Tensor, ...], Tensor], Tensor | None]:
        return lambda mlp, inputs, output: watch(layer, inputs[0], output)

    blocks = enumerate(model.model.layers)
    handles = [block.mlp.register_forward_hook(hook(layer)) for layer, block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def record(
    model: LlamaForCausalLM, parts: Sequence[Tensor]
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return the inputs and the outputs [token, d_model] of each layer's MLP, without padding."""
    inputs: dict[int, list[Tensor]] = {}
    outputs: dict[int, list[Tensor]] = {}
    for tokens in parts:
        keep = tokens != EOS

        def store(layer: int, x: Tensor, y: Tensor, keep: Tensor = keep) -> None:
            inputs.setdefault(layer, []).append(x[keep])
            outputs.setdefault(layer, []).append(y[keep])

        with at_mlps(model, store):
            model(tokens)
    joined = [
        {layer: torch.cat(xs) for layer, xs in stored.items()} for stored in (inputs, outputs)
    ]
    return joined[0], joined[1]


def kl(original: Tensor, imitated: Tensor) -> Tensor:
    """Return the mean KL(original ‖ imitated), given log-probabilities [token, d_vocab]."""
    return (original.exp() * (original - imitated)).sum(1).mean()


class Layer:
    """The transcoder of one layer during training.

    Inputs and outputs are divided by scales, so that the mean squared error is the FVU. W_enc and
    W_dec have one row per feature; rows of W_dec have norm 1.
    """

    def __init__(
        self, x: Tensor, y: Tensor, recipe: Recipe, target: float, generator: torch.Generator
    ) -> None:
        """Initialise features from random tokens: their inputs and outputs minus the means."""
        self.target, self.generator = target, generator
        self.x_scale, self.y_scale = float(x.square().mean() ** 0.5), float(y.var(0).mean() ** 0.5)
        x_mean, y_mean = x.mean(0), y.mean(0)
        chosen = torch.randint(len(x), (recipe.d_features,), generator=generator).to(x.device)
        W_enc, W_dec = (F.normalize(a[chosen] - a.mean(0), dim=1) for a in (x, y))
        q = (x[:1_000] - x_mean) / self.x_scale @ W_enc.T
        self.threshold = float(q.flatten()[::7].quantile(1 - START))
        imitated = F.threshold(q, self.threshold, 0.0) @ W_dec
        gain = float((imitated * (y[:1_000] - y_mean)).sum() / imitated.square().sum())
        gain /= self.y_scale  # the factor that minimises the squared error
        self.threshold *= gain
        self.weights = {
            "W_enc": W_enc * gain,
            "W_dec": W_dec,
            "b_enc": -(W_enc @ x_mean) * gain / self.x_scale,
            "b_dec": y_mean / self.y_scale,
        }
        for weight in self.weights.values():
            weight.requires_grad_()
        self.steps_silent = torch.zeros_like(self.weights["b_enc"])

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scaled outputs and the activations for scaled inputs."""
        weights = self.weights
        z = F.threshold(torch.addmm(weights["b_enc"], x, weights["W_enc"].T), self.threshold, 0.0)
        return torch.addmm(weights["b_dec"], z, weights["W_dec"]), z

    def fvu(self, x: Tensor, y: Tensor, tightness: float) -> Tensor:
        """Return the FVU, and change the threshold so that L0 comes closer to its target."""
        x = x / self.x_scale
        imitated, z = self(x)
        error = y / self.y_scale - imitated
        self.inputs, self.error = x.detach().float(), error.detach().float()
        count = z.detach().sign().sum(0)
        self.steps_silent = (self.steps_silent + 1) * (count == 0)
        loosest = len(count) * START
        target = self.target * (loosest / self.target) ** (1 - tightness)
        ratio = float(count.sum()) / len(x) / target
        self.threshold *= max(0.5, min(2.0, ratio)) ** 0.05
        return error.square().mean()

    def imitate(self, x: Tensor) -> Tensor:
        """Return the transcoder's outputs [token, d_model] for an MLP's inputs."""
        return self(x / self.x_scale)[0] * self.y_scale

    @torch.no_grad()
    def resample(self, optimizer: torch.optim.Optimizer) -> int:
        """Give dead features new weights, each from another input, and return their number."""
        dead = (self.steps_silent >= DEAD).nonzero()[:, 0]
        if not len(dead):
            return 0
        # Equal inputs would make copies of one feature, which stay copies during training.
        _, first = np.unique(self.inputs.cpu().numpy(), axis=0, return_index=True)
        candidates = torch.from_numpy(first)
        sizes = self.error.square().sum(1).cpu()[candidates]
        dead = dead[: int((sizes > 0).sum())]
        picked = torch.multinomial(sizes, len(dead), generator=self.generator)
        chosen = candidates[picked]
        x, error = self.inputs[chosen], self.error[chosen]
        length = self.weights["W_enc"].norm(dim=1).mean()
        W_enc = F.normalize(x - self.inputs.mean(0), dim=1) * length
        new = {
            "W_enc": W_enc,
            "W_dec": F.normalize(error, dim=1),
            "b_enc": 2 * self.threshold - (W_enc * x).sum(1),
        }
        for name, rows in new.items():
            self.weights[name][dead] = rows
            for moment in ("exp_avg", "exp_avg_sq"):
                optimizer.state[self.weights[name]][moment][dead] = 0
        self.steps_silent[dead] = 0
        return len(dead)

    @torch.no_grad()
    def transcoder(self, name: str) -> Transcoder:
        """Return the transcoder in float16; a feature's activation is the norm of its output."""
        weights, scale = self.weights, self.y_scale
        scaled = {
            "W_enc": weights["W_enc"].T * (scale / self.x_scale),
            "W_dec": weights["W_dec"],
            "b_enc": weights["b_enc"] * scale,
            "b_dec": weights["b_dec"] * scale,
            "threshold": torch.full_like(weights["b_enc"], self.threshold * scale),
        }
        half = {key: weight.detach().half().contiguous() for key, weight in scaled.items()}
        return Transcoder(**half, activation="jumprelu", name=name)


class Training:
    """The transcoders of all layers during training."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        self.recipe, self.batches = recipe, batches(recipe, device)
        self.model = read_model(device)
        generator = torch.Generator().manual_seed(recipe.seed)
        xs, ys = record(self.model, list(islice(self.batches, 16)))
        self.layers = [
            Layer(xs[layer], ys[layer], recipe, target, generator)
            for layer, target in enumerate(recipe.l0)
        ]
        weights = [weight for layer in self.layers for weight in layer.weights.values()]
        self.optimizer = torch.optim.Adam(weights, betas=(0.9, 0.99))

    def run(self, phase: int) -> None:
        """Train for one phase; 0 is the first phase, 1 the second."""
        steps, highest = self.recipe.steps[phase], self.recipe.rates[phase]
        for step in tqdm(range(steps), desc=f"phase {phase + 1}", mininterval=5):
            done = step / steps
            rate = highest * min(1, (step + 1) / 50) * min(1, 1.25 * (1 - done))
            tightness = 1.0 if phase else min(1.0, 4 * done)
            self._step(next(self.batches), bool(phase), rate, tightness)
            if not phase and step % DEAD == DEAD - 1 and done < 0.8:
                for layer in self.layers:
                    layer.resample(self.optimizer)

    def _step(self, tokens: Tensor, together: bool, rate: float, tightness: float) -> None:
        keep, fvu = tokens != EOS, []

        def compare(layer: int, x: Tensor, y: Tensor) -> None:
            fvu.append(self.layers[layer].fvu(x[keep], y[keep], tightness))

        def imitate(layer: int, x: Tensor, y: Tensor) -> Tensor:
            return y.masked_scatter(keep[:, :, None], self.layers[layer].imitate(x[keep]).to(y))

        # On processors with bfloat16, matrix products take less than half the time of float32.
        with torch.autocast(tokens.device.type, torch.bfloat16):
            with at_mlps(self.model, compare):
                original = self.model(tokens).logits[keep]
            loss = torch.stack(fvu).sum()
            if together:
                with at_mlps(self.model, imitate):
                    replaced = self.model(tokens).logits[keep]
                log_probs = [x.float().log_softmax(1) for x in (original, replaced)]
                loss = loss + self.recipe.kl_weight * kl(*log_probs)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        for layer in self.layers:
            W_dec = layer.weights["W_dec"].data
            W_dec /= W_dec.norm(dim=1, keepdim=True)

    def transcoders(self) -> dict[int, Transcoder]:
        """Return the transcoders in float16, by layer."""
        name = "small-english-4l, layer {}"
        return {i: layer.transcoder(name.format(i)) for i, layer in enumerate(self.layers)}


@torch.no_grad()
def measure(
    model: LlamaForCausalLM, transcoders: dict[int, Transcoder], texts: Sequence[str]
) -> dict[str, Any]:
    """Return FVU, L0 and dead features by layer, and the metrics of the replacement model.

    `losses` has three losses: of the original model, of the model with transcoders, and of a model
    in which each MLP outputs its mean output. `loss_recovered` is 1 if the second loss equals the
    first, and 0 if it equals the third.
    """
    parts = [tokens.to(model.device) for tokens in _padded(_rows(texts))]
    inputs, outputs = record(model, parts)
    report: dict[str, Any] = {"tokens": len(inputs[0]), "fvu": [], "l0": [], "dead": []}
    for layer, transcoder in transcoders.items():
        x, y = inputs[layer], outputs[layer]
        z = transcoder.encode(x)
        error = (y - transcoder.decode(z)).square().sum() / (y - y.mean(0)).square().sum()
        report["fvu"].append(float(error))
        report["l0"].append(float((z > 0).sum(1).float().mean()))
        report["dead"].append(float((z == 0).all(0).float().mean()))

    def imitate(layer: int, x: Tensor, y: Tensor) -> Tensor:
        return transcoders[layer].decode(transcoders[layer].encode(x))

    def mean(layer: int, x: Tensor, y: Tensor) -> Tensor:
        return outputs[layer].mean(0).expand_as(y)

    original = log_probs(model, parts)
    with at_mlps(model, imitate):
        replaced = log_probs(model, parts)
    with at_mlps(model, mean):
        ablated = log_probs(model, parts)
    following = torch.cat([tokens.roll(-1, 1)[tokens != EOS] for tokens in parts])
    # After the last token of a row, `roll` gives padding, or the first token of the same row (BOS).
    known = (following != EOS) & (following != language.vocabulary()[language.BOS])
    losses = [float(F.nll_loss(x[known], following[known])) for x in (original, replaced, ablated)]
    return report | {
        "kl": float(kl(original, replaced)),
        "top_token": float((original.argmax(1) == replaced.argmax(1)).float().mean()),
        "losses": losses,
        "loss_recovered": (losses[2] - losses[1]) / (losses[2] - losses[0]),
    }


def log_probs(model: LlamaForCausalLM, parts: Sequence[Tensor]) -> Tensor:
    """Return the next-token log-probabilities [token, d_vocab] at all tokens except padding."""
    return torch.cat([model(tokens).logits[tokens != EOS].log_softmax(-1) for tokens in parts])


def main(
    out: Out = Path("out/transcoders"),
    device: Device = "cpu",
    seed: Seed = 0,
    smoke: Smoke = False,
) -> None:
    """Train the shipped transcoders, and write their weights, metrics and the run's record."""
    started, recipe = time.perf_counter(), Recipe(seed=seed)
    texts = pretrained.small_english_texts()
    if smoke:
        recipe, texts = replace(recipe, d_features=67, steps=(70, 2), rows=2), texts[:7]
    torch.set_num_threads(1)  # so that sums are always computed in the same order
    training = Training(recipe, device)
    metrics: dict[str, Any] = asdict(recipe)
    for phase, name in enumerate(("separate", "together")):
        start = time.process_time()
        training.run(phase)
        metrics[f"{name}_cpu_seconds"] = round(time.process_time() - start)
        transcoders = training.transcoders()
        if phase:
            transcoders = without_dead(training.model, transcoders, training.batches)
            transcoders = {layer: without_copies(x) for layer, x in transcoders.items()}
        metrics[name] = measure(training.model, to_float32(transcoders), texts)
    out.mkdir(parents=True, exist_ok=True)
    save(out / "weights", transcoders)
    text = json.dumps(metrics, indent=2) + "\n"
    leave(__file__, out, {"metrics.json": text}, started=started, device=device, smoke=smoke)
    typer.echo(text)


def without_dead(
    model: LlamaForCausalLM, transcoders: dict[int, Transcoder], texts: Iterator[Tensor]
) -> dict[int, Transcoder]:
    """Return the transcoders without features that are dead in the next batches of `texts`."""
    inputs, _ = record(model, list(islice(texts, DEAD)))
    return {
        layer: _some(transcoders[layer], (transcoder.encode(inputs[layer]) > 0).any(0))
        for layer, transcoder in to_float32(transcoders).items()
    }


def _some(transcoder: Transcoder, keep: Tensor) -> Transcoder:
    tensors = transcoder.tensors()
    tensors |= {name: tensors[name][keep] for name in ("W_dec", "b_enc", "threshold")}
    return replace(transcoder, **tensors | {"W_enc": tensors["W_enc"][:, keep].contiguous()})


def without_copies(transcoder: Transcoder) -> Transcoder:
    """Return a transcoder in which each group of nearly equal features is one feature.

    The activation of this feature is the sum over the group, so equal features are merged exactly.
    """
    wide = to_float32({0: transcoder})[0]
    encoders, decoders = F.normalize(wide.W_enc.T, dim=1), F.normalize(wide.W_dec, dim=1)
    alike = (encoders @ encoders.T > ALIKE) & (decoders @ decoders.T > ALIKE)
    first = (alike | torch.eye(len(alike), dtype=torch.bool)).int().argmax(dim=1)
    _, group = first.unique(return_inverse=True)
    sums = F.one_hot(group).T.float()  # [group, feature]
    assert wide.threshold is not None
    merged = replace(
        transcoder,
        W_enc=wide.W_enc @ sums.T,
        W_dec=F.normalize(sums @ wide.W_dec, dim=1),
        b_enc=sums @ wide.b_enc,
        b_dec=wide.b_dec,
        threshold=sums @ wide.threshold,
    )
    return replace(merged, **{name: x.half() for name, x in merged.tensors().items()})


def to_float32(transcoders: dict[int, Transcoder]) -> dict[int, Transcoder]:
    """Return the same transcoders in float32."""
    return {
        layer: replace(
            transcoder, **{name: tensor.float() for name, tensor in transcoder.tensors().items()}
        )
        for layer, transcoder in transcoders.items()
    }


if __name__ == "__main__":
    typer.run(main)
