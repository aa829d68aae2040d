"""Tests of sites and positions: each name once and in order; and refusals."""

import bridges
import pytest
import torch
from common import D_MLP, tokens

from attn_only_lens import Bilinear, Contrast
from attn_only_lens import patching as p
from attn_only_lens.engine.positions import aligned, length_reasons, resolve_positions
from attn_only_lens.engine.sites import resolve_sites
from attn_only_lens.errors import InputError

BATCH, POS = 3, 7


MODEL = bridges.exposed_copy(bridges.boot("llama"))


def names(resolved):
    return [name for group in resolved for name in group.names]


def test_all_heads_or_some_in_order_with_their_indices():
    groups = resolve_sites(MODEL, "all")
    expected = [f"L0H{i}" for i in range(2)] + [f"L0N{i}" for i in range(D_MLP)]
    assert names(groups) == expected + [name.replace("L0", "L1") for name in expected]
    assert names(resolve_sites(MODEL, "heads")) == ["L0H0", "L0H1", "L1H0", "L1H1"]
    assert names(resolve_sites(MODEL, ["neurons", "heads"])) == names(groups)
    groups = resolve_sites(MODEL, p.Sites("neurons", layers=[1, 0]))
    assert [(group.layer, group.names[-1]) for group in groups] == [(0, "L0N36"), (1, "L1N36")]
    assert groups[1].index.tolist() == list(range(D_MLP))
    groups = resolve_sites(MODEL, ["L1N31", "L0N7", "L1H1", "L1N29"])
    assert names(groups) == ["L0N7", "L1H1", "L1N29", "L1N31"]
    assert [group.index.tolist() for group in groups] == [[7], [1], [29, 31]]
    bilinear = bridges.exposed_copy(bridges.boot("gpt2"), gate=Bilinear(4))
    assert len(names(resolve_sites(bilinear, p.Sites("neurons", layers=0)))) == 4 * D_MLP
    with pytest.raises(InputError, match="neurons 0 to 147"):
        resolve_sites(bilinear, ["L1N148"])


def test_refused_with_all_reasons():
    bad = {
        "5.3": "got '5.3'; expected 'L5H3'",
        "L3N0": "layers 0 to 1",
        "L0N37": "neurons 0 to 36",
        "L0H2": "attention heads 0 to 1",
        "L0N1.0": "got 'L0N1.0'; expected 'L5H3'",
        7: "got 7",
    }
    with pytest.raises(InputError, match="L0N1 more than once") as caught:
        resolve_sites(MODEL, ["L0N1", "L0N1", *bad])
    assert len(caught.value.reasons) == len(bad) + 1
    assert all(reason in str(caught.value) for reason in bad.values())
    for heads, message in (
        ([], r"expected only words \('all', 'heads', 'neurons'"),
        (["heads", "L0N1"], r"got 'heads'; expected only words \("),
        (["skips", "features"], "got heads of kind feature or skip; these layers have n"),
        (p.Sites("heads", layers=[1, 3]), "got layer 3"),
    ):
        with pytest.raises(InputError, match=message):
            resolve_sites(MODEL, heads)
    with pytest.raises(InputError, match="got ") as caught:
        p.Sites("all", layers=[-1, True, 2, 2, "0"])
    assert len(caught.value.reasons) == 4


def pair_of(lengths, side="right", roles=None):
    clean = tokens(batch=BATCH, pos=POS)
    corrupted = (clean + 1) % 41
    mask = torch.zeros(BATCH, POS)
    for row, length in zip(mask, lengths, strict=True):
        row[slice(length) if side == "right" else slice(POS - length, None)] = 1
    return Contrast(clean, corrupted, p.loss(), mask=mask, roles=roles or {}).pair(MODEL)


def shown(sets):
    return {position_set.label: position_set.chosen.nonzero().tolist() for position_set in sets}


def test_each_and_all_leave_padding_out():
    pair = pair_of([5, 2, 3])
    expected = {0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 2], 3: [0], 4: [0]}
    assert shown(resolve_positions(pair, "each")) == {
        pos: [[prompt, pos] for prompt in prompts] for pos, prompts in expected.items()
    }
    (whole,) = resolve_positions(pair, "all")
    assert torch.equal(whole.chosen, pair.real)


@pytest.mark.parametrize(("side", "ends"), [("right", [4, 1, 2]), ("left", [6, 6, 6])])
def test_from_the_end(side, ends):
    last = [[i, end] for i, end in enumerate(ends)]
    before = [[i, end - 1] for i, end in last]
    assert shown(resolve_positions(pair_of([5, 2, 3], side), [-1, -2])) == {-1: last, -2: before}


