"""What every public function does with every kind of model: the tables of docs/support.md.

A row calls one function on a small model with GPT-2's architecture, and checks that the result is
sensible; other tests check that it is right. An error from this package is also a cell.
`make support` stores the cells of one transformer-lens version after the other, and
`test_support.py` compares them with the installed version's.

    python tests/support.py
"""

import csv
import json
import re
import sys
import tempfile
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from io import StringIO
from pathlib import Path

import bridges
import mixtures
import models
import torch
from common import BATCH, D_VOCAB, POS, tokens
from task_tokenizer import task_tokenizer
from tiny_tokenizer import tiny_tokenizer
from typer.testing import CliRunner

import attn_only_lens as lens
from attn_only_lens import Contrast, circuits, explain, growth, neurons, tasks, viz
from attn_only_lens import patching as p
from attn_only_lens.cli import app
from attn_only_lens.cli.json_output import schema
from attn_only_lens.storage import write_text
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

STORED = Path(__file__).parents[1] / "docs" / "support.csv"
PAGE = STORED.with_suffix(".md")
SCHEMA = STORED.with_name("json.schema.json")
HOOKED, BRIDGE, BRIDGE_4 = (
    "HookedTransformer, 3.9",
    "TransformerBridge, 3.9",
    "TransformerBridge, 4",
)
MIXTURE = "mixture of experts, 4"
KINDS = (BRIDGE_4, MIXTURE, BRIDGE, HOOKED)
HERE = (BRIDGE, HOOKED) if HAS_HOOKED_TRANSFORMER else (BRIDGE_4, MIXTURE)
WORKS = "works"
SIZES = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 8}  # for its kernels
TEXT, OTHER = "w3 w5 w7 w2", "w3 w5 w11 w2"
WORDS = [f"w{i}" for i in range(POS)]
METRIC = p.logit_diff(correct=7, wrong=8)
BATCHED = Contrast(tokens(1), tokens(2), METRIC)
PAIR = Contrast(tokens(batch=1), tokens(1, batch=1), METRIC)
ONE_RUN = Contrast(tokens(batch=1), None, METRIC)
THINGS = [{"thing": f"w{i}", "answer": f" w{i + 4}"} for i in (7, 9)]


