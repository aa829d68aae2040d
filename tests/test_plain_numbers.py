"""Tests that all number types are accepted, and that weights that are not finite are named."""

from types import SimpleNamespace

import bridges
import numpy as np
import pandas as pd
import pytest
import torch
from common import D_MLP, tokens

from attn_only_lens import Contrast, expose_neuron_heads, grow, growth
from attn_only_lens import patching as p
from attn_only_lens.devices import free_bytes
from attn_only_lens.engine.metrics import bind
from attn_only_lens.engine.positions import resolve_positions
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.patching.run_patches import Batching

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # warnings from TransformerLens
]
KINDS = {
    "numpy": np.array,
    "pandas": pd.Series,
    "list of torch": lambda numbers: [torch.tensor(number) for number in numbers],
}
ONE = {"numpy": np.int64, "0-d": np.array, "torch": torch.tensor}


def test_what_the_allocator_holds_without_use_is_free(monkeypatch):
    """Of 80 GiB, 30 are left, and of the 50 that torch's allocator holds, 20 are unused.

    Of these 20, 3 are remainders of blocks in use. The fullest of several devices decides.
    """
    gib = 2**30
    counts = {"reserved_bytes": 50, "active_bytes": 30, "inactive_split_bytes": 3}
    stats = {f"{name}.all.current": n * gib for name, n in counts.items()}
    gpus = SimpleNamespace(
        mem_get_info=lambda device: (30 * gib // (1 + device.index), 80 * gib),
        memory_stats=lambda device: stats,
    )
    monkeypatch.setattr("torch.get_device_module", lambda device: gpus)
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    assert (free_bytes(first), free_bytes(second)) == (47 * gib, 32 * gib)
    parameters = [
        SimpleNamespace(device=device, element_size=lambda: 4) for device in (first, second)
    ]
    split = SimpleNamespace(parameters=lambda: iter(parameters))
    chunks = []

    def run(chunk):
        chunks.append(len(chunk))
        return chunk.double()

    Batching(split, None, lambda n: None).fill(torch.zeros(40), torch.arange(40), gib // 4, run)
    assert chunks == [16, 16, 8]  # chunks of 1 GiB each, in half of the free memory


@pytest.fixture(scope="module")
def model():
    return bridges.exposed_copy(bridges.boot("gpt2"))


@pytest.fixture(scope="module")
def pair(model):
    return Contrast(tokens(), tokens(seed=1), p.loss()).pair(model)


@pytest.mark.parametrize("kind", KINDS)
def test_several_numbers(model, pair, kind):
    made = KINDS[kind]
    got, expected = (resolve_positions(pair, positions) for positions in (made([2, 5]), [2, 5]))
    for first, second in zip(got, expected, strict=True):
        assert (first.label, type(first.label)) == (second.label, int)
        assert torch.equal(first.chosen, second.chosen)
    assert p.Sites("neurons", layers=made([1, 0])) == p.Sites("neurons", layers=[1, 0])
    both = [bind(p.logit_diff(made(a), 7), model, pair) for a in ([3, 5],)]
    assert both[0].of(model(pair.clean)) == bind(p.logit_diff([3, 5], 7), model, pair).of(
        model(pair.clean)
    )
    for wrong in (made([2.0, 5.0]), made([True, False])):
        with pytest.raises(InputError, match="expected"):
            resolve_positions(pair, wrong)
        with pytest.raises(InputError, match="expected source layers"):
            p.Sites("neurons", layers=wrong)


@pytest.mark.parametrize("kind", ONE)
def test_one_number(pair, kind):
    made = ONE[kind]
    assert resolve_positions(pair, made(-2))[0].label == -2
    assert p.Sites("heads", layers=made(1)) == p.Sites("heads", layers=1)
    bridge = bridges.boot("native")
    got, expected = (
        grow(bridge, d_mlp=size, seed=seed) for size, seed in ((made(41), made(3)), (41, 3))
    )
    assert got.model.cfg.d_mlp == 41
    # The seed is the same, too.
    for first, second in zip(got.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(first, second)
    assert growth.AddNeurons(made(3), layers=np.array([0])) == growth.AddNeurons(3, layers=[0])


@pytest.mark.parametrize("size", [8.5, True, float("nan")])
def test_sizes_that_are_none(size):
    with pytest.raises(InputError, match=r"got d_mlp=.*expected a whole number, 1 or more"):
        grow(bridges.boot("native"), d_mlp=size)


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), torch.float64), (-float("inf"), torch.bfloat16)]
)
def test_weights_that_are_not_finite_are_named(value, dtype):
    bridge = bridges.boot("native", dtype)
    with torch.no_grad():
        named = bridge.named_parameters()
        name, weight = next((n, w) for n, w in named if "layers.1." in n and "mlp" in n)
        weight[3, 5] = value
    plain = name.replace("._original_component", "")
    before = set(bridge.hook_dict)
    for act, error in (
        (lambda: expose_neuron_heads(bridge), UnsupportedModelError),
        (lambda: bridges.exposed_copy(bridge), UnsupportedModelError),
        (lambda: grow(bridge, d_mlp=D_MLP + 4), InputError),
    ):
        with pytest.raises(error) as caught:
            act()
        assert f"its parameter {plain} has 1 entries that are NaN or infinite" in str(caught.value)
    assert set(bridge.hook_dict) == before
    with torch.no_grad():  # the control: large, and finite
        weight[3, 5] = 1e4
    assert grow(bridge, d_mlp=D_MLP + 4).model.cfg.d_mlp == D_MLP + 4
