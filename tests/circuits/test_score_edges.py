"""Edges by two factors, held against hooks on the modules of transformers, written anew."""

from contextlib import ExitStack

import bridges
import pytest
import torch
from common import relative, tokens

from attn_only_lens import Bilinear, InputError
from attn_only_lens import patching as p
from attn_only_lens.circuits import score_edges
from attn_only_lens.heads import HeadName

NODES = ["L0H1", "L0N3", "L1H0", "L1N7"]
N_EDGES = 3 * 1 + 2 + 3 * 3 + 4 + 5  # into each of them, and into the logits
ROUNDING = 1e-6  # relative: norms of transformers compute in float32, whatever the dtype


class Plain:
    """A Llama of transformers, of which heads and neurons are slices of its projections."""

    def __init__(self):
        self.model = bridges.original("llama")
        self.layers = self.model.model.layers
        cfg = self.model.config
        self.width, self.group = cfg.head_dim, cfg.num_attention_heads // cfg.num_key_value_heads

    def out(self, name):
        """The projection that a part writes by, and the columns that are its own."""
        layer, i = self.layers[int(name[1])], int(name[3:])
        if name[2] == "N":
            return layer.mlp.down_proj, slice(i, i + 1)
        return layer.self_attn.o_proj, slice(i * self.width, (i + 1) * self.width)

    @torch.no_grad()
    def run(self, given, edits=None, seen=None):
        """Logits; `edits` by module: what is done to its output, or its input if a pair."""
        with ExitStack() as stack:
            for module, edit in (edits or {}).items():
                if isinstance(edit, tuple):
                    hook = module.register_forward_pre_hook(lambda m, x, e=edit[0]: (e(x[0]),))
                else:
                    hook = module.register_forward_hook(lambda m, x, y, e=edit: e(y))
                stack.callback(hook.remove)
            for module, kept in (seen or {}).items():
                look = module.register_forward_pre_hook(lambda m, x, k=kept: k.append(x[0].clone()))
                stack.callback(look.remove)
            return self.model(given).logits

    def inputs(self, given, modules, edits=None):
        seen = {module: [] for module in modules}
        self.run(given, edits, seen)
        return [kept[0] for kept in seen.values()]

    def z(self, given, name, edits=None):
        module, own = self.out(name)
        return self.inputs(given, [module], edits)[0][..., own]

    def put(self, given, name, z):
        """Logits when a part puts out another z."""
        module, own = self.out(name)

        def edit(x):
            x = x.clone()
            x[..., own] = z
            return x

        return self.run(given, {module: (edit,)})

    def written(self, name, z):
        module, own = self.out(name)
        return z @ module.weight[:, own].T

    def through(self, norm, given, change):
        """A change of what a norm reads, its scale held."""
        (x,) = self.inputs(given, [norm])
        scale = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        return change * norm.weight / scale

    def edits(self, given, name, kind, change):
        """Edits of what a reader projects, when what it reads changes by this."""
        layer, i = self.layers[int(name[1])], int(name[3:])
        if kind == "in":
            more = self.through(layer.post_attention_layernorm, given, change)
            modules, own = (layer.mlp.gate_proj, layer.mlp.up_proj), slice(i, i + 1)
        else:
            more = self.through(layer.input_layernorm, given, change)
            modules = (getattr(layer.self_attn, f"{kind[0]}_proj"),)
            at = i if kind == "q" else i // self.group
            own = slice(at * self.width, (at + 1) * self.width)

        def edit(y, module):
            y = y.clone()
            y[..., own] += (more @ module.weight.T)[..., own]
            return y

        return {m: lambda y, m=m: edit(y, m) for m in modules}


def largest(change):
    """Of each token, summed."""
    return float(change.abs().amax(-1).sum())


