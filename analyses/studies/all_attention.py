"""All-attention layers, both ways: MLPs as persistent vectors, and persistent vectors as neurons.

Sukhbaatar et al., "Augmenting Self-attention with Persistent Memory" (2019), leave MLPs out, and
give each ordinary head N learned pairs of a key and a value: *persistent vectors*. A head's queries
attend, in one softmax, to the text and to its persistent vectors. Remark 3 of "Attention-Only
Transformers and Implementing MLPs with Attention Heads" says that neuron-heads can be written in
this architecture, with one vector for all heads. This study asks about both directions:

    MLP -> all-attention    what Remark 3 needs of the architecture, and for which gates it is exact
    all-attention -> package    load such a model, and read persistent vectors as neurons

`all_attention_models.py` has the constructions, and `attention_only_models.py` the trained layer.

Five arms are trained on Small English, each with five seeds. All arms have two layers, width 48,
four heads, and the same texts, optimizer and schedule; each arm uses the best of three rates,
chosen with another seed.

    mlp                         192 SiLU neurons a layer
    mlp, an eighth              24 neurons
    all-attention               192 persistent vectors in each head: the parameters of "mlp"
    all-attention, an eighth    24 persistent vectors in each head
    neither                     ordinary attention alone

Let a_n = q·key_n / √d_head be the score of persistent vector n of a head at a token, and p_n its
weight in the pattern. *Leaving out* a vector has two meanings: `zeroed`, where its value is 0 and
the pattern stays; and `deleted`, where its key is removed, so that the other weights grow.

Predictions, written before any of these models was trained (the arm "mlp" was trained for 600 steps
in `train_attention_only.py`). Figures are means over seeds.

1.  "all-attention" ends within 2 % of the loss of "mlp".
2.  "neither" ends at least 3 % above "mlp", and "all-attention" closes at least half of this gap.
3.  Heads of "all-attention" give more than half of their weight to persistent vectors, in both
    layers; and more in the second layer than in the first.
4.  At a token, a head uses few of its vectors: the exponential of the entropy of p_n / Σ p_n is less
    than 48, a quarter of N, in both layers.
5.  Deleting all vectors of a layer costs more than 0.5 nats in each layer. Deleting one vector costs
    less than 0.001 nats in the median over vectors.
6.  Costs of zeroed and of deleted vectors have the same order (Spearman's ρ > .8 over vectors).
7.  A vector's own score a_n explains more than half of the variance over tokens of log p_n, in the
    median over vectors; the rest is the denominator, which all vectors of the head share.
8.  Vectors are no more interchangeable than neurons: the strongest tenth of the vectors (by the cost
    of zeroing, on half of the texts) has more than half of the summed positive costs on the other
    half.

    python -m analyses.studies.all_attention --out analyses/results
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from analyses.studies import attention_only_models as models
from analyses.studies.train_attention_only import Text

ARMS: dict[str, tuple[models.Kind, float]] = {
    "mlp": ("mlp", 1),
    "mlp, an eighth": ("mlp", 1 / 8),
    "all-attention": ("all-attention", 1),
    "all-attention, an eighth": ("all-attention", 1 / 8),
    "neither": ("all-attention", 0),
}
"""The kind of each arm, and its neurons, or persistent vectors per head, per neuron of the MLP."""
SEED_OF_SEARCH = 100


@dataclass(frozen=True)
class English(Text):
    """The task of predicting Small English texts, with this study's arms."""

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that are trained."""
        return tuple(ARMS)

    def neurons(self, arm: str) -> tuple[models.Kind, int]:
        """Return the kind of an arm, and its number of neurons, or N."""
        kind, share = ARMS[arm]
        return kind, round(share * self.d_mlp)

    def model(self, kind: models.Kind, n_neurons: int, seed: int) -> nn.Module:
        """Return an untrained model; N may be 0."""
        if n_neurons:
            return super().model(kind, n_neurons, seed)
        model = super().model(kind, 1, seed)
        for sublayer in models.sublayers_of(model):
            assert isinstance(sublayer, models.AllAttention)
            for name in ("scaled_key", "scaled_value"):
                setattr(
                    sublayer, name, nn.Parameter(torch.zeros_like(getattr(sublayer, name))[:, :0])
                )
        return model


@dataclass(frozen=True)
class Study:
    """What determines the result."""

    text: English = field(
        default_factory=lambda: English(48, 4, 192, 1200, 480, 12, (8e-3, 1.6e-2, 3.2e-2), 50)
    )
    n_seeds: int = 5


SMOKE = Study(English(8, 2, 16, 4, 2, 2, (1e-2,), 2, n_layers=2, rows=3, n_held_out=2, prompts=5))
