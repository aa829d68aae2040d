"""Models in a notebook that has asked for speed: `torch.set_float32_matmul_precision("high")`.

On a GPU that rounds what enters a matrix product to TF32's 10 bits (`rounded_products.py`). Nothing
is refused for it: what is held against a tolerance is computed in full precision, and what is found
differs from full precision by as much as the setting asks for, and the setting is as it was.
"""

import bridges
import pytest
import torch
from common import HAS_HOOKED_TRANSFORMER, relative, tokens
from rounded_products import RoundedProducts, tf32

from attn_only_lens import (
    InputError,
    circuits,
    compare,
    convert,
    expose_neuron_heads,
    grow,
    verify,
    viz,
)
from attn_only_lens import patching as p
from attn_only_lens.heads import host_of
from attn_only_lens.precision import full_precision, matmul_precision, rounded_products
from attn_only_lens.tolerances import LOGIT_TOLERANCE

CLEAN, CORRUPTED = tokens(0, pos=7), tokens(1, pos=7)
GIVEN = (CLEAN, CORRUPTED, p.logit_diff([7, 8], [8, 9]))
TF32 = 2e-2  # of the largest number: 2⁻¹¹ a product, through two layers and a difference of logits


def bridge():
    return expose_neuron_heads(bridges.boot("gpt2", torch.float32)).model


def gated_bridge():
    return expose_neuron_heads(bridges.boot("llama", torch.float32)).model


def converted():
    from models import build

    return convert(build("llama", torch.float32))


MODELS = [bridge, gated_bridge] + [converted] * HAS_HOOKED_TRANSFORMER


def sweep(model):
    return p.activation_patch(model, *GIVEN, sites=p.all_heads([0, 1]), progress=False)


def attribution(model):
    return p.attribution(model, *GIVEN, progress=False)


def frozen_pattern(model):
    return p.attribution(model, *GIVEN, method="frozen_pattern", progress=False)


def graph(model):
    found = circuits.attribution_graph(model, CLEAN, GIVEN[2], top=10)
    assert len(viz.circuit_view(found, model, CLEAN)) > 10_000
    return found


def paths(model):
    given = {"senders": ["L0H1", "L0N3"], "receivers": ["L1H0", "L1N29"], "part": "z"}
    found = p.path_patch(model, *GIVEN, positions=-1, progress=False, **given)
    shares = circuits.score_sources(model, CLEAN[0], "L1H0", -1, 0)["share"]
    return [*found.frame["value"], shares.sum()]


def numbers(found):
    if isinstance(found, list):
        return torch.tensor(found)
    if isinstance(found, circuits.CircuitGraph):
        return torch.tensor(found.inflow()["metric"])
    return torch.tensor(found.to_frame().sort_values(["name", "position"])["value"].to_numpy())


@pytest.mark.parametrize(
    "use", [sweep, attribution, frozen_pattern, graph, paths], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_less_precise_products_are_no_reason_to_refuse(make, use):
    expected = numbers(use(make()))
    with tf32(least=5) as products:
        model = make()
        model(CLEAN)
        before = products.rounded
        got = numbers(use(model))
        assert torch.get_float32_matmul_precision() == "high"
    assert before  # the model's own products are rounded
    assert relative(got, expected) < TF32


def test_a_comparison_is_made_by_the_users_setting():
    model = bridges.boot("native", torch.float32)
    how = {"n_patched": 3, "n_nodes": 0, "n_resamples": 3, "progress": False}
    with tf32(least=5):
        larger = grow(model, d_mlp=41, seed=0)
        found = compare(model, larger, torch.cat([CLEAN, CORRUPTED]), p.loss(), batch_size=2, **how)
    assert len(found.heads)


def test_verify_measures_the_models_and_not_the_setting():
    model = bridges.boot("llama", torch.float32)
    with tf32(), expose_neuron_heads(model):
        logits = model(CLEAN)
        report = verify(model, model, CLEAN)
    assert report.relative < LOGIT_TOLERANCE[torch.float32]
    # A control: the products are rounded where nothing is checked, by far more than that.
    assert relative(logits, model(CLEAN)) > LOGIT_TOLERANCE[torch.float32]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_sweep_with_products_in_bfloat16_says_by_how_much_it_is_off(make, tmp_path):
    """Every row is in the sample, and the error is that of the sweep held against one in full."""
    model = make()
    last = f"L{host_of(model).n_layers - 1}N29"
    how = {"sites": ["L0N3", "L0H1", "L1H0", last], "progress": False}
    exact = p.activation_patch(model, *GIVEN, **how)
    found = p.activation_patch(model, *GIVEN, **how, precision="bf16", resume=tmp_path / "parts")
    error = (found.frame["score"] - exact.frame["score"]).abs()
    # In other batches: sums in another order, a few of which round to another bfloat16.
    assert found.rounding == pytest.approx(error.max(), rel=0.3)
    assert f"bf16 (off by up to {found.rounding:.2g}" in repr(found)
    # Nothing but blocks is rounded: none runs after the last one, and these values are the same.
    whole = exact.frame["name"] == last
    assert error[whole].max() < 1e-6
    assert (error[~whole] > 1e-6).mean() > 0.9
    assert found.n_rounded >= (~whole).sum()
    found.save(tmp_path / "sweep.parquet")
    assert p.Sweep.load(tmp_path / "sweep.parquet").rounding == found.rounding
    with pytest.raises(InputError, match="precision: got null; the folder has"):
        p.activation_patch(model, *GIVEN, **how, resume=tmp_path / "parts")


def test_the_rounding_of_rows_of_prompts_is_theirs():
    """The score of a prompt is off by more than the mean of them."""
    model = expose_neuron_heads(bridges.boot("gpt2", torch.float32)).model
    how = {"sites": ["L0N3", "L0H1"], "progress": False, "per_prompt": True}
    exact, found = (p.activation_patch(model, *GIVEN, **how, precision=x) for x in (None, "bf16"))
    error = (found.frame["score"] - exact.frame["score"]).abs().max()
    assert found.rounding == pytest.approx(error, rel=0.1)


def test_products_that_cannot_be_rounded_are_refused():
    model = expose_neuron_heads(bridges.boot("gpt2")).model
    with pytest.raises(InputError) as caught:
        p.activation_patch(model, *GIVEN, precision="tf32", part="x")
    assert [each.split(";")[0] for each in caught.value.reasons] == [
        "got precision='tf32' with a model in torch.float64",
        "got precision='tf32' on cpu",
        "got part='x'",
    ]
    with pytest.raises(InputError, match="precision='fp8'"):
        p.activation_patch(model, *GIVEN, precision="fp8")


def test_tf32_is_inside_of_some_modules_alone_and_off_after_an_error():
    one, other, x = torch.nn.Linear(7, 5), torch.nn.Linear(7, 5), torch.ones(3, 7)
    with RoundedProducts() as products:
        with rounded_products([one], "tf32"):
            one(x), other(x)
            with pytest.raises(RuntimeError):
                one(x[:, :3])
            other(x)
        one(x)
    assert products.rounded == 2  # one of `one`, and its failed one
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_setting_comes_back_whatever_happens():
    def broken_off():
        with full_precision() as raised, full_precision():
            assert (raised, matmul_precision()) == (True, "ieee")
            raise KeyError

    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(KeyError):
            broken_off()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
