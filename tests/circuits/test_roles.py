"""Tests of circuits whose sites are at roles, for prompts of different lengths.

The oracle runs every prompt alone, without padding, with a plain hook for each ablated site.
"""

from dataclasses import replace

import bridges
import numpy as np
import pandas as pd
import pytest
import torch
from common import mlp_hook, tokens
from page_of_circuit import read_back

from attn_only_lens import Contrast, HeadName, Work, explain, viz
from attn_only_lens import patching as p
from attn_only_lens.circuits import Search, attribution_graph, discover, evaluate, faithfulness
from attn_only_lens.errors import InputError
from attn_only_lens.patching.site_groups import site_groups, site_rows

pytestmark = pytest.mark.numeric

METRIC = p.logit_diff(7, 11)
LENGTHS = (7, 5, 6)
ROLES = {"subject": [1, 2, 1], "verb": [4, 3, 3], "end": -1}
SHARED = {"subject": [1, 2, 1], "verb": [4, 4, 1], "end": -1}  # in prompts 1 and 2
OTHERS = {"subject": [2, 1, 3], "verb": [4, 3, 4], "end": -1}
SITES = ["L0H1", "L0N3", "L1H0", "L1N5"]
BY_ROLE, ALONE = p.Sites(SITES, "roles"), Search(n_random=0)
EXACT = 1e-9


@pytest.fixture(scope="module")
def model():
    return bridges.exposed_copy(bridges.boot("gpt2"))


def prompts(roles, seed=0):
    """Return three pairs of unequal lengths, padded on the right, and the unpadded pairs."""
    clean = tokens(seed, batch=3, pos=7)
    corrupted = clean.clone()
    for row, place in enumerate(roles["subject"]):
        corrupted[row, place] = (clean[row, place] + 7) % 41
    mask = torch.zeros(3, 7, dtype=torch.long)
    for row, n in enumerate(LENGTHS):
        mask[row, :n] = 1
    pairs = [(clean[i, :n], corrupted[i, :n]) for i, n in enumerate(LENGTHS)]
    return Contrast(clean * mask, corrupted * mask, METRIC, roles=roles, mask=mask), pairs


def sites_of(frame):
    """Return the sites (name, role) of a frame."""
    return list(frame[["name", "position"]].itertuples(index=False, name=None))


def every_site(model, contrast):
    """Return all sites of a model at roles."""
    groups = site_groups(model, contrast.pair(model), p.Sites(positions="roles"), "z")
    return set(sites_of(site_rows(groups)))


def place_of(pairs, roles, i, role):
    """Return the role's token, or None if a later role has the same token."""
    at = {x: len(pairs[i][0]) - 1 if x == "end" else roles[x][i] for x in roles}
    return at[role] if [x for x in at if at[x] == at[role]][-1] == role else None


@torch.no_grad()
def ablating(model, pairs, roles, gone, ablation):
    """Return hooks for every prompt that ablate the `gone` sites (name, role)."""
    caches, hooks_of_prompts = [model.run_with_cache(clean)[1] for clean, _ in pairs], []

    def place(i, role):
        return place_of(pairs, roles, i, role)

    for i, (_, corrupted) in enumerate(pairs):
        source, hooks = model.run_with_cache(corrupted)[1], []
        for name, role in gone:
            head = HeadName.parse(name)
            hook_name = f"blocks.{head.layer}.attn.hook_z"
            if head.kind == "neuron":
                hook_name = mlp_hook("z", head.layer)
            if (pos := place(i, role)) is None:
                continue
            having = [j for j in range(len(pairs)) if place(j, role) is not None]

            def ablate(z, hook, index=head.index, pos=pos, source=source, role=role, having=having):
                z = z.clone()
                z[:, pos, index] = {
                    "resample": lambda: source[hook.name][:, pos, index],
                    "positional_mean": lambda: (
                        sum(caches[j][hook.name][0, place(j, role), index] for j in having)
                        / len(having)
                    ),
                }[ablation]()
                return z

            hooks.append((hook_name, ablate))
        hooks_of_prompts.append(hooks)
    return hooks_of_prompts


