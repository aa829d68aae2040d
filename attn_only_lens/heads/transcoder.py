"""The weights of a transcoder: a sparse MLP that imitates one MLP of a model.

A transcoder reads the input x of an MLP (or the residual stream before the norm) and computes

    q = x W_enc + b_enc                          pre-activations of the features
    z = q · w(q)                                 activations; the gate w is 0 or 1
    y = z W_dec + b_dec + x W_skip               the imitated output of the MLP

A feature is thus an attention head (a neuron-head) that attends with weight w to its own token,
whose value is q, and with weight 1 - w to a static bias token, whose value is 0. The gates are

    relu          w = 1[q > 0], which is 1 if q > 0, otherwise 0
    jumprelu      w = 1[q > θ], with a threshold θ ≥ 0 for each feature
    topk          w = 1[q > 0 and q is one of the k largest at this token]

Only topk gates depend on other features. BatchTopK transcoders use one threshold for all tokens at
inference, so they are "jumprelu" here.

A cross-layer transcoder is a dict of such transcoders, one per layer, whose features also write to
the outputs of later MLPs:

    y_l = Σ_{k < l} z_k W_later_k[l - k - 1] + z_l W_dec_l + b_dec_l + x_l W_skip_l

A feature is then one head with several writes.

Sources: Dunefsky et al., "Transcoders Find Interpretable LLM Feature Circuits" (2024);
Rajamanoharan et al., "Jumping Ahead: Improving Reconstruction Fidelity with JumpReLU Sparse
Autoencoders" (2024); Gao et al., "Scaling and evaluating sparse autoencoders" (2024); Paulo et al.,
"Transcoders Beat Sparse Autoencoders for Interpretability" (2025), for W_skip; Ameisen et al.,
"Circuit Tracing" (2025), for cross-layer transcoders.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jaxtyping import Float
from torch import Tensor

from attn_only_lens.arguments import is_count, one_of
from attn_only_lens.errors import InputError
from attn_only_lens.gates.features import active_features

FeatureActivation = Literal["relu", "jumprelu", "topk"]
FEATURE_ACTIVATIONS: tuple[str, ...] = get_args(FeatureActivation)
Reads = Literal["stream", "normalized", "input"]
READS: tuple[str, ...] = get_args(Reads)
OPTIONS = ("activation", "k", "reads", "after_norm", "name")
"""The fields of a `Transcoder` that are not tensors."""
_PROBLEM = "this transcoder is not valid"


@dataclass(frozen=True, eq=False, repr=False)
class Transcoder:
    """The weights and options of a transcoder for one layer.

    Attributes:
        W_enc: the encoder; feature f has the pre-activation x W_enc[:, f] + b_enc[f].
        W_dec: the decoder; feature f adds z[f] W_dec[f] to the output.
        b_enc: the bias of the encoder.
        b_dec: the bias of the decoder.
        activation: "relu", "jumprelu" or "topk".
        threshold: the threshold θ of each feature, for "jumprelu"; otherwise None.
        k: the largest number of features that are active at a token, for "topk"; otherwise None.
        W_skip: the linear map whose output x W_skip is added to the output, or None.
        W_later: for a cross-layer transcoder, the decoders to the next layers, nearest first:
            feature f of layer l adds z[f] W_later[n, f] to the MLP's output in layer l + 1 + n. In
            the last layer, it has no entries; for other transcoders, it is None.
        reads: what the encoder reads: "stream", the residual stream before the MLP's norm;
            "normalized", the output of this norm before its gain and bias; or "input", the MLP's
            input, which is the norm's output after its gain and bias.
        after_norm: whether y imitates the vector that is added to the stream (hook_mlp_out) instead
            of the MLP's output (mlp.hook_out). These differ if a norm follows the MLP, as in Gemma
            2 and 3.
        name: says where the transcoder comes from, in messages and its printed form.

    Raises:
        InputError: with every reason: shapes that do not fit together, different dtypes or devices,
            entries that are not finite, or options that do not fit the activation.

    Example:
        >>> import torch
        >>> from attn_only_lens.heads.transcoder import Transcoder
        >>> transcoder = Transcoder(torch.eye(2, 3), torch.ones(3, 2), torch.zeros(3),
        ...     torch.zeros(2), "jumprelu", threshold=torch.full((3,), 0.5))
        >>> transcoder.encode(torch.tensor([0.4, 2.0]))
        tensor([0., 2., 0.])
        >>> transcoder
        <Transcoder of 3 features (jumprelu), reads input>
    """

    W_enc: Float[Tensor, "d_model d_features"]
    W_dec: Float[Tensor, "d_features d_model"]
    b_enc: Float[Tensor, "d_features"]
    b_dec: Float[Tensor, "d_model"]
    activation: FeatureActivation = "relu"
    threshold: Float[Tensor, "d_features"] | None = None
    k: int | None = None
    W_skip: Float[Tensor, "d_model d_model"] | None = None
    W_later: Float[Tensor, "n_later d_features d_model"] | None = None
    reads: Reads = "input"
    after_norm: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        reasons = one_of(*FEATURE_ACTIVATIONS).reasons(activation=self.activation)
        reasons += one_of(*READS).reasons(reads=self.reads)
        tensors = self.tensors()
        wrong = [
            f"got {name}={tensor!r:.40}; expected a tensor"
            for name, tensor in tensors.items()
            if not isinstance(tensor, Tensor) or tensor.is_meta
        ]
        InputError.raise_if(wrong, f"{self.name}: {_PROBLEM}" if self.name else _PROBLEM)
        d_model, d_features = self.W_enc.shape if self.W_enc.ndim == 2 else (0, 0)
        n_later = () if self.W_later is None else self.W_later.shape[:1]
        shapes = {
            "W_enc": [d_model, d_features],
            "W_dec": [d_features, d_model],
            "b_enc": [d_features],
            "b_dec": [d_model],
            "threshold": [d_features],
            "W_skip": [d_model, d_model],
            "W_later": [*n_later, d_features, d_model],
        }
        for name, tensor in tensors.items():
            is_empty = not tensor.numel() and name != "W_later"
            if (shape := list(tensor.shape)) != shapes[name] or is_empty:
                reasons.append(f"got {name} of shape {shape}; expected {shapes[name]}")
            elif not tensor.isfinite().all():
                reasons.append(f"got {name} with entries that are NaN or infinite")
        kinds = {(tensor.dtype, str(tensor.device)) for tensor in tensors.values()}
        if len(kinds) > 1 or not self.W_enc.is_floating_point():
            got = ", ".join(f"{dtype} on {device}" for dtype, device in sorted(kinds, key=str))
            reasons.append(f"got tensors in {got}; expected one floating-point dtype, one device")
        if (self.threshold is not None) != (self.activation == "jumprelu"):
            reasons.append("expected a threshold for 'jumprelu', and None for other activations")
        elif self.threshold is not None and (self.threshold < 0).any():
            reasons.append(
                "got negative thresholds; expected numbers ≥ 0: a feature with a negative q would "
                "be active. If the activation is relu(q) 1[q > θ], set these thresholds to 0"
            )
        expects_k = self.activation == "topk"
        if expects_k != (self.k is not None) or (expects_k and not is_count(self.k, 1, d_features)):
            reasons.append(
                f"got k={self.k!r}; expected a number from 1 to {d_features} for 'topk', and None "
                "for other activations"
            )
        InputError.raise_if(reasons, f"{self.name}: {_PROBLEM}" if self.name else _PROBLEM)

    def __repr__(self) -> str:
        of = f" {self.name}:" if self.name else ""
        skip = ", with W_skip" if self.W_skip is not None else ""
        later = f", writes to {self.n_later} later layers" if self.n_later else ""
        gate = f"topk, k={self.k}" if self.k else self.activation
        what = f"{self.d_features} features ({gate}), reads {self.reads}{skip}{later}"
        return f"<Transcoder{of} of {what}>"

    @property
    def d_model(self) -> int:
        """The width of the residual stream."""
        return int(self.W_enc.shape[0])

    @property
    def d_features(self) -> int:
        """The number of features."""
        return int(self.W_enc.shape[1])

    @property
    def n_later(self) -> int:
        """The number of later layers to which the features write; 0 without `W_later`."""
        return 0 if self.W_later is None else len(self.W_later)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, as {name: tensor}."""
        names = ("W_enc", "W_dec", "b_enc", "b_dec", "threshold", "W_skip", "W_later")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def options(self) -> dict[str, Any]:
        """Return the fields that are not tensors, as {name: value}."""
        return {name: getattr(self, name) for name in OPTIONS}

    def encode(self, x: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_features"]:
        """Return the activations z of all features for the input x."""
        if x.shape[-1:] != self.W_enc.shape[:1]:
            reason = f"got x of shape {list(x.shape)}; expected [..., {self.d_model}] for W_enc"
            raise InputError([reason], "x cannot be encoded")
        q = x @ self.W_enc + self.b_enc
        return q * active_features(q, self.threshold, self.k)

    def decode(
        self, z: Float[Tensor, "*any d_features"], x: Float[Tensor, "*any d_model"] | None = None
    ) -> Float[Tensor, "*any d_model"]:
        """Return the output y for activations z; transcoders with W_skip also need the input x.

        What the features write to later layers is not part of y.
        """
        y = z @ self.W_dec + self.b_dec
        if self.W_skip is None:
            return y
        if x is None:
            raise InputError(["got no x; expected the input, because W_skip reads it"], _PROBLEM)
        return y + x @ self.W_skip


def cross_layer_reasons(
    transcoders: Mapping[int, Transcoder], n_layers: int | None = None
) -> list[str]:
    """Return error messages if transcoders are only a part of a cross-layer transcoder.

    `n_layers` is the number of layers of the model, if it is known.
    """
    cross = {layer: x for layer, x in sorted(transcoders.items()) if x.W_later is not None}
    if not cross:
        return []
    last = max(layer + x.n_later for layer, x in cross.items())
    if list(cross) != list(range(last + 1)) or n_layers not in (None, last + 1):
        of_model = "" if n_layers is None else f"; the model has {n_layers} layers"
        return [
            f"got layers {list(cross)} of a cross-layer transcoder, whose features write to layers "
            f"up to {last}{of_model}; expected all layers of the model, from layer 0"
        ]
    reasons = [
        f"layer {layer}: its features write to {x.n_later} later layers; expected {last - layer}"
        for layer, x in cross.items()
        if layer + x.n_later != last
    ]
    if len({x.after_norm for x in cross.values()}) > 1:
        reasons.append("got different values of after_norm; expected one value for all layers")
    return reasons
