"""The measures of the growth study, for a model that adds modulo p.

Logits by offset. Let f(d) be the mean over all pairs (a, b) of the logit of a + b + d. The discrete
Fourier transform of f shows which frequencies k distinguish the answer (d = 0) from other tokens;
Nanda et al. (2023) found that logits consist of terms cos(2π k d / p). A frequency is a *key*
frequency if |f̂(k)|² is at least KEY of the sum over k = 1 … (p - 1) / 2.

Neuron-heads. The self weight σ(q) of a neuron-head at '=' is a function of (a, b). Frequency k
explains the part of its variance in those entries of the two-dimensional transform whose indices
are 0, k or -k (not both 0): in Nanda et al., a neuron is a polynomial of degree 2 in waves of one
frequency. A neuron is *tuned* to the frequency that explains most, if that share is at least TUNED.

Margin. The answer's logit minus the mean logit, averaged over all pairs, is linear in the outputs
to the stream, because the model has no norm: neuron-head i contributes z_i · W_out[i] · W_U. The
shares of neurons, and of the direct outputs of attention and embedding, add up to 1.

Flops are those of the matrix products in one training step, forward and backward, according to
torch's counter; gathers, softmax, activations and the optimizer are left out.
"""

from collections.abc import Iterable

import pandas as pd
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from analyses.tools.train_modular_addition import fast_logits, loss_of
from attn_only_lens import HeadName, expose_neuron_heads
from attn_only_lens.tl import HookedTransformer

KEY = 0.05
TUNED = 0.5


def step_flops(model: HookedTransformer, tokens: Tensor, answers: Tensor) -> int:
    """Return the flops of one training step."""
    with FlopCounterMode(display=False) as counter:
        loss_of(fast_logits(model, tokens), answers).backward()
    model.zero_grad(set_to_none=True)
    return counter.get_total_flops()


def by_offset(logits: Tensor, answers: Tensor) -> Tensor:
    """Return the mean logit of answer + d, [d]."""
    p = logits.shape[1]
    tokens = (answers[:, None] + torch.arange(p, device=answers.device)) % p
    return logits.gather(1, tokens).double().mean(0)


def frequency_shares(profile: Tensor) -> pd.Series:
    """Return the share of each frequency, starting at 1, in a function of the offset."""
    power = torch.fft.rfft(profile.double()).abs()[1:] ** 2
    shares = (power / power.sum()).cpu().numpy()
    return pd.Series(shares, index=pd.RangeIndex(1, len(shares) + 1, name="frequency"))


def key_frequencies(shares: pd.Series) -> list[int]:
    """Return the frequencies with a share of at least KEY."""
    return shares.index[shares >= KEY].tolist()


def explained(grid: Tensor) -> Tensor:
    """Return the share of variance that each frequency explains, for functions [a, b, neuron].

    Returns:
        Shares [frequency, neuron], starting with frequency 1; zeros for a constant function.
    """
    p = grid.shape[0]
    power = torch.fft.fft2(grid.double(), dim=(0, 1)).abs() ** 2
    power[0, 0] = 0.0
    rows = []
    for k in range(1, (p + 1) // 2):
        waves = torch.tensor([0, k, p - k], device=grid.device)
        rows.append(power[waves][:, waves].sum((0, 1)))
    return torch.stack(rows) / power.sum((0, 1)).clamp_min(1e-300)


@torch.no_grad()
def neurons(model: HookedTransformer, tokens: Tensor, answers: Tensor) -> pd.DataFrame:
    """Return a row for each neuron-head, with its share of the margin.

    Columns: `name`, `frequency` (0 if it is not tuned), `tuned` (the explained share), `share`.

    Args:
        model: a one-layer model without norms, whose neuron-heads are exposed during the call.
        tokens: all pairs, in order.
        answers: the answers of all pairs.
    """
    p = model.cfg.d_vocab_out
    with expose_neuron_heads(model) as exposed:
        hooks = [HeadName.parse("L0N0").hook("pattern", exposed), "blocks.0.mlp.hook_post"]
        logits, cache = exposed.run_with_cache(tokens, names_filter=hooks)
    weights = cache[hooks[0]][:, :, -1, 0]  # [pair, neuron]
    shares = explained(weights.view(p, p, -1))
    tuned, best = shares.max(0)
    post = cache[hooks[1]][:, -1].double()
    to_logits = (model.blocks[0].mlp.W_out @ model.W_U).double()  # [neuron, answer]
    to_margin = to_logits[:, answers].T - to_logits.mean(1)  # [pair, neuron]
    profile = by_offset(logits[:, -1], answers)
    margin = profile[0] - profile.mean()
    return pd.DataFrame(
        {
            "name": [f"L0N{i}" for i in range(model.cfg.d_mlp)],
            "frequency": torch.where(tuned >= TUNED, best + 1, 0).cpu().numpy(),
            "tuned": tuned.cpu().numpy(),
            "share": ((post * to_margin).mean(0) / margin).cpu().numpy(),
        }
    )


def joined(frame: pd.DataFrame, old_keys: Iterable[int]) -> dict[str, float]:
    """Return how many new neuron-heads are tuned to old keys, and shares of the margin.

    Args:
        frame: the frame from `neurons`, with a column `is_new`.
        old_keys: the key frequencies before growth.
    """
    new = frame[frame["is_new"]]
    to_old = new["frequency"].isin(list(old_keys))
    to_other = (new["frequency"] > 0) & ~to_old
    return {
        "new_neurons": len(new),
        "tuned_to_old_keys": int(to_old.sum()),
        "tuned_to_others": int(to_other.sum()),
        "share_old_neurons": frame.loc[~frame["is_new"], "share"].sum(),
        "share_new_on_old_keys": new.loc[to_old, "share"].sum(),
        "share_new_on_others": new.loc[to_other, "share"].sum(),
        "share_new_untuned": new.loc[new["frequency"] == 0, "share"].sum(),
    }
