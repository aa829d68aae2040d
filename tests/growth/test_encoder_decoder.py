"""Tests that T5 and mT5 grow exactly; transformers alone computes every compared logit.

The models are random, and their sizes are distinct primes. Casts to float32 are removed where
logits are compared in float64.
"""

import copy
import random

import pytest
import torch
import transformers
from bridges import bridged, randomise
from common import D_MLP, D_VOCAB, needs_transformer_lens_4, relative, run_cli
from growing import in_float64, is_new, largest_difference, same_bits, state, worst_activation
from torch.nn import Parameter
from torch.nn.functional import cross_entropy

from attn_only_lens import grow, growth, load
from attn_only_lens.errors import InputError
from attn_only_lens.growth.models._grow import read
from attn_only_lens.tolerances import LOGIT_TOLERANCE

pytestmark = [pytest.mark.numeric, needs_transformer_lens_4]

EXACT, FLOAT32 = LOGIT_TOLERANCE[torch.float64], LOGIT_TOLERANCE[torch.float32]
SIZES = {"vocab_size": D_VOCAB, "d_model": 23, "d_kv": 7, "d_ff": D_MLP, "num_heads": 3}
SIZES |= {"num_layers": 2, "num_decoder_layers": 3, "relative_attention_num_buckets": 14}
SIZES |= {"relative_attention_max_distance": 13, "decoder_start_token_id": 0, "dropout_rate": 0.0}
GATED, UNSCALED = {"feed_forward_proj": "gated-gelu"}, {"tie_word_embeddings": False}
T5, MT5 = transformers.T5ForConditionalGeneration, transformers.MT5ForConditionalGeneration
# The class, whether embeddings are tied, and the configuration. (If `tie_word_embeddings` is False,
# transformers ties the embeddings, but does not divide the logits by √d_model.)
VARIANTS = {
    **{"plain": (T5, True, {}), "gated": (T5, True, GATED), "unscaled": (T5, True, UNSCALED)},
    **{"untied": (T5, False, {}), "v1.1": (T5, False, GATED | UNSCALED), "mt5": (MT5, True, GATED)},
}
ENCODER, DECODER = ({"stack": stack} for stack in ("encoder", "decoder"))
STEPS = [
    *(growth.AddNeurons(5), growth.AddNeurons(2, [0], **ENCODER), growth.AddNeurons(3, **DECODER)),
    *(growth.AddHeads(2), growth.AddHeads(1, **DECODER), growth.AddHeads(3, **ENCODER)),
    *(growth.WidenValues(4), growth.WidenValues(1, **ENCODER), growth.WidenStream(6)),
    *(growth.WidenQueriesAndKeys(2), growth.WidenQueriesAndKeys(4, heads=[1], **DECODER)),
    *(growth.InsertLayer(0, **ENCODER), growth.InsertLayer(2, **ENCODER)),
    *(growth.InsertLayer(0, **DECODER), growth.InsertLayer(3, like=1, copy=True, **DECODER)),
]
INITS = [growth.init.cancelling(0.3), growth.init.splits(0.3, 0.7), growth.init.own()]
INITS += [growth.init.normal(0.3), growth.init.copies(0.3)]
ALONE = [("d_ff", growth.AddNeurons(5, **of)) for of in ({}, ENCODER, DECODER | {"layers": [2]})]
ALONE += [("num_heads", growth.AddHeads(2, **of)) for of in ({}, ENCODER, DECODER)]
ALONE += [("d_kv", growth.WidenValues(4, **of)) for of in ({}, ENCODER, DECODER)]
ALONE += [("d_kv", growth.WidenQueriesAndKeys(4, **of)) for of in ({}, ENCODER, DECODER)]
ALONE += [("num_layers", growth.InsertLayer(at, **ENCODER)) for at in range(3)]
ALONE += [("num_decoder_layers", growth.InsertLayer(at, **DECODER)) for at in range(4)]
ALONE += [("d_model", growth.WidenStream(6))]


def model(variant="plain", dtype=torch.float64):
    kind, tied, options = VARIANTS[variant]
    made = kind(kind.config_class(**SIZES, **options)).to(dtype).eval()
    if not tied:
        made.lm_head.weight = Parameter(torch.empty_like(made.lm_head.weight))
    return randomise(made)


