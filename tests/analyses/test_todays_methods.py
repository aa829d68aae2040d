"""Tests of today's attribution methods against a Llama by hand, with plain autograd.

The Llama below shares no code with the package: it reads the weights of a transformers model. Its
rules are those of the papers: detached tensors, hooks on gradients, and a softmax with a backward
pass of its own.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import transformers
from bridges import GROUPED, SIZES, bridged, randomise, with_heads
from common import needs_hooked_transformer
from torch.nn.functional import silu

from analyses.tools import gradient_rules as rules
from attn_only_lens import Contrast, Work, expose_neuron_heads
from attn_only_lens import patching as p

pytestmark = pytest.mark.numeric
LAYERS = 3
CLEAN, CORRUPTED = torch.tensor([[3, 11, 5, 7, 2]]), torch.tensor([[3, 4, 5, 7, 2]])
RIGHT, WRONG = 8, 9


class Softmax(torch.autograd.Function):
    """A softmax whose gradient is p' (g - Σ p' g) with p' = softmax(s / 2)."""

    @staticmethod
    def forward(ctx, scores):
        ctx.save_for_backward((scores / 2).softmax(-1))
        return scores.softmax(-1)

    @staticmethod
    def backward(ctx, gradient):
        (p,) = ctx.saved_tensors
        return p * (gradient - (p * gradient).sum(-1, keepdim=True))


def less(x, share):
    """Return x, whose gradient is multiplied by a share."""
    x = x * 1
    if x.requires_grad:
        x.register_hook(lambda gradient: share * gradient)
    return x