class Kit:
    """A model of one kind, and objects made from it that functions take, each made once."""

    def __init__(self, kind, folder):
        self.kind, self.folder = kind, Path(folder)

    @cached_property
    def model(self):
        """Return a model whose neurons are not exposed."""
        made = self._built("gelu", "gpt2")
        tokenizer = tiny_tokenizer(D_VOCAB, self.folder / "words")
        if self.kind == HOOKED:
            made.set_tokenizer(tokenizer)
        else:
            made.tokenizer = tokenizer
        made.cfg.default_prepend_bos = True
        made.tokenizer.chat_template = "{{ messages[0]['content'] }} w2"
        return made

    @cached_property
    def gated(self):
        return self._built("llama", "llama")

    def _built(self, hooked, bridge):
        if self.kind == HOOKED:
            return models.build(hooked, torch.float32, d_vocab_out=D_VOCAB)
        if self.kind == MIXTURE:
            return mixtures.boot("qwen2", torch.float32, **SIZES)
        return bridges.boot(bridge, torch.float32)

    @cached_property
    def exposed(self):
        return lens.expose_neuron_heads(self.model, copy=True).model

    @cached_property
    def cache(self):
        with torch.no_grad():
            return self.exposed.run_with_cache(tokens())[1]

    @cached_property
    def graph(self):
        return circuits.attribution_graph(self.exposed, ONE_RUN, top=7)

    @cached_property
    def grown(self):
        return lens.grow(self.model, d_mlp=41, seed=0)

    @cached_property
    def comparison(self):
        sizes = growth.ComparisonSizes(faithfulness=0.5, n_patched=2, n_nodes=5)
        contrast = Contrast(tokens(), None, p.loss())
        return lens.compare(self.model, self.grown, contrast, sizes=sizes)

    def sweep(self, heads=("L0H1", "L1N3"), metric=METRIC, positions=-1):
        sites = p.Sites(heads, positions=positions)
        return p.activation_patch(self.exposed, replace(BATCHED, metric=metric), sites=sites)

    def attributed(self, metric=METRIC):
        return p.attribution(self.exposed, replace(BATCHED, metric=metric))

    def patched_by_role(self, task):
        """Return whether patches of the task's prompts at its roles change anything."""
        sites = p.Sites(["L0H1", "L1N3"], positions="roles")
        return _changed(p.activation_patch(self.exposed, task, sites=sites))

    def looked_up(self, by, metric=None):
        corpus = neurons.Corpus([TEXT, OTHER])
        options = {"k": 3, "by": by, "metric": metric}
        return neurons.corpus_statistics(self.exposed, ["L1N3"], corpus, **options).neurons

    def grown_by(self, expansion, **options):
        """Return whether the model grows this way and computes the same function."""
        grown = lens.grow(self.model, expansion, seed=0, **options).model
        with torch.no_grad():
            return torch.allclose(grown(tokens()), self.model(tokens()), rtol=0, atol=1e-3)

    @cached_property
    def files(self):
        """Save the model in a folder without this package's files."""
        folder = self.folder / "files"
        folder.mkdir()
        if self.kind == HOOKED:
            return models.source_folder(folder)
        if self.kind == MIXTURE:
            mixtures.original("qwen2", torch.float32, **SIZES).save_pretrained(folder)
        else:
            bridges.original("gpt2", torch.float32).save_pretrained(folder)
        tiny_tokenizer(D_VOCAB, folder)
        return folder

    def run(self, *arguments):
        """Run a command, and return its last argument, the output file or folder."""
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exit_code == 2:
            raise lens.errors.AttnOnlyLensError(result.output.rpartition("error: ")[2])
        assert result.exit_code == 0, result.output
        return arguments[-1]

    def out(self, name):
        return Path(tempfile.mkdtemp(dir=self.folder)) / name

    @cached_property
    def patched(self):
        prompts = ("--clean", TEXT, "--corrupted", OTHER, "--answer", "w7", "--wrong", "w11")
        return self.run("patch", self.files, *prompts, "--layers", "1", "--out", self.out("x.csv"))

    @cached_property
    def larger(self):
        return self.run("grow", "--d-mlp", "41", self.files, self.out("larger"))

    @cached_property
    def prompts(self):
        path = self.folder / "prompts.txt"
        path.write_text(f"{TEXT}\nw11 w13 w3 w5\n")
        return path


def _changed(sweep):
    return bool((sweep.frame["value"] != sweep.corrupted_value).any())


def _other_inside(kit, context):
    with context:
        inside = kit.exposed(tokens())
    return not torch.equal(inside, kit.exposed(tokens()))


def _bilinear(kit):
    how = {"copy": True, "gate": lens.Bilinear(2), "check": tokens()}
    return lens.expose_neuron_heads(kit.model, **how).verification.ok


def _followed(kit):
    senders = p.Sites(["L0H1", "L0N3"], positions=-1)
    edges = p.Edges(senders, ["L1H1", "L1N3", "logits"], part="z")
    return p.path_patch(kit.exposed, BATCHED, edges)


def _circuit_result(kit, how):
    if how == "discover":
        return circuits.discover(kit.exposed, BATCHED, search=circuits.Search(n_random=2))
    if how == "evaluate":
        search = circuits.Search(order="signed", n_random=0)
        circuit = circuits.discover(kit.exposed, BATCHED, search=search)
        return circuits.evaluate(kit.exposed, circuit, Contrast(tokens(3), tokens(5), METRIC))
    return circuits.faithfulness(kit.exposed, BATCHED, kit.attributed(), n_random=2)


