"""Tests of files of cross-layer transcoders, against loops over the tensors as they are stored.

The oracles follow `CrossLayerTranscoder` of circuit-tracer and of crosslayer-transcoder, and Gemma
Scope 2's `JumpReLUMultiLayerSAE`.
"""

from dataclasses import replace

import pytest
import torch
from drawn_transcoders import cross_layer
from transcoder_files import CONFIG, random, refused, write

from attn_only_lens import transcoders as t
from attn_only_lens.errors import InputError

L, D, F, N = 3, 7, 13, 5
X = random(L, N, D, seed=100)
CLT = CONFIG | {"model_kind": "cross_layer_transcoder"}
GEMMA = {"type": "clt", "architecture": "jump_relu"}
INPUT = {"reads": "input"}


def circuit_tracer(folder, threshold=True):
    stored = {}
    for layer in range(L):
        encoder = {
            f"W_enc_{layer}": random(F, D, seed=layer),
            f"b_enc_{layer}": random(F, seed=10 + layer),
            f"b_dec_{layer}": random(D, seed=20 + layer),
        }
        if threshold:
            encoder[f"threshold_{layer}"] = random(F, seed=30 + layer).abs()
        decoder = {f"W_dec_{layer}": random(F, L - layer, D, seed=40 + layer)}
        write(folder, encoder, f"W_enc_{layer}.safetensors")
        write(folder, decoder, f"W_dec_{layer}.safetensors", config_yaml=CLT)
        stored |= encoder | decoder
    return stored


def gemma_scope_2(skip=True):
    stored = {
        "w_enc": random(L, D, F),
        "w_dec": random(L, F, L, D, seed=1),
        "b_enc": random(L, F, seed=2),
        "b_dec": random(L, D, seed=3),
        "threshold": random(L, F, seed=4),  # some are negative
    }
    if skip:
        stored["affine_skip_connection"] = random(L, D, D, seed=5)
    for layer in range(L):
        stored["w_dec"][layer, :, :layer] = 0
    return stored


def of_crosslayer_transcoder(prefix="", per_entry=True):
    std = (L, D) if per_entry else (L,)
    stored = {
        "encoder.W": random(L, D, F),
        "encoder.b": random(L, F, seed=1),
        "decoder.b": random(L, D, seed=2),
        "nonlinearity.theta": random(1, L, F, seed=3),  # some are negative
        "nonlinearity.bandwidth": torch.tensor(1.0),
    }
    for layer in range(L):
        stored[f"decoder.W_{layer}"] = random(layer + 1, F, D, seed=4 + layer)
    for seed, name in enumerate(("input", "output")):
        stored[f"{name}_standardizer.mean"] = random(*std, seed=10 + seed)
        stored[f"{name}_standardizer.std"] = random(*std, seed=20 + seed).abs() + 0.5
    return {prefix + key: x for key, x in stored.items()}


def outputs(transcoders, x=X):
    """Return the activations and the outputs of a loaded transcoder in each layer."""
    z = [transcoders[layer].encode(x[layer]) for layer in range(L)]
    y = [transcoders[layer].decode(z[layer], x[layer]) for layer in range(L)]
    for layer in range(L):
        for source in range(layer):
            y[layer] = y[layer] + z[source] @ transcoders[source].W_later[layer - source - 1]
    return torch.stack(z), torch.stack(y)


def compare(transcoders, expected_z, expected_y):
    assert list(transcoders) == list(range(L))
    z, y = outputs(transcoders)
    assert 0.1 < (expected_z != 0).double().mean() < 0.9  # the oracle is not trivial
    torch.testing.assert_close(z, expected_z, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y, expected_y, rtol=1e-12, atol=1e-12)


def slow(encode, decoder, bias, skip=lambda layer, x: 0.0):
    """Return activations and outputs, feature by feature; `decoder` is None for earlier layers."""
    z = torch.zeros(L, N, F, dtype=torch.float64)
    y = torch.stack([bias(layer).repeat(N, 1) for layer in range(L)])
    for layer in range(L):
        for n in range(N):
            y[layer, n] += skip(layer, X[layer, n])
            for feature in range(F):
                z[layer, n, feature] = encode(layer, feature, X[layer, n])
                for target in range(layer, L):
                    y[target, n] += z[layer, n, feature] * decoder(layer, feature, target)
    return z, y


def jump(q, theta, relu=True):
    return q if q > theta and (q > 0 or not relu) else torch.zeros(())