@torch.no_grad()
def with_gone(model, pairs, roles, gone, ablation):
    """Return the mean logit difference with the `gone` sites (name, role) ablated."""
    values, all_hooks = [], ablating(model, pairs, roles, gone, ablation)
    for (clean, _), hooks in zip(pairs, all_hooks, strict=True):
        logits = model.run_with_hooks(clean, fwd_hooks=hooks)[0, -1]
        values.append((logits[7] - logits[11]).item())
    return sum(values) / len(values)


@pytest.mark.parametrize("ablation", ["positional_mean", "resample"])
def test_the_curve_is_what_plain_hooks_make_of_it(model, ablation):
    roles = SHARED
    contrast, pairs = prompts(roles)
    ranking = p.attribution(model, contrast, sites=BY_ROLE)
    how = {"ablation": ablation, "shares": (0.0, 0.4, 1.0), "n_random": 0}
    curve = faithfulness(model, contrast, ranking, **how)
    rows = ranking.frame.assign(size=ranking.effect.abs())
    sites = sites_of(rows.sort_values("size", ascending=False, kind="stable"))
    assert len(sites) == len(SITES) * len(ROLES)

    def value(gone):
        return with_gone(model, pairs, roles, gone, ablation)

    whole, nothing = value([]), value(sites)
    assert abs(whole - nothing) > 1e-3
    assert (curve.whole, curve.nothing) == pytest.approx((whole, nothing), abs=EXACT)
    for row in curve.frame.itertuples():
        kept = (value(sites[row.n_sites :]) - nothing) / (whole - nothing)
        others = (value(sites[: row.n_sites]) - nothing) / (whole - nothing)
        assert row.faithfulness == pytest.approx(kept, abs=1e-6)
        assert row.completeness == pytest.approx(others, abs=1e-6)


def test_circuits_are_found_and_measured_on_prompts_of_other_lengths(model):
    contrast, pairs = prompts(ROLES)
    circuit = discover(model, contrast, sites=BY_ROLE, search=Search(n_random=1))
    assert set(circuit.frame["position"]) <= set(ROLES)
    assert 0 < len(circuit) < circuit.n_sites == len(SITES) * len(ROLES)
    chosen = set(sites_of(circuit.frame))
    every = {(name, role) for name in SITES for role in ROLES}

    def faithful(pairs, roles):
        values = (
            with_gone(model, pairs, roles, gone, "resample") for gone in ((), every - chosen, every)
        )
        whole, kept, nothing = values
        return (kept - nothing) / (whole - nothing)

    assert circuit.faithfulness == pytest.approx(faithful(pairs, ROLES), abs=1e-6)
    contrast, pairs = prompts(OTHERS, seed=3)
    result = evaluate(model, circuit, contrast)
    assert result.faithfulness == pytest.approx(faithful(pairs, OTHERS), abs=1e-6)
    # Control: other role positions give another value.
    moved = replace(contrast, roles=OTHERS | {"verb": [3, 2, 2]})
    assert abs(evaluate(model, circuit, moved).faithfulness - result.faithfulness) > 1e-4


def test_a_function_of_logits_reads_each_prompts_last_token(model):
    """A custom metric of padded prompts is the mean over prompts that run alone."""
    contrast, pairs = prompts(ROLES)
    metric = p.custom(lambda logits: logits[:, -1, 7] - logits[:, -1, 11], name="by hand")
    contrast = on_the_left(replace(contrast, metric=metric))

    def numbers(contrast):
        some, edges = p.Sites(SITES[:2], "roles"), p.Edges(p.Sites(SITES[:2], "roles"), ["L1N5"])
        results = [
            p.activation_patch(model, contrast, sites=some),
            p.attribution(model, contrast, sites=BY_ROLE, method=p.Estimate(budget=0)),
            p.path_patch(model, contrast, edges),
        ]
        graph = attribution_graph(model, contrast, positions="roles")
        ends = [results[0].clean_value, results[0].corrupted_value, graph.value]
        return [*(result.frame["value"] for result in results), ends]

    got, alone = numbers(contrast), []
    for i, pair in enumerate(pairs):
        roles = {role: -1 if role == "end" else [ROLES[role][i]] for role in ROLES}
        alone.append(numbers(Contrast(*pair, metric, roles=roles)))
    for values, *of_prompts in zip(got, *alone, strict=True):
        np.testing.assert_allclose(values, np.mean(of_prompts, axis=0), rtol=0, atol=EXACT)


