"""A module that replaces a model's MLP by a transcoder.

For the MLP's input x, the module computes

    y = hook_written(z W_dec + b_dec) + hook_skip(x) W_skip + hook_error(e)

Neuron-heads (single-neuron attention heads) replace z at hook_post. The error e is the original
MLP's output at x minus the transcoder's output at x, both without edits by hooks. As long as no
hook edits the features, y is therefore the original MLP's output. If a hook changes z by Δz, y
changes by Δz W_dec. With `error="zero"`, e is left out, and the original MLP does not run.

If the transcoder reads the residual stream before the norm, this norm moves into `original`, and an
identity replaces it in the model. The norm after the MLP moves, too, if the transcoder imitates
this norm's output.

The features of a cross-layer transcoder also write to later layers. In layer l, y then has the
added term Σ_k z_k W_later_k[l - k - 1], over earlier layers k. If a hook changes z_k by Δz, y
changes by Δz W_later_k[l - k - 1], because the error e does not count edits of any feature. These
writes pass through `PassState.values`, so the layers must run in one forward pass of the model.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from attn_only_lens.axes import PreActivation, Residual
from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.gates.features import active_features
from attn_only_lens.heads.computation import is_live
from attn_only_lens.heads.host import LATER_WRITES, LaterWrites
from attn_only_lens.heads.transcoder import Transcoder
from attn_only_lens.tl import head_point


class FeatureMLP(nn.Module):
    """A transcoder as a module that replaces an MLP.

    Attributes:
        transcoder_activation: "relu", "jumprelu" or "topk".
        original: the original MLP, with the norms that moved into this module.
        name: in a bridge, the name of the MLP in the wrapped model's layer.
    """

    threshold: Tensor | None
    W_skip: Tensor | None
    W_later: Tensor | None

    def __init__(
        self, transcoder: Transcoder, original: nn.Sequential, error: bool, name: str | None
    ) -> None:
        super().__init__()
        self.W_in = nn.Parameter(transcoder.W_enc, requires_grad=False)
        self.b_in = nn.Parameter(transcoder.b_enc, requires_grad=False)
        self.W_out = nn.Parameter(transcoder.W_dec, requires_grad=False)
        self.b_out = nn.Parameter(transcoder.b_dec, requires_grad=False)
        self.register_buffer("threshold", transcoder.threshold)
        self.register_buffer("W_skip", transcoder.W_skip)
        later = transcoder.W_later
        self.W_later = None if later is None else nn.Parameter(later, requires_grad=False)
        self.transcoder_activation, self.k, self.name = transcoder.activation, transcoder.k, name
        self.original, self.has_error, self.was_exposed = original, error, False
        self._options = transcoder.options()
        self.hook_in = HookPoint()  # [batch, pos, d_model]
        self.hook_pre = HookPoint()  # [batch, pos, d_mlp]
        self.hook_post = HookPoint()  # [batch, pos, d_mlp]
        self.hook_written = HookPoint()  # [batch, pos, d_model]
        if transcoder.W_skip is not None:
            self.hook_skip = head_point()  # [batch, pos, head_index=1, d_model]
        if error:
            self.hook_error = head_point()  # [batch, pos, head_index=1, d_model]
        self.hook_out = HookPoint()  # [batch, pos, d_model]

    def forward(self, x: Residual) -> Residual:
        """Return the output of the features, plus x W_skip, plus the error."""
        x = self.hook_in(x)
        q = self.encode(x)
        # Hooks may edit in place, but the error needs the unedited pre-activations.
        hooked: Tensor = self.hook_pre(q.clone() if is_live(self.hook_pre) else q)
        z = self.hook_post(self.act_fn(hooked))
        features = self.hook_written(self.decode(z))
        unedited = self.act_fn(q) if self.has_error and self._features_are_hooked() else z
        arrived, arrived_unedited = self._pass_on(z, unedited)
        output = features + arrived
        if self.W_skip is not None:
            output = output + self.hook_skip(x.unsqueeze(-2)).squeeze(-2) @ self.W_skip
        if self.has_error:
            imitated = (features if unedited is z else self.decode(unedited)) + arrived_unedited
            if self.W_skip is not None:
                imitated = imitated + x @ self.W_skip
            error = self.original(x) - imitated
            output = output + self.hook_error(error.unsqueeze(-2)).squeeze(-2)
        result: Residual = self.hook_out(output)
        return result

    def transcoder(self) -> Transcoder:
        """Return the transcoder with its current weights."""
        return Transcoder(
            W_enc=self.W_in.detach(),
            W_dec=self.W_out.detach(),
            b_enc=self.b_in.detach(),
            b_dec=self.b_out.detach(),
            threshold=self.threshold,
            W_skip=self.W_skip,
            W_later=None if self.W_later is None else self.W_later.detach(),
            **self._options,
        )

    def _pass_on(
        self, z: PreActivation, unedited: PreActivation
    ) -> tuple[Residual | float, Residual | float]:
        """Store what the features write to later layers; return what earlier features wrote here.

        Both are also computed for features without edits by hooks.
        """
        if self.W_later is None:
            return 0.0, 0.0
        heads: Any = vars(self).get("_neuron_heads")
        if heads is None and self.was_exposed:
            raise UnsupportedCallError("features that write to later layers run only as heads")
        self.was_exposed = heads is not None
        outside = LaterWrites({})  # outside a pass of the model, no earlier layer has run
        writes = None if heads is None else heads.passing.values.get(LATER_WRITES, outside)
        if writes is None:  # attach tests this module alone, before and after it has heads
            return 0.0, 0.0
        layer = heads.layer
        writes.begin(layer)
        for number, W in enumerate(self.W_later, layer + 1):
            written = z @ W
            writes.written[number, layer] = written, written if unedited is z else unedited @ W
        arrived = [writes.written[layer, source] for source in range(layer)]
        edited = sum(x.to(z.device) for x, _ in arrived)
        return edited, sum(x.to(z.device) for _, x in arrived)

    def _features_are_hooked(self) -> bool:
        others = ("hook_in", "hook_skip", "hook_error", "hook_out")
        return any(
            isinstance(point, HookPoint) and is_live(point) and name not in others
            for name, point in self.named_children()
        )

    def encode(self, x: Residual) -> PreActivation:
        return x @ self.W_in + self.b_in

    def act_fn(self, q: PreActivation) -> PreActivation:
        return torch.where(active_features(q, self.threshold, self.k), q, 0.0)

    def decode(self, z: PreActivation) -> Residual:
        """Return the output of features with activations z, plus b_dec."""
        return z @ self.W_out + self.b_out