@pytest.mark.parametrize("threshold", [True, False])
def test_circuit_tracer_computes_the_same(tmp_path, threshold):
    stored = circuit_tracer(tmp_path, threshold)

    def encode(layer, feature, x):
        q = (stored[f"W_enc_{layer}"][feature] * x).sum() + stored[f"b_enc_{layer}"][feature]
        return jump(q, stored[f"threshold_{layer}"][feature] if threshold else 0.0, relu=False)

    def decoder(layer, feature, target):
        return stored[f"W_dec_{layer}"][feature, target - layer]

    loaded = t.load(tmp_path, dtype=torch.float64)
    compare(loaded, *slow(encode, decoder, lambda layer: stored[f"b_dec_{layer}"]))
    assert loaded[0].reads == "stream"
    assert loaded[0].after_norm
    assert "writes to 2 later layers" in repr(loaded[0])


@pytest.mark.parametrize("one_file", [True, False])
def test_gemma_scope_2_computes_the_same(tmp_path, one_file):
    stored = gemma_scope_2()
    if one_file:
        hooks = {
            f"hf_hook_point_{end}": [
                f"model.layers.{i}.{norm}_feedforward_layernorm.output" for i in range(L)
            ]
            for end, norm in (("in", "pre"), ("out", "post"))
        }
        write(tmp_path, stored, "params.safetensors", config_json=GEMMA | hooks)
    for layer in range(L if not one_file else 0):
        of_layer = {key: x[layer].contiguous() for key, x in stored.items()}
        write(tmp_path, of_layer, f"params_layer_{layer}.safetensors", config_json=GEMMA)
    skip = stored["affine_skip_connection"]

    def encode(layer, feature, x):
        q = (stored["w_enc"][layer, :, feature] * x).sum() + stored["b_enc"][layer, feature]
        return jump(q, stored["threshold"][layer, feature])

    expected = slow(
        encode,
        lambda layer, feature, target: stored["w_dec"][layer, feature, target],
        lambda layer: stored["b_dec"][layer],
        lambda layer, x: x @ skip[layer],
    )
    assert (stored["threshold"] < 0).any()
    loaded = t.load(tmp_path, dtype=torch.float64, **({} if one_file else INPUT))
    compare(loaded, *expected)
    assert loaded[1].reads == "input"
    assert loaded[1].after_norm


@pytest.mark.parametrize("per_entry", [True, False])
@pytest.mark.parametrize("theta", [True, False])
def test_crosslayer_transcoder_computes_the_same(tmp_path, per_entry, theta):
    stored = of_crosslayer_transcoder(per_entry=per_entry)
    if not theta:
        del stored["nonlinearity.theta"], stored["nonlinearity.bandwidth"]
    prefix = "model." * theta
    path = write(tmp_path, {prefix + key: x for key, x in stored.items()}, "clt.safetensors")

    def encode(layer, feature, x):
        x = (x - stored["input_standardizer.mean"][layer]) / stored["input_standardizer.std"][layer]
        q = (stored["encoder.W"][layer, :, feature] * x).sum() + stored["encoder.b"][layer, feature]
        return jump(q, stored["nonlinearity.theta"][0, layer, feature] if theta else 0.0)

    z, y = slow(
        encode,
        lambda layer, feature, target: stored[f"decoder.W_{target}"][layer, feature],
        lambda layer: stored["decoder.b"][layer],
    )
    mean, std = (stored[f"output_standardizer.{x}"] for x in ("mean", "std"))
    shape = (L, 1, D if per_entry else 1)
    compare(t.load(path, dtype=torch.float64, **INPUT), z, y * std.view(shape) + mean.view(shape))
    assert t.load(path, **INPUT)[0].W_later.dtype == torch.float32
    write(tmp_path, {k: x.half() for k, x in stored.items()}, "clt.safetensors")
    assert t.load(path, dtype=None, **INPUT)[2].W_enc.dtype == torch.float16


def test_save_and_load_return_the_same_bits(tmp_path):
    saved = cross_layer(L, D, dtype=torch.bfloat16)
    loaded = t.load(t.save(tmp_path / "x", saved), dtype=None)
    for layer, transcoder in loaded.items():
        assert transcoder.tensors().keys() == saved[layer].tensors().keys()
        for name, tensor in transcoder.tensors().items():
            assert torch.equal(tensor, saved[layer].tensors()[name]), name
    refused(tmp_path / "x", "got layers [2] of a cross-layer transcoder", layers=[2])
    (tmp_path / "x" / "layer_0.transcoder.safetensors").unlink()
    refused(tmp_path / "x", "got layers [1, 2]", "from layer 0")