@torch.no_grad()
def by_hooks(prompts, to):
    """L, N and the exact cut of every edge, one at a time."""
    plain, n_tokens = Plain(), sum(map(len, prompts))
    rows = [row[None] for row in prompts]

    def written(given, writer, z=None):
        if writer == "embed":
            return plain.model.model.embed_tokens(given) if z is None else z
        return plain.written(writer, plain.z(given, writer) if z is None else z)

    def z_of(given, name):
        return written(given, "embed") if name == "embed" else plain.z(given, name)

    parts = ["embed", *NODES]
    means = {n: torch.cat([z_of(x, n)[0] for x in rows]).mean(0) for n in parts}
    put = {n: torch.zeros_like(mean) if to == "zero" else mean for n, mean in means.items()}
    size = {n: max(float(written(x, n).norm(dim=-1).max()) for x in rows) for n in NODES}
    local, node, exact = {}, dict.fromkeys(NODES, 0.0), {}
    for given in rows:
        whole = plain.run(given)
        for reader in NODES:
            moved = plain.put(given, reader, put[reader].expand_as(plain.z(given, reader))) - whole
            node[reader] += largest(moved) / n_tokens
        for number, reader in enumerate([*NODES, "output"]):
            for writer in parts[: number + 1]:
                own = written(given, writer)
                z = put[writer].expand_as(z_of(given, writer))
                change = written(given, writer, z) - own
                if reader == "output":
                    moved = plain.through(plain.model.model.norm, given, change)
                    cut = largest(moved @ plain.model.lm_head.weight.T) / n_tokens
                    edge = writer, reader, "in"
                    local[edge] = exact[edge] = local.get(edge, 0.0) + cut
                    continue
                for kind in ("q", "k", "value") if "H" in reader else ("in",):
                    edits, edge = plain.edits(given, reader, kind, change), (writer, reader, kind)
                    z = plain.z(given, reader, edits)
                    first = written(given, reader, z) - written(given, reader)
                    share = float(first.norm(dim=-1).sum()) / n_tokens
                    local[edge] = local.get(edge, 0.0) + share
                    cut = largest(plain.put(given, reader, z) - whole) / n_tokens
                    exact[edge] = exact.get(edge, 0.0) + cut
    return local, node, exact, size


@pytest.fixture(scope="module")
def exposed():
    return bridges.exposed_copy(bridges.boot("llama"))


@pytest.fixture(scope="module")
def prompts():
    return [tokens(3, 1, 5)[0], tokens(5, 1, 3)[0], tokens(7, 1, 5)[0]]


def test_scores_and_cuts_are_those_of_hooks(exposed, prompts):
    """Each reference, and both: keys that heads share, gated neurons, prompts of two lengths."""
    expected = {to: by_hooks(prompts, to) for to in ("zero", "mean")}
    for to in (["zero"], ["mean"], ["zero", "mean"]):
        found = score_edges(exposed, prompts, NODES, to=to, exact=N_EDGES, progress=False)
        assert len(found) == N_EDGES
        assert found["score"].is_monotonic_decreasing
        local, node, exact = (
            {key: sum(expected[each][i][key] for each in to) for key in expected[to[0]][i]}
            for i in range(3)
        )
        size = expected["zero"][3]
        for row in found.itertuples():
            edge = row.writer, row.reader, row.kind
            assert row.local == pytest.approx(local[edge], rel=ROUNDING, abs=1e-12)
            assert row.exact == pytest.approx(exact[edge], rel=ROUNDING, abs=1e-12)
            if row.reader == "output":
                assert row.score == row.local
                continue
            assert row.node == pytest.approx(node[row.reader], rel=ROUNDING, abs=1e-12)
            score = local[edge] * node[row.reader] / size[row.reader]
            assert row.score == pytest.approx(score, rel=ROUNDING, abs=1e-12)
        assert (found["exact"] > 1e-4).sum() > 20
        # the control: a score is no cut
        assert (found["score"] - found["exact"]).abs().max() > 1e-3