def run(module):
    """Return the logits of a transformers model, also if a bridge is around it."""
    generator = torch.Generator().manual_seed(5)
    prompts, written = (torch.randint(3, D_VOCAB, (2, n), generator=generator) for n in (11, 7))
    return module(input_ids=prompts, decoder_input_ids=written).logits


def step(module, optimizer):
    optimizer.zero_grad()
    cross_entropy(run(module).flatten(0, 1), torch.arange(14) % D_VOCAB).backward()
    optimizer.step()


def loaded(grown, folder, dtype=torch.float64):
    grown.save_pretrained(folder)
    assert load(folder / "provenance.json") == grown.provenance
    return transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype)


def activations(bridge):
    """Return the activations of a bridge by hook point."""
    prompts = torch.arange(3, 3 + 2 * 11).reshape(2, 11)
    return dict(bridge.run_with_cache(prompts, decoder_input=prompts[:, :7] + 5)[1])


def padded(grown):
    return any(note.startswith("padded: ") for note in grown.notes)


@pytest.fixture
def float64(monkeypatch):
    with in_float64(monkeypatch):
        yield


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_any_order_of_expansions_is_exact_and_a_way_back(variant, shift, tmp_path, float64):
    bridge = bridged(model(variant))
    before, logits = state(bridge), run(bridge.original_model)
    init = INITS[(list(VARIANTS).index(variant) + shift) % len(INITS)]
    order = random.Random(f"{variant} {shift}").sample(STEPS, len(STEPS))
    grown = grow(bridge, [*order], init=init, seed=3)
    assert padded(grown)
    assert relative(run(grown.model.original_model), logits) < EXACT
    alone = loaded(grown, tmp_path / "grown")
    kind, tied, _ = VARIANTS[variant]
    assert type(alone) is kind
    assert (alone.lm_head.weight is alone.shared.weight) == tied
    assert relative(run(alone), logits) < EXACT
    assert same_bits(grown.shrink(), bridge)
    assert all(torch.equal(before[key], value) for key, value in bridge.state_dict().items())


@pytest.mark.parametrize(("field", "expansion"), ALONE)
@torch.no_grad()
def test_each_expansion_is_exact_and_its_zeros_matter(field, expansion, tmp_path, float64):
    bridge = bridged(model("gated"))
    logits = run(bridge.original_model)
    grown = grow(bridge, expansion, init=growth.init.normal(0.3), seed=3)
    alone = loaded(grown, tmp_path / "grown")
    assert relative(run(alone), logits) < EXACT
    assert {name for name in SIZES if getattr(alone.config, name) != SIZES[name]} == {field}
    tensors, unused = read(grown.model).tensors, 0
    for zeros in grown.provenance.zeros:
        index = torch.meshgrid(*map(torch.tensor, zeros.indices), indexing="ij")
        tensors[zeros.name][index] = torch.randn(index[0].shape)
        change = relative(run(grown.model.original_model), logits)
        assert change < EXACT or change > 1e-3, zeros.name
        unused += change < EXACT  # units whose other weights are zero, too
        tensors[zeros.name][index] = 0.0
    assert (unused > 0) == padded(grown)


@torch.no_grad()
def test_old_activations_are_found(float64):
    original = model("gated")
    original.set_attn_implementation("eager")  # which shows patterns
    bridge = bridged(original)
    steps = [step for step in STEPS if not getattr(step, "copy", False)]
    grown = grow(bridge, [*steps], init=growth.init.normal(0.3))
    worst, _ = worst_activation(grown.provenance, activations(bridge), activations(grown.model))
    # TransformerLens 4.3 shows the scales of a LayerNorm for the RMSNorms of T5.
    worst = {x: y for x, y in worst.items() if "hook_scale" not in x and "normalized" not in x}
    assert max(worst.values()) < EXACT, max(worst, key=worst.get)
    counts = {"encoder": 2 * 14, "decoder": 3 * 22}
    assert {x: sum(hook.startswith(x) for hook in worst) for x in counts} == counts


def narrow(module, stack, n_heads, width, d_ff):
    """Remove all but the first heads, coordinates and neurons of a stack of gated T5."""
    for part in getattr(module, stack).modules():
        if hasattr(part, "inner_dim"):
            split = (part.n_heads, part.key_value_proj_dim)
            for linear in (part.q, part.k, part.v):
                kept = linear.weight.unflatten(0, split)[:n_heads, :width].flatten(0, 1)
                linear.weight = Parameter(kept.clone())
            kept = part.o.weight.unflatten(1, split)[:, :n_heads, :width].flatten(1)
            part.o.weight = Parameter(kept.clone())
            if part.has_relative_attention_bias:
                table = part.relative_attention_bias
                table.weight = Parameter(table.weight[:, :n_heads].clone())
            part.n_heads, part.key_value_proj_dim = n_heads, width
        elif hasattr(part, "wo"):
            for linear in (part.wi_0, part.wi_1):
                linear.weight = Parameter(linear.weight[:d_ff].clone())
            part.wo.weight = Parameter(part.wo.weight[:, :d_ff].clone())
    return module


