"""The results of path patching: a row for each path, on a scale from 0 to 1 (see `results.py`)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from attn_only_lens.errors import InputError
from attn_only_lens.patching.over_prompts import SPREAD
from attn_only_lens.patching.prompt_tokens import PromptTokens
from attn_only_lens.patching.scored_frame import ScoredFrame
from attn_only_lens.storage import Document
from attn_only_lens.storage.tables import TableFields

_GIVEN = ["sender", "receiver", "position", "value"]
_PROBLEM = "these are not the results of path patching"


class _Fields(TableFields):
    part: str
    scale: str
    direction: str
    metric: str
    clean_value: float
    corrupted_value: float
    n_prompts: int
    n_paths: int
    model: str
    tokens: PromptTokens | None


_DOCUMENT = Document("attn_only_lens.Paths", 2, _Fields)


@dataclass(frozen=True, eq=False, repr=False)
class Paths(ScoredFrame):
    """The results of path patching, with its settings.

    Attributes:
        frame: a row for each path, with columns `sender`, `receiver`, `part`, `position` (the
            sender's: a number, a role, or "all"), `value` (the metric after the patch) and
            `score`. For several prompts also the columns that a `Sweep` has: standard errors of
            means, or `prompt` and `unpatched` of single prompts. With `top` also `estimate`, the
            score estimated by gradients, as a mean over prompts.
        part: the inputs of the receivers: "q", "k", "value", "pattern", "z".
        scale: of the norms that receivers read through: "held" or "anew".
        direction: "denoise" or "noise".
        metric: the metric's name.
        clean_value: the metric of the clean run.
        corrupted_value: the metric of the corrupted run.
        n_prompts: pairs of prompts, over which values are means.
        n_paths: how many paths there were; more than rows if only the top ones were patched.
        model: the model's name.
        tokens: the texts of the prompts' tokens; None of a frame that was given without.

    Raises:
        InputError: columns are missing, or a value is not finite.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import patching as p
        >>> values = pd.DataFrame({"sender": "L0H1", "receiver": ["L0N5", "logits"],
        ...                        "position": 2, "value": [2.0, -1.0]})
        >>> paths = p.Paths(values, part="z", scale="held", direction="denoise",
        ...                 metric="logit_diff(7, 8)", clean_value=3.0, corrupted_value=-1.0,
        ...                 n_prompts=1, n_paths=2, model="adder")
        >>> paths.to_frame()["score"].tolist(), paths.top(1)["receiver"].tolist()
        ([0.75, 0.0], ['L0N5'])
    """

    _document = _DOCUMENT

    frame: pd.DataFrame
    part: str
    scale: str
    direction: str
    metric: str
    clean_value: float
    corrupted_value: float
    n_prompts: int
    n_paths: int
    model: str
    tokens: PromptTokens | None = None

    def __post_init__(self) -> None:
        InputError.raise_if(self._setting_reasons(), _PROBLEM)
        missing = [name for name in _GIVEN if name not in self.frame]
        reasons = [f"got columns {list(self.frame.columns)}; expected {_GIVEN}"] * bool(missing)
        InputError.raise_if(reasons, _PROBLEM)
        bad = int((~np.isfinite(self.frame["value"])).sum())
        InputError.raise_if([f"{bad} values are not finite"] * bool(bad), _PROBLEM)
        span = self.clean_value - self.corrupted_value
        frame = pd.DataFrame(
            {
                "sender": pd.Categorical(self.frame["sender"]),
                "receiver": pd.Categorical(self.frame["receiver"]),
                "part": self.part,
                "position": self.frame["position"].to_numpy(),
                "value": self.frame["value"].to_numpy(dtype=np.float64),
                "score": (self.frame["value"].to_numpy() - self.corrupted_value) / span,
            }
        )
        for name in (*SPREAD, "prompt", "unpatched", "estimate"):
            if name in self.frame:
                dtype = np.int64 if name == "prompt" else np.float64
                frame[name] = self.frame[name].to_numpy(dtype=dtype)
        if "unpatched" in frame:
            frame["score"] = self.baseline + (frame["value"] - frame["unpatched"]) / span
        object.__setattr__(self, "frame", frame)

    def _headline(self) -> str:
        of_all: Any = "" if self.n_paths == len(self.frame) else f" of {self.n_paths:,}"
        return (
            f"Paths of {self.model}: {self.part}, {self.direction}, {len(self.frame)}{of_all} rows,"
            f" {self.n_prompts} prompts; {self.metric} is {self.clean_value:.4g} clean, "
            f"{self.corrupted_value:.4g} corrupted"
        )
