"""Train twins of compiled programs by interchange interventions: analyses/benchmark/twins.

A twin is a transformer that is trained to compute a program with parts that are known beforehand
(strict interchange intervention training, SIIT: Gupta et al., "InterpBench: Semi-Synthetic
Transformers for Evaluating Mechanistic Interpretability Techniques", 2024). The design maps each
true head of the compiled program to one head of the twin, and the true neurons of each layer to
the first `MAPPED` neurons of the twin's layer. All other heads and neurons have no counterpart.
Each step draws two inputs of one length, a base and a source, and minimises the sum of three mean
squared errors of logits, at positions where the outputs of both inputs are defined:

    behaviour    the twin on the base, against the program on the base
    interchange  the output of one mapped part (a head, or all mapped neurons of a layer) is
                 replaced by its output on the source, in the twin and in the program
    strict       the outputs of some parts without a counterpart are replaced by their outputs on
                 the source, against the program on the base

A twin becomes two files, NAME.safetensors and NAME.json; the latter has the measured faithfulness
of the design. `analyses/benchmark/twins.py` reads them.

    python -m analyses.tools.train_twins --out analyses/benchmark/twins
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from analyses.benchmark.tasks import load
from analyses.studies.tracr_models import TracrProgram
from analyses.tools.options import Seed, Smoke
from attn_only_lens import HeadName
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig

PROGRAMS = (
    "frac_prevs",
    "repeats_previous",
    "sum_with_previous",
    "detect_ab",
    "rank",
    "hist",
    "pair_balance",
    "count_x",
)
MAPPED, OTHERS = 12, 8  # neurons of a layer with and without a counterpart
D_MODEL, D_HEAD = 32, 8
BATCH, LEARNING_RATE = 96, 3e-3
NEAR = 0.25  # a numerical output is right within this; outputs differ by more

Part = tuple[int, str, tuple[int, ...]]
"""A layer, "H" or "N", and indices: what is replaced at once."""


@dataclass(frozen=True)
class Design:
    """Which parts of a twin are those of the program.

    Attributes:
        mapped: pairs of a part of the program and a part of the twin.
        others: parts of the twin without a counterpart, one head or neuron each.
    """

    mapped: tuple[tuple[Part, Part], ...]
    others: tuple[Part, ...]


def design_of(program: TracrProgram) -> Design:
    """Return the design of a program's twin."""
    true = {edge.writer for edge in program.true_edges()} - {"embed"}
    heads = [HeadName.parse(name) for name in sorted(true)]
    cfg, mapped, others = program.model.cfg, [], list[Part]()
    for layer in range(cfg.n_layers):
        for h in range(cfg.n_heads + 1):
            if f"L{layer}H{h}" in true:
                mapped.append(((layer, "H", (h,)), (layer, "H", (h,))))
            else:
                others.append((layer, "H", (h,)))
        neurons = tuple(x.index for x in heads if (x.layer, x.kind) == (layer, "neuron"))
        if neurons:
            mapped.append(((layer, "N", neurons), (layer, "N", tuple(range(MAPPED)))))
        first = MAPPED if neurons else 0
        others += [(layer, "N", (n,)) for n in range(first, MAPPED + OTHERS)]
    return Design(tuple(mapped), tuple(others))


def untrained(program: TracrProgram, seed: int) -> HookedTransformer:
    """Return a transformer of the twin's sizes, in float32."""
    cfg = program.model.cfg
    return HookedTransformer(
        HookedTransformerConfig(
            n_layers=cfg.n_layers,
            n_heads=cfg.n_heads + 1,
            d_model=D_MODEL,
            d_head=D_HEAD,
            d_mlp=MAPPED + OTHERS,
            d_vocab=cfg.d_vocab,
            d_vocab_out=cfg.d_vocab_out,
            n_ctx=cfg.n_ctx,
            act_fn="relu",
            normalization_type=None,
            attention_dir=cfg.attention_dir,
            seed=seed,
            device="cpu",
            model_name=f"twin-{program.name}",
        )
    )


def replaced(
    model: HookedTransformer, tokens: Tensor, source: Tensor, parts: Sequence[Part]
) -> Tensor:
    """Return logits of a run in which some outputs come from a run on the source."""
    points = {"H": "attn.hook_z", "N": "mlp.hook_post"}
    chosen: dict[str, list[int]] = {}
    for layer, letter, indices in parts:
        chosen.setdefault(f"blocks.{layer}.{points[letter]}", []).extend(indices)
    with torch.no_grad() if not model.embed.W_E.requires_grad else torch.enable_grad():
        seen: dict[str, Tensor] = {}

        def keep(x: Tensor, hook: Any) -> None:
            seen[hook.name] = x

        def put(x: Tensor, hook: Any) -> Tensor:
            x = x.clone()
            x[:, :, chosen[hook.name]] = seen[hook.name][:, :, chosen[hook.name]]
            return x

        model.run_with_hooks(source, fwd_hooks=[(name, keep) for name in chosen])
        return model.run_with_hooks(tokens, fwd_hooks=[(name, put) for name in chosen])


