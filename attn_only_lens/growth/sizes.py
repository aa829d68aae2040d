"""From the sizes that somebody wants to the expansions that lead there."""

from attn_only_lens import expansion as ex
from attn_only_lens.expansion import Axis, Weights
from attn_only_lens.expansion.plan import reasons_against_bytes
from attn_only_lens.expansion.weights import in_layer

__all__ = ["to_sizes"]

_BY_LAYER = (
    ("d_mlp", "d_mlp", ex.AddNeurons),
    ("n_heads", "head", ex.AddHeads),
    ("d_head", "d_value", ex.WidenValues),
    ("d_head", "d_query", ex.WidenQueriesAndKeys),
)


def to_sizes(weights: Weights, asked: dict[str, int]) -> tuple[ex.Expansion, list[str]]:
    """The expansions that lead to these sizes, the same in every layer; what is wrong with them."""
    steps: list[ex.Expansion] = []
    reasons: list[str] = []
    sizes, n_layers = weights.sizes, weights.constants.n_layers

    def missing(name: str, had: int) -> int:
        if asked[name] < had:
            reasons.append(f"got {name}={asked[name]}; it has {had}, and growth does not shrink")
        return asked[name] - had

    for name, label, expansion in _BY_LAYER:
        if name in asked:
            layers_by_n: dict[int, list[int]] = {}
            for layer in range(n_layers):
                n = missing(name, sizes.get(Axis(label, layer), 0))
                layers_by_n.setdefault(n, []).append(layer)
            steps += [expansion(n, layers) for n, layers in layers_by_n.items() if n > 0]
    if "d_model" in asked:
        n = missing("d_model", sizes[Axis("d_model")])
        steps += [ex.WidenStream(n)] if n > 0 else []
    if "n_layers" in asked:
        n = missing("n_layers", n_layers)
        last = (each for name, each in weights.tensors.items() if in_layer(name) == n_layers - 1)
        too_many = reasons_against_bytes(n * sum(x.numel() * x.element_size() for x in last))
        reasons += too_many
        steps += [] if too_many else map(ex.InsertLayer, range(n_layers, n_layers + n))
    if not steps and not reasons:
        reasons.append(f"got {asked}, which it has already; give at least one larger size")
    return ex.compose(*steps), list(dict.fromkeys(reasons))