def test_prompts_are_cut_out_of_padding_and_as_many_cuts_are_made_as_asked(exposed, prompts):
    how = {"nodes": NODES, "progress": False}
    found = score_edges(exposed, prompts, exact=7, **how)
    assert found["exact"].notna().tolist() == [True] * 7 + [False] * (N_EDGES - 7)
    for left in (True, False):
        padded, mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)
        for i, row in enumerate(prompts):
            where = slice(7 - len(row), None) if left else slice(len(row))
            padded[i, where], mask[i, where] = row, 1
        again = score_edges(exposed, padded, mask=mask, exact=7, **how)
        assert again.equals(found)


def test_the_bar_ends_where_the_passes_do(exposed, prompts, capsys):
    """Cuts from the logits take no forward pass, and there are fewer edges than asked for."""
    found = score_edges(exposed, prompts, NODES, exact=10 * N_EDGES)
    cuts = 2 * 2 * (found["reader"] != "output").sum()  # lengths and references
    total = 2 * 2 * len(NODES) + cuts
    assert f"{total}/{total} [" in capsys.readouterr().err


def test_the_nodes_are_those_of_largest_attribution(exposed, prompts):
    metric = p.custom(lambda logits: logits[:, -1, 7].mean(), name="a logit")
    given = torch.stack([prompts[0], prompts[2]])
    found = score_edges(exposed, given, metric=metric, top=5, to=["zero"], progress=False)
    chosen = set(found["reader"]) - {"output"}
    sizes = {}
    for layer in range(2):
        for kind, count in (("H", 2), ("N", bridges.D_MLP)):
            for i in range(count):
                name = f"L{layer}{kind}{i}"
                sizes[name] = slope(exposed, given, name)
    assert chosen == set(sorted(sizes, key=sizes.get)[-5:])


def slope(model, given, name):
    """Σ |gradient · z| of a logit over tokens, the gradient by the z of all heads at once."""
    head, kept = HeadName.parse(name), []

    def keep(z, hook):
        z = z.detach().requires_grad_()
        kept.append(z)
        return z

    with torch.enable_grad(), model.hooks(fwd_hooks=[(head.hook("z", model), keep)]):
        value = model(given)[:, -1, 7].mean()
    (gradient,) = torch.autograd.grad(value, kept)
    return float((gradient * kept[0]).detach().sum(-1)[..., head.index].abs().sum())


def test_neurons_of_several_heads_are_nodes_whole(prompts):
    """Bilinear gates: close to the exact heads of the same neurons."""
    nodes, key = ["L0H1", "L0N3", "L1N7"], ["writer", "reader", "kind"]
    exact, bilinear = (
        score_edges(
            bridges.exposed_copy(bridges.boot("gpt2"), **gate),
            *(prompts, nodes),
            exact=20,
            progress=False,
        )
        .set_index(key)
        .fillna(0.0)
        for gate in ({}, {"gate": Bilinear(2)})
    )
    for column in ("local", "node", "exact"):
        one, other = (torch.tensor(x[column][exact.index].to_numpy()) for x in (exact, bilinear))
        assert relative(other, one) < 0.1


def test_what_makes_no_sense_is_refused(exposed, prompts):
    def refused(match, *nodes, **how):
        with pytest.raises(InputError, match=match):
            score_edges(exposed, prompts, *nodes, **how)

    refused(r"(?s)to='zero'.*exact=-1.*top=0", NODES, to="zero", exact=-1, top=0)
    refused(r"to=\['zero', 'zero'\]", NODES, to=["zero", "zero"])
    refused("to=3", NODES, to=3)
    refused(r"to=\[\['zero'\]\]", NODES, to=[["zero"]])
    refused("kl compares with another run", metric=p.kl())
    with torch.inference_mode():
        refused(r"torch\.inference_mode", top=7, metric=p.loss())
    refused(r"heads and neurons; expected nodes, or a metric", top=7)
    refused("got nodes and a metric", NODES, metric=p.loss())