def _grouped(kit):
    graph = circuits.attribution_graph(kit.exposed, PAIR, top=9)
    return circuits.group_nodes(graph, kit.exposed, PAIR)


def _transfer(kit):
    some = {"one": _circuit_result(kit, "discover")}
    others = {"there": Contrast(tokens(3), tokens(5), METRIC)}
    return circuits.transfer(kit.exposed, some, others)


def _transcoder(kit):
    made = torch.Generator().manual_seed(0)
    d_model = kit.model.cfg.d_model
    W_enc, W_dec = (torch.randn(sizes, generator=made) for sizes in ((d_model, 41), (41, d_model)))
    return lens.transcoders.Transcoder(W_enc, 0.1 * W_dec, torch.zeros(41), torch.zeros(d_model))


def _kinds_with_transcoder(kit, sites):
    with lens.transcoders.attach(kit.model, {1: _transcoder(kit)}) as model:
        sweep = p.activation_patch(model, BATCHED, sites=p.Sites(sites, positions=-1))
        return _changed(sweep) and set(sweep.frame["kind"])


def _same_with_transcoder(kit):
    with torch.no_grad():
        before = kit.model(tokens())
        with lens.transcoders.attach(kit.model, {1: _transcoder(kit)}) as model:
            return torch.allclose(model(tokens()), before, rtol=0, atol=1e-3)


def _detached(kit):
    lens.transcoders.attach(kit.model, {1: _transcoder(kit)})
    lens.transcoders.detach(kit.model)
    return torch.equal(kit.model(tokens()), kit.model(tokens())) and not hasattr(
        kit.model.blocks[1].mlp, "hook_error"
    )


def _fidelity(kit):
    return lens.transcoders.fidelity(kit.model, {1: _transcoder(kit)}, tokens())


def _saved_transcoder(kit):
    folder = lens.transcoders.save(kit.out("features"), {1: _transcoder(kit)})
    return torch.equal(lens.transcoders.load(folder)[1].W_enc, _transcoder(kit).W_enc)


def _evaluated(kit):
    prompts = ("--clean", TEXT, "--corrupted", OTHER, "--answer", "w7", "--wrong", "w11")
    circuit, out = kit.out("circuit.json"), kit.out("why.html")
    kit.run("explain", kit.files, *prompts, "--save-circuit", circuit, "--out", out)
    kit.run("evaluate", kit.files, circuit, *prompts)
    return circuit.exists()


def _solvable(kit):
    """Return a pair whose answers are two tokens of which the model prefers one on each prompt."""
    texts = "w3 w5 w2", "w3 w7 w2"
    clean, corrupted = (kit.model(text, return_type="logits")[0, -1].detach() for text in texts)
    here, there = (side[:, None] > side[None] for side in (clean, corrupted))
    right, wrong = (here & ~there).nonzero()[0].tolist()
    names = [f" {kit.model.tokenizer.decode([token])}" for token in (right, wrong)]
    return Contrast(*texts, p.logit_diff(*names))


def _read_pairs(kit):
    path, keys = kit.out("pairs.jsonl"), ("clean", "corrupted", "answer", "wrong")
    row = ("The keys near", "The key near", " are", " is")
    path.write_text(json.dumps(dict(zip(keys, row, strict=True))), encoding="utf-8")
    return tasks.from_jsonl(task_tokenizer(), 1, path, keys=keys)


def _generalized_silu(kit):
    silu = lens.GeneralizedSiLU(0.5, 2.0)
    if kit.kind == HOOKED:
        model = models.build("gelu", torch.float32)
        for block in model.blocks:
            block.mlp.act_fn = silu
    else:
        gpt2 = bridges.original("gpt2", torch.float32)
        for block in gpt2.transformer.h:
            del block.mlp.act  # a module
            block.mlp.act = silu
        model = bridges.bridged(gpt2)
    exposed = lens.expose_neuron_heads(model, copy=True, gate=silu, check=tokens())
    return exposed.verification.ok


