"""An oracle: every head of a transformers model as dense float64 matrices, from its raw weights."""

import bridges
import pandas as pd
import torch
import transformers

FAMILIES = ("gpt2", "neox", "grouped", "phi3", "gemma2", "qwen3", "olmo2")
PATHS = {"gpt2": ("h", "ln_f"), "neox": ("layers", "final_layer_norm")}


def original(family):
    """Return a transformers model; in `grouped`, a head's key is not its index modulo two."""
    if family != "grouped":
        return bridges.original(family)
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "hidden_size": 28}
    config = transformers.LlamaConfig(**bridges.SIZES | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return bridges.randomise(model.double().eval())


class Dense:
    """Every head of a model as dense matrices [d_model, d_model], by name; slow."""

    def __init__(self, family, fold=True):
        self.family, self.fold, model = family, fold, original(family).requires_grad_(False)
        embed, out = model.get_input_embeddings(), model.get_output_embeddings()
        paths = PATHS.get(family, ("layers", "norm"))
        layers, last = (getattr(model.base_model, path) for path in paths)
        self.cfg, self.parallel = model.config, family == "neox"
        self.writes, self.reads = {"embed": embed.weight}, {}
        for layer, block in enumerate(layers):
            self._attention(layer, block)
            self._neurons(layer, block)
        unembed = self._norm(last) @ out.weight.T
        self.unembed = unembed - unembed.mean(1, keepdim=True)

    def _norm(self, module):
        d = self.cfg.hidden_size
        one = torch.eye(d, dtype=torch.float64)
        if module is None or not self.fold:
            return one
        centre = one - 1 / d if isinstance(module, torch.nn.LayerNorm) else one
        return centre @ torch.diag(module.weight + (self.family == "gemma2"))

    def _norms(self, block, kind):
        """Return the norms before and after a sublayer."""
        names = {
            "gpt2": ("ln_1", "ln_2", None, None),
            "gemma2": (
                *("input_layernorm", "pre_feedforward_layernorm"),
                *("post_attention_layernorm", "post_feedforward_layernorm"),
            ),
            "olmo2": (None, None, "post_attention_layernorm", "post_feedforward_layernorm"),
        }.get(self.family, ("input_layernorm", "post_attention_layernorm", None, None))
        norms = [self._norm(name and getattr(block, name)) for name in names]
        return norms[kind == "neuron" :: 2]

    def _attention(self, layer, block):
        n, d = self.cfg.num_attention_heads, self.cfg.hidden_size
        attn = getattr(block, "self_attn", None) or getattr(block, "attention", None) or block.attn
        if self.family == "gpt2":
            weights = [w.T for w in attn.c_attn.weight.split(d, 1)]
            o = attn.c_proj.weight.view(n, -1, d)
        elif self.family == "neox":
            weights = attn.query_key_value.weight.view(n, 3, -1, d).unbind(1)
            o = attn.dense.weight.T.reshape(n, -1, d)
        else:
            o = attn.o_proj.weight.T.reshape(n, -1, d)
            if self.family == "phi3":
                h = o.shape[1]
                shared = self.cfg.num_key_value_heads * h
                weights = attn.qkv_proj.weight.split([n * h, shared, shared])
            else:
                weights = [getattr(attn, f"{x}_proj").weight for x in "qkv"]
        q, k, v = (w.reshape(-1, o.shape[1], d).transpose(1, 2) for w in weights)
        if self.fold and hasattr(attn, "q_norm"):
            norms = (getattr(attn, f"{x}_norm").weight.view(-1, 1, o.shape[1]) for x in "qk")
            q, k = (w * norm for w, norm in zip((q, k), norms, strict=True))
        before, after = self._norms(block, "attention")
        for head in range(n):
            shared = head * len(k) // n
            qk = before @ q[head] @ (before @ k[shared]).T
            ov = before @ v[shared] @ o[head] @ after
            self.writes[f"L{layer}H{head}"] = ov
            self.reads[f"L{layer}H{head}"] = {"q": qk, "k": qk.T, "v": ov}

    def _neurons(self, layer, block):
        mlp = block.mlp
        if self.family == "gpt2":
            into, out = mlp.c_fc.weight, mlp.c_proj.weight
        elif self.family == "neox":
            into, out = mlp.dense_h_to_4h.weight.T, mlp.dense_4h_to_h.weight.T
        else:
            out = mlp.down_proj.weight.T
        if self.family == "phi3":
            gate, into = mlp.gate_up_proj.weight.T.chunk(2, 1)
        elif self.family in PATHS:
            gate = into
        else:
            gate, into = mlp.gate_proj.weight.T, mlp.up_proj.weight.T
        before, after = self._norms(block, "neuron")
        gate, into, out = before @ gate, before @ into, out @ after
        for i in range(len(out)):
            # The value vector comes first; its length cancels, as in TransformerLens' W_V W_O.
            self.writes[f"L{layer}N{i}"] = torch.outer(into[:, i], out[i])
            self.reads[f"L{layer}N{i}"] = {"q": gate[:, [i]], "v": into[:, [i]]}

    def order(self, writer, reader):
        def place(name):
            layer = int(name[1 : name.index("H" if "H" in name else "N")])
            return layer, 0 if "H" in name or self.parallel else 1

        return writer == "embed" or place(writer) < place(reader)

    def score(self, writer, reader, kind):
        W, R = self.writes[writer], self.reads[reader].get(kind)
        if R is None:
            return 0.0
        return ((W @ R).norm() / (W.norm() * R.norm())).item()

    def table(self, writers, readers, kind):
        rows = {
            (w, r): self.score(w, r, kind) for w in writers for r in readers if self.order(w, r)
        }
        return pd.Series(rows)