class Inputs:
    """All inputs of a program by length, and where their outputs are defined."""

    def __init__(self, program: TracrProgram) -> None:
        self.batches = []
        for tokens, expected, _ in program.batches():
            defined = torch.tensor([[False, *(y is not None for y in ys)] for ys in expected])
            if tokens.shape[1] > 2 and defined.any():
                self.batches.append((tokens, defined))

    def draw(self, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Draw bases, sources, and where both have an output; longer inputs more often."""
        sizes = torch.tensor([float(len(tokens)) * tokens.shape[1] for tokens, _ in self.batches])
        tokens, defined = self.batches[int(torch.multinomial(sizes, 1, generator=random))]
        base, source = torch.randint(len(tokens), (2, BATCH), generator=random)
        return tokens[base], tokens[source], defined[base] & defined[source]


def train(program: TracrProgram, steps: int, seed: int) -> HookedTransformer:
    """Train a twin."""
    twin, design, inputs = untrained(program, seed), design_of(program), Inputs(program)
    random = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=LEARNING_RATE, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    program.model.requires_grad_(False)
    for step in tqdm(range(steps), desc=program.name, leave=False):
        base, source, defined = inputs.draw(random)
        part, twins_part = design.mapped[step % len(design.mapped)]
        chosen = torch.rand(len(design.others), generator=random) < 0.5
        unmapped = [x for x, use in zip(design.others, chosen.tolist(), strict=True) if use]
        whole = program.model(base)
        changed = replaced(program.model, base, source, [part])
        pairs = (
            (twin(base), whole),
            (replaced(twin, base, source, [twins_part]), changed),
            (replaced(twin, base, source, unmapped), whole),
        )
        loss = sum((got - want.float())[defined].square().mean() for got, want in pairs)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return twin.requires_grad_(False)


@torch.no_grad()
def faithfulness(program: TracrProgram, twin: HookedTransformer) -> dict[str, Any]:
    """Return which shares of outputs are right: plain, and after interventions of each kind.

    Each input is the base once, with the next input of its length as the source. After an
    interchange, "right" means: the output of the program after the same interchange.
    """
    design, shares = design_of(program), dict[str, list[Tensor]]()
    program.model.requires_grad_(False)
    for base, defined in Inputs(program).batches:
        source = base.roll(1, 0)
        both = defined & defined.roll(1, 0)
        whole = program.model(base)

        def add(name: str, got: Tensor, want: Tensor, where: Tensor = both) -> None:
            shares.setdefault(name, []).append(_right(got, want)[where])

        add("outputs", twin(base), whole, defined)
        for part, twins_part in design.mapped:
            want = replaced(program.model, base, source, [part])
            add("interchanges", replaced(twin, base, source, [twins_part]), want)
            changed = ~_right(want, whole)
            got = replaced(twin, base, source, [twins_part])
            add("interchanges that change the output", got, want, both & changed)
        for other in design.others:
            add("replaced other parts", replaced(twin, base, source, [other]), whole)
        add("all other parts replaced", replaced(twin, base, source, design.others), whole)
    return {name: float(torch.cat(right).double().mean()) for name, right in shares.items()}


def _right(got: Tensor, want: Tensor) -> Tensor:
    """Return where decoded outputs agree: [batch, pos]."""
    if got.shape[-1] == 1:
        return (got - want).abs()[..., 0] < NEAR * want.abs().max()
    return got.argmax(-1) == want.argmax(-1)


def main(
    out: Annotated[Path, typer.Option(help="folder of the twins")] = Path("out/twins"),
    steps: Annotated[int, typer.Option(help="training steps of each twin")] = 8000,
    seed: Seed = 0,
    only: Annotated[str, typer.Option(help="names, separated by commas")] = "",
    smoke: Smoke = False,
) -> None:
    """Train the twins, measure them, and write them."""
    out.mkdir(parents=True, exist_ok=True)
    for name in only.split(",") if only else PROGRAMS[:1] if smoke else PROGRAMS:
        started, program = time.process_time(), load(name)
        twin = train(program, 20 if smoke else steps, seed)
        measured = faithfulness(program, twin)
        save_file({n: x.detach().contiguous() for n, x in twin.named_parameters()},
                  out / f"{name}.safetensors")  # fmt: skip
        card = {"steps": steps, "seed": seed, "seconds": round(time.process_time() - started, 1)}
        text = json.dumps(card | {"faithfulness": measured}, indent=1)
        (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(name, card, measured, flush=True)


if __name__ == "__main__":
    typer.run(main)
