"""Top examples: the places of a corpus where a neuron's values are largest, as windows of text."""

from dataclasses import dataclass

import pandas as pd

from attn_only_lens.errors import InputError

COLUMNS = ("tokens", "values", "gates", "position", "value", "text")


@dataclass(frozen=True)
class Example:
    """A window of a text, around the token that it is an example of.

    Attributes:
        tokens: their texts.
        values: z of the neuron at each token, gate × value.
        gates: its attention to the token itself, at each.
        position: index in the window of the token that the example is of.
        value: what examples are ranked by, at that token: z, the gate, or an attribution.
        text: which text of the corpus.
    """

    tokens: tuple[str, ...]
    values: tuple[float, ...]
    gates: tuple[float, ...]
    position: int
    value: float
    text: int


def examples_of(frame: pd.DataFrame, name: str) -> list[Example]:
    """Return the examples of one neuron, by end and then rank.

    Args:
        frame: of `top_examples`.
        name: the neuron.

    Raises:
        InputError: the frame lacks columns, or has no such neuron.

    Example:
        >>> import torch
        >>> from attn_only_lens import expose_neuron_heads, neurons, pretrained
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> texts = [[3, 4, 113], [5, 7, 113]]
        >>> frame = neurons.top_examples(model, ["L0N7"], texts, k=2, progress=False)
        >>> [each.tokens for each in neurons.examples_of(frame, "L0N7")][:1]
        [('3', '4', '113')]
    """
    problem = "no examples can be taken from this frame"
    if not isinstance(frame, pd.DataFrame):
        raise InputError([f"got a {type(frame).__name__}; expected that of top_examples"], problem)
    lacking = sorted({"name", *COLUMNS} - set(frame.columns))
    InputError.raise_if([f"it lacks {', '.join(lacking)}"] * bool(lacking), problem)
    rows = frame[frame["name"] == name]
    if rows.empty:
        raise InputError([f"got {name!r}; it has examples of {_names(frame)}"], problem)
    return [Example(**{key: row[key] for key in COLUMNS}) for row in rows.to_dict("records")]


def _names(frame: pd.DataFrame) -> str:
    names = frame["name"].unique().tolist()
    return ", ".join(names[:5]) + ", …" * (len(names) > 5)
