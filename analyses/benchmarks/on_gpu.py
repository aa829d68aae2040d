"""Run all GPU benchmarks and studies, in order and within minutes, and write one page.

Each step is a process with a time budget. A step that is cut off, fails or has no time left is
named on the page, and is run again when this script runs again. Finished steps are not repeated, so
losing the device costs only the current step. `on_gpu.md` is rewritten after every step; outputs of
the steps are in the same folder. To repeat all measurements, remove the folder.

The first step belongs to this script: sweeps on the device are compared with sweeps on the CPU.

    python -m analyses.benchmarks.on_gpu --device cuda --out out/gpu
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from analyses import study
from analyses.benchmarks.bench_patching import Task, bridge_of, prompts
from analyses.tools.benching import machine, markdown, table, wait
from analyses.tools.options import Device, Out, Smoke
from attn_only_lens import Contrast, Work, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.storage import write_text
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

FIRST_STEP = Task("every neuron", "each", 15, 10)


@dataclass(frozen=True)
class Step:
    """A script with its options, and the seconds that it may take."""

    script: str
    seconds: int
    options: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The module to run, and its first arguments."""
        if self.script in study.names():
            return ["analyses", "run", self.script]
        return [f"analyses.benchmarks.{self.script}"]

    @property
    def name(self) -> str:
        """The name of the step's folder."""
        return "_".join([self.script, *(option.strip("-") for option in self.options)])


STEPS = (
    Step("on_gpu", 60, ("--sweeps",)),
    Step("bench_patching", 120, ("--model", "bridge")),
    Step("bench_paths", 60),
    Step("bench_patching", 90, ("--model", "hooked")),
    Step("bench_results", 60),
    Step("bench_growth", 60),
    Step("bench_convert", 60),
    Step("exactness_by_gate", 120),
    Step("known_circuits", 300),
)
"""The most important steps come first, because time may run out."""
if not HAS_HOOKED_TRANSFORMER:
    STEPS = tuple(step for step in STEPS if "hooked" not in step.options)


def sweeps(device: str, smoke: bool) -> str:
    """Return a page that compares sweeps on a device with sweeps on the CPU."""
    inputs = prompts(FIRST_STEP, 41 if smoke else 50257, "cpu")
    metric = p.logit_diff(correct=11, wrong=12)
    neurons = range(0, 37 if smoke else 3072, 18 if smoke else 384)
    names = [f"L{layer}N{i}" for layer in range(2 if smoke else 12) for i in neurons]
    rows: list[dict[str, Any]] = []
    expected = None
    for place in dict.fromkeys(("cpu", device)):
        with expose_neuron_heads(bridge_of(place, smoke=smoke)) as model:
            moved = [tensor.to(place) for tensor in inputs]
            seconds = []
            for _ in range(2):  # kernels are loaded in the first round
                wait(place)
                start = time.perf_counter()
                contrast = Contrast(*moved, metric)
                sweep = p.activation_patch(model, contrast, sites=names, work=Work(progress=False))
                wait(place)
                seconds.append(time.perf_counter() - start)
            score = sweep.frame["score"]
            expected = score if expected is None else expected
            rows.append(
                {
                    "device": place,
                    "sites": len(score),
                    "seconds": seconds[-1],
                    "largest difference from the CPU's score": (score - expected).abs().max(),
                }
            )
    return f"# Sweeps on the device and on the CPU\n\n{table(pd.DataFrame(rows))}\n"


def run(command: Sequence[str], log: Path, seconds: float) -> str:
    """Run a command; if it did not finish, return the reason."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # also kills the processes that it has started
            process.wait()
            return f"cut off after {seconds:.0f} s"
    lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    return f"failed: {lines[-1][:200] if lines else code}" if code else ""


def page(out: Path, states: dict[str, str], about: str) -> str:
    """Return a page with the state of each step, and the pages of all finished steps."""
    rows = [[name, state] for name, state in states.items()]
    texts = [
        path.read_text("utf-8") for name in states for path in sorted(out.glob(f"{name}/*.md"))
    ]
    parts = ["# Measured on a GPU", about, markdown(["step", "state"], rows), *texts]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main(
    out: Out = Path("out/gpu"),
    device: Device = "cuda",
    minutes: Annotated[float, typer.Option(help="for all steps of this run")] = 9.0,
    only: Annotated[list[str] | None, typer.Option(help="scripts; all if none")] = None,
    sweeps_only: Annotated[
        bool, typer.Option("--sweeps", help="the first step alone, here")
    ] = False,
    smoke: Smoke = False,
) -> None:
    """Run every step that is not done, and write `on_gpu.md`."""
    if sweeps_only:
        write_text(out / "sweeps.md", sweeps(device, smoke))
        return
    steps = [step for step in STEPS if not only or step.script in only]
    if not steps:
        expected = ", ".join(dict.fromkeys(step.script for step in STEPS))
        raise typer.BadParameter(f"got --only {only}; expected some of {expected}")
    end = time.monotonic() + 60 * minutes
    command = f"python -m analyses.benchmarks.on_gpu --device {device}"
    about = f"Machine: {machine(device)}. Made by `{command}`."
    states = {step.name: "not begun: no time was left; run this again" for step in steps}
    for step in steps:
        folder = out / step.name
        flags = ["--device", device, *step.options, *["--smoke"] * smoke]
        record = {"script": step.script, "flags": flags, "machine": machine(device)}
        kept, done = folder / "done.json", None
        if kept.exists() and (done := json.loads(kept.read_text("utf-8"))) | record == done:
            states[step.name] = f"done in {done['seconds']:.0f} s"
            continue
        left = end - time.monotonic()
        if left < 1:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", *step.command, "--out", str(folder), *flags]
        start = time.monotonic()
        reason = run(command, folder / "log.txt", min(step.seconds, left))
        took = time.monotonic() - start
        states[step.name] = reason or f"done in {took:.0f} s"
        if not reason:
            write_text(kept, json.dumps(record | {"seconds": took}, indent=2) + "\n")
        typer.echo(f"{step.name}: {states[step.name]}")
        write_text(out / "on_gpu.md", page(out, states, about))
    write_text(out / "on_gpu.md", page(out, states, about))


if __name__ == "__main__":
    typer.run(main)
