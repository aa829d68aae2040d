"""The design of the twins of compiled programs: their sizes, and which of their parts are known."""

from dataclasses import dataclass

from analyses.benchmark.tracr_models import TracrProgram
from attn_only_lens import HeadName
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig

MAPPED, OTHERS = 12, 8  # neurons of a layer with and without a counterpart
D_MODEL, D_HEAD = 32, 8

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