@pytest.mark.parametrize(("grows", "stays"), [("encoder", "decoder"), ("decoder", "encoder")])
def test_a_padded_model_learns_as_one_with_stacks_of_two_sizes(grows, stays, tmp_path, float64):
    kinds = (growth.AddNeurons, growth.AddHeads, growth.WidenValues, growth.WidenQueriesAndKeys)
    grown = grow(bridged(model("gated")), [kind(4, stack=grows) for kind in kinds])
    whole = loaded(grown, tmp_path / "grown")
    apart = narrow(copy.deepcopy(whole), stays, 3, 7, D_MLP)
    logits = [run(whole)]
    assert relative(run(apart), logits[0]) < EXACT
    for module in (whole, apart):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.3)
        for _ in range(3):
            step(module, optimizer)
        logits.append(run(module))
    assert relative(logits[1], logits[2]) < 1e-11
    assert relative(logits[1], logits[0]) > 0.01
    of = {x: getattr(whole, x).block[0].layer[-1].DenseReluDense.wo.weight for x in (grows, stays)}
    assert of[grows][:, D_MLP:].all()
    assert not of[stays][:, D_MLP:].any()


@pytest.mark.parametrize("variant", ["plain", "v1.1"])
def test_training_goes_on(variant, float64):
    bridge = bridged(model(variant))
    optimizer = torch.optim.AdamW(bridge.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.3)
    step(bridge.original_model, optimizer)
    grown = grow(bridge, d_mlp=41, n_heads=5, d_head=11, d_model=29, n_layers=5)
    new = grown.optimizer(optimizer, bridge)
    step(bridge.original_model, optimizer)
    step(grown.model.original_model, new)
    assert largest_difference(bridge, grown) < 1e-12
    step(grown.model.original_model, new)  # the first step has changed the zeros
    for name, tensor in read(grown.model).tensors.items():
        added = is_new(grown.provenance, name, tensor.detach())
        # New columns of relative positions start at zero; the decoder uses half of their entries.
        assert not added.any() or (tensor[added] != 0).double().mean() > 0.4, name


@torch.no_grad()
def test_a_folder_generates_and_grows_again(tmp_path):
    original = model("gated", torch.float32)
    expected, bridge = copy.deepcopy(original), bridged(original)
    original.encoder.block[1].layer[0].dropout.p = 0.3
    original.shared.weight.requires_grad_(False)
    alone = loaded(grow(bridge, d_mlp=41, d_model=29, n_layers=3), tmp_path / "a", torch.float32)
    options = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5}
    prompt = torch.arange(3, 14)[None]
    # With a cache, T5 of transformers generates only if the decoder is not deeper than the encoder.
    written = expected.generate(prompt, use_cache=False, **options)
    assert torch.equal(alone.generate(prompt, **options), written)
    again = grow(load(tmp_path / "a"), growth.InsertLayer(0, **ENCODER)).model.original_model
    assert relative(run(again), run(expected)) < FLOAT32
    wrapped = grow(bridge, growth.InsertLayer(1, **ENCODER)).model.original_model
    assert [block.layer[0].dropout.p for block in wrapped.encoder.block] == [0.0, 0.0, 0.3]
    assert not wrapped.shared.weight.requires_grad
    assert wrapped.shared.weight is wrapped.decoder.embed_tokens.weight


def test_the_command_inserts_layers_into_a_stack(tmp_path):
    original = model("gated", torch.float32)
    original.save_pretrained(tmp_path / "small")
    larger, insert = tmp_path / "larger", ("--insert", 0, "--copy")
    result = run_cli("grow", tmp_path / "small", larger, *insert)
    assert "--stack encoder" in result.output
    for options in (("--d-mlp", 41, "--stack", "encoder"), (*insert, "--stack", "middle")):
        assert run_cli("grow", tmp_path / "small", larger, *options).exit_code == 2
    assert not larger.exists()
    result = run_cli("grow", tmp_path / "small", larger, *insert, "--stack", "decoder")
    assert result.exit_code == 0, result.output
    alone = transformers.AutoModelForSeq2SeqLM.from_pretrained(larger)
    assert (len(alone.encoder.block), len(alone.decoder.block)) == (2, 4)
    assert relative(run(alone), run(original)) < FLOAT32