def test_numbers():
    pair = pair_of([5, 2, 3])
    assert shown(resolve_positions(pair, 1)) == {1: [[0, 1], [1, 1], [2, 1]]}
    assert list(shown(resolve_positions(pair, [1, 0]))) == [1, 0]
    bad = [0, 0, 7, -8, True, "3", 6, -1]
    with pytest.raises(InputError, match="got -1 and 6, which are the same") as caught:
        resolve_positions(pair_of([7, 7, 7]), bad)
    assert len(caught.value.reasons) == 6
    for position in (2, -3):
        with pytest.raises(InputError, match=r"in prompts \[1\]"):
            resolve_positions(pair, position)
    with pytest.raises(InputError, match="expected 'each', 'all', 'roles', names of roles"):
        resolve_positions(pair, 1.5)
    sites = p.Sites(["L1N3@-1", "L0H1", "L0H1@end of text"])
    assert sites.split() == [("L1N3", -1), ("L0H1", None), ("L0H1", "end of text")]
    with pytest.raises(InputError, match="got 'L1N3@01'; expected a position after @") as caught:
        p.Sites(["L1N3@", "L1N3@01", "L1N3@1@2", "L1N3@4"]).split()
    assert len(caught.value.reasons) == 3


@pytest.mark.parametrize("side", ["right", "left"])
def test_prompts_of_different_lengths_have_roles_or_are_refused(side):
    roles = {"end": -1, "first": 0}
    pair, without = pair_of([5, 2, 3], side, roles), pair_of([5, 2, 3], side)
    assert aligned(pair, "each") == "roles"
    with pytest.raises(InputError, match=r"prompt 0 has 5 tokens, and prompt 1 has 2, .*roles={'"):
        aligned(without, "each")
    assert "the contrast's roles: end, first" in length_reasons(pair)[0]
    assert length_reasons(pair, only_columns=True)[0].endswith("prompts of the same length")
    for positions in ("all", "end", -1, [-1, -2], []):
        assert aligned(pair, positions) is positions
    for positions in (0, [-1, 1], range(2), ["end", 1]):
        with pytest.raises(InputError, match=r"expected prompts of the same length, positions"):
            aligned(pair, positions)
    same = pair_of([3, 3, 3], side, roles)
    for positions in ("each", 0, [-1, 1]):
        assert aligned(same, positions) is positions


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_token_belongs_to_the_last_of_its_roles(side):
    """Compare with a list of pairs (prompt, token), counted without padding."""
    lengths, roles = [5, 2, 3], {"a": [4, 1, 1], "b": [0, 1, 1], "c": -1, "d": [4, 1, 2]}
    pair = pair_of(lengths, side, roles)

    def at(*tokens):
        start = [0, 0, 0] if side == "right" else [POS - n for n in lengths]
        return [[prompt, start[prompt] + token] for prompt, token in tokens]

    expected = {"b": at((0, 0), (2, 1)), "d": at((0, 4), (1, 1), (2, 2))}
    assert shown(resolve_positions(pair, "roles")) == expected
    alone = {"a": at((0, 4), (1, 1), (2, 1)), "c": expected["d"]}
    for name, places in alone.items():
        assert shown(resolve_positions(pair, name)) == {name: places}
    # Names decide in the order of the contrast, and not in their own.
    assert shown(resolve_positions(pair, ["b", "a"])) == {
        "b": at((0, 0), (1, 1), (2, 1)),
        "a": at((0, 4)),
    }
    with pytest.raises(InputError, match="got 'a', 'c', whose tokens all have later roles, too"):
        resolve_positions(pair, list(roles))
    # A half of the prompts may lack a role, so that a circuit of all prompts also runs on it.
    half = pair.of_prompts([1], cut=False)
    assert shown(resolve_positions(half, ["b", "d"])) == {"b": [], "d": [[0, at((1, 1))[0][1]]]}


def test_roles_that_are_none():
    bad = {"a": [1, 2, 0], "b": [1, 1], "all": 0, 3: -1, "c": [4, -3, 1.5], "d": -1, "h": True}
    with pytest.raises(InputError, match="b: got 2 positions; expected one whole number") as caught:
        Contrast(["w"] * 3, None, p.loss(), roles=bad)
    assert len(caught.value.reasons) == 5
    pair = pair_of([5, 2, 3], roles={"a": [1, 2, 0], "d": -1, "e": [4, 1, 3]})
    with pytest.raises(InputError, match="a: got 2 in prompt 1; expected a number from -2 to 1"):
        resolve_positions(pair, "roles")
    assert resolve_positions(pair, "d")  # only the given roles are read
    with pytest.raises(InputError, match="got the role 'end'; expected a role of the contrast: a"):
        resolve_positions(pair, ["end", "d"])
    with pytest.raises(InputError, match="got positions='roles', but the contrast has no roles"):
        resolve_positions(pair_of([5, 2, 3]), "roles")
