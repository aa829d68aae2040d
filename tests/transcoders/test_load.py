"""Tests of files from circuit-tracer, Gemma Scope and SAELens, and of those packages' formulas.

The oracles loop over features in float64, with the tensors in the layout of the file. They follow
`SingleLayerTranscoder` (circuit_tracer 0.5.0) and `Transcoder`, `SkipTranscoder`,
`JumpReLUTranscoder` and `TopKSAE` (sae_lens 6.54).
"""

import numpy as np
import pytest
import torch
import yaml
from drawn_transcoders import drawn
from transcoder_files import CONFIG, random, refused, write

from attn_only_lens import transcoders as t
from attn_only_lens.errors import CheckpointError, InputError

D, F, N = 7, 13, 11
EXACT = 1e-12  # float64 sums of 13 terms of size 1
SAELENS = {
    "architecture": "transcoder",
    "d_in": D,
    "d_out": D,
    "d_sae": F,
    "dtype": "float32",
    "apply_b_dec_to_input": False,
    "normalize_activations": "none",
    "reshape_activations": "none",
    "metadata": {
        "sae_lens_version": "6.54.12",
        "hook_name": "blocks.5.ln2.hook_normalized",
        "hook_name_out": "blocks.5.hook_mlp_out",
    },
}


def circuit_tracer(seed=0, skip=True, threshold=True, d=D, f=F):
    stored = {
        "W_enc": random(f, d, seed=seed),
        "W_dec": random(f, d, seed=seed + 1),
        "b_enc": random(f, seed=seed + 2),
        "b_dec": random(d, seed=seed + 3),
    }
    if threshold:
        stored["activation_function.threshold"] = random(f, seed=seed + 4).abs()
    if skip:
        stored["W_skip"] = random(d, d, seed=seed + 5)
    return stored


def saelens(seed=0, **more):
    stored = circuit_tracer(seed, skip=False, threshold=False)
    return stored | {"W_enc": stored["W_enc"].T.contiguous(), **more}


def slow(x, rows, stored, gate, skip=None):
    """Return activations and output; `rows` are the encoders, `skip` maps x to the output."""
    b_enc, W_dec, b_dec = (stored[name] for name in ("b_enc", "W_dec", "b_dec"))
    z = torch.zeros(len(x), len(rows), dtype=torch.float64)
    y = b_dec.repeat(len(x), 1)
    for n in range(len(x)):
        q = torch.stack([(x[n] * rows[f]).sum() + b_enc[f] for f in range(len(rows))])
        for f in range(len(rows)):
            if gate(q, f):
                z[n, f] = q[f]
                y[n] += q[f] * W_dec[f]
        if skip is not None:
            y[n] += skip(x[n])
    return z, y


