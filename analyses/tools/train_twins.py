"""Train twins of compiled programs by interchange interventions: analyses/benchmark/twins.

A twin is a transformer that is trained to compute a program with parts that are known beforehand
(strict interchange intervention training, SIIT: Gupta et al., "InterpBench: Semi-Synthetic
Transformers for Evaluating Mechanistic Interpretability Techniques", 2024). The design maps each
true head of the compiled program to one head of the twin, and the true neurons of each layer to
the first `MAPPED` neurons of the twin's layer (`twin_design.py`). All other heads and neurons have
no counterpart. Each step draws inputs of one length, bases and sources, and minimises the sum of
three mean squared errors of logits, where the outputs of both inputs are defined:

    behaviour    the twin on the base, against the program on the base
    interchange  the output of one mapped part (a head, or all mapped neurons of a layer) is
                 replaced by its output on the source, in the twin and in the program
    strict       the outputs of some parts without a counterpart are replaced by their outputs on
                 the source, against the program on the base

A twin becomes two files, seedN/NAME.safetensors and seedN/NAME.json; the latter has the measured
faithfulness of the design. `analyses/benchmark/twins.py` reads them.

    python -m analyses.tools.train_twins --out analyses/benchmark/twins --seed 0
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from analyses.benchmark.tasks import load
from analyses.benchmark.tracr_models import TracrProgram
from analyses.tools.options import Seed, Smoke
from analyses.tools.twin_design import Design, Part, design_of, untrained
from attn_only_lens.tl import HookedTransformer

PROGRAMS = (
    "frac_prevs",
    "repeats_previous",
    "sum_with_previous",
    "detect_ab",
    "rank",
    "hist",
    "pair_balance",
    "count_x",
    "first_time",
    "parity_of_three",
)
BATCH, LEARNING_RATE = 48, 5e-3
NEAR = 0.1  # a numerical output is right within this


@dataclass(frozen=True)
class Run:
    """A run: its logits and the outputs of its parts, by (layer, "H" or "N")."""

    logits: Tensor
    outputs: dict[tuple[int, str], Tensor]


def run(
    model: HookedTransformer, tokens: Tensor, put: dict[tuple[int, str], tuple[Tensor, Tensor]]
) -> Run:
    """Run a model without norms, without its hooks, which take most of the time of a tiny model.

    Args:
        model: the weights.
        tokens: [batch, pos].
        put: for a layer and kind, which outputs to replace [batch, part], and by what.
    """
    x = model.embed.W_E[tokens] + model.pos_embed.W_pos[: tokens.shape[1]]
    future = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    future = future & (model.cfg.attention_dir == "causal")
    outputs = {}

    def replace(layer: int, letter: str, output: Tensor) -> Tensor:
        if (layer, letter) in put:
            where, source = put[layer, letter]
            where = where[:, None, :, None] if output.ndim == 4 else where[:, None]
            output = torch.where(where, source, output)
        outputs[layer, letter] = output
        return output

    for layer, block in enumerate(model.blocks):
        attn, mlp = block.attn, block.mlp
        q, k, v = (
            torch.einsum("bpd,hde->bhpe", x, getattr(attn, f"W_{name}"))
            + getattr(attn, f"b_{name}")[:, None]
            for name in "QKV"
        )
        scores = q @ k.transpose(2, 3) / attn.attn_scale
        pattern = scores.masked_fill(future, -torch.inf).softmax(-1)
        z = replace(layer, "H", (pattern @ v).transpose(1, 2))
        x = x + torch.einsum("bphe,hed->bpd", z, attn.W_O) + attn.b_O
        post = replace(layer, "N", (x @ mlp.W_in + mlp.b_in).relu())
        x = x + post @ mlp.W_out + mlp.b_out
    return Run(x @ model.unembed.W_U + model.unembed.b_U, outputs)


def replacements(
    source: Run, rows: Tensor, parts: Sequence[Sequence[Part]]
) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """Return what to put into each row of a batch: a row's parts, from a row of the source run."""
    put = {}
    for (layer, letter), outputs in source.outputs.items():
        where = torch.zeros(len(rows), outputs.shape[2], dtype=torch.bool)
        for row, some in enumerate(parts):
            for part in some:
                if part[:2] == (layer, letter):
                    where[row, list(part[2])] = True
        if where.any():
            put[layer, letter] = where, outputs[rows]
    return put


@dataclass(frozen=True)
class Inputs:
    """All inputs of one length, and what the program computes from them.

    Attributes:
        tokens: [input, pos].
        defined: where the outputs are defined.
        logits: the program's logits.
        interchanged: its logits for each mapped part, base and source: [part, base, source, …].
    """

    tokens: Tensor
    defined: Tensor
    logits: Tensor
    interchanged: Tensor