LENS = {
    "Bilinear": _bilinear,
    "GeneralizedSiLU": _generalized_silu,
    "HeadName": lambda kit: lens.HeadName.parse("L0N3").hook("z", kit.exposed) in kit.cache,
    "Bilinear.calibrated": lambda kit: (
        min(lens.Bilinear.calibrated(kit.gated, tokens()).calibration.ranges) > 0
    ),
    "compare": lambda kit: (kit.comparison.heads["divergence"] < 1e-3).all(),
    "chat_tokens": lambda kit: len(lens.chat_tokens(kit.model, "w3 w5")[0]) > 2,
    "convert": lambda kit: lens.convert(kit.model).cfg.attn_only,
    "explain": lambda kit: len(explain(kit.exposed, PAIR).table()),
    "expose_neuron_heads": lambda kit: (
        lens.expose_neuron_heads(kit.exposed, check=tokens()).verification.bitwise
    ),
    "grow": lambda kit: kit.grown.model.cfg.d_mlp == 41,
    "load": lambda kit: lens.load(kit.files)(tokens()).isfinite().all(),
    "neuron_pattern": lambda kit: lens.neuron_pattern(kit.cache, "L0N3").shape == (BATCH, POS, 2),
    "HeadName.original_neuron": lambda kit: (
        lens.HeadName.parse("L1N7")
        .original_neuron(
            lens.expose_neuron_heads(kit.model, copy=True, gate=lens.Bilinear(2)).model
        )
        .index
        == 3
    ),
    "save": lambda kit: torch.equal(
        lens.load(lens.save(kit.exposed, kit.out("saved")))(tokens()), kit.exposed(tokens())
    ),
    "to_stock": lambda kit: (
        lens.to_stock(
            lens.convert(kit.model, gate=lens.Bilinear(2)) if kit.kind == HOOKED else kit.exposed
        ).cfg.attn_only
    ),
}
PATCHING = {
    "Ablation": lambda kit: len(
        p.activation_patch(
            kit.exposed, BATCHED, sites=["L0H1"], direction=p.Ablation("mean", tokens(3))
        )
    ),
    "ablated": lambda kit: _other_inside(kit, p.ablated(kit.exposed, ["L0H1", "L1N3"])),
    "activation_patch": lambda kit: _changed(kit.sweep()),
    "Sweep.agreement": lambda kit: len(
        kit.sweep("all", positions="each").agreement(kit.attributed())
    ),
    "attribution": lambda kit: _changed(kit.attributed()),
    "custom": lambda kit: _changed(
        kit.sweep(metric=p.custom(lambda logits: logits[:, -1, 7].mean()))
    ),
    "kl": lambda kit: _changed(kit.attributed(p.kl())),
    "log_probability": lambda kit: _changed(kit.attributed(p.log_probability(7))),
    "logit_diff": lambda kit: _changed(kit.attributed(p.logit_diff("w3", "w5"))),
    "loss": lambda kit: _changed(kit.attributed(p.loss())),
    "path_patch": lambda kit: _followed(kit).effect.abs().max() > 1e-3,
    "plan": lambda kit: p.plan(kit.exposed, BATCHED, sites=["L0H1"]).seconds > 0,
    "probability": lambda kit: _changed(kit.attributed(p.probability(7))),
    "probability_diff": lambda kit: _changed(
        kit.attributed(p.probability_diff([[7, 8]] * BATCH, [["w9"]] * BATCH))
    ),
    "Sites": lambda kit: (
        set(kit.sweep("all").frame["kind"]) == {"attention", "neuron"}
        and _kinds_with_transcoder(kit, "errors") == {"error"}
        and _kinds_with_transcoder(kit, "features") == {"feature"}
    ),
    "steered": lambda kit: _other_inside(kit, p.steered(kit.exposed, {"L1N3": 4.0})),
}
TASKS = {
    # These use a tokenizer of their own, because the model's lacks their words.
    "agreement": lambda kit: len(tasks.agreement(task_tokenizer(), 3)),
    "brackets": lambda kit: len(tasks.brackets(task_tokenizer(), 3)),
    "greater_than": lambda kit: len(tasks.greater_than(task_tokenizer(), 3)),
    "ioi": lambda kit: len(tasks.ioi(task_tokenizer(), 3)),
    "from_templates": lambda kit: kit.patched_by_role(
        tasks.from_templates(kit.model.tokenizer, 2, ["w3 {thing} w2", "{thing} w5"], THINGS)
    ),
    "from_jsonl": lambda kit: len(_read_pairs(kit)),
    "from_pair": lambda kit: len(tasks.from_pair(kit.model, 1, _solvable(kit), {"w2": ["w11"]})),
    "Contrast.solved_by": lambda kit: len(_solvable(kit).solved_by(kit.model)),
    "induction": lambda kit: kit.patched_by_role(tasks.induction(kit.model.tokenizer, 3, length=5)),
}
CIRCUITS = {
    "attribution_graph": lambda kit: len(kit.graph.edges) > 0,
    "composition": lambda kit: (
        circuits.composition(kit.exposed, "L0N3", "L1H1").virtual_weights().shape[0]
    ),
    "copying_scores": lambda kit: circuits.copying_scores(kit.exposed)["copying"].notna().any(),
    "discover": lambda kit: len(_circuit_result(kit, "discover")),
    "faithfulness": lambda kit: len(_circuit_result(kit, "faithfulness").frame),
    "evaluate": lambda kit: _circuit_result(kit, "evaluate").whole,
    "group_nodes": lambda kit: len(_grouped(kit).nodes),
    "path_expansion": lambda kit: len(
        circuits.path_expansion(kit.exposed, Contrast(tokens(), None, METRIC)).paths(5)
    ),
    "score_sources": lambda kit: len(
        circuits.score_sources(kit.exposed, tokens(batch=1), "L1H1", query=-1, key=0)
    ),
    "token_circuit": lambda kit: all(
        len(circuits.token_circuit(kit.exposed, "L1H1", kind).top(5)) for kind in ("qk", "ov")
    ),
    "transfer": lambda kit: _transfer(kit).size,
}
VIZ = {
    "attention_view": lambda kit: len(viz.attention_view(kit.exposed, ["L1H1", "L1N3"], TEXT)),
    "circuit_view": lambda kit: len(viz.circuit_view(kit.graph, kit.exposed, ONE_RUN)),
    "comparison_report": lambda kit: len(viz.comparison_report(kit.comparison)),
    "neuron_page": lambda kit: len(
        viz.neuron_page(kit.exposed, ["L1N3"], neurons.Corpus([TEXT, OTHER]))
    ),
    "bars": lambda kit: viz.bars(kit.sweep()).data,
    "heatmap": lambda kit: viz.heatmap(kit.sweep()).data and viz.heatmap(_transfer(kit)).data,
    "write": lambda kit: (
        viz.write(viz.bars(kit.sweep()), kit.out("x.html")).exists()
        and viz.write(viz.circuit_view(kit.comparison), kit.out("x.svg")).exists()
    ),
}
NEURONS = {
    "corpus_statistics": lambda kit: (
        len(
            neurons.corpus_statistics(
                kit.exposed, ["L1N3", "L1H1"], neurons.Corpus([TEXT, OTHER]), k=3
            ).names
        )
        == 2
    ),
    "expert_visits": lambda kit: len(
        neurons.expert_visits(kit.exposed, neurons.Corpus([TEXT, OTHER]))
    ),
    "top_examples": lambda kit: len(kit.looked_up("attribution", p.loss()).frame()),
}
TRANSCODERS = {
    "Transcoder": lambda kit: _transcoder(kit).encode(torch.ones(kit.model.cfg.d_model)).any(),
    "attach": _same_with_transcoder,
    "detach": _detached,
    "fidelity": lambda kit: 0 <= _fidelity(kit).top_token <= 1,
    "load": _saved_transcoder,
    "save": _saved_transcoder,
}
GROWTH = {
    "AddHeads": lambda kit: kit.grown_by(growth.AddHeads(1)),
    "AddNeurons": lambda kit: kit.grown_by(growth.AddNeurons(5)),
    "InsertLayer": lambda kit: kit.grown_by(growth.InsertLayer(1)),
    "WidenQueriesAndKeys": lambda kit: kit.grown_by(growth.WidenQueriesAndKeys(3)),
    "WidenStream": lambda kit: kit.grown_by(growth.WidenStream(10)),
    "WidenValues": lambda kit: kit.grown_by(growth.WidenValues(3)),
    "init": lambda kit: kit.grown_by(
        [growth.AddNeurons(5), growth.AddHeads(1)], init=growth.init.copies()
    ),
    "Grown.save_pretrained": lambda kit: torch.allclose(
        lens.load(kit.grown.save_pretrained(kit.out("grown")))(tokens()),
        kit.model(tokens()),
        rtol=0,
        atol=1e-3,
    ),
    "Grown.shrink": lambda kit: torch.equal(kit.grown.shrink()(tokens()), kit.model(tokens())),
}
COMMANDS = {
    "atlas": lambda kit: kit.run(
        *("atlas", kit.files, "--texts", kit.prompts, "--names", "L1N3", "--out", kit.out("atlas"))
    ).exists(),
    "circuit": lambda kit: kit.run(
        *("circuit", kit.files, "--clean", TEXT, "--answer", "w7", "--wrong", "w11"),
        *("--nodes", 7, "--out", kit.out("x.html")),
    ).exists(),
    "evaluate": _evaluated,
    "explain": lambda kit: kit.run(
        *("explain", kit.files, "--clean", TEXT, "--corrupted", OTHER, "--answer", "w7"),
        *("--wrong", "w11", "--out", kit.out("why.html")),
    ).exists(),
    "compare": lambda kit: kit.run(
        *("compare", kit.files, kit.larger, "--clean", kit.prompts, "--metric", "loss"),
        *("--faithfulness", 0.5),
        *("--patched", 2, "--nodes", 5, "--out", kit.out("report")),
    ).exists(),
    "convert": lambda kit: kit.run("convert", kit.files, kit.out("converted")).exists(),
    "grow": lambda kit: kit.larger.exists(),
    "patch": lambda kit: kit.patched.exists(),
    "pattern": lambda kit: kit.run(
        "pattern", kit.files, "--prompt", TEXT, "--names", "L1N3", "--out", kit.out("x.html")
    ).exists(),
    "picture": lambda kit: kit.run("picture", kit.patched, "--out", kit.out("x.html")).exists(),
    "verify": lambda kit: kit.run("verify", kit.files, "--text", TEXT),
}
OF_NO_MODEL = {
    "errors",
    # What users make to say what they want.
    *("Contrast", "Work", "Edges", "Estimate", "Search", "Corpus", "Overlays"),
    "ComparisonSizes",
    # Shipped models, whose kinds are in the tables.
    *("demo", "pretrained"),
    "pairs",  # a random model solves no task; `Contrast.solved_by` has a row
}
"""Public names without a row."""
TITLES = {
    "attn_only_lens": "attn_only_lens",
    "attn_only_lens.patching": "attn_only_lens.patching",
    "attn_only_lens.tasks": "attn_only_lens.tasks",
    "attn_only_lens.circuits": "attn_only_lens.circuits",
    "attn_only_lens.viz": "attn_only_lens.viz",
    "attn_only_lens.neurons": "attn_only_lens.neurons",
    "attn_only_lens.transcoders": "attn_only_lens.transcoders",
    "attn_only_lens.growth": "attn_only_lens.growth",
    "attn-only-lens": "The command line",
}
INTRODUCTION = """\
# Which function takes which model

This page shows which public functions work on a small model with GPT-2's architecture: a
`TransformerBridge` around a Hugging Face transformers model, with transformer-lens 4 and 3.9, and a
`HookedTransformer`, which only 3.9 has. The second column is a `TransformerBridge` around a
[mixture of experts](mixtures.md) with Qwen2-MoE's architecture, with transformer-lens 4; with 3.9,
`expose_neuron_heads` refuses every mixture.

- *works*: the call returned a plausible result; other tests check the result in detail;
- *refused*: the call raised an error from this package; the messages are listed below.

If a function raises any other error, `make support` fails and does not write this page. The same
results are available [as CSV](support.csv).

`demo` and `pretrained` use only the shipped models: bridges with version 4, either class with
version 3.9. `pairs` takes the models that `Contrast.solved_by` takes. Models from other families
may be refused for other reasons: see [limits](limits.md) and [growth](growth.md)."""
ROWS = {
    "attn_only_lens": LENS,
    "attn_only_lens.patching": PATCHING,
    "attn_only_lens.tasks": TASKS,
    "attn_only_lens.circuits": CIRCUITS,
    "attn_only_lens.viz": VIZ,
    "attn_only_lens.neurons": NEURONS,
    "attn_only_lens.transcoders": TRANSCODERS,
    "attn_only_lens.growth": GROWTH,
    "attn-only-lens": COMMANDS,
}


