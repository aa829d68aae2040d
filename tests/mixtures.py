"""Small mixtures of experts of every family, and their neurons by definition.

Sizes are distinct primes where the families allow it. The oracle is the transformers model without
a bridge, with torch's hooks; it computes the neurons of all experts for all tokens.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import transformers
from bridges import bridged, randomise
from common import D_VOCAB

from attn_only_lens import expose_neuron_heads

N, SIZE = 5, 11
BASE = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
BASE |= {"vocab_size": D_VOCAB, "hidden_size": 28, "max_position_embeddings": 17, "head_dim": 14}
BASE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LOCAL = {"intermediate_size": SIZE, "num_local_experts": N, "num_experts_per_tok": 3}
MOE = {"intermediate_size": 13, "moe_intermediate_size": SIZE, "num_experts_per_tok": 3}
GROUPS = {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
WHOLE = {"layer_types": ["full_attention"] * 2}
LATENT = {"num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 6}
LATENT |= {"qk_nope_head_dim": 10, "v_head_dim": 14, "head_dim": 6}


@dataclass(frozen=True)
class Family:
    """A kind of mixture.

    Attributes:
        config: the class of its configurations.
        options: the options of its configuration.
        block: the path of the mixture in a layer.
        shared: the name of its shared experts in the mixture.
    """

    config: str
    options: dict
    block: str = "mlp"
    shared: str | None = None


FAMILIES = {
    "mixtral": Family("MixtralConfig", LOCAL),
    "olmoe": Family("OlmoeConfig", {**LOCAL, "num_experts": N, "norm_topk_prob": False}),
    "qwen2": Family(
        "Qwen2MoeConfig",
        MOE | {"num_experts": N, "shared_expert_intermediate_size": 7, "norm_topk_prob": False},
        shared="shared_expert",
    ),
    "qwen3": Family("Qwen3MoeConfig", MOE | {"num_experts": N, "norm_topk_prob": True}),
    "granite": Family(
        "GraniteMoeConfig", LOCAL | {"residual_multiplier": 0.31}, "block_sparse_moe"
    ),
    "gpt_oss": Family("GptOssConfig", LOCAL | {"swiglu_limit": 0.7}),
    "deepseek2": Family(
        "DeepseekV2Config",
        MOE | GROUPS | LATENT | {"n_shared_experts": 2, "topk_method": "greedy"},
        shared="shared_experts",
    ),
    "deepseek3": Family(
        "DeepseekV3Config", MOE | GROUPS | LATENT | {"n_shared_experts": 1}, shared="shared_experts"
    ),
    "ernie": Family(
        "Ernie4_5_MoeConfig",
        MOE
        | {"moe_num_experts": N, "moe_k": 3, "moe_num_shared_experts": 1}
        | {"moe_layer_start_index": 0},
        shared="shared_experts",
    ),
    "glm4": Family(
        "Glm4MoeConfig", MOE | GROUPS | {"n_shared_experts": 1}, shared="shared_experts"
    ),
    "minimax": Family("MiniMaxM2Config", LOCAL),
    "flex_olmo": Family("FlexOlmoConfig", LOCAL | {"num_experts": N}),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        MOE | WHOLE | {"num_experts": N, "shared_expert_intermediate_size": 7},
        shared="shared_expert",
    ),
    "lfm2": Family(
        "Lfm2MoeConfig", MOE | WHOLE | {"num_experts": N, "num_dense_layers": 0}, "feed_forward"
    ),
    "jamba": Family(
        "JambaConfig",
        LOCAL
        | {"num_experts": N, "attn_layer_period": 1, "attn_layer_offset": 0}
        | {"expert_layer_period": 1, "expert_layer_offset": 0, "use_mamba_kernels": False},
        "feed_forward",
    ),
    "glm4_lite": Family(
        "Glm4MoeLiteConfig",
        MOE | GROUPS | LATENT | {"n_shared_experts": 1, "mlp_layer_types": ["sparse"] * 2},
        shared="shared_experts",
    ),
}


def original(name, dtype=torch.float64, **options):
    """Return the transformers model of a family."""
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**BASE | family.options | options)
    torch.manual_seed(0)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **eager)
    return randomise(model.to(dtype).eval())


def boot(name, dtype=torch.float64, **options):
    """Return a bridge around the same model."""
    return bridged(original(name, dtype, **options))


def exposed(name, dtype=torch.float64, **options):
    """Return the same bridge with its neuron-heads exposed."""
    return expose_neuron_heads(boot(name, dtype, **options)).model


def linear(module, x):
    """Return x · W + b."""
    return x @ module.weight.T + (0.0 if module.bias is None else module.bias)


class Oracle:
    """The transformers model of a family without a bridge, and the neurons of one of its layers."""

    def __init__(self, name, layer=1, dtype=torch.float64, **options):
        self.name, self.model = name, original(name, dtype, **options)
        self.family = FAMILIES[name]
        self.block = self.model.model.layers[layer].get_submodule(self.family.block)
        self.shared = getattr(self.block, self.family.shared) if self.family.shared else None

    @contextmanager
    def hooked(self, route=None, added=None):
        """Change the arguments (index, weights) of the experts, or add to the mixture's output."""
        with ExitStack() as stack:
            if route is not None:

                def enter(module, args):
                    return (args[0], *route(*args[1:]))

                stack.enter_context(self.block.experts.register_forward_pre_hook(enter))
            if added is not None:

                def leave(module, args, out):
                    return (out[0] + added, *out[1:]) if isinstance(out, tuple) else out + added

                stack.enter_context(self.block.register_forward_hook(leave))
            yield

    @torch.no_grad()
    def __call__(self, tokens, **how):
        with self.hooked(**how):
            return self.model(tokens).logits

    @torch.no_grad()
    def neurons(self, tokens):
        """Return routing weights r, and q, u and z of every neuron at every token."""
        seen = {}

        def enter(module, args):
            seen["x"], seen["index"], seen["chosen"] = args

        with self.block.experts.register_forward_pre_hook(enter):
            self.model(tokens)
        x, experts, shape = seen["x"], self.block.experts, tokens.shape
        n, size = self.sizes()
        r = torch.stack(
            [(seen["chosen"] * (seen["index"] == e)).sum(-1) for e in range(n)], dim=-1
        ).to(x)
        q, u = x.new_empty(len(x), n, size), x.new_empty(len(x), n, size)
        for e in range(n):
            if self.name == "gpt_oss":
                both = x @ experts.gate_up_proj[e] + experts.gate_up_proj_bias[e]
                q[:, e] = torch.clamp(both[:, 0::2], max=0.7)
                u[:, e] = 1 + torch.clamp(both[:, 1::2], min=-0.7, max=0.7)
            else:
                both = x @ experts.gate_up_proj[e].T
                q[:, e], u[:, e] = both[:, :size], both[:, size:]
        q, u, factor = q.flatten(1), u.flatten(1), r.repeat_interleave(size, dim=1)
        if self.shared is not None:
            q = torch.cat([q, linear(self.shared.gate_proj, x)], dim=1)
            u_shared = linear(self.shared.up_proj, x)
            gate = torch.ones_like(x[:, :1])
            if hasattr(self.block, "shared_expert_gate"):
                gate = torch.sigmoid(linear(self.block.shared_expert_gate, x))
                r = torch.cat([r, gate], dim=1)
            u, factor = (
                torch.cat([u, u_shared], 1),
                torch.cat([factor, gate.expand_as(u_shared)], 1),
            )
        weight = torch.sigmoid((1.702 if self.name == "gpt_oss" else 1.0) * q)
        values = {
            "x": x,
            "r": r,
            "q": q,
            "u": u,
            "v": q * u * factor,
            "w": weight,
            "factor": factor,
        }
        values["z"] = weight * values["v"]
        return {key: x.unflatten(0, shape) for key, x in values.items()}

    def sizes(self):
        """Return the number of routed experts, and the number of neurons of each."""
        down = self.block.experts.down_proj
        return down.shape[0], down.shape[1 if self.name == "gpt_oss" else 2]

    def W_out(self):
        """Return the output weights of all neurons."""
        down = self.block.experts.down_proj.detach()
        rows = [x if self.name == "gpt_oss" else x.T for x in down]
        if self.shared is not None:
            rows.append(self.shared.down_proj.weight.detach().T)
        return torch.cat(rows)


def one_of(r, n):
    """Return an expert that some tokens visit and others do not."""
    visits = (r[..., :n] != 0).flatten(0, 1)
    return int((visits.any(0) & ~visits.all(0)).nonzero()[1])


def unvisited(r, expert):
    """Return the first (prompt, position) whose token does not visit an expert."""
    return tuple((r[..., expert] == 0).nonzero()[0].tolist())


def visited(r, expert):
    """Return the first (prompt, position) whose token visits an expert."""
    return tuple((r[..., expert] != 0).nonzero()[0].tolist())
