"""The edges that path patching patches: senders, receivers, and what the receivers read."""

from dataclasses import dataclass

from attn_only_lens.arguments import one_of
from attn_only_lens.engine.readers import READ_PARTS
from attn_only_lens.engine.sites import SomeSites
from attn_only_lens.engine.writes import SCALES, Scale


@dataclass(frozen=True)
class Edges:
    """All edges from some senders to later receivers, for `path_patch`.

    Attributes:
        senders: the heads whose outputs are replaced, and the positions at which they are; see
            `Sites`.
        receivers: the heads that read the change; "logits"; or a list of names, which may include
            "logits". Heads read at every position; with a name such as `L5N7@3`, or with
            `Sites.positions`, only there. A receiver's position is where its output z changes: the
            query's position.
        part: the receiver inputs that change: "q"; "k"; "value" (a neuron's gate stays fixed);
            "pattern", queries and keys; or "z", all inputs, which is the whole direct effect. A
            neuron-head has no "k", and its "q" sets its pattern. Its value is the pre-activation,
            or in a gated MLP the pre-activation times the output of W_in. The receiver "logits"
            ignores `part`.
        scale: "held" keeps the scale of the norms before receivers as it was in the target run;
            "anew" computes it from the changed stream.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.Edges("heads", ["L5N7@3", "logits"]).part
        'value'
    """

    senders: SomeSites
    receivers: SomeSites
    part: str = "value"
    scale: Scale = "held"

    def reasons(self) -> list[str]:
        """Return an error message for each unknown word."""
        return one_of(*READ_PARTS).reasons(part=self.part) + one_of(*SCALES).reasons(
            scale=self.scale
        )