def test_refusals(tmp_path):
    circuit_tracer(tmp_path / "a")
    refused(tmp_path / "a", "got layers [1]", layers=[1])
    refused(tmp_path / "a" / "W_enc_1.safetensors", "got layers [1]")
    (tmp_path / "a" / "W_dec_1.safetensors").unlink()
    refused(tmp_path / "a", "W_enc_1.safetensors: got no W_dec_1.safetensors")
    stored = circuit_tracer(tmp_path / "b")
    wrong = {"W_dec_1": random(F, 1, D), "extra_1": random(F)}
    write(tmp_path / "b", wrong, "W_dec_1.safetensors")
    refused(tmp_path / "b", "got extra")
    write(tmp_path / "b", {"W_dec_1": random(F, 1, D)}, "W_dec_1.safetensors")
    refused(tmp_path / "b", "layer 1: its features write to 0 later layers; expected 1")
    negative = {key: stored[key] for key in ("W_enc_1", "b_enc_1", "b_dec_1")}
    write(tmp_path / "b", {**negative, "threshold_1": -random(F).abs()}, "W_enc_1.safetensors")
    refused(tmp_path / "b", "negative thresholds", "set these thresholds to 0")

    of_layer = {"W_enc": random(F, D), "b_enc": random(F), "b_dec": random(D)}
    write(tmp_path / "g", of_layer | {"W_dec": random(F, 2, D)}, "a.safetensors", config_yaml=CLT)
    refused(tmp_path / "g", "a layer of a cross-layer transcoder, and does not say which")
    saelens = of_layer | {"W_enc": random(D, F), "W_dec": random(F, 2, D), "threshold": random(F)}
    write(tmp_path / "h", saelens, "layer_1.safetensors")
    refused(tmp_path / "h", "W_dec of shape [13, 2, 7]; SAELens has [13, 7]", **INPUT)

    backwards = gemma_scope_2()
    backwards["w_dec"][2, 5, 0] = 1.0
    write(tmp_path / "c", backwards, "params.safetensors")
    refused(tmp_path / "c", "layer 2 write to earlier layers", "a crosscoder", **INPUT)
    write(
        tmp_path / "d",
        {"w_enc": random(D, F), "w_dec": random(F, D), "b_enc": random(F), "b_dec": random(D)},
        "params_layer_1.safetensors",
        config_json=GEMMA,
    )
    refused(tmp_path / "d", "settings say that it is a cross-layer", "[13, 7]", **INPUT)

    topk = of_crosslayer_transcoder() | {"nonlinearity.k": torch.tensor(3)}
    del topk["decoder.W_1"]
    write(tmp_path / "e", topk, "clt.safetensors")
    refused(tmp_path / "e", "got no decoder.W_1", "got nonlinearity.k", "ReLU or JumpReLU", **INPUT)
    write(tmp_path / "f", of_crosslayer_transcoder(), "clt.safetensors")
    refused(tmp_path / "f", "does not say what it reads")
    with pytest.raises(InputError, match="W_later of shape"):
        replace(cross_layer(L, D)[0], W_later=random(F, D))


def test_tensors_of_other_layers_or_sizes_are_refused(tmp_path):
    folder = tmp_path / "exchanged"
    circuit_tracer(folder)
    one, other = (folder / f"W_enc_{layer}.safetensors" for layer in (0, 1))
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)
    refused(folder, "got W_enc_1 in the files of layer 0", "got W_enc_0 in the files of layer 1")
    circuit_tracer(tmp_path / "half")
    refused(tmp_path / "half" / "W_dec_0.safetensors", "got layers [0]")

    changes = {
        "encoder.b": random(F),
        "decoder.b": random(L + 1, D),
        "decoder.W_1": random(L, F, D),
        "nonlinearity.theta": random(2, L, F),
        "input_standardizer.std": random(D),
    }
    for number, (key, tensor) in enumerate(changes.items()):
        stored = of_crosslayer_transcoder() | {key: tensor}
        write(tmp_path / str(number), stored, "clt.safetensors")
        shape = f"got {key} of shape {list(tensor.shape)}"
        refused(tmp_path / str(number), shape, "because encoder.W has shape [3, 7, 13]", **INPUT)
    write(tmp_path / "gemma", gemma_scope_2() | {"b_dec": random(L + 1, D)}, "params.safetensors")
    refused(tmp_path / "gemma", "got b_dec of shape [4, 7]", "first axis of 3 layers", **INPUT)


def test_a_part_is_not_saved(tmp_path):
    whole = cross_layer(L, D)
    t.save(tmp_path / "x", whole)
    with pytest.raises(InputError, match=r"got layers \[0, 1\] of a cross-layer transcoder"):
        t.save(tmp_path / "x", {layer: whole[layer] for layer in (0, 1)})
    assert list(t.load(tmp_path / "x")) == [0, 1, 2]