def norm(x, module, rule):
    scale = (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()
    return x / (scale.detach() if rule in ("gim", "relp") else scale) * module.weight


def turned(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def run(model, tokens, rule="plain", layer=None, put=None):
    """Return the metric and z by (layer, kind), with a rule for gradients.

    With rule="drop", the gradient skips a layer. `put` replaces z by (layer, kind).
    """
    body, zs = model.model, {}
    x = body.embed_tokens(tokens).detach().requires_grad_()
    n, n_pos = model.config.num_attention_heads, tokens.shape[1]
    mask = torch.ones(n_pos, n_pos, dtype=x.dtype).tril().log()
    cos, sin = body.rotary_emb(x, torch.arange(n_pos)[None])

    def kept(z, *place):
        z = z if put is None or place not in put else put[place].requires_grad_()
        zs[place] = z
        return z.detach() if rule == "drop" and place[0] == layer else z

    for i, block in enumerate(body.layers):
        h, attn = norm(x, block.input_layernorm, rule), block.self_attn
        q, k, v = (
            f(h).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
            for f in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        if rule == "gim":
            q, k, v = less(q, 1 / 4), less(k, 1 / 4), less(v, 1 / 2)
        k, v = k.expand(-1, n, -1, -1), v.expand(-1, n, -1, -1)
        scores = turned(q, cos, sin) @ turned(k, cos, sin).mT * attn.head_dim**-0.5 + mask
        pattern = Softmax.apply(scores) if rule == "gim" else scores.softmax(-1)
        pattern = pattern.detach() if rule == "relp" else pattern
        z = kept((pattern @ v).transpose(1, 2), i, "attention")
        x = x + attn.o_proj(z.flatten(2))
        h, mlp = norm(x, block.post_attention_layernorm, rule), block.mlp
        g, u = mlp.gate_proj(h), mlp.up_proj(h)
        if rule == "gim":
            g, u = less(g, 1 / 2), less(u, 1 / 2)
        z = silu(g) * u
        if rule == "relp":
            weight = g.detach().sigmoid()
            z = weight * (g * u.detach() + g.detach() * u) / 2
        z = kept(z, i, "neuron")
        x = x + mlp.down_proj(z)
    logits = model.lm_head(norm(x, body.norm, rule))[:, -1]
    return (logits[:, RIGHT] - logits[:, WRONG]).mean(), zs


def gradients(*args, only=None, **options):
    metric, zs = run(*args, **options)
    places = [only] if only else [*zs]
    found = torch.autograd.grad(metric, [zs[x] for x in places], allow_unused=True)
    return {
        place: torch.zeros_like(zs[place]) if g is None else g
        for place, g in zip(places, found, strict=True)
    }


@pytest.fixture(scope="module", params=["denoise", "noise"])
def case(request):
    """A model in the package and by hand, and both runs by hand, the target first."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | GROUPED | {"num_hidden_layers": LAYERS})
    auto = transformers.AutoModelForCausalLM
    model = randomise(
        auto.from_config(config, attn_implementation="eager").to(torch.float64).eval()
    )
    exposed = expose_neuron_heads(bridged(model)).model
    contrast = Contrast(CLEAN, CORRUPTED, p.logit_diff(RIGHT, WRONG))
    runs = rules.Runs(exposed, contrast, request.param)
    sides = (CORRUPTED, CLEAN) if request.param == "denoise" else (CLEAN, CORRUPTED)
    values, zs = zip(*(run(model, tokens) for tokens in sides), strict=True)
    return SimpleNamespace(model=model, runs=runs, tokens=sides[0], zs=zs, values=values)


def by_place(case, by_hook):
    """Return multipliers by (layer, kind), in the shapes of the Llama by hand."""
    host = rules.host_of(case.runs.model)
    places = [(i, kind) for i in range(LAYERS) for kind in ("attention", "neuron")]
    found = {x: by_hook[host.hook_name(*x, "z")] for x in places}
    return {x: g if x[1] == "attention" else g.squeeze(-1) for x, g in found.items()}


def same(found, expected):
    """Return whether tensors are equal, up to the rounding of transformers' norms in float32."""
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-12)


def agree(found, expected):
    return all(same(found[x], expected[x]) for x in expected)


@pytest.mark.parametrize(
    ("name", "rule"), [("gradient", "plain"), ("RelP", "relp"), ("GIM", "gim")]
)
def test_rules_for_gradients_are_those_of_the_papers(case, name, rule):
    (by_hook,) = rules.METHODS[name](case.runs)
    found = by_place(case, by_hook)
    assert agree(found, gradients(case.model, case.tokens, rule))
    for other in {"plain", "relp", "gim"} - {rule}:  # the control
        assert not agree(found, gradients(case.model, case.tokens, other))
    assert run(case.model, case.tokens, rule)[0].item() == pytest.approx(case.values[0].item())


def test_graddrop_adds_absolute_values_over_gradients_that_skip_a_layer(case):
    change = {x: case.zs[1][x] - z for x, z in case.zs[0].items()}
    every = [gradients(case.model, case.tokens, "drop", layer=i) for i in range(LAYERS)]
    effects = rules.estimates(case.runs, rules.dropped)
    for layer, kind in change:
        products = torch.stack([g[layer, kind] * change[layer, kind] for g in every])
        assert products[layer].abs().max() == 0 < products.abs().max()
        products = products.sum(-1) if kind == "attention" else products
        found = effects[rules.host_of(case.runs.model).hook_name(layer, kind, "z")]
        assert same(found, products.abs().sum(0)[0] / (LAYERS - 1))


def test_ig_at_activations_is_the_mean_gradient_at_interpolated_outputs(case):
    (by_hook,) = rules.interpolated_outputs(case.runs)
    found = by_place(case, by_hook)
    target, source = ({x: z.detach() for x, z in some.items()} for some in case.zs)
    for place in found:
        g = 0.0
        for step in range(rules.STEPS):
            z = torch.lerp(target[place], source[place], (step + 0.5) / rules.STEPS)
            g = g + gradients(case.model, case.tokens, put={place: z}, only=place)[place]
        assert same(found[place], g / rules.STEPS)


def test_ig_at_activations_adds_up_to_the_patch_of_a_sublayer(case, monkeypatch):
    monkeypatch.setattr(rules, "STEPS", 200)
    effects = rules.estimates(case.runs, rules.interpolated_outputs)
    place = (1, "neuron")
    value, _ = run(case.model, case.tokens, put={place: case.zs[1][place].detach()})
    name = rules.host_of(case.runs.model).hook_name(*place, "z")
    assert effects[name].sum().item() == pytest.approx((value - case.values[0]).item(), rel=1e-4)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_sweeps_are_those_of_the_package_where_it_has_the_method(direction):
    model = with_heads("native_gated")
    contrast = Contrast(CLEAN, CORRUPTED, p.logit_diff(RIGHT, WRONG))
    how = {"direction": direction, "work": Work(progress=False)}
    runs = rules.Runs(model, contrast, direction)
    for name, method in (("gradient", "gradient"), ("EAP-IG", "integrated"), ("secant", "secant")):
        steps = {"steps": rules.STEPS} if method == "integrated" else {}
        own = p.attribution(model, contrast, method=p.Estimate(method, budget=0, **steps), **how)
        like = p.attribution(model, contrast, method=p.Estimate("gradient", budget=0), **how)
        values = rules.sweep_of(runs, rules.METHODS[name], like).frame["value"].to_numpy()
        assert values == pytest.approx(own.frame["value"].to_numpy(), rel=1e-8)
        assert own.effect.abs().max() > 0.01


def random_model(**options):
    """Return a HookedTransformer with random parameters."""
    from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig

    sizes = {"d_model": 6, "n_heads": 2, "d_head": 3, "d_mlp": 5, "n_ctx": 7, "d_vocab": 11}
    return randomise(
        HookedTransformer(HookedTransformerConfig(**sizes, **options)).to(torch.float64)
    )


@needs_hooked_transformer
def test_the_arms_of_the_benchmark_are_the_same_methods():
    """Independent code: hooks on a HookedTransformer, and the functions for neuron-heads."""
    from analyses.benchmark import gradients as g
    from analyses.benchmark.tasks import Pairs

    model = random_model(n_layers=LAYERS, act_fn="relu")
    weights = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0)).double()
    clean, corrupted = (
        torch.tensor([[3, 8, 1, 4, 4], [2, 7, 9, 1, 5]]),
        torch.tensor([[3, 0, 1, 4, 6]]),
    )
    pairs, n = Pairs(clean, corrupted.expand(2, -1).clone(), weights), 2
    exposed = expose_neuron_heads(model, copy=True).model
    runs = rules.Runs(exposed, pairs.contrast, "denoise")
    host = rules.host_of(exposed)
    for way, method in (
        (g.plain, rules.gradient),
        (g.dropped, rules.dropped),
        (g.interpolated_outputs, rules.interpolated_outputs),
        (g.held_patterns, rules.held),
        (g.softened, rules.interactions),
    ):
        here, there = way(model, pairs), method(runs)
        assert len(here) == len(there)
        for one, other in zip(here, there, strict=True):
            for layer in range(host.n_layers):
                for kind, point in (("attention", "attn.hook_z"), ("neuron", "mlp.hook_post")):
                    found = n * other[host.hook_name(layer, kind, "z")]
                    found = found.squeeze(-1) if kind == "neuron" else found
                    expected = one.by_hook[f"blocks.{layer}.{point}"]
                    assert torch.allclose(found, expected, atol=1e-8), (way, layer, kind)


