"""The page and the figures of the study of attention-only training."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

def curves_figure(curves): return Figure()
def heads_figure(heads): return Figure()
def page(frames, about, flag): return "\n\n".join(f.to_string() for f in frames.values())
