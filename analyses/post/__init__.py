"""The post's construction: an MLP as three attention sublayers, with a large Ω for masks.

Source: "No Really, Attention is ALL You Need - Attention can do feedforward networks"
(Robert_AIZI, 31 January 2023), "the post" in this folder.

    stream.py     the widened stream: D + d_mlp + (N + 1) coordinates of N + 1 vectors
    heads.py      a plain head, and weights of high rank split over several heads
    sublayers.py  the four kinds of attention sublayer, as matrices
    plain.py      the original transformer
    model.py      the whole multi-layer model, which the post does not test

Ω and 2Ω. The post requires that softmax([0, …, 0, Ω]) is [0, …, 0, 1] to within the tolerance,
and that Ω exceeds every score of the original model. The matrices hold 2Ω, as the author's
demonstration code does, so that a score below Ω leaves a gap of at least Ω.

Measured on whole models of up to 8 layers and 128 tokens (`analyses/studies/omega_study.py`): in
float32 every Ω from ½ ln(2²⁴ N), about 10, to about 32 is as accurate as direct evaluation, if the
original heads' scores do not exceed Ω. The author's Ω = 1000 is 15 to 30 times worse in float32,
and sufficient in float64. If scores grow with depth, float32 may have no good Ω in the published
form; in the "shifted" gauge of `sublayers.py` any large Ω works.

Choices of this folder that the post leaves open:

- a causal mask, which the post does not have: −3Ω at future positions, in the position block;
- biases of the attention heads: the post puts biases into weight matrices and reads a 1 from the
  one-hot positions; the same is done for b_Q, b_K, b_V and b_O;
- the bias vector reads a 0 where other vectors read that 1, so it stays (0, 0, e_N);
- LayerNorm: the post omits it, and so does this folder.

A statement of the post that cannot hold: "the bias vector strongly avoids attending to the
non-bias vectors, and strongly attends to itself (preventing non-bias vectors from attending to
the bias vector)". Softmax runs over the row of each query, so nothing in the bias vector's row
keeps others from attending to it. The −2Ω must stand in its *column*, as in the author's code.
"""

from analyses.post.heads import Heads
from analyses.post.model import (
    SUBLAYERS,
    PostLayer,
    PostRun,
    PostTransformer,
    post_transformer,
)
from analyses.post.plain import PlainLayer, PlainTransformer
from analyses.post.stream import StreamCoordinates
from analyses.post.sublayers import Gauge

__all__ = [
    "SUBLAYERS",
    "Gauge",
    "Heads",
    "PlainLayer",
    "PlainTransformer",
    "PostLayer",
    "PostRun",
    "PostTransformer",
    "StreamCoordinates",
    "post_transformer",
]