def test_names():
    steps = [growth.InsertLayer(1, **DECODER), growth.AddHeads(1), growth.InsertLayer(0, **ENCODER)]
    provenance = grow(bridged(model()), [*steps, growth.AddNeurons(1)]).provenance
    names = {"E1N17": "E2N17", "D0H2": "D0H2", "D1C2": "D2C2", "D2": "D3"}
    assert {name: provenance[name] for name in names} == names
    assert {provenance.old_of(new): new for new in names.values()} == names
    assert provenance.old_of("D1C0") is None
    assert provenance.new_layers == ("E0", "D1")
    assert {"E1H3", "D0H3", "D0C3", "D1C0"} < set(provenance.new_heads)
    kinds = provenance.to_frame().kind.value_counts().to_dict()
    assert kinds == {"layer": 7, "head": 28, "cross-attention head": 16, "neuron": 7 * 38}
    for unknown in ("E2", "L0H0", "E0C0", "D3", "D0H3", 7):
        with pytest.raises(InputError, match="got "):
            provenance[unknown]


def test_own_is_the_distribution_of_transformers():
    larger = (
        SIZES
        | {"d_model": 64, "num_heads": 8, "d_kv": 16}
        | dict.fromkeys(("num_layers", "num_decoder_layers"), 1)
    )
    config = T5.config_class
    small = bridged(T5(config(**larger)))
    grown = grow(small, d_mlp=256, n_layers=2, init=growth.init.cancelling())
    expected = read(bridged(T5(config(**larger | {"d_ff": 256})))).tensors
    for name, tensor in read(grown.model).tensors.items():
        of_new_layer = grown.provenance.old_name(name) is None and ".W_" in name
        if of_new_layer and not name.endswith(".attn.W_O"):  # zero, because positions differ
            std = expected[grown.provenance.source_of(name)].std().item()
            assert tensor.std().item() == pytest.approx(std, rel=0.1), name


REFUSED = [
    (growth.AddNeurons(-1, [0]), ["got n=-1", "pass stack="]),
    (growth.AddNeurons(1, stack="middle"), ["got stack='middle'"]),
    (growth.WidenValues(1, [2], **ENCODER), ["got layers [2]; expected layers 0 … 1"]),
    (growth.AddHeads(1, [0], **DECODER), ["expected all layers of the stack"]),
    (growth.AddHeads(3, into_groups=True), ["has no grouped heads"]),
    (growth.InsertLayer(0), ["pass stack="]),
    (growth.InsertLayer(4, like=3, **DECODER), ["got at=4; expected 0 … 3", "got like=3"]),
    ({"n_layers": 2, "d_mlp": 31}, ["the decoder has 3", "got d_mlp=31"]),
]


@pytest.mark.parametrize(("wanted", "reasons"), REFUSED)
def test_refused(wanted, reasons):
    with pytest.raises(InputError) as error:
        grow(bridged(model()), **wanted if isinstance(wanted, dict) else {"expansion": wanted})
    assert all(reason in str(error.value) for reason in reasons)


def test_neurons_that_would_learn_are_not_padding(float64):
    """sigmoid(0) is not 0, so output weights of neurons of zeros would get gradients."""
    config = T5.config_class(**SIZES, feed_forward_proj="sigmoid")
    bridge = bridged(randomise(T5(config).double().eval()))
    with pytest.raises(InputError, match=r"sigmoid\(0\) is 0\.5, so neurons of zeros"):
        grow(bridge, [growth.AddNeurons(5, **ENCODER)])
    both = grow(bridge, [growth.AddNeurons(5), growth.AddHeads(1, **DECODER)])
    with torch.no_grad():
        models = (both.model.original_model, bridge.original_model)
        assert relative(*map(run, models)) < EXACT


def test_an_embedding_of_its_own_is_refused():
    changed = model()
    changed.decoder.embed_tokens.weight = Parameter(changed.shared.weight.detach().clone())
    with pytest.raises(InputError, match=r"decoder\.embed_tokens\.weight is not shared.weight"):
        grow(bridged(changed), d_mlp=41)
