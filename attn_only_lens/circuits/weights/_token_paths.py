"""Token → neuron → token: which tokens drive a neuron, and which it writes for; weights alone.

    drive(s)   (W_E N W_in)[s, i]⁺                   plain MLP, ⁺ for max(0, ·)
               (W_E N W_gate)[s, i]⁺ (W_E N W_in)[s, i]     gated MLP: gate and value
    write(t)   (W_out N W_U)[i, t], centred over the vocabulary
    score      drive(s) · write(t)

That is the direct path of a token through one neuron with ReLU in the place of its activation,
which every activation here approaches as the stream grows. ReLU commutes with positive factors, so
the scale of a norm changes no order, but for what differs between tokens. Left out, as in
`token_circuits.py`: biases, positions, and what earlier heads add. In a gated MLP the value may be
negative, so a neuron has two rows, one for either sign. In bytes beyond the model, float32, with
m = d_mlp, n tokens kept and b tokens at once:

    4 (2 d_model m + b (4 m + d_model) + 12 m (b + n))    one layer's tables of drives
    4 · 64 · 4 d_vocab                                    what 64 neurons write
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.arguments import positive_reasons
from attn_only_lens.circuits.weights._composition import is_gated
from attn_only_lens.circuits.weights.vocabulary import VocabularyMatrices
from attn_only_lens.engine.sites import LayerSites, Sites, neuron_heads, resolve_sites
from attn_only_lens.engine.tokens import token_text
from attn_only_lens.errors import InputError
from attn_only_lens.gates import Gate
from attn_only_lens.heads import host_of
from attn_only_lens.precision import full_precision

_NEURONS = 64  # of d_vocab numbers at once
_PROBLEM = "these neurons have no paths between tokens"


@torch.no_grad()
@full_precision()
def token_paths(
    model: Any,
    neurons: Sites | None = None,
    k: int = 100,
    *,
    tokens: Sequence[int] | None = None,
    n_tokens: int = 5,
    block: int = 1024,
    fold_norms: bool = True,
    progress: bool = True,
) -> pd.DataFrame:
    """Return the neurons with the strongest direct paths from token to token.

    Args:
        model: converted, or with exposed neuron-heads.
        neurons: `patching.neuron_heads()`, names of whole neurons; None for all.
        k: how many rows; fewer if there are fewer.
        tokens: as in `ov_circuit`.
        n_tokens: how many tokens of either end to name.
        block: tokens at once.
        fold_norms: whether to fold gains of norms into the weights.
        progress: whether to show a bar over layers.

    Returns:
        Rows by falling score, one for each neuron, or for each sign of a gated one's value: `name`,
        `layer`, `value` (the sign), `reads` and `writes` (texts of the tokens that drive it most,
        and that it then raises most, the strongest first), `drive`, `write` and `score` (of the
        first of them).

    Raises:
        InputError: with every reason: numbers that are not positive, no neurons, single heads of a
            neuron, unknown weights or norms.
        InputError: the model has no neuron-heads, or not those neurons.

    Example:
        >>> from attn_only_lens import circuits, expose_neuron_heads, patching as p, pretrained
        >>> model = expose_neuron_heads(pretrained.small_english()).model
        >>> frame = circuits.token_paths(model, p.neuron_heads(0), k=3, progress=False)
        >>> bool(frame["score"].is_monotonic_decreasing), len(frame["reads"][0])
        (True, 5)
    """
    reasons = positive_reasons(k=k, n_tokens=n_tokens, block=block)
    chosen = resolve_sites(model, neuron_heads() if neurons is None else neurons)
    names = [name for sites in chosen for name in sites.names]
    wrong = [name for name in names if "N" not in name or "." in name]
    reasons += [f"got {name}; expected whole neurons, such as L5N1234" for name in wrong[:3]]
    InputError.raise_if(reasons, _PROBLEM)
    matrices = VocabularyMatrices.of(model, tokens, fold_norms=fold_norms)
    frames = []
    for sites in tqdm(chosen, unit="layer", disable=not progress):
        reads = _drives(matrices, sites, n_tokens, block)
        writes = _writes(matrices, sites, n_tokens)
        for sign, (drive, read) in reads.items():
            write, written = writes[sign]
            score = drive[:, 0] * write[:, 0].to(drive.device)
            frame = pd.DataFrame({"name": sites.names, "layer": sites.layer, "value": sign})
            frame["reads"], frame["writes"] = read.tolist(), written.tolist()
            for name, x in (("drive", drive[:, 0]), ("write", write[:, 0]), ("score", score)):
                frame[name] = x.cpu().double().numpy()
            frames.append(frame.nlargest(k, "score"))
    paths = pd.concat(frames).nlargest(k, "score").reset_index(drop=True)
    for end, chosen_tokens in (
        ("reads", matrices.read_tokens),
        ("writes", matrices.written_tokens),
    ):
        paths[end] = [
            tuple(token_text(model, i if chosen_tokens is None else chosen_tokens[i]) for i in row)
            for row in paths[end]
        ]
    return paths


_Top = tuple[Float[Tensor, "neuron kept"], Int[Tensor, "neuron kept"]]
"""The largest numbers of each neuron, and their tokens."""


def _drives(matrices: VocabularyMatrices, sites: LayerSites, n: int, block: int) -> dict[str, _Top]:
    """The tokens of largest drive of each neuron, by the sign of its value."""
    gate, value = (matrices.heads.read_matrices(sites, kind).A[:, :, 0].T for kind in ("q", "v"))
    gated = is_gated(matrices.heads.model, sites.layer)
    neuron_gate: Any = host_of(matrices.heads.model).neurons[sites.layer].gate
    height = 1.0
    if not gated and isinstance(neuron_gate, Gate):
        height = neuron_gate.scale * neuron_gate.side
    signs = "+-" if gated else "+" if height > 0 else "-"
    tops: dict[str, _Top] = {}
    for first in range(0, len(matrices.W_E), block):
        E = matrices.W_E[first : first + block]
        drive = (E @ gate.to(E)).clamp_(min=0)
        if gated:
            drive *= E @ value.to(E)
        elif height != 1:
            drive *= height
        for sign in signs:
            top = _top((drive if sign == "+" else -drive).T, n, first)
            tops[sign] = _merged(tops[sign], top, n) if sign in tops else top
    return tops


def _writes(matrices: VocabularyMatrices, sites: LayerSites, n: int) -> dict[str, _Top]:
    """The tokens whose logits each neuron raises most, by the sign of its value."""
    rows = matrices.heads.write_matrices(sites).B[:, 0]
    both = []
    for some in rows.split(_NEURONS):
        written = matrices.writes(some)
        both.append((_top(written, n, 0), _top(-written, n, 0)))
    return {
        sign: (torch.cat([top[0] for top in tops]), torch.cat([top[1] for top in tops]))
        for sign, tops in zip("+-", zip(*both, strict=True), strict=True)
    }


def _top(x: Float[Tensor, "neuron token"], n: int, first: int) -> _Top:
    values, tokens = x.topk(min(n, x.shape[1]), dim=1)
    return values, tokens + first


def _merged(first: _Top, second: _Top, n: int) -> _Top:
    values, tokens = (torch.cat(pair, dim=1) for pair in zip(first, second, strict=True))
    values, places = values.topk(min(n, values.shape[1]), dim=1)
    return values, tokens.gather(1, places)