def measure(kit, row):
    """Return the cell of a row: that it works, or why it is refused.

    Raises:
        AssertionError: the result is not sensible.
        Exception: an error that is not this package's, which is a bug.
    """
    try:
        sensible = row(kit)
    except lens.errors.AttnOnlyLensError as error:
        reasons = getattr(error, "reasons", (str(error),))
        text = " ".join("; ".join(reasons).split())
        text = text.replace(version("transformer-lens"), kit.kind.partition(", ")[2])
        return re.sub(rf"{re.escape(str(kit.folder))}[\w./-]*", "…", text)
    assert sensible, "what came back is not sensible"
    return WORKS


def stored():
    """Return the cells of docs/support.csv by package and name, then by kind."""
    with STORED.open(encoding="utf-8", newline="") as file:
        return {(row.pop("package"), row.pop("name")): row for row in csv.DictReader(file)}


def page(cells):
    """Return the page of docs/support.csv, which shows each reason once."""
    reasons = []
    lines = [INTRODUCTION]
    for package, title in TITLES.items():
        lines += ["", f"## {title}", "", f"| | {' | '.join(KINDS)} |"]
        lines.append("| --- |" + " --- |" * len(KINDS))
        for name, row_cells in (
            (n, row) for (package_of, n), row in cells.items() if package_of == package
        ):
            shown = []
            for cell in (row_cells[kind] for kind in KINDS):
                if cell != WORKS and cell not in reasons:
                    reasons.append(cell)
                shown.append(WORKS if cell == WORKS else f"refused ({reasons.index(cell) + 1})")
            lines.append(f"| `{name}` | {' | '.join(shown)} |")
    lines += ["", "## Reasons", "", *(f"{i}. {why}" for i, why in enumerate(reasons, 1))]
    return "\n".join(lines) + "\n"


def main():
    """Store the cells of the installed version, and keep those of the other version."""
    cells = stored() if STORED.exists() else {}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        kits = {kind: Kit(kind, tempfile.mkdtemp(dir=folder)) for kind in HERE}
        for package, names in ROWS.items():
            for name, row in sorted(names.items()):
                now = {kind: measure(kit, row) for kind, kit in kits.items()}
                others = cells.get((package, name), {})
                rows.append({"package": package, "name": name, **others, **now})
    text = StringIO(newline="")
    writer = csv.DictWriter(text, ["package", "name", *KINDS], lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    write_text(STORED, text.getvalue())
    write_text(PAGE, page(stored()))
    write_text(SCHEMA, json.dumps(schema(), indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
