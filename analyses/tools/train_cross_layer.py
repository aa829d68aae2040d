"""Train a cross-layer transcoder for Small English, and per-layer transcoders for as many steps.

Both start from the transcoders that ship with Small English, with decoders of 0 to later layers.
They learn in two phases, as the shipped ones did: first, to imitate each MLP in runs of the
original model; the loss is the sum of the layers' fractions of variance unexplained (FVU). Then all
layers replace the MLPs together, and a multiple of KL(original ‖ replaced) is added. A factor of
each layer's thresholds is adjusted so that the mean number of active features per token (L0) comes
close to its target. The metrics are those of `transcoders.fidelity` on held-out texts, with the
stored float16 weights.

    python -m analyses.tools.train_cross_layer --out runs/cross_layer
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

from analyses.tools import small_english as language
from analyses.tools.options import Out, Seed, Smoke
from analyses.tools.small_english_grammar import Grammar
from attn_only_lens import load, pretrained, transcoders
from attn_only_lens.heads.transcoder import Transcoder

EOS = language.vocabulary()[language.EOS]
FIRST_POOL = 7_000_000  # the seed of the first grammar; other seeds were used before


@dataclass(frozen=True)
class Recipe:
    """The settings that determine the weights."""

    l0: tuple[float, ...] = (24, 12, 16, 20)  # the target for each layer
    seed: int = 0
    steps: tuple[int, int] = (800, 300)
    rates: tuple[float, float] = (2e-3, 5e-4)
    kl_weight: float = 4.0
    rows: int = 32  # texts in a batch


def batches(recipe: Recipe) -> Iterator[Tensor]:
    """Yield batches of tokens [batch, pos], without held-out texts and without tasks' prompts."""
    tokenizer, never = language.tokenizer(), language.held_out(language.Recipe.prompts)
    held_out = {tuple(tokenizer(text)["input_ids"]) for text in pretrained.small_english_texts()}
    number = FIRST_POOL + recipe.seed * 1_000_000
    while True:
        texts = language.texts_of(Grammar(number, never), 32 * recipe.rows)
        texts = [text for text in texts if tuple(text[:-1]) not in held_out]
        yield from language.by_length(texts, recipe.rows, language.Recipe.n_ctx)
        number += 1


