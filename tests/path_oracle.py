"""Paths from head to head on a HookedTransformer or a bridge, by its own hooks and weights.

Outputs, norms and inputs are computed from the weights and the cache. One run with changed queries,
keys or values gives the receiver's z, and another run gets this z. Nothing from attn_only_lens is
used.
"""

import torch

ACTS = {
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


class PathOracle:
    """Path patching by hand on a HookedTransformer, or a bridge with its names.

    `factor` is that of the model on what sublayers add.
    """

    def __init__(self, model, contrast, scale="held", factor=1.0, answers=(7, 11)):
        self.model, self.scale, self.factor, self.answers = model, scale, factor, answers
        with torch.no_grad():
            self.source = model.run_with_cache(contrast.clean)[1]
            self.target = model.run_with_cache(contrast.corrupted)[1]
        self.tokens, self.cfg = contrast.corrupted, model.cfg
        self.post = getattr(self.cfg, "original_architecture", None) == "Olmo2ForCausalLM"

    def normed(self, norm, cache, name, change, x=None):
        """Return the norm of a change; with `x`, of x + change minus x, with a new scale."""
        if norm is None or isinstance(norm, torch.nn.Identity):
            return change
        kind = (self.cfg.normalization_type or "").removesuffix("Pre")
        if kind == "LN":
            change = change - change.mean(-1, keepdim=True)
        w = self.weight(norm)
        old = cache[f"{name}.hook_scale"]
        if x is None:
            return change / old * w
        x = x - x.mean(-1, keepdim=True) if kind == "LN" else x
        new = ((x + change).square().mean(-1, keepdim=True) + self.cfg.eps).sqrt()
        return (x + change) / new * w - x / old * w

    def weight(self, norm):
        w = getattr(norm, "w", None)
        gemma = type(getattr(norm, "original_component", None)).__name__.startswith("Gemma")
        return 1.0 if w is None else w + gemma

    def difference(self, logits):
        last = logits[:, -1]
        return (last[:, self.answers[0]] - last[:, self.answers[1]]).mean().item()

    def around(self, head):
        """Return the norms before and after a sublayer, with their names."""
        n = 1 if head.kind == "attention" else 2
        block, prefix = self.model.blocks[head.layer], f"blocks.{head.layer}.ln{n}"
        first = (getattr(block, f"ln{n}", None), prefix)
        if self.post:
            return (None, ""), first
        return first, (getattr(block, f"ln{n}_post", None), f"{prefix}_post")

    def write(self, head, cache):
        (_, _), (norm, prefix) = self.around(head)
        block = self.model.blocks[head.layer]
        if head.kind == "attention":
            z = cache[f"blocks.{head.layer}.attn.hook_z"]
            out = z[:, :, head.index] @ block.attn.W_O[head.index]
        else:
            post = cache[f"blocks.{head.layer}.mlp.hook_post"][:, :, head.index, None]
            b_in = getattr(block.mlp, "b_in", None)
            if b_in is not None and getattr(self.cfg, "gated_mlp", False):
                post = post - b_in[head.index]  # TransformerLens adds it to the product
            out = post * block.mlp.W_out[head.index]
        return self.normed(norm, cache, prefix, out) * self.factor

    @torch.no_grad()
    def value(self, sender, receiver, part, positions, at=slice(None)):
        """Return the metric if the receiver's z changes, at positions `at`."""
        sent = self.write(sender, self.source) - self.write(sender, self.target)
        delta = torch.zeros_like(sent)
        delta[:, positions] = sent[:, positions]
        if receiver == "logits":
            return self.to_logits(delta)
        (norm, prefix), _ = self.around(receiver)
        parallel = self.cfg.parallel_attn_mlp
        place = "pre" if receiver.kind == "attention" or parallel else "mid"
        x = self.target[f"blocks.{receiver.layer}.hook_resid_{place}"]
        entering = self.normed(
            norm, self.target, prefix, delta, x if self.scale == "anew" else None
        )
        follow = self.to_head if receiver.kind == "attention" else self.to_neuron
        return follow(receiver, part, entering, at)

    def logits(self, *edits):
        with self.model.hooks(fwd_hooks=list(edits)):
            return self.model(self.tokens)

    def to_logits(self, delta):
        norm = getattr(self.model, "ln_final", None)
        if norm is None or isinstance(norm, torch.nn.Identity):
            last = f"blocks.{self.cfg.n_layers - 1}.hook_resid_post"
            return self.difference(self.logits((last, lambda x, hook: x + delta)))
        x = self.target[f"blocks.{self.cfg.n_layers - 1}.hook_resid_post"]
        x = x if self.scale == "anew" else None
        more = self.normed(norm, self.target, "ln_final", delta, x) / self.weight(norm)
        return self.difference(self.logits(("ln_final.hook_normalized", lambda x, hook: x + more)))

    def to_head(self, head, part, entering, at):
        attn, prefix = self.model.blocks[head.layer].attn, f"blocks.{head.layer}.attn"
        inputs = {"q": "q", "k": "k", "value": "v", "pattern": "qk", "z": "qkv"}[part]
        edits, values = [], []
        for point in inputs:
            W = getattr(attn, f"W_{point.upper()}")
            W_head = W[head.index * len(W) // self.cfg.n_heads]

            def put(value, hook, W_head=W_head):
                value = value.clone()
                value[:, :, head.index * value.shape[2] // self.cfg.n_heads] += entering @ W_head
                return value

            edits.append((f"{prefix}.hook_{point}", put))
        keep = (f"{prefix}.hook_z", lambda z, hook: values.append(z[:, :, head.index].clone()))
        self.logits(*edits, keep)

        def patch(z, hook):
            z = z.clone()
            z[:, at, head.index] = values[0][:, at]
            return z

        return self.difference(self.logits((f"{prefix}.hook_z", patch)))

    def to_neuron(self, head, part, entering, at):
        mlp, prefix = self.model.blocks[head.layer].mlp, f"blocks.{head.layer}.mlp"
        act, i = ACTS[self.cfg.act_fn], head.index
        q = self.target[f"{prefix}.hook_pre"][:, :, i]
        gate = getattr(mlp, "W_gate", None)
        if gate is None:
            new = q + entering @ mlp.W_in[:, i]
            v, new_v = q, new
        else:
            u = self.target[f"{prefix}.hook_pre_linear"][:, :, i]
            new = q + entering @ gate[:, i]
            v, new_v = q * u, new * (u + entering @ mlp.W_in[:, i])
        w, new_w = act(q) / q, act(new) / new
        z = {"q": new_w * v, "pattern": new_w * v, "value": w * new_v, "z": new_w * new_v}[part]

        def patch(post, hook):
            post = post.clone()
            post[:, at, i] += (z - w * v)[:, at]
            return post

        return self.difference(self.logits((f"{prefix}.hook_post", patch)))
