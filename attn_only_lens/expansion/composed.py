"""One expansion after another: where the first sends a part, the second finds it."""

from dataclasses import dataclass
from itertools import chain

from attn_only_lens.errors import GrowthError
from attn_only_lens.expansion.expansion import Expansion
from attn_only_lens.expansion.initialise import Initialiser, own
from attn_only_lens.expansion.plan import Plan, carry_out
from attn_only_lens.expansion.provenance import Provenance
from attn_only_lens.expansion.weights import Weights

__all__ = ["Composed", "compose"]


@dataclass(frozen=True)
class Composed:
    """Several expansions, one after another; itself one.

    Attributes:
        steps: in the order in which they are done.
    """

    steps: tuple[Expansion, ...]

    def reasons_against(self, weights: Weights) -> list[str]:
        """Why these weights cannot be expanded so, of every step; empty where they can.

        A later step is asked about what the earlier ones lead to, without numbers.
        """
        sketch, reasons = weights.sketch(), []
        for step in self.steps:
            against = step.reasons_against(sketch)
            if not against:
                try:
                    sketch, _ = step(sketch)
                except GrowthError as error:  # it would not fit into memory
                    against = list(error.reasons)
            reasons += [f"{type(step).__name__}: {reason}" for reason in against]
        return reasons

    def __call__(
        self, weights: Weights, init: Initialiser | None = None, seed: int = 0
    ) -> tuple[Weights, Provenance]:
        """The expanded weights, and where everything went.

        Raises:
            GrowthError: with all `reasons_against` these weights.
        """
        grown, provenance = carry_out(weights, Plan(), own(), seed)
        try:
            for step in self.steps:
                grown, more = step(grown, init or own(), seed)
                provenance = provenance.then(more)
        except GrowthError as error:
            raise GrowthError(self.reasons_against(weights)) from error  # later steps' too
        return grown, provenance


def compose(*expansions: Expansion) -> Composed:
    """One expansion made of several, done in this order.

    Whatever the order, the function stays the same; which new entries there are to draw, and hence
    their numbers, may differ. Layers that an expansion names are counted where it stands in the
    order: after `InsertLayer(at=0)`, layer 0 is the new one.

    Args:
        *expansions: e.g. `AddNeurons(256, layers=(0,))`, `AddHeads(2)`, `InsertLayer(at=1)`.
    """
    steps = (each.steps if isinstance(each, Composed) else (each,) for each in expansions)
    return Composed(tuple(chain.from_iterable(steps)))