@torch.no_grad()
def inputs_of(program: TracrProgram, design: Design) -> list[Inputs]:
    """Return the stored inputs of a program by length, without those of one token."""
    result = []
    for tokens, expected, _ in program.batches():
        defined = torch.tensor([[False, *(y is not None for y in ys)] for ys in expected])
        if tokens.shape[1] < 3 or not defined.any():
            continue
        whole, n = run(program.model, tokens, {}), len(tokens)
        base, source = torch.cartesian_prod(torch.arange(n), torch.arange(n)).T
        changed = [
            run(program.model, tokens[base], replacements(whole, source, [[part]] * n**2)).logits
            for part, _ in design.mapped
        ]
        interchanged = torch.stack(changed).unflatten(1, (n, n)).float()
        result.append(Inputs(tokens, defined, whole.logits.float(), interchanged))
    return result


def train(program: TracrProgram, steps: int, seed: int) -> HookedTransformer:
    """Train a twin."""
    twin, design = untrained(program, seed), design_of(program)
    inputs, random = inputs_of(program, design), torch.Generator().manual_seed(seed)
    parameters = list(twin.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    sizes = torch.tensor([float(x.tokens.numel()) for x in inputs])
    for _ in tqdm(range(steps), desc=program.name, leave=False):
        some = inputs[int(torch.multinomial(sizes, 1, generator=random))]
        base, source = torch.randint(len(some.tokens), (2, 2 * BATCH), generator=random)
        which = torch.randint(len(design.mapped), (BATCH,), generator=random)
        used = (torch.rand(BATCH, len(design.others), generator=random) < 0.5).tolist()
        parts = [[design.mapped[i][1]] for i in which.tolist()]
        parts += [[x for x, use in zip(design.others, row, strict=True) if use] for row in used]
        plain = run(twin, some.tokens, {})
        moved = run(twin, some.tokens[base], replacements(plain, source, parts)).logits
        want = torch.cat(
            [some.interchanged[which, base[:BATCH], source[:BATCH]], some.logits[base[BATCH:]]]
        )
        defined = some.defined[base] & some.defined[source]
        loss = (plain.logits - some.logits)[some.defined].square().mean()
        loss = loss + 2 * (moved - want)[defined].square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    return twin.requires_grad_(False)


@torch.no_grad()
def faithfulness(program: TracrProgram, twin: HookedTransformer) -> dict[str, float]:
    """Return which shares of outputs are right: plain, and after interventions of each kind.

    All pairs of a base and a source are used. After an interchange, "right" means: the output of
    the program after the same interchange.
    """
    design, shares = design_of(program), dict[str, list[Tensor]]()
    for some in inputs_of(program, design):
        n, plain = len(some.tokens), run(twin, some.tokens, {})
        base, source = torch.cartesian_prod(torch.arange(n), torch.arange(n)).T
        both, whole = some.defined[base] & some.defined[source], some.logits[base]
        cases = [("interchanges", [part], some.interchanged[i].flatten(0, 1))
                 for i, (_, part) in enumerate(design.mapped)]  # fmt: skip
        cases += [("one other part replaced", [part], whole) for part in design.others]
        cases.append(("all other parts replaced", list(design.others), whole))
        shares.setdefault("outputs", []).append(_right(plain.logits, some.logits)[some.defined])
        for name, parts, want in cases:
            put = replacements(plain, source, [parts] * n**2)
            right = _right(run(twin, some.tokens[base], put).logits, want)
            shares.setdefault(name, []).append(right[both])
            if name == "interchanges":
                changed = both & ~_right(want, whole)
                shares.setdefault("interchanges that change outputs", []).append(right[changed])
    return {name: float(torch.cat(right).double().mean()) for name, right in shares.items()}


def _right(got: Tensor, want: Tensor) -> Tensor:
    """Return where decoded outputs agree: [batch, pos]."""
    if got.shape[-1] == 1:
        return (got - want).abs()[..., 0] < NEAR
    return got.argmax(-1) == want.argmax(-1)


def main(
    out: Annotated[Path, typer.Option(help="folder of the twins")] = Path("out/twins"),
    steps: Annotated[int, typer.Option(help="training steps of each twin")] = 1500,
    seed: Seed = 0,
    smoke: Smoke = False,
) -> None:
    """Train the twins, measure them, and write them."""
    folder = out / f"seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS[:1] if smoke else PROGRAMS:
        started, program = time.process_time(), load(name)
        twin = train(program, 20 if smoke else steps, seed)
        measured = faithfulness(program, twin)
        save_file({n: x.detach().contiguous() for n, x in twin.named_parameters()},
                  folder / f"{name}.safetensors")  # fmt: skip
        card = {"steps": steps, "seed": seed, "seconds": round(time.process_time() - started, 1)}
        text = json.dumps(card | {"faithfulness": measured}, indent=1)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(name, card, measured, flush=True)


if __name__ == "__main__":
    typer.run(main)