def test_a_role_without_tokens_of_its_own_is_left_out(model):
    contrast, _ = prompts(ROLES)
    more = replace(contrast, roles={"last": -1, "third": ROLES["verb"]} | ROLES)
    circuit, another = (
        discover(model, some, sites=BY_ROLE, search=ALONE) for some in (contrast, more)
    )
    assert circuit.candidates == another.candidates == p.Sites(SITES, tuple(ROLES))
    pd.testing.assert_frame_equal(circuit.frame, another.frame)
    graph, other_graph = (attribution_graph(model, some, top=7) for some in (contrast, more))
    assert graph.roles == other_graph.roles
    pd.testing.assert_frame_equal(graph.edges, other_graph.edges)


def on_the_left(contrast):
    """Return the same prompts, padded on the left."""
    shifts = [max(LENGTHS) - n for n in LENGTHS]
    parts = {name: getattr(contrast, name) for name in ("clean", "corrupted", "mask")}
    rolled = {
        name: torch.stack(list(map(torch.roll, rows, shifts))) for name, rows in parts.items()
    }
    return replace(contrast, **rolled)


def test_an_explanation_by_role_is_that_of_plain_hooks_with_padding_on_either_side(model):
    roles = SHARED
    contrast, pairs = prompts(roles)
    quick = {"strong": 1.0, "faithfulness": 0.5}
    why, other = (explain(model, x, **quick) for x in (contrast, on_the_left(contrast)))
    every, chosen = every_site(model, contrast), set(sites_of(why.circuit.frame))
    assert 0 < len(chosen) < len(every) == why.circuit.n_sites

    def value(gone, pairs=pairs):
        return with_gone(model, pairs, roles, gone, "resample")

    swapped = [pair[::-1] for pair in pairs]
    whole, least, kept, nothing = value([]), value([], swapped), value(every - chosen), value(every)
    assert why.circuit.faithfulness == pytest.approx((kept - nothing) / (whole - nothing), abs=1e-6)
    assert why.graph.value == pytest.approx(kept - least, abs=1e-6)
    table = why.table()
    of_circuit = table[table["group"] == "circuit"]
    assert set(of_circuit["id"]) == {f"{name}@{role}" for name, role in chosen}
    for row in table.head(3).itertuples():
        site = [tuple(row.id.split("@"))]
        denoised = (value(site, swapped) - least) / (whole - least)
        noised = (whole - value(site)) / (whole - least)
        assert (row.denoise, row.noise) == pytest.approx((denoised, noised), abs=1e-6)
    # The token is that of the shown prompt, and "" if the role has none of its own there.
    for row in table.itertuples():
        place = place_of(pairs, roles, why.shown, row.id.split("@")[1])
        assert row.token == ("" if place is None else str(pairs[why.shown][0][place].item()))
    assert why.does == other.does
    assert why.labels == other.labels
    pd.testing.assert_frame_equal(table, other.table(), rtol=1e-6, check_exact=False)


