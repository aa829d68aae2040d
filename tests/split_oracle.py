"""The parts of a head's share of a difference, by hand: through its pattern and through its value.

For heads that write directly to the last stream. The formulas are those of docs/theory.md, and all
activations come from TransformerLens' hook points: the final LayerNorm y = x r has
Δy = r̄ Δx + x̄ Δr, and a head writes the sum of p v, so its parts are Δp v̄ and p̄ Δv.
"""

import torch


def multiplier(model, clean, corrupted, answers):
    """Return how much of the logit difference comes from Δx of the last stream, and that change."""
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    x_1, x_0 = (model.run_with_cache(run)[1][last][:, -1] for run in (clean, corrupted))
    x_1, x_0 = (x - x.mean(-1, keepdim=True) for x in (x_1, x_0))
    s_1, s_0 = ((x.square().mean(-1, keepdim=True) + model.cfg.eps).sqrt() for x in (x_1, x_0))
    gain = (model.W_U[:, answers[0]] - model.W_U[:, answers[1]]) * model.ln_final.w
    middle, d_model = (x_1 + x_0) / 2, x_1.shape[-1]
    along = (middle * gain).sum(-1, keepdim=True) * 2 / d_model / (s_1 * s_0 * (s_1 + s_0))
    result = (1 / s_1 + 1 / s_0) / 2 * gain - along * middle
    result = (result - result.mean(-1, keepdim=True)) / len(clean)
    return result, (result * (x_1 - x_0)).sum().item()


@torch.no_grad()
def parts(model, clean, corrupted, kind, answers):
    """Return the two parts of each head of a kind in the last layer, at the last token.

    The third result is a control: the first part with v of the clean run in the place of the mean.
    """
    block = f"blocks.{model.cfg.n_layers - 1}"
    runs = [model.run_with_cache(run)[1] for run in (clean, corrupted)]
    M, _ = multiplier(model, clean, corrupted, answers)
    if kind == "attention":
        p_1, p_0 = (run[f"{block}.attn.hook_pattern"][:, :, -1, :, None] for run in runs)
        v_1, v_0 = (run[f"{block}.attn.hook_v"].transpose(1, 2) for run in runs)
        M = torch.einsum("bm,hdm->bhd", M, model.blocks[-1].attn.W_O)[:, :, None]
    else:
        p_1, p_0 = (run[f"{block}.mlp.hook_neuron_probs"][:, :, -1, :1, None] for run in runs)
        v_1, v_0 = (run[f"{block}.mlp.hook_neuron_value"][:, -1, :, None] for run in runs)
        M = (M @ model.blocks[-1].mlp.W_out.T)[:, :, None, None]
    terms = (p_1 - p_0) * (v_1 + v_0) / 2, (p_1 + p_0) / 2 * (v_1 - v_0), (p_1 - p_0) * v_1
    return [(term * M).sum((0, 2, 3)).numpy() for term in terms]