@needs_hooked_transformer
def test_covectors_of_gim_add_up_at_the_embedding():
    """With held scales, the embedding's gradient is the sum over all that reads it."""
    from analyses.benchmark import gradients as g
    from analyses.benchmark import tasks

    task = tasks.problem(tasks.load("sort"), "disguised").task
    pairs = task.pairs[-1]
    for way, adds_up in ((g.softened, True), (g.held_patterns, True), (g.plain, False)):
        (gradients,) = way(task.model, pairs)
        total = sum(x.sum(0) for *_, x in g.read_covectors(task.model, gradients))
        expected = gradients.by_hook["blocks.0.hook_resid_pre"]
        assert torch.allclose(total, expected, atol=1e-8) == adds_up, way


def normalised(x, beta):
    """Unpack's division of credit: shares of a signed sum, but never of less than β Σ |x|."""
    total, size = sum(x.values()), sum(map(abs, x.values()))
    if size == 0:
        return {}
    divisor = max(abs(total), beta * size) * (1 if total >= 0 else -1)
    return {key: value / divisor for key, value in x.items()}


def paths_by_recursion(model, tokens, weights, beta):
    """Follow every path of Unpack from the metric to the embedding, one by one."""
    _, cache = model.run_with_cache(tokens[None], return_cache_object=False)
    a = {name.removeprefix("blocks."): x[0] for name, x in cache.items()}
    writes = {"embed": a["hook_embed"] + a["hook_pos_embed"]}
    for layer, block in enumerate(model.blocks):
        for head in range(model.cfg.n_heads):
            z = a[f"{layer}.attn.hook_z"][:, head]
            writes[f"L{layer}H{head}"] = z @ block.attn.W_O[head]
        writes[f"L{layer}M"] = a[f"{layer}.mlp.hook_post"] @ block.mlp.W_out
    found = Counter()

    def centred(x):
        return x - x.mean()

    def read(name, pos, layer, norm):
        module = getattr(model.blocks[layer], norm)
        return centred(writes[name][pos]) / a[f"{layer}.{norm}.hook_scale"][pos] * module.w

    def visit(name, pos, credit, depth):
        if name == "embed":
            return
        layer = int(name[1])
        order = [*writes]
        first = order.index(f"L{layer}H0") if "H" in name else order.index(name)
        before, block = order[:first], model.blocks[layer]

        def pass_on(kind, given, at, contributions):
            for source, part in normalised(contributions, beta).items():
                found[source, name, kind] += given * part
                visit(source, at, given * part, depth + 1)

        if "M" in name:
            post, pre = (a[f"{layer}.mlp.hook_{x}"][pos] for x in ("post", "pre"))
            out, key = block.mlp.W_out, block.mlp.W_in
            toward = [
                float(centred(row) @ d) if depth == 0 else float(row @ (post @ out)) for row in out
            ]
            way = sum(post[j] / pre[j] * toward[j] * key[:, j] for j in range(len(post)))
            parts = {x: float(read(x, pos, layer, "ln2") @ way) for x in before}
            pass_on("in", credit, pos, parts)
            return
        head, attn = int(name[3:]), block.attn
        values, pattern = a[f"{layer}.attn.hook_v"], a[f"{layer}.attn.hook_pattern"]
        output = sum(
            pattern[h, pos, s] * values[s, h] @ attn.W_O[h]
            for h in range(model.cfg.n_heads)
            for s in range(pos + 1)
        )
        by_source = {}
        for s in range(pos + 1):
            moved = values[s, head] @ attn.W_O[head]
            aligned = centred(moved) @ d if depth == 0 else moved @ output
            by_source[s] = float(pattern[head, pos, s] * aligned)
        q, k = (a[f"{layer}.attn.hook_{x}"][:, head] for x in "qk")
        for s, share in normalised(by_source, beta).items():
            third = credit * share / 3
            keys, queries = (
                {
                    x: [float(score(read(x, t if moves else pos, layer, "ln1"), t)) for t in every]
                    for x in before
                }
                for every in [range(pos + 1)]
                for moves, score in (
                    (True, lambda c, t: q[pos] @ (c @ attn.W_K[head])),
                    (False, lambda c, t: k[t] @ (c @ attn.W_Q[head])),
                )
            )
            for kind, at, logits in (("k", s, keys), ("q", pos, queries)):
                parts = {x: row[s] - sum(row) / len(row) for x, row in logits.items()}
                pass_on(kind, third, at, parts)
            parts = {
                x: float(read(x, s, layer, "ln1") @ attn.W_V[head] @ values[s, head])
                for x in before
            }
            pass_on("value", third, s, parts)

    last = len(tokens) - 1
    d = model.ln_final.w / a["ln_final.hook_scale"][last] * (model.W_U @ weights)
    for name in writes:
        credit = float(centred(writes[name][last]) @ d)
        found[name, "metric", "value"] += credit
        visit(name, last, credit, 0)
    return found


@needs_hooked_transformer
@torch.no_grad()
def test_credit_of_edges_is_the_sum_over_unpacks_paths():
    from analyses.tools.unpack_credit import edge_credit

    model = random_model(n_layers=2, act_fn="gelu")
    tokens, weights = torch.tensor([3, 8, 1]), torch.zeros(11, dtype=torch.float64)
    weights[[2, 5]] = torch.tensor([1.0, -1.0], dtype=torch.float64)
    for beta in (0.8, 0.3):
        expected = paths_by_recursion(model, tokens, weights, beta)
        credit = edge_credit(model, tokens, weights, beta)
        found = dict(zip(zip(*(credit[x] for x in ("source", "target", "kind")), strict=True),
                         credit["weight"], strict=True))  # fmt: skip
        assert {*expected} <= {*found}
        assert found == pytest.approx({edge: expected[edge] for edge in found}, abs=1e-9)
        assert max(map(abs, found.values())) > 0.1
