"""Where a gradient is taken for each kind of head, and what a patch changes there.

heads        part                    node            Δ, source run minus the run patched into
neuron       "z" "pattern" "value"   z               Δz of that part (`parts.py`)
neuron       "q", gate linear        q               q' - q
neuron       "q", gate closed        z               (w(q') - w(q)) v
attention    any                     its hook point  what it shows in one run, less the other
attention    "q", gate closed        z               softmax(q' · K) V - z (`closed_form.py`)
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from attn_only_lens.heads import neuron_heads, point_name
from attn_only_lens.patching.attention import hook_name
from attn_only_lens.patching.parts import Part, by_site, moved
from attn_only_lens.patching.record import Recording
from attn_only_lens.patching.sites import LayerSites

__all__ = ["Node", "node_of", "shares"]

Node = str
"""The name of a hook point."""


def node_of(model: Any, sites: LayerSites, part: Part, *, closed: bool) -> Node:
    """The hook point at which the gradient is taken.

    Args:
        model: converted, or with exposed neuron-heads.
        sites: heads of one kind in one layer.
        part: what is patched.
        closed: whether what a query does to its pattern is computed, not linearised.
    """
    if sites.kind == "attention":
        return hook_name(model, sites.layer, "z" if part == "q" and closed else part)
    activation = "q" if part == "q" and not closed else "z"
    return point_name(model, sites.layer, "neuron", activation)


def shares(
    model: Any,
    sites: LayerSites,
    part: Part,
    node: Node,
    gradient: Tensor,
    target: Recording,
    source: Recording,
) -> Float[Tensor, "site batch pos"]:
    """Gradient times change at each head and position: what the estimate is the sum of.

    Args:
        model: converted, or with exposed neuron-heads.
        sites: heads of one kind in one layer.
        part: what is patched.
        node: where.
        gradient: there.
        target: the run patched into.
        source: the other run; but for z of neurons, `hooked[node]` is what the patch puts there.
    """
    if node == point_name(model, sites.layer, "neuron", "z"):
        change = moved(target.neurons[sites.layer], source.neurons[sites.layer], part).unsqueeze(-1)
    else:
        change = source.hooked[node] - target.hooked[node]
    each = (gradient * change).sum(dim=-1)
    if sites.kind == "neuron":
        return by_site(neuron_heads(model)[sites.layer], sites, each)
    if node.endswith("hook_pattern"):  # [batch, head_index, query_pos]
        each = each.transpose(1, 2)
    return each[:, :, sites.index.to(each.device)].permute(2, 0, 1)
