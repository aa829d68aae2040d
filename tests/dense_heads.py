"""An oracle: every head of a HookedTransformer as dense float64 matrices, from its raw weights."""

import pandas as pd
import torch


class Dense:
    """Every head of a source model as dense matrices [d_model, d_model], by name; slow."""

    def __init__(self, source, fold):
        self.writes, self.reads, self.at, self.wrote = {}, {}, {}, {}
        cfg, one = source.cfg, torch.eye(source.cfg.d_model, dtype=torch.float64)
        centre = one - torch.full_like(one, 1 / cfg.d_model)

        def norm(block, name):
            if not fold or cfg.normalization_type is None or not hasattr(block, name):
                return one
            w = getattr(getattr(block, name), "w", None)
            matrix = centre if cfg.normalization_type.startswith("LN") else one
            return matrix if w is None else matrix @ torch.diag(w.detach())

        for layer, block in enumerate(source.blocks):
            attn, mlp = block.attn, block.mlp
            if cfg.original_architecture == "Olmo2ForCausalLM":
                before, after = [one, one], [norm(block, "ln1"), norm(block, "ln2")]
            else:
                before = [norm(block, "ln1"), norm(block, "ln2")]
                after = [norm(block, "ln1_post"), norm(block, "ln2_post")]
            shared = cfg.n_heads // (cfg.n_key_value_heads or cfg.n_heads)
            raw_k, raw_v = (
                getattr(attn, ("_" if cfg.n_key_value_heads else "") + name).detach()
                for name in ("W_K", "W_V")
            )
            for head in range(cfg.n_heads):
                name = f"L{layer}H{head}"
                q = before[0] @ attn.W_Q.detach()[head]
                k, v = (before[0] @ raw[head // shared] for raw in (raw_k, raw_v))
                if fold and attn.q_norm is not None:
                    wq, wk = attn.q_norm.w.detach(), attn.k_norm.w.detach()
                    part = slice(head * cfg.d_head, (head + 1) * cfg.d_head)
                    part = part if len(wq) != cfg.d_head else slice(None)
                    q, k = q * wq[part], k * wk[part]
                ov = v @ attn.W_O.detach()[head] @ after[0]
                self.writes[name] = ov
                self.reads[name] = {"q": q @ k.T, "k": k @ q.T, "v": ov}
            for neuron in range(cfg.d_mlp):
                name = f"L{layer}N{neuron}"
                value = before[1] @ mlp.W_in.detach()[:, neuron]
                gate = before[1] @ mlp.W_gate.detach()[:, neuron] if cfg.gated_mlp else value
                out = mlp.W_out.detach()[neuron] @ after[1]
                # The value vector comes first; its length cancels, as in TransformerLens' W_V W_O.
                self.writes[name] = torch.outer(value, out)
                self.reads[name] = {"q": gate[:, None], "v": value[:, None]}
        self.writes["embed"] = source.W_E.detach()
        last = norm(source, "ln_final")
        if cfg.final_rms and cfg.normalization_type is not None and fold:
            last = torch.diag(source.ln_final.w.detach())
        unembed = last @ source.W_U.detach()
        self.unembed = unembed - unembed.mean(1, keepdim=True)
        self.parallel = cfg.parallel_attn_mlp

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
