"""Tests of growth during training, and of resuming from a checkpoint."""

import pytest
import torch
from common import D_VOCAB
from models import build

from analyses.tools.growth_training import _DOCUMENT, Training, _Checkpoint
from attn_only_lens import growth
from attn_only_lens.errors import CheckpointError, GrowthError
from attn_only_lens.storage import read_tensors, write_tensors

TOKENS = torch.arange(5 * 7).reshape(5, 7) * 11 % D_VOCAB
SCHEDULE = {
    2: growth.AddNeurons(3),
    4: growth.compose(growth.AddHeads(1), growth.InsertLayer(at=1)),
}
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95)),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def start(kind="adamw", schedule=SCHEDULE, name="rms"):
    model = build(name)
    return Training(model, OPTIMIZERS[kind](model.parameters()), schedule, seed=3)


def run(training, until):
    losses = []
    for _ in training.steps(until):
        log_probs = training.model(TOKENS)[:, :-1].log_softmax(-1)
        loss = -log_probs.gather(-1, TOKENS[:, 1:, None] % log_probs.shape[-1]).mean()
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_model_grows_before_the_step_that_the_schedule_names():
    training = start()
    run(training, 2)
    assert training.model.cfg.d_mlp == 37
    assert training.provenance is None
    run(training, 3)
    assert training.model.cfg.d_mlp == 40
    run(training, 5)
    assert (training.model.cfg.n_heads, training.model.cfg.n_layers) == (3, 4)
    assert training.provenance.new_layers == ("L1",)
    assert training.provenance["L1N2"] == "L2N2"
    assert len(training.history) == 2


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("step", [1, 4])
def test_going_on_from_a_checkpoint_is_as_if_nothing_had_happened(tmp_path, kind, step):
    straight = start(kind)
    losses = run(straight, 7)
    first = start(kind)
    run(first, step)
    first.save(tmp_path / "training.safetensors")
    second = start(kind)
    second.resume(tmp_path / "training.safetensors")
    assert second.done == step
    assert run(second, 7) == losses[step:]
    expected = dict(second.model.named_parameters())
    for name, parameter in straight.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_a_step_that_is_broken_off_is_done_again_and_growth_is_not():
    training = start()
    run(training, 2)
    for _ in training.steps(7):
        break  # before step 2, the model has grown
    assert training.done == 2
    assert training.model.cfg.d_mlp == 40
    assert run(training, 7) == pytest.approx(run(start(), 7)[2:], abs=0)
    assert len(training.history) == 2


def test_what_does_not_fit_is_refused_and_the_training_stays_as_it_was(tmp_path):
    path = tmp_path / "training.safetensors"
    written = start()
    run(written, 3)
    written.save(path)

    def refused(training, match):
        before = [p.detach().clone() for p in training.model.parameters()]
        model, optimizer, done = training.model, training.optimizer, training.done
        with pytest.raises(CheckpointError, match=match):
            training.resume(path)
        assert (training.model, training.optimizer) == (model, optimizer)
        assert training.done == done
        after = training.model.parameters()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    refused(start(schedule={2: growth.AddNeurons(5)}), "grew by")
    refused(start("sgd"), "its optimizer was AdamW")
    refused(start(name="rms_pre"), "other parameters")
    other_seed = start()
    other_seed.seed += 1
    refused(other_seed, "its seed was")
    other_order = start()
    other_order.optimizer.param_groups[0]["params"].reverse()
    refused(other_order, "in the same order")
    later = start()
    run(later, 1)
    refused(later, "stands at step 1")
    other_init = start()
    other_init.init = growth.init.zeros()
    refused(other_init, "another init")
    tensors, said = read_tensors(path, _DOCUMENT)
    for change, match in (
        (lambda t: t.pop("model/embed.W_E"), r"other parameters: embed\.W_E"),
        (lambda t: t.update({"step/ghost": torch.tensor(1.0)}), "step of ghost"),
        (lambda t: t.update({"exp_avg/embed.W_E": torch.zeros(2)}), r"exp_avg of embed\.W_E"),
    ):
        changed = dict(tensors)
        change(changed)
        body = {key: said[key] for key in _Checkpoint.__annotations__ if key != "tensors"}
        write_tensors(path, changed, _DOCUMENT, **body)
        refused(start(), match)
    path.write_bytes(path.read_bytes()[:1000])
    refused(start(), "not a readable safetensors file")


def test_an_expansion_that_does_not_fit_leaves_the_training_as_it_was():
    training = start(schedule={1: growth.AddNeurons(3, layers=[0])})
    run(training, 1)
    model, optimizer = training.model, training.optimizer
    with pytest.raises(GrowthError, match="differ"):
        run(training, 3)
    assert (training.model, training.optimizer, training.done) == (model, optimizer, 1)
    with pytest.raises(GrowthError, match="expected 0 or more"):
        start(schedule={-1: growth.AddNeurons(3)})
