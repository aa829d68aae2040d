"""Sweeps of random values, for tests of functions that take sweeps."""

import numpy as np
import pandas as pd

from attn_only_lens.patching.prompt_tokens import PromptTokens
from attn_only_lens.patching.results import Sweep

SITES, POSITIONS = 13, 5
RUN = {
    "part": "z",
    "direction": "denoise",
    "metric": "logit_diff(' Mary', \" John\")",
    "clean_value": 3.7,
    "corrupted_value": -1.3,
    "n_prompts": 7,
    "model": "<tiny>",
}
TEXTS = ["<b>x</b>", "</script>", " the", "\n", "&lt;"]
TOKENS = PromptTokens([TEXTS] * 7, [[*TEXTS[:2], " a", *TEXTS[3:]]] * 7, {"subject": [2] * 7})


def values(seed=0, positions=range(POSITIONS)):
    """Return a frame of 13 sites at each position."""
    rows = [
        (layer, kind, index, f"L{layer}{kind[0].upper().replace('A', 'H')}{index}", pos)
        for index, layer, kind in zip(
            range(SITES), [0, 1, 1] * SITES, ["attention", "neuron", "neuron"] * SITES, strict=False
        )
        for pos in positions
    ]
    frame = pd.DataFrame(rows, columns=["layer", "kind", "index", "name", "position"])
    return frame.assign(value=np.random.default_rng(seed).normal(size=len(frame)))


def sweep(seed=0, frame=None, **changes):
    """Return a sweep of those values."""
    return Sweep(values(seed) if frame is None else frame, **RUN | changes)