@pytest.mark.parametrize(
    ("roles", "of_circuit"), [(SHARED, False), (ROLES, True)], ids=["whole", "circuit"]
)
@torch.no_grad()
def test_a_page_by_role_shows_plain_runs_of_the_shown_prompt(model, roles, of_circuit):
    """The clean run of a circuit is its own: plain hooks ablate all other sites."""
    contrast, pairs = prompts(roles)
    all_hooks, sites = [[]] * len(pairs), None
    if of_circuit:
        sites = discover(model, contrast, sites=p.Sites(positions="roles"), search=ALONE)
        gone = every_site(model, contrast) - set(sites_of(sites.frame))
        assert gone
        all_hooks = ablating(model, pairs, roles, gone, "resample")
    graph = attribution_graph(model, contrast, sites=sites, positions="roles")
    moved = 0
    for padded, prompt in ((x, i) for x in (contrast, on_the_left(contrast)) for i in range(3)):
        data = read_back(viz.circuit_view(graph, model, padded, prompt=prompt))
        with model.hooks(fwd_hooks=all_hooks[prompt]):
            _, clean = model.run_with_cache(pairs[prompt][0])
        _, corrupted = model.run_with_cache(pairs[prompt][1])
        texts = [list(map(str, side.tolist())) for side in pairs[prompt]]
        assert [data["tokens"], data["corrupted"]] == texts
        at = {role: place_of(pairs, roles, prompt, role) for role in graph.roles}
        assert dict(zip(data["columns"], data["places"], strict=True)) == at
        names = [
            "–" if i is None else " / ".join(dict.fromkeys((texts[0][i], texts[1][i])))
            for i in at.values()
        ]
        assert data["below"] == names
        for node in graph.heads.itertuples():
            head, i = HeadName.parse(node.name), at[node.id.split("@")[1]]
            of_neuron, of_node = (data["details"].get(key, {}) for key in (node.name, node.id))
            assert ("writes" in of_node) == (i is not None)
            for side, cache in (("", clean), ("corrupted_", corrupted)):
                pattern = cache[head.hook("pattern", model)][0, head.index]
                if head.kind == "neuron":
                    z = cache[head.hook("z", model)][0, :, head.index, 0]
                    assert of_neuron[f"{side}z"] == pytest.approx(z.tolist(), rel=6e-3, abs=1e-9)
                    assert of_neuron[f"{side}pattern"] == pytest.approx(
                        pattern[:, 0].tolist(), abs=6e-4
                    )
                elif i is None:
                    assert f"{side}pattern" not in of_node
                else:
                    row = pattern[i].tolist()
                    assert of_node[f"{side}pattern"] == pytest.approx(row, abs=6e-4)
                    moved += side == "" and max(abs(pattern[i] - pattern[0])) > 0.01
    assert moved  # control: another row would differ


def test_numbers_as_positions_of_prompts_of_different_lengths(model, monkeypatch):
    """Circuits, graphs and means of sweeps refuse them before any run."""
    contrast, _ = prompts({"subject": [1, 2, 1]})
    contrast = replace(contrast, roles={})
    whole = discover(model, contrast, sites=p.Sites(SITES, "all"), search=ALONE)
    match = r"prompt 0 has 7 tokens, and prompt 1 has 5, .*"
    refused = {
        match + r"roles: Contrast\(…, roles=": [
            lambda: discover(model, contrast, sites=["L0H1@2"]),
            lambda: explain(model, contrast),
            lambda: attribution_graph(model, contrast),
        ],
        match + r"per_prompt=True, .* end \(-1\), or (the contrast's )?roles: ": [
            lambda: p.activation_patch(model, contrast, sites=["L0H1@2", "L0N3@-1"]),
        ],
    }
    with monkeypatch.context() as patch:
        # The test of padding, whose result is remembered, is the only run.
        patch.setattr("attn_only_lens.engine.prompts.ignores_padding", lambda *_: True)
        patch.setattr(type(model), "forward", lambda *args, **kwargs: pytest.fail("a run"))
        for words, calls in refused.items():
            for call in calls:
                with pytest.raises(InputError, match=words):
                    call()
    evaluate(model, whole, contrast)  # positions="all" need no numbers


