"""Faults in the package, made one at a time in a copy of the repository: does a test notice?

    python tests/mutations.py                    all faults, each with the tests next to it
    python tests/mutations.py --only secants     faults whose file or reason contains a text
    python tests/mutations.py --tests tests      with other tests: here, all

Not a part of `make test`: the tests run once for each fault. A fault that no test notices is
"alive".
If the package changes, a fault whose text is no longer there is an error: change its text here.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich import print as show
from rich.table import Table

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        file: the file in the package.
        text: what stands there, once.
        fault: what takes its place.
        why: what a user would get.
        tests: the tests that should notice.
    """

    file: str
    text: str
    fault: str
    why: str
    tests: str


MUTATIONS = [
    Mutation(
        "circuits/kept_heads.py",
        "if not fits:",
        "if False:",
        "circuits of models that compute otherwise are run with wrong constants",
        "tests/circuits/test_kept_heads.py",
    ),
    Mutation(
        "circuits/kept_heads.py",
        "        return (gradient @ self._heads.decoders[0].detach().T).unsqueeze(-1)",
        "        return (gradient @ self._heads.decoders[0].detach().T).unsqueeze(-1).roll(1, -2)",
        "the worth of a neuron is that of its neighbour",
        "tests/circuits/test_kept_heads.py",
    ),
    Mutation(
        "circuits/ablated_points.py",
        "index, is_site = number, is_site[:, kept.heads_there]",
        "index, is_site = number.flip(0), is_site[:, kept.heads_there]",
        "circuits keep other neurons than they name",
        "tests/circuits/test_kept_heads.py",
    ),
    Mutation(
        "patching/job.py",
        "if i == self._rank:",
        "if True:",
        "every process computes all chunks",
        "tests/patching/test_processes.py",
    ),
    Mutation(
        "patching/processes.py",
        "InputError.raise_if(failures, _PROBLEM)",
        "pass",
        "processes go on without the results of one that failed",
        "tests/patching/test_processes.py",
    ),
    Mutation(
        "patching/job.py",
        'InputError.raise_if(reasons, "all processes must run the same job")',
        "pass",
        "results of different jobs are mixed",
        "tests/patching/test_processes.py",
    ),
    Mutation(
        "patching/job.py",
        "if folder is not None and self._rank == 0 else",
        "if folder is not None else",
        "every process needs the folder",
        "tests/patching/test_processes.py",
    ),
    Mutation(
        "engine/secants.py",
        "(r_1 * r_0).square() / r * along * x",
        "(r_1 * r_0) * along * x",
        "multipliers of norms are wrong",
        "tests/engine/test_multipliers.py",
    ),
    Mutation(
        "engine/secants.py",
        "return torch.where(flat, at_middle,",
        "return torch.where(dx == 0, at_middle,",
        "slopes of nearly equal inputs cancel in float32",
        "tests/engine/test_multipliers.py",
    ),
    Mutation(
        "engine/contrast.py",
        "if pair is None or kept != reading:",
        "if pair is None:",
        "a contrast's texts have the tokens of the model's former tokenizer",
        "tests/engine/test_contrast.py",
    ),
    Mutation(
        "engine/multipliers.py",
        "return through * mean(v)",
        "return through * v.chunk(2)[0]",
        "by_pattern is wrong, the sum is right",
        "tests/engine/test_multipliers.py",
    ),
    Mutation(
        "engine/secants.py",
        "lambda gradient: gradient if self._is_open else None",
        "lambda gradient: gradient",
        "edges into values contain those into patterns",
        "tests/circuits/test_difference_graph.py",
    ),
    Mutation(
        "circuits/linear_graph.py",
        "(misses**2).sum(axis=1) * n / (n - 1)",
        "(misses**2).sum(axis=1)",
        "standard errors of edges are too small",
        "tests/circuits",
    ),
    Mutation(
        "circuits/_score_sources.py",
        "of_heads[head.index * len(of_heads) // n_heads]",
        "of_heads[head.index % len(of_heads)]",
        "with grouped queries, sources of a pattern are of another key head",
        "tests/circuits",
    ),
    Mutation(
        "circuits/_path_expansion.py",
        "if not back.any():",
        "if back.abs().sum() < 1e-2:",
        "paths with small effects are missing",
        "tests/circuits",
    ),
    Mutation(
        "patching/path_runner.py",
        "        change = self.readers.neuron_change(receivers, entering, self.part, columns)",
        "        change = self.readers.neuron_change(receivers, entering, 'z', columns)",
        "path_patch ignores part=",
        "tests/patching/test_path_patch.py",
    ),
    Mutation(
        "patching/over_prompts.py",
        "squares.clamp(min=0) * n / (n - 1)",
        "squares.clamp(min=0)",
        "standard errors over prompts are too small",
        "tests/patching/test_over_prompts.py",
    ),
    Mutation(
        "patching/repairs.py",
        "c_half = (self._errors(half) ** 2).sum() / (self._key[half] ** 2).sum()",
        "c_half = 0.0",
        "expected_pearson is too sure",
        "tests/patching/test_repairs.py",
    ),
    Mutation(
        "engine/multipliers.py",
        "for x in (heads.outside, heads.z) if x is not None",
        "for x in (heads.z,) if x is not None",
        "a circuit's kept run is that of another circuit",
        "tests/engine/test_kept_runs.py",
    ),
    Mutation(
        "circuits/ablated_model.py",
        "digest(circuits, self.prompts)",
        "digest(circuits)",
        "a resumed search of a half of the prompts reads what another half gave",
        "tests/circuits/test_resume.py",
    ),
    Mutation(
        "growth/comparison/drops.py",
        "_falls(sweep).loc[here].to_numpy()",
        "_falls(sweep).to_numpy()",
        "exact drops are those of other components",
        "tests/comparison/test_compare.py",
    ),
    Mutation(
        "engine/positions.py",
        "columns == pair.last.cpu()[:, None] + pos + 1",
        "columns == pair.clean.shape[1] + pos",
        "negative positions are padding",
        "tests/engine/test_sites.py",
    ),
    Mutation(
        "engine/largest.py",
        "sizes[rows].topk(min(self.k, block.shape[1]), dim=1)",
        "sizes[rows].topk(min(self.k, 2, block.shape[1]), dim=1)",
        "fewer rows than asked for",
        "tests/engine tests/circuits",
    ),
    Mutation(
        "circuits/stability.py",
        "2 + (n - 2) / _DEPENDENCE",
        "n",
        "inclusion intervals are too narrow",
        "tests/circuits",
    ),
    Mutation(
        "growth/models/optimizer.py",
        '"max_exp_avg_sq": 2}',
        '"max_exp_avg_sq": 1}',
        "amsgrad's moments are wrong after growth",
        "tests/growth",
    ),
    Mutation(
        "growth/expansion/queries.py",
        "tuple(index + (index >= half) * (self.n // 2) for index in range(size))",
        "tuple(range(size))",
        "rotary queries are widened at the wrong place",
        "tests/theorems tests/growth",
    ),
    Mutation(
        "growth/comparison/statistics.py",
        "(squares - total**2 / n).clip(min=0) / ((n - 1) * n)",
        "(squares - total**2 / n).clip(min=0) / (n * n)",
        "standard errors in compare are too small",
        "tests/comparison",
    ),
    Mutation(
        "neurons/accumulate.py",
        "now = torch.maximum(held, exponent - (mantissa == 0.5).long())",
        "now = torch.maximum(held, exponent)",
        "the histogram's last bin is wrong",
        "tests/neurons",
    ),
    Mutation(
        "tasks/pairs.py",
        '_require(not set(answers) & set(wrong), "an answer is both right and wrong")',
        "pass",
        "a task has an answer that is both right and wrong",
        "tests/tasks",
    ),
    Mutation(
        "engine/replay/faster.py",
        "_ROUNDINGS = 8  #",
        "_ROUNDINGS = 10**9  #",
        "a changed activation class is not noticed",
        "tests/engine/test_faster_steps.py",
    ),
    # The faults above are of the first list; those below were added.
    Mutation(
        "engine/interventions.py",
        'z.roll(-1, dims=0) if to == "resample"',
        'z if to == "resample"',
        "resample ablation does nothing",
        "tests/patching/test_activation_patch.py",
    ),
    Mutation(
        "circuits/ablated_model.py",
        "result[chosen] = z[chosen].mean(dim=0)",
        "result[chosen] = z.flatten(0, 1).mean(dim=0)",
        "positional means are means over all positions",
        "tests/circuits",
    ),
    Mutation(
        "circuits/_faithfulness.py",
        "random_cmd=float(trapezoid(abs(1 - random), shares).mean()),",
        "random_cmd=float(trapezoid(1 - random, shares).mean()),",
        "CMD of random circuits lets errors cancel",
        "tests/circuits",
    ),
    Mutation(
        "growth/comparison/statistics.py",
        "divergence = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2",
        "divergence = entropy((p + q) / 2) - entropy(p)",
        "divergences of neuron patterns are not symmetric",
        "tests/comparison",
    ),
    Mutation(
        "transcoders/formats.py",
        "        b_enc = b_enc - b_dec @ W_enc\n",
        "        b_enc = b_enc + b_dec @ W_enc\n",
        "SAEs that subtract the decoder bias are loaded wrongly",
        "tests/transcoders",
    ),
    Mutation(
        "growth/expansion/stream.py",
        "constants.eps * s**2}",
        "constants.eps * s}",
        "a widened stream is not exact if eps is large",
        "tests/theorems tests/growth",
    ),
    Mutation(
        "growth/expansion/stream.py",
        "twice or constants.unembed_scaled",
        "twice",
        "T5 with a wider stream has other logits",
        "tests/growth/test_encoder_decoder.py",
    ),
    Mutation(
        "growth/models/optimizer.py",
        '        powers["weight_decay"] = 1\n',
        '        powers["weight_decay"] = 0\n',
        "Adam with decoupled weight decay decays scaled weights too fast after growth",
        "tests/growth",
    ),
    Mutation(
        "engine/edits.py",
        "return heads // (n_heads // n_shared)",
        "return heads % n_shared",
        "with grouped queries, heads read another group's key and value",
        "tests/patching/test_grouped_queries.py",
    ),
    Mutation(
        "engine/writes.py",
        "return moved / new_scale + linear * (1 / new_scale - 1 / self.scale)",
        "return moved / new_scale",
        'scale="anew" leaves out that the norm shrinks everything else',
        "tests/patching/test_path_patch.py",
    ),
    Mutation(
        "circuits/_group_nodes.py",
        ".A[:, :, 0].cpu().double() * signs",
        ".A[:, :, 0].cpu().double()",
        "neurons that act against one another are in one group",
        "tests/circuits",
    ),
    Mutation(
        "engine/metrics.py",
        "positions = (pair.last[:, None] + 1 + from_end).clamp(min=0)",
        "positions = (pair.last[:, None] + from_end).clamp(min=0)",
        "custom metrics read the token before the last",
        "tests/engine/test_metrics.py",
    ),
    Mutation(
        "engine/positions.py",
        "PositionSet(role.label, role.chosen & ~taken)",
        "PositionSet(role.label, role.chosen)",
        "a token with two roles counts twice in a graph",
        "tests/circuits tests/engine",
    ),
    Mutation(
        "neurons/statistics.py",
        "itself, previous = offsets[:, middle], offsets[:, middle + 1]",
        "itself, previous = offsets[:, middle], offsets[:, middle - 1]",
        "the atlas reports attention to the next token as attention to the previous one",
        "tests/neurons",
    ),
    Mutation(
        "gates/exact.py",
        "return 0.5 * torch.special.erfc(-math.sqrt(0.5) * q)",
        "return 0.5 * (1 + torch.special.erf(math.sqrt(0.5) * q))",
        "gates of strongly negative pre-activations are 0",
        "tests/gates",
    ),
    Mutation(
        "growth/expansion/queries.py",
        "factor = math.sqrt((sizes[axis] + self.n) / sizes[axis])",
        "factor = 1.0",
        "wider queries change the scores of heads",
        "tests/theorems tests/growth",
    ),
    Mutation(
        "growth/models/hugging_face.py",
        "f\"{rope['rope_theta'] ** (width / was):.14g}\"",
        "f\"{rope['rope_theta']:.14g}\"",
        "a grown folder with wider rotary queries computes other logits in transformers",
        "tests/growth",
    ),
    Mutation(
        "engine/cached_generation.py",
        "if not torch.allclose(got, expected, rtol=0, atol=bound, equal_nan=True):",
        "if False:",
        "generation with a broken cache is silently wrong",
        "tests/engine/test_cached_generation.py",
    ),
    Mutation(
        "engine/model_state.py",
        'for tensors in (attributes["_parameters"], attributes["_buffers"]):',
        'for tensors in (attributes["_parameters"],):',
        "resume= returns rows of a model with other buffers",
        "tests/engine/test_model_state.py",
    ),
    Mutation(
        "explanation/explanation.py",
        'signs["share"] == -signs["denoise"]',
        'signs["share"] == signs["denoise"]',
        "shares whose sign both patches contradict are not marked",
        "tests/explanation",
    ),
    Mutation(
        "storage/atomic.py",
        "                os.replace(new, path)\n",
        "                shutil.copy(new, path)\n",
        "a process that is killed while it saves leaves a part of a file",
        "tests/storage",
    ),
]


def fate(mutation: Mutation, tests: str) -> str:
    """Make a copy with the fault, run the tests, and return the first test that fails."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv*", "out", "site", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
        path = copy / "attn_only_lens" / mutation.file
        source = path.read_text("utf-8")
        if source.count(mutation.text) != 1:
            raise typer.BadParameter(f"{mutation.file} does not have this once: {mutation.text}")
        path.write_text(source.replace(mutation.text, mutation.fault), "utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
        ]
        done = subprocess.run(
            [*command, *tests.split()],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else "alive"


def main(
    only: Annotated[str, typer.Option(help="faults whose file or reason contains this")] = "",
    tests: Annotated[str, typer.Option(help="tests to run instead of those next to it")] = "",
) -> None:
    """Make each fault, and show which test notices it."""
    table = Table("fault", "what a user would get", "noticed by")
    for mutation in MUTATIONS:
        if only in mutation.file or only in mutation.why:
            noticed = fate(mutation, tests or mutation.tests)
            typer.echo(f"{mutation.file}: {mutation.why}: {noticed}", err=True)
            table.add_row(mutation.file, mutation.why, noticed)
    show(table)


if __name__ == "__main__":
    typer.run(main)
