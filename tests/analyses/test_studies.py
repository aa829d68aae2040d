"""Tests that every study has a page, a table, a figure, and a record that they belong together."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
import transformers
from common import needs_hooked_transformer
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from analyses import __main__, study
from analyses.benchmarks import cost_at_scale
from analyses.benchmarks.models import bridge_of
from attn_only_lens import Contrast, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.sites import resolve_sites
from attn_only_lens.neurons.accumulate import no_counts, no_examples
from attn_only_lens.neurons.summary import _NUMBERS, _WINDOWS
from attn_only_lens.patching.prompt_chunks import numbers_per_prompt

RESULTS = Path(__file__).parents[2] / "analyses" / "results"


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.run.json")), ids=lambda path: path.stem)
def test_what_is_stored_is_of_one_run_and_nobody_changed_it(path):
    run, name = json.loads(path.read_text("utf-8")), Path(path.stem).stem
    assert not run["settings"]["smoke"]
    pattern = f"{name}*.{{}}"
    files = {path.name for end in ("csv", "svg") for path in RESULTS.glob(pattern.format(end))}
    assert set(run["sha256"]) == {f"{name}.md", *files}
    assert run["sha256"] == {name: digest(RESULTS / name) for name in run["sha256"]}
    scripts = {path.stem for path in RESULTS.parent.glob("*/*.py")}
    assert Path(run["script"]).stem in scripts


@pytest.mark.parametrize("name", study.names())
def test_a_page_is_made_from_its_tables(name):
    """The page is equal byte for byte."""
    record = json.loads((RESULTS / f"{name}.run.json").read_text("utf-8"))
    page = study.page(name, study.read(name), record["settings"])
    assert page == (RESULTS / f"{name}.md").read_text("utf-8")


def test_what_is_made_again_is_in_the_record(tmp_path):
    """Figures may differ with the version of matplotlib."""
    name = "attribution_repairs"
    record = json.loads((RESULTS / f"{name}.run.json").read_text("utf-8"))
    for file in [f"{name}.run.json", *record["sha256"]]:
        (tmp_path / file).write_bytes((RESULTS / file).read_bytes())
    (tmp_path / f"{name}.md").write_text("# An older text\n", "utf-8")
    study.render(name, tmp_path)
    assert (tmp_path / f"{name}.md").read_bytes() == (RESULTS / f"{name}.md").read_bytes()
    rendered = json.loads((tmp_path / f"{name}.run.json").read_text("utf-8"))
    assert rendered["sha256"] == {file: digest(tmp_path / file) for file in record["sha256"]}
    assert {key: value for key, value in rendered.items() if key != "sha256"} == {
        key: value for key, value in record.items() if key != "sha256"
    }


HOOKED = {"exactness_by_gate", "known_circuits", "todays_methods", "train_attention_only"}
RUNS = [
    pytest.param(name, marks=[needs_hooked_transformer] * (name in HOOKED))
    for name in study.names()
]


@pytest.mark.parametrize("name", RUNS)
def test_a_study_runs(name, tmp_path):
    """A trial with tiny sizes leaves the files that are stored of the whole run."""
    command = ["run", name, "--smoke", "--n-seeds", "1", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(__main__.app, [*command, "--runs", str(tmp_path / "runs")])
    assert result.exit_code == 0, result.output
    stored = {path.name for path in RESULTS.glob(f"{name}*")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == stored


def test_what_is_stored_is_small():
    limits = {".csv": 100_000, ".svg": 60_000}
    sizes = {path.name: path.stat().st_size for path in RESULTS.iterdir()}
    assert {x: n for x, n in sizes.items() if n > limits.get(Path(x).suffix, 60_000)} == {}


PAGES = list(RESULTS.glob("*.md"))


@pytest.mark.parametrize("path", sorted(PAGES), ids=lambda path: path.stem)
def test_every_page_has_its_record_or_says_that_it_has_none(path):
    has_none = "No record of this run was kept" in path.read_text("utf-8")
    assert path.with_suffix(".run.json").exists() != has_none


def test_what_a_large_model_costs():
    """Parameters match transformers' count, and flops match torch's count on a tiny model.

    The page contains the table that the script makes.
    """
    names = {
        "n_layers": "num_hidden_layers",
        "d_model": "hidden_size",
        "d_mlp": "intermediate_size",
    }
    names |= {"n_heads": "num_attention_heads", "n_key_value_heads": "num_key_value_heads"}
    names |= {"d_head": "head_dim", "d_vocab": "vocab_size"}

    def built(shape):
        config = transformers.LlamaConfig(
            **{names[k]: v for k, v in vars(shape).items() if k in names}
        )
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager"
            )

    large = cost_at_scale.Shape()
    assert sum(parameter.numel() for parameter in built(large).parameters()) == large.parameters
    tiny = cost_at_scale.Shape(3, 30, 37, 6, 2, 14, 41)
    with FlopCounterMode(display=False) as counter:
        built(tiny)(torch.zeros(1, 13, dtype=torch.long, device="meta"))
    assert counter.get_total_flops() == tiny.forward(13)
    page = (RESULTS.parents[1] / "docs" / "scale.md").read_text("utf-8")
    assert cost_at_scale.table() in page
    assert cost_at_scale.limits() in page


def test_what_fits_memory_is_counted_as_the_package_does():
    with expose_neuron_heads(bridge_of("cpu", smoke=True)) as model:
        cfg = model.cfg
        contrast = Contrast(torch.arange(7), torch.arange(1, 8), p.loss())
        pair = contrast.pair(model)
        sizes = cfg.n_layers, cfg.d_model, cfg.d_mlp, cfg.n_heads, cfg.n_heads, cfg.d_head
        shape = cost_at_scale.Shape(*sizes, cfg.d_vocab, gated=False, tied=True)
        sites = resolve_sites(model, "all")
        for part, traced, decomposed in (
            ("z", False, False),
            ("z", True, False),
            ("value", True, True),
        ):
            counted = shape.numbers_per_token(7, traced=traced, decomposed=decomposed)
            numbers = numbers_per_prompt(model, pair, sites, part, traced, decomposed)
            assert numbers == 7 * counted
    # A neuron's examples at both ends, with windows of 12 + 1 + 6 tokens, and its histograms.
    kinds = _NUMBERS["neuron"], _WINDOWS["neuron"]
    examples = no_examples(1, 20, 19, torch.zeros(()), *kinds)
    states = [examples, examples, no_counts(1, torch.device("cpu"))]
    held = sum(tensor.nbytes for state in states for tensor in state.values())
    assert shape.statistics == cfg.n_layers * cfg.d_mlp * held
