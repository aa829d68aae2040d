"""Code that benchmarks and studies share: time, memory, machine, tables, and the run's record."""

import gc
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch

from attn_only_lens.storage import write_text

MIB = 2**20
T = TypeVar("T")
PACKAGES = ("attn_only_lens", "transformer-lens", "torch", "numpy", "pandas")


def page_name(script: str, device: str) -> str:
    """Return a page's name: the script's name, plus the device unless it is a CPU."""
    place = "" if device == "cpu" else f"_{device.replace(':', '')}"
    return f"{Path(script).stem}{place}.md"


def leave(
    script: str, out: Path, files: Mapping[str, str], *, started: float, **settings: Any
) -> None:
    """Write the files of a script, and a record, NAME.run.json, named after the first file.

    The record has command, settings, seconds, machine, versions, and the sha256 of all files. So
    pages that were edited by hand, and tables of other runs, can be recognised.

    Args:
        script: the script's `__file__`.
        out: the folder.
        files: texts by file name, starting with the page.
        started: `time.perf_counter()` at the beginning.
        settings: the settings of the run.
    """
    run = {
        "script": "/".join(Path(script).parts[-3:]),
        "settings": settings,
        "seconds": round(time.perf_counter() - started, 1),
        "machine": machine(settings.get("device", "cpu")),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "sha256": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()},
    }
    files = {**files, f"{Path(next(iter(files))).stem}.run.json": _json(run)}
    for name, text in files.items():
        write_text(out / name, text)


def _json(run: Mapping[str, Any]) -> str:
    return json.dumps(run, indent=2, ensure_ascii=False) + "\n"


def machine(device: str) -> str:
    """Return the machine as text: processor, threads, accelerator, torch version."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":")[1].strip() if models else name
    if torch.device(device).type == "cuda":
        name = f"{torch.cuda.get_device_name(device)}, {name}"
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def wait(device: str) -> None:
    """Wait until the device has finished its work."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def seconds(device: str) -> float:
    """Return processor time, which is not affected by other work; on a GPU, wall time."""
    wait(device)
    return time.process_time() if device == "cpu" else time.perf_counter()


def peak_of(call: Callable[[], T], device: str) -> tuple[T, float]:
    """Return a call's result, and its peak memory in MiB above the memory that was held before."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        return result, (torch.cuda.max_memory_allocated(device) - before) / MIB
    Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak to current memory
    before = _kib("VmRSS")
    result = call()
    return result, (_kib("VmHWM") - before) / 1024


def _kib(name: str) -> int:
    """Return a size of this process in KiB: "VmRSS" is held now, "VmHWM" is the peak."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def in_new_process(call: Callable[..., T], *arguments: Any, preload: Sequence[str] = ()) -> T:
    """Return a call's result from a new process, so that a peak cannot hide in freed memory.

    Args:
        call: a function at the top of a module.
        arguments: its arguments.
        preload: modules that all new processes share, so that they are imported only once.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with context.Pool(1) as pool:
        return pool.apply(call, arguments)


def conditions(device: str) -> str:
    """Return how a benchmark measures, for its page; call it when the benchmark begins."""
    if device != "cpu":
        return f"Machine: {machine(device)}."
    return (
        f"Machine: {machine(device)}. Other work ran on it (load average "
        f"{os.getloadavg()[0]:.1f} when this began), so times are processor time. Compare ratios."
    )


def medians(calls: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, float]:
    """Return median milliseconds of alternating calls; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for count in range(rounds + 1):
        for name, call in calls.items():
            start = seconds(device)
            kept = call()
            took = seconds(device) - start
            del kept
            if count:
                times[name].append(1e3 * took)
    return {name: statistics.median(ts) for name, ts in times.items()}


def speeds(device: str, smoke: bool) -> tuple[float, float]:
    """Return this machine's flops per second in a matrix product, and bytes copied per second."""
    size = 256 if smoke else 2048
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    source, target = (torch.ones(32 * MIB, device=device) for _ in range(2))
    took = medians({"mm": lambda: a @ b, "copy": lambda: target.copy_(source)}, 7, device)
    return 2 * size**3 / took["mm"] * 1e3, 2 * source.numel() * 4 / took["copy"] * 1e3


def table(frame: pd.DataFrame) -> str:
    """Return a frame as a Markdown table with numbers to three digits."""
    return markdown(
        list(frame.columns),
        (
            [f"{cell:.3g}" if isinstance(cell, float) else cell for cell in row]
            for row in frame.itertuples(index=False)
        ),
    )


def markdown(header: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in Markdown."""
    every = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in every)
