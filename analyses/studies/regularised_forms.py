"""Three trainable forms of one model, and measures of the structure that the post relies on.

    MLP      the model as it was trained
    heads    `convert`: one head per neuron; masks and the bias token are not weights
    post     the post's four attention sublayers; Ω is stored in their weights

The post's form trains W_QK and W_OV of every head, at full rank as in the post, and the embedding
and unembedding: either the initially nonzero entries, or all entries. The inputs of the
construction are fixed: the one-hot positions, the bias vector, and the empty hidden part of the
stream. The weights of the post's heads have three parts:

    own      the model's own weights
    omega    the position blocks, which hold 2Ω and -2Ω
    ones     the -1 of the SiLU heads (score and value), and the -1 that clears the hidden part

"factored" stores W_Q, W_K, W_V and W_O instead, like attention layers, so 2Ω is a product.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analyses.post import SUBLAYERS, StreamCoordinates, plain_of, post_transformer
from attn_only_lens import convert
from attn_only_lens.tl import HookedTransformer

Site = Literal["patterns", "stream", "hidden"]
PARTS = ("own", "omega", "ones")
EVERY = "every entry"

SITES: dict[str, dict[str, tuple[str, ...]]] = {
    "MLP": {
        "patterns": ("blocks.0.attn.hook_pattern",),
        "stream": ("blocks.0.hook_attn_out", "blocks.0.hook_mlp_out"),
        "hidden": ("blocks.0.mlp.hook_post",),
    },
    "heads": {
        "patterns": ("blocks.0.attn.hook_pattern", "blocks.1.attn.hook_pattern"),
        "stream": ("blocks.0.hook_attn_out", "blocks.1.hook_attn_out"),
        "hidden": ("blocks.1.attn.hook_z",),
    },
}


class Form(Protocol):
    """A trainable form of the model."""

    def trained(self) -> list[nn.Parameter]:
        """Return the trained parameters."""
        ...

    def logits(self, tokens: Tensor, site: Site | None = None, rate: float = 0.0) -> Tensor:
        """Return logits at the last position, [batch, p], with dropout at a site."""
        ...


class Hooked:
    """The original model with an MLP, or its converted model."""

    def __init__(self, model: nn.Module, sites: Mapping[str, tuple[str, ...]]) -> None:
        self.model: Any = model
        self.sites = sites

    def trained(self) -> list[nn.Parameter]:
        """Return all parameters except biases, which the recipe leaves at zero."""
        return [parameter for name, parameter in self.model.named_parameters() if ".b_" not in name]

    def logits(self, tokens: Tensor, site: Site | None = None, rate: float = 0.0) -> Tensor:
        """Return logits at the last position, [batch, p], with dropout at a site."""

        def drop(x: Tensor, hook: Any) -> Tensor:
            return F.dropout(x, rate)

        hooks = [(name, drop) for name in self.sites[site]] if site else []
        with self.model.hooks(fwd_hooks=hooks):
            logits: Tensor = self.model(tokens)[:, -1]
        return logits


@dataclass(frozen=True)
class Seen:
    """The logits of a run, and the largest attention weight outside the masks, by sublayer."""

    logits: Tensor
    leaks: dict[str, float]


class Post(nn.Module):
    """The post's form of a one-layer model.

    Attributes:
        coordinates: the coordinates of the widened stream.
        factored: whether W_QK and W_OV are products of trained matrices; if not, they are trained
            themselves, as in the post.
    """

    def __init__(
        self, model: HookedTransformer, omega: float, *, factored: bool, every_entry: bool
    ) -> None:
        super().__init__()
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        names = ("embed.W_E", "pos_embed.W_pos", "unembed.W_U")
        self.W_E, self.W_pos, self.W_U = (nn.Parameter(state[name]) for name in names)
        # At full rank, a linear sublayer is one head.
        d_head = (
            None if factored else max(self.W_E.shape[1], state["blocks.0.mlp.b_in"].numel()) + 1
        )
        post = post_transformer(plain_of(state), len(self.W_pos), omega=omega, d_head=d_head)
        self.coordinates: StreamCoordinates = post.coordinates
        self.factored, self.every_entry = factored, every_entry
        self.sublayers = nn.ModuleDict()
        for name, heads in zip(SUBLAYERS, post.layers[0].sublayers, strict=True):
            # Clones, because heads with equal initial weights are trained separately.
            weights = {m: getattr(heads, m).clone() for m in ("W_Q", "W_K", "W_V", "W_O")}
            if not factored:
                keys, values = self._read_by(name)
                weights = {
                    "W_QK": (weights["W_Q"] @ weights["W_K"].mT)[..., keys],
                    "W_OV": (weights["W_V"] @ weights["W_O"])[:, values, values],
                }
            self.sublayers[name] = nn.ParameterDict(
                {m: nn.Parameter(w) for m, w in weights.items()}
            )
        if not every_entry:
            for parameter in self.sublayers.parameters():
                # AdamW does not change a zero entry if its gradients have always been zero.
                parameter.register_hook(parameter.detach().ne(0).mul)

    def trained(self) -> list[nn.Parameter]:
        """Return all parameters."""
        return list(self.parameters())

    def logits(self, tokens: Tensor, site: Site | None = None, rate: float = 0.0) -> Tensor:
        """Return logits at the last position, [batch, p], with dropout at a site."""
        return self._run(tokens, site=site, rate=rate).logits

    def seen(self, tokens: Tensor, *, masked: bool) -> Seen:
        """Run the model and measure leaks; `masked` restores the masks."""
        return self._run(tokens, masked=masked, look=True)

    def _run(
        self,
        tokens: Tensor,
        *,
        site: Site | None = None,
        rate: float = 0.0,
        masked: bool = False,
        look: bool = False,
    ) -> Seen:
        x = self.coordinates.augment(self.W_E[tokens] + self.W_pos)
        leaks = {}
        for name in SUBLAYERS:
            scores, allowed = self._scores(name, x), self.allowed(name)
            pattern = (scores.masked_fill(~allowed, -math.inf) if masked else scores).softmax(-1)
            if look:
                leaks[name] = pattern.masked_fill(allowed, 0.0).sum(-1).max().item()
            if site == "patterns":
                pattern = F.dropout(pattern, rate)
            out = self._write(name, x, pattern)
            x = x + (F.dropout(out, rate) if site == "stream" else out)
            if site == "hidden" and name == "silu":
                hidden = self.coordinates.hidden
                left, right = x[..., : hidden.start], x[..., hidden.stop :]
                x = torch.cat([left, F.dropout(x[..., hidden], rate), right], dim=-1)
        return Seen(self.coordinates.read(x)[:, -1] @ self.W_U, leaks)

    def _read_by(self, name: str) -> tuple[slice, slice]:
        """Return the coordinates of trained entries: those that keys read, and those of values."""
        width, coordinates = slice(0, self.coordinates.width), self.coordinates
        if self.every_entry:
            return width, width
        keys = width if name == "attention" else coordinates.position
        return keys, coordinates.hidden if name == "silu" else width

    def _scores(self, name: str, x: Tensor) -> Tensor:
        w: Any = self.sublayers[name]
        if not self.factored:
            return _by_head(x, w["W_QK"]) @ x[..., self._read_by(name)[0]].unsqueeze(-3).mT
        return _by_head(x, w["W_Q"]) @ _by_head(x, w["W_K"]).mT

    def _write(self, name: str, x: Tensor, pattern: Tensor) -> Tensor:
        w: Any = self.sublayers[name]
        if not self.factored:
            values = self._read_by(name)[1]
            written = (pattern @ _by_head(x[..., values], w["W_OV"])).sum(-3)
            return F.pad(written, (values.start, self.coordinates.width - values.stop))
        return torch.einsum("bhnd,hdw->bnw", pattern @ _by_head(x, w["W_V"]), w["W_O"])

    def allowed(self, name: str) -> Tensor:
        """Return where a sublayer's heads may attend, [query, key], as the masks in our form."""
        n, device = self.coordinates.n_tokens, self.W_E.device
        allowed = torch.eye(n + 1, dtype=torch.bool, device=device)
        if name == "attention":
            allowed[:n, :n] = torch.ones_like(allowed[:n, :n]).tril()
        elif name == "silu":
            allowed[:, n] = True
        return allowed

    def omega_left(self) -> float:
        """Return half of the mean score gap between own and other positions, in linear heads."""
        scores = []
        for name in ("into_hidden", "out_of_hidden"):
            w: Any = self.sublayers[name]
            position = self.coordinates.position
            if self.factored:
                block = w["W_Q"][:, position] @ w["W_K"][:, position].mT
            else:
                block = w["W_QK"][:, position, -self.coordinates.n_vectors :]
            diagonal = block.diagonal(dim1=1, dim2=2)
            others = (block.sum(-1) - diagonal) / (diagonal.shape[1] - 1)
            scores.append((diagonal - others).mean().item() / 2)
        return sum(scores) / len(scores)

    @torch.no_grad()
    def shrunk(self, factor: float, parts: tuple[str, ...]) -> "Post":
        """Return a copy with some parts multiplied by a factor, as by decay without gradients."""
        scaled = copy.deepcopy(self)
        if "own" in parts:
            for embedding in (scaled.W_E, scaled.W_pos, scaled.W_U):
                embedding.mul_(factor)
        for name in SUBLAYERS:
            matrices: Any = scaled.sublayers[name]
            for m, marks in self.marks(name).items():
                for part in parts:
                    matrices[m].mul_(torch.where(marks == PARTS.index(part), factor, 1.0))
        return scaled

    def marks(self, name: str) -> dict[str, Tensor]:
        """Return for every entry of a sublayer's matrices the index of its part in PARTS."""
        plain, omega, ones = range(3)
        coordinates, hidden, position = (
            self.coordinates,
            self.coordinates.hidden,
            self.coordinates.position,
        )
        matrices: Any = self.sublayers[name]
        marks = {m: torch.full_like(w, plain, dtype=torch.int) for m, w in matrices.items()}
        if self.factored:
            for m in ("W_Q", "W_K"):  # the first columns hold the model's own W_Q and W_K
                marks[m][:, position, -coordinates.n_vectors :] = omega
            if name == "silu":
                marks["W_Q"][:, hidden] = ones
                marks["W_O"][:] = ones
            if name != "attention":  # W_1 and W_2 are in W_O, and W_V holds ones
                marks["W_V"][:] = ones
            if name == "out_of_hidden":
                marks["W_O"][:, :, hidden] = ones
        else:
            marks["W_QK"][:, position, -coordinates.n_vectors :] = omega
            if name == "silu":
                marks["W_QK"][:, hidden] = ones
                marks["W_OV"][:] = ones
            if name == "out_of_hidden":
                marks["W_OV"][:, hidden, hidden] = ones
        return marks


def _by_head(x: Tensor, matrices: Tensor) -> Tensor:
    return torch.einsum("bnw,hwd->bhnd", x, matrices)


def form_of(model: HookedTransformer, form: str) -> Form:
    """Return a new copy of a form: "MLP", "heads", or "post Ω=…[, factored | , every entry]"."""
    if form == "MLP":
        return Hooked(copy.deepcopy(model), SITES[form])
    if form == "heads":
        return Hooked(convert(copy.deepcopy(model)), SITES[form])
    omega, _, kind = form.partition("=")[2].partition(", ")
    return Post(model, float(omega), factored=kind == "factored", every_entry=kind == EVERY)