def compare(transcoder, z, y, x, tolerance=EXACT):
    assert (z != 0).float().mean() > 0.1  # the oracle is not trivial
    torch.testing.assert_close(transcoder.encode(x), z, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(transcoder.decode(z, x), y, rtol=tolerance, atol=tolerance)


X = random(N, D, seed=100)


@pytest.mark.parametrize(("skip", "threshold"), [(True, False), (False, True)])
def test_circuit_tracer_computes_the_same(tmp_path, skip, threshold):
    stored = circuit_tracer(skip=skip, threshold=threshold)
    write(tmp_path, stored, config_yaml=CONFIG)
    [(layer, transcoder)] = t.load(tmp_path, dtype=torch.float64).items()
    theta = stored.get("activation_function.threshold", torch.zeros(F))
    through = (lambda x: x @ stored["W_skip"].T) if skip else None
    z, y = slow(X, stored["W_enc"], stored, lambda q, f: q[f] > theta[f], through)
    compare(transcoder, z, y, X)
    assert layer == 5
    assert transcoder.reads == "stream"
    assert transcoder.after_norm
    assert transcoder.name == "a-scan"


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_gemma_scope_computes_the_same(tmp_path, kind):
    """Both suites store W_enc by columns and compute relu(q) 1[q > θ]; the second has a skip."""
    first = kind == "npz"
    stored = saelens(threshold=random(F, seed=4).abs())
    if first:
        path = write(tmp_path, stored, "layer_3/width_16k/average_l0_76/params.npz")
        options = {"reads": "normalized", "layers": 3}  # the layer of a file is in its own name
    else:
        keys = {"W_enc": "w_enc", "W_dec": "w_dec"}
        stored["affine_skip_connection"] = random(D, D, seed=9)
        config = {
            "hf_hook_point_in": "model.layers.3.pre_feedforward_layernorm.output",
            "hf_hook_point_out": "model.layers.3.post_feedforward_layernorm.output",
            "architecture": "jump_relu",
            "affine_connection": True,
            "type": "transcoder",
        }
        renamed = {keys.get(key, key): tensor for key, tensor in stored.items()}
        path = write(tmp_path, renamed, "a/params.safetensors", config_json=config)
        options = {}
    [(layer, transcoder)] = t.load(path, dtype=torch.float64, **options).items()
    through = None if first else lambda x: x @ stored["affine_skip_connection"]
    theta = stored["threshold"]
    z, y = slow(X, stored["W_enc"].T, stored, lambda q, f: q[f] > max(theta[f], 0), through)
    compare(transcoder, z, y, X)
    assert (layer, transcoder.after_norm) == (3, True)
    assert transcoder.reads == ("normalized" if first else "input")


@pytest.mark.parametrize(("skip", "jump"), [("skip_", ""), ("", "jumprelu_")])
def test_saelens_computes_the_same(tmp_path, skip, jump):
    stored = saelens()
    if jump:
        stored["threshold"] = random(F, seed=4).abs()
    if skip:
        stored["W_skip"] = random(D, D, seed=9)
    config = SAELENS | {"architecture": f"{jump}{skip}transcoder"}
    write(tmp_path, stored, "sae_weights.safetensors", cfg_json=config)
    [(layer, transcoder)] = t.load(tmp_path, dtype=torch.float64).items()
    theta = stored.get("threshold", torch.zeros(F))
    through = (lambda x: x @ stored["W_skip"].T) if skip else None
    z, y = slow(X, stored["W_enc"].T, stored, lambda q, f: q[f] > max(theta[f], 0), through)
    compare(transcoder, z, y, X)
    assert (layer, transcoder.reads) == (5, "normalized")


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("subtract", [True, False])
def test_linear_settings_of_topk_are_folded(tmp_path, rescale, subtract):
    """TopKSAE compares q |W_dec[f]|, and its encoder reads x - b_dec."""
    stored, k = saelens(), 5
    config = SAELENS | {
        "architecture": "topk",
        "k": k,
        "rescale_acts_by_decoder_norm": rescale,
        "apply_b_dec_to_input": subtract,
    }
    write(tmp_path, stored, "sae_weights.safetensors", cfg_json=config)
    transcoder = t.load(tmp_path, dtype=torch.float64)[5]
    norms = stored["W_dec"].norm(dim=1) if rescale else torch.ones(F, dtype=torch.float64)
    z, y = slow(
        X - stored["b_dec"] * subtract,
        stored["W_enc"].T,
        stored,
        lambda q, f: q[f] > 0 and f in (q * norms).topk(k).indices,
    )
    assert transcoder.k == k
    compare(transcoder, z * norms, y, X)


def test_half_precision_files(tmp_path):
    """They keep their dtype with `dtype=None`, and become float32 without it."""
    stored = circuit_tracer()
    write(tmp_path, stored, dtype=torch.bfloat16, config_yaml=CONFIG)
    for dtype, options in ((torch.bfloat16, {"dtype": None}), (torch.float32, {})):
        W_enc = t.load(tmp_path, **options)[5].W_enc
        assert W_enc.dtype == dtype
        assert torch.equal(W_enc, stored["W_enc"].T.bfloat16().to(dtype))


@pytest.mark.parametrize(
    ("hook", "reads"),
    [
        ("hook_resid_mid", "stream"),
        ("hook_mlp_in", "stream"),
        ("ln2.hook_normalized", "normalized"),
        ("mlp.hook_in", "input"),
    ],
)
def test_the_hook_in_the_settings_says_what_is_read(tmp_path, hook, reads):
    written = {"mlp.hook_in": "mlp.hook_out"}.get(hook, "hook_mlp_out")
    config = CONFIG | {"feature_input_hook": hook, "feature_output_hook": written}
    write(tmp_path, circuit_tracer(), config_yaml=config)
    names = {"hook_name": f"blocks.5.{hook}", "hook_name_out": f"blocks.5.{written}"}
    write(tmp_path / "s", saelens(), "x.safetensors", cfg_json=SAELENS | {"metadata": names})
    for folder in (tmp_path / "layer_5.safetensors", tmp_path / "s"):
        transcoder = t.load(folder)[5]
        assert transcoder.reads == reads
        assert transcoder.after_norm is (written == "hook_mlp_out")


def test_saelens_name_of_the_input_of_gemma_scope_2_is_not_trusted(tmp_path):
    """SAELens calls it hook_mlp_in, which in TransformerLens is before the norm."""
    names = {
        "hook_name": "blocks.5.hook_mlp_in",
        "hf_hook_name": "model.layers.5.pre_feedforward_layernorm.output",
        "hook_name_out": "blocks.5.hook_mlp_out",
    }
    write(tmp_path, saelens(), "sae_weights.safetensors", cfg_json=SAELENS | {"metadata": names})
    assert t.load(tmp_path)[5].reads == "input"


def test_layers_come_from_paths_settings_or_the_list(tmp_path):
    for layer in (0, 1, 3):
        folder = f"gemma/layer_{layer}/width_16k/average_l0_{layer + 70}"
        write(tmp_path, saelens(layer, threshold=random(F).abs()), f"{folder}/params.npz")
    loaded = t.load(tmp_path / "gemma", reads="normalized", layers=[3, 0])
    assert list(loaded) == [0, 3]
    refused(tmp_path / "gemma", "no transcoder for layer 2", layers=[2, 3], reads="normalized")
    write(tmp_path, saelens(1, threshold=random(F).abs()), "layer_12_x/params.npz")
    # A link's name counts, not its target's.
    (tmp_path / "layer_5").symlink_to(tmp_path / "layer_12_x")
    assert list(t.load(tmp_path / "layer_5", reads="normalized")) == [5]
    uris = [
        f"hf://google/a/layer_{layer}/width_16k/average_l0_{layer + 70}/params.npz?revision=main"
        for layer in (3, 1)
    ]
    listed = CONFIG | {"transcoders": uris, "feature_input_hook": "ln2.hook_normalized"}
    (tmp_path / "gemma" / "config.yaml").write_text(yaml.safe_dump(listed))
    loaded = t.load(tmp_path / "gemma")
    assert list(loaded) == [0, 1]  # the position in the list
    assert torch.equal(loaded[0].b_enc, saelens(3)["b_enc"].float())
    listed["transcoders"].append("hf://a/b/layer_9/params.npz")
    (tmp_path / "gemma" / "config.yaml").write_text(yaml.safe_dump(listed))
    refused(tmp_path / "gemma", "layer_9/params.npz", "download")


def same(first, second):
    assert repr(first) == repr(second)
    assert (first.after_norm, first.k) == (second.after_norm, second.k)
    assert first.tensors().keys() == second.tensors().keys()
    for name, tensor in first.tensors().items():
        assert tensor.dtype == second.tensors()[name].dtype
        assert torch.equal(tensor, second.tensors()[name]), name


def test_save_and_load_return_the_same_bits(tmp_path):
    saved = {
        11: drawn(D, skip=True, dtype=torch.bfloat16, reads="stream", after_norm=True, name="ü"),
        2: drawn(D, activation="topk", reads="normalized"),
    }
    t.save(tmp_path / "x", {0: saved[2]})
    t.save(tmp_path / "x", saved)  # replaces layer 0
    loaded = t.load(tmp_path / "x", dtype=None)
    assert list(loaded) == [2, 11]
    for layer, transcoder in loaded.items():
        same(transcoder, saved[layer])
    one = t.load(tmp_path / "x" / "layer_11.transcoder.safetensors", dtype=None)
    same(one[11], saved[11])


def test_save_refuses_what_it_cannot_store_and_other_files(tmp_path):
    transcoder = drawn(D)
    for wrong in ({}, {-1: transcoder}, {3: "x"}):
        with pytest.raises(InputError, match="cannot be saved"):
            t.save(tmp_path / "x", wrong)
    write(tmp_path / "other", circuit_tracer())
    with pytest.raises(CheckpointError, match="also holds"):
        t.save(tmp_path / "other", {3: transcoder})
    assert (tmp_path / "other" / "layer_5.safetensors").exists()
    assert not (tmp_path / "x").exists()


# Refusals: a function that makes a folder, words of the error, options of `load`


def changed(threshold=True, config=CONFIG, **tensors):
    """Return a function that writes a folder of circuit-tracer with other tensors (None: none)."""

    def make(folder):
        stored = {**circuit_tracer(threshold=threshold), **tensors}
        stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
        write(folder, stored, **({} if config is None else {"config_yaml": config}))

    return make


def entry(name, index, value):
    """Return a tensor of circuit-tracer with one other entry."""
    tensor = circuit_tracer()[name].clone()
    tensor[index] = value
    return {name: tensor}


def only(name, content=b"x"):
    return lambda folder: (folder / name).write_bytes(content)


def pickled(folder):
    np.savez(folder / "layer_6.npz", W_enc=np.array([{}], dtype=object))


def saelens_with(**settings):
    return lambda folder: write(folder, saelens(), cfg_json=SAELENS | settings)


def two_layers(folder):
    write(folder, saelens(), "layer_3/sae_weights.safetensors", cfg_json=SAELENS)


def twice(folder):
    for name in ("layer_05", "layer_5"):
        write(folder, circuit_tracer(), f"{name}.safetensors", config_yaml=CONFIG)


INPUT = {"reads": "input"}
SHAPE = {"W_dec": random(F, D + 4), "b_enc": torch.ones(F).int()}
REFUSED = [
    # files
    (only("layer_5.pt"), ["layer_5.pt", "can execute arbitrary code", "expected safetensors"], {}),
    (pickled, ["allow_pickle=False"], INPUT),
    (only("layer_5.safetensors", b"\xff" * 99), ["not a readable"], {}),
    (lambda folder: None, ["holds no transcoders"], {}),
    # tensors
    (changed(b_enc=None, log_thresholds=random(F)), ["got no b_enc", "got log_thresholds"], {}),
    (changed(**SHAPE), ["W_dec of shape [13, 11]", "has [13, 7]", "b_enc in torch.int32"], {}),
    # which is too large for float32
    (changed(**entry("W_dec", (3, 2), 1e39)), ["W_dec with entries that are NaN"], {}),
    (changed(**entry("activation_function.threshold", 2, -1.0)), ["negative thresholds"], {}),
    # settings of circuit-tracer
    (changed(config=None), ["does not say what it reads", "reads='stream'"], {}),
    (changed(config=CONFIG | {"feature_output_hook": "hook_resid_post"}), ["output hook="], {}),
    (changed(False, CONFIG | {"activation": "topk", "k": 3}), ["got activation='topk'"], {}),
    (changed(config=CONFIG | {"activation": "relu"}), ["tensors are those of jumprelu"], {}),
    (changed(config=[1, 2]), [], INPUT),
    (changed(config=CONFIG | {"feature_input_hook": 3}), [], {}),
    (changed(config=CONFIG | {"transcoders": "layer_5.safetensors"}), ["expected a list"], {}),
    # settings of SAELens
    (lambda folder: write(folder, saelens()), ["architecture=None"], INPUT),
    (saelens_with(normalize_activations="layer_norm"), ["normalize_activations='layer"], {}),
    (saelens_with(apply_b_dec_to_input=True), ["apply_b_dec_to_input=True"], {}),
    (saelens_with(architecture="skip_transcoder"), ["lacks W_skip"], {}),
    (saelens_with(architecture="topk", metadata={}, k=3), ["a sparse autoencoder"], INPUT),
    (saelens_with(architecture="topk", k=99), ["got k=99"], {}),
    (saelens_with(metadata={"hook_name": "blocks.5.hook_z"}), ["input hook='hook_z'"], {}),
    # layers, devices and dtypes
    (twice, ["got layer 5 in two files", "layer_05", "layer_5"], {}),
    (two_layers, ["different layers"], {}),
    (changed(), ["no transcoder for layer 2"], {"layers": [2]}),
]


@pytest.mark.parametrize(("make", "words", "options"), REFUSED)
def test_refusals(make, words, options, tmp_path):
    make(tmp_path)
    refused(tmp_path, *words, error=(CheckpointError, InputError), **options)


def test_settings_that_are_accepted(tmp_path):
    changed(**entry("W_dec", (3, 2), 1e39))(tmp_path)
    assert t.load(tmp_path, dtype=torch.float64)  # control: too large for float32 only
    changed(True, CONFIG | {"activation": "jump_relu"})(tmp_path)
    assert t.load(tmp_path)[5].activation == "jumprelu"
    changed(False, None)(tmp_path / "x")
    loaded = t.load(tmp_path / "x", reads="stream")[5]
    assert (loaded.activation, loaded.reads) == ("relu", "stream")


def test_square_encoders_are_decided_by_keys_or_settings_alone(tmp_path):
    stored = circuit_tracer(skip=False, threshold=False, f=D)
    write(tmp_path, stored)
    refused(tmp_path, "either order", "config.yaml", "cfg.json", reads="input")
    write(tmp_path, stored, config_yaml=CONFIG)
    assert torch.equal(t.load(tmp_path, dtype=None)[5].W_enc, stored["W_enc"].T)
    write(tmp_path, stored, cfg_json=SAELENS)
    assert torch.equal(t.load(tmp_path, dtype=None)[5].W_enc, stored["W_enc"])
    stored = circuit_tracer(skip=False, f=D)
    write(tmp_path / "keys", stored)
    loaded = t.load(tmp_path / "keys", dtype=None, reads="input")
    assert torch.equal(loaded[5].W_enc, stored["W_enc"].T)


def test_only_the_names_of_a_file_and_its_folder_say_the_layer(tmp_path):
    path = write(tmp_path, circuit_tracer(), "a.safetensors", config_yaml=CONFIG)
    refused(path, "does not say its layer")
    assert list(t.load(path, layers=2)) == [2]
    study = tmp_path / "layer_12_study"
    for name in ("run/a", "layer_7_run/a", "run/layer_7"):  # a folder above says nothing
        write(study, circuit_tracer(), f"{name}.safetensors", config_yaml=CONFIG)
    refused(study / "run" / "a.safetensors", "does not say its layer")
    for named in (study / "layer_7_run", study / "run" / "layer_7.safetensors"):
        assert list(t.load(named)) == [7]