class Training:
    """The weights of all layers during training."""

    def __init__(self, recipe: Recipe, model: LlamaForCausalLM, cross_layer: bool) -> None:
        self.recipe, self.model, self.batches = recipe, model, batches(recipe)
        self.start = transcoders.load("small-english")
        n = len(self.start)
        self.weights = [
            {name: x.clone().requires_grad_(name != "threshold") for name, x in t.tensors().items()}
            for t in self.start.values()
        ]
        self.later = [
            [torch.zeros_like(t.W_dec).requires_grad_() for _ in range(layer + 1, n)]
            for layer, t in self.start.items()
        ]
        self.cross_layer, self.variance = cross_layer, [1.0] * n
        trained = [x for w in self.weights for x in w.values() if x.requires_grad]
        trained += [x for some in self.later for x in some] if cross_layer else []
        self.optimizer = torch.optim.Adam(trained, betas=(0.9, 0.99))

    def encode(self, layer: int, x: Tensor) -> Tensor:
        """Return the activations of a layer's features."""
        w = self.weights[layer]
        q = torch.addmm(w["b_enc"], x, w["W_enc"])
        return q * (q > w["threshold"])

    def decode(self, layer: int, z: list[Tensor]) -> Tensor:
        """Return the imitated output of a layer's MLP."""
        w = self.weights[layer]
        y = torch.addmm(w["b_dec"], z[layer], w["W_dec"])
        if self.cross_layer:
            for source in range(layer):
                y = y + z[source] @ self.later[source][layer - source - 1]
        return y

    def step(self, tokens: Tensor, together: bool, rate: float) -> list[float]:
        """Make one step; return the FVU of each layer."""
        keep, fvu, z = tokens != EOS, [], []

        def compare(layer: int, x: Tensor, y: Tensor) -> None:
            x, y = x[keep], y[keep].detach()
            z.append(self.encode(layer, x.detach()))
            with torch.no_grad():  # change the thresholds so that L0 comes closer to its target
                ratio = float((z[-1] != 0).sum()) / len(x) / self.recipe.l0[layer]
                self.weights[layer]["threshold"] *= max(0.5, min(2.0, ratio)) ** 0.05
                self.variance[layer] = 0.99 * self.variance[layer] + 0.01 * float(y.var(0).sum())
            error = (y - self.decode(layer, z)).square().sum(1).mean()
            fvu.append(error / y.var(0).sum())

        def imitate(layer: int, x: Tensor, y: Tensor) -> Tensor:
            active.append(self.encode(layer, x[keep]))
            return y.masked_scatter(keep[:, :, None], self.decode(layer, active))

        original = self.run(tokens, compare)[keep].detach()
        loss = torch.stack(fvu).sum()
        if together:
            active: list[Tensor] = []
            log_q, log_p = self.run(tokens, imitate)[keep].log_softmax(1), original.log_softmax(1)
            loss = loss + self.recipe.kl_weight * (log_p.exp() * (log_p - log_q)).sum(1).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        return [x.item() for x in fvu]

    def run(self, tokens: Tensor, watch: Any) -> Tensor:
        """Return the model's logits; if `watch` returns a tensor, it replaces an MLP's output."""
        handles = [
            block.mlp.register_forward_hook(
                lambda mlp, inputs, output, layer=layer: watch(layer, inputs[0], output)
            )
            for layer, block in enumerate(self.model.model.layers)
        ]
        try:
            logits: Tensor = self.model(tokens).logits
        finally:
            for handle in handles:
                handle.remove()
        return logits

    def train(self) -> None:
        """Train in two phases."""
        for phase, (steps, highest) in enumerate(
            zip(self.recipe.steps, self.recipe.rates, strict=True)
        ):
            for step in tqdm(range(steps), desc=f"phase {phase + 1}", mininterval=20):
                rate = highest * min(1, (step + 1) / 50) * min(1, 1.25 * (1 - step / steps))
                fvu = self.step(next(self.batches), bool(phase), rate)
                if step % 100 == 99:
                    tqdm.write(f"{step + 1}: FVU {[round(x, 4) for x in fvu]}")

    def result(self) -> dict[int, Transcoder]:
        """Return the transcoders in float16, by layer."""
        made = {}
        for layer, w in enumerate(self.weights):
            tensors = {name: x.detach().half() for name, x in w.items()}
            if self.cross_layer:
                empty = w["W_dec"].new_zeros(0, *w["W_dec"].shape)
                later = (
                    torch.stack([x.detach() for x in self.later[layer]])
                    if self.later[layer]
                    else empty
                )
                tensors["W_later"] = later.half()
            kind = "cross-layer, " * self.cross_layer
            name = f"small-english-4l, {kind}layer {layer}"
            made[layer] = replace(self.start[layer], **tensors, name=name)
        return made


def main(out: Out = Path("out/cross_layer"), seed: Seed = 0, smoke: Smoke = False) -> None:
    """Train both, and write the weights and the metrics."""
    recipe, texts = Recipe(seed=seed), pretrained.small_english_texts()
    if smoke:
        recipe, texts = replace(recipe, steps=(3, 2), rows=2), texts[:7]
    torch.set_num_threads(1)  # so that sums are always computed in the same order
    folder = pretrained.__path__[0] + "/data/small_english"
    model = LlamaForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    metrics: dict[str, Any] = asdict(recipe)
    for name, cross_layer in (("cross_layer", True), ("per_layer", False)):
        start = time.process_time()
        training = Training(recipe, model, cross_layer)
        training.train()
        seconds = round(time.process_time() - start)
        transcoders.save(out / name, training.result())
        result = transcoders.fidelity(load("small-english"), transcoders.load(out / name), texts)
        metrics[name] = {
            "cpu_seconds": seconds,
            "fvu": result.layers["fvu"].tolist(),
            "l0": result.layers["l0"].tolist(),
            "dead": result.layers["dead"].tolist(),
            "kl": result.kl,
            "top_token": result.top_token,
            "losses": [result.loss, result.replacement_loss],
            "loss_recovered": result.loss_recovered,
        }
    text = json.dumps(metrics, indent=2) + "\n"
    (out / "metrics.json").write_text(text, "utf-8")
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