def test_names_say_their_role(model):
    """`L0N3@subject` selects L0N3 at the role in sweeps, circuits and elsewhere."""
    contrast, _ = prompts(ROLES)
    every = p.Sites(["L0N3", "L0H1", "L1H0"], "roles")
    every = p.activation_patch(model, contrast, sites=every).frame
    names, key = ["L0N3@subject", "L1H0@end", "L0H1"], ["name", "position"]
    some = p.activation_patch(model, contrast, sites=names).frame
    expected = {("L0N3", "subject"), ("L1H0", "end")} | {("L0H1", role) for role in ROLES}
    assert set(sites_of(some)) == expected
    both = some.merge(every, on=key, how="left")
    assert abs(both["score_x"] - both["score_y"]).max() < EXACT
    circuit = discover(model, contrast, sites=p.Sites(names, "roles"), search=ALONE)
    assert circuit.n_sites == len(expected)
    assert set(sites_of(circuit.frame)) <= expected
    with pytest.raises(InputError, match="got the role 'object'; expected a role of the contrast:"):
        p.activation_patch(model, contrast, sites=["L0N3@object"])
    with pytest.raises(InputError, match="L0N3@end more than once"):
        p.activation_patch(model, contrast, sites=p.Sites(["L0N3", "L0N3@end"], "roles"))


def test_circuits_of_chunks_are_those_of_all_prompts(model):
    """The prompts have different weights, and the chunks have different first changes."""
    contrast, _ = prompts(ROLES)
    how = {"sites": p.Sites(SITES[:2], "roles"), "faithfulness": 0.5, "search": ALONE}
    whole = discover(model, contrast, **how)
    by_prompt = discover(model, contrast, **how, work=Work(prompts_at_once=1))
    pd.testing.assert_frame_equal(whole.frame, by_prompt.frame, rtol=1e-6)
    loss = replace(contrast, metric=p.loss())
    first, second = (evaluate(model, whole, loss, work=Work(prompts_at_once=n)) for n in (None, 2))
    for name in ("faithfulness", "completeness", "error", "standard_error"):
        assert getattr(first, name) == pytest.approx(getattr(second, name), rel=1e-6)


def test_prompts_of_a_loss_weigh_by_their_tokens(model):
    """Compare with weighted sums over prompts, each of which is evaluated alone."""
    lengths, end = (7, 5, 3, 6), {"subject": 1, "end": -1}
    generator = torch.Generator().manual_seed(0)
    corrupted = [torch.randint(41, (n,), generator=generator) for n in lengths]
    clean = [torch.cat([row[:1], (row[1:2] + 7) % 41, row[2:]]) for row in corrupted]
    pairs, loss = list(zip(clean, corrupted, strict=True)), p.loss()
    contrast = Contrast(clean, corrupted, loss, roles=end)
    singles = [Contrast(*pair, loss, roles=end) for pair in pairs]
    circuit = discover(model, contrast, sites=BY_ROLE, faithfulness=0.5, search=ALONE)
    weights = np.array(lengths) - 1

    def of(circuit, prompts, **numbers):
        """Return sums over prompts, and the standard error of their ratio."""
        results = [evaluate(model, circuit, singles[i]) for i in prompts]
        w = weights[prompts] / weights[prompts].sum()
        spans = np.array([result.whole - result.nothing for result in results])
        left = np.array([result.faithfulness for result in results]) * spans
        share, n = (w @ left) / (w @ spans), len(prompts)
        error = np.sqrt((w**2 * (left - share * spans) ** 2).sum() * n / (n - 1)) / abs(w @ spans)
        return share, error, w @ abs(left - spans) / (w @ abs(spans))

    result = evaluate(model, circuit, contrast)
    got = result.faithfulness, result.standard_error, result.error
    assert got == pytest.approx(of(circuit, range(len(lengths))), rel=1e-6)
    graph = attribution_graph(model, contrast, positions="roles", top=5)
    nodes = list(graph.heads["id"])
    alone = [attribution_graph(model, one, positions="roles", sites=nodes) for one in singles]
    values = np.array([one.heads["attribution"] for one in alone])
    w = (weights / weights.sum())[:, None]
    mean, n = (w * values).sum(axis=0), len(lengths)
    np.testing.assert_allclose(graph.heads["attribution"], mean, rtol=1e-6)
    errors = np.sqrt((w**2 * (values - mean) ** 2).sum(axis=0) * n / (n - 1))
    np.testing.assert_allclose(graph.heads["error"].to_numpy(), errors, rtol=1e-6)
