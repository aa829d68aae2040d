"""Write the pages and figures of the studies of capacity pressure."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure


def english_page(frames: Mapping[str, pd.DataFrame], about: Mapping[str, Any], flag: str) -> str:
    """Return the page of the study on Small English."""
    raise NotImplementedError


def figure(frames: Mapping[str, pd.DataFrame]) -> Figure:
    """Draw the share of new parts against pressure."""
    raise NotImplementedError


def addition_page(frames: Mapping[str, pd.DataFrame], about: Mapping[str, Any], flag: str) -> str:
    """Return the page of the study on addition."""
    raise NotImplementedError
