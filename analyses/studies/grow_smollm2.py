"""Grow a real model, save it, and load it with transformers: time, memory and logits.

SmolLM2-135M-Instruct (`make smollm2`) grows in each direction separately, and in all at once. Every
growth runs in a separate process; another process, which does not import this package, loads the
saved folder and runs the model on the same prompts. The grown model's logits are compared with the
logits of the original model in transformers.

    python -m analyses.studies.grow_smollm2 --out analyses/results
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import pandas as pd
import tokenizers
import torch
import transformers
import typer
from tqdm import tqdm
from transformer_lens.model_bridge import TransformerBridge

from analyses.benchmarks.bench_peak_memory import held_and_peak, reset_peak
from analyses.tools.benching import MIB, leave, machine, table, wait
from analyses.tools.options import Device, Out, Smoke
from attn_only_lens import grow

SIZES = {"d_mlp": 2048, "n_heads": 12, "d_head": 80, "d_model": 720, "n_layers": 32}
TINY = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 14,
    "hidden_size": 28,
    "intermediate_size": 31,
    "vocab_size": 41,
    "max_position_embeddings": 29,
}
TINY_SIZES = {"d_mlp": 37, "n_heads": 4, "d_head": 18, "d_model": 36, "n_layers": 3}
ALL = "all six"
PROMPTS = (
    "The capital of France is",
    "def add(a, b):\n    return a +",
    "Water boils at a temperature of",
    "<|im_start|>user\nName a fruit that is yellow.<|im_end|>\n<|im_start|>assistant\n",
)
N_NEW = 16

ALONE = """
import json, sys, time
import torch, transformers
folder, prompts, n_new, out = json.loads(sys.argv[1])
start = time.process_time()
model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
seconds = time.process_time() - start
with torch.no_grad():
    logits = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
options = {"max_new_tokens": n_new, "do_sample": False}
texts = [model.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in prompts]
ours = [name for name in sys.modules if name.startswith(("attn_only_lens", "transformer_lens"))]
assert not ours, ours
torch.save(logits, out)
print(json.dumps({"seconds": seconds, "texts": texts}))
"""


def growths(sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return the sizes to grow to: each size separately, and all; only all for the tiny model."""
    alone = {} if sizes is TINY_SIZES else {name: {name: size} for name, size in sizes.items()}
    return alone | {ALL: sizes}


def tokens_of(folder: Path) -> list[list[int]]:
    """Return the tokens of the prompts, each starting with BOS."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    bos = tokenizer.bos_token_id
    encoded = tokenizer(list(PROMPTS))["input_ids"]
    return [ids if ids[0] == bos else [bos, *ids] for ids in encoded]


def tiny(folder: Path) -> Path:
    """Save a LLaMA with random weights, and a tokenizer with the words of the prompts."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TINY)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = dict.fromkeys(["<unk>", "<bos>", "<eos>", *" ".join(PROMPTS).split()])
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
    return folder


def alone(folder: Path, prompts: list[list[int]], scratch: Path) -> dict[str, Any]:
    """Run a folder's model in transformers: seconds to load, logits, greedy tokens."""
    out = scratch / "logits.pt"
    arguments = json.dumps([str(folder), prompts, N_NEW, str(out)])
    command = [sys.executable, "-c", ALONE, arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1]) | {"logits": torch.load(out)}


def error(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest logit difference, divided by the largest logit."""
    largest = max(logits.abs().max().item() for logits in expected)
    differences = (a - b for a, b in zip(got, expected, strict=True))
    return max(difference.abs().max().item() for difference in differences) / largest


def measure(folder: Path, sizes: dict[str, int], grown_folder: Path, device: str) -> dict[str, Any]:
    """Grow and save the model in a folder, in this process, whose peak memory is measured."""
    bridge = TransformerBridge.boot_transformers(str(folder), device=device)
    reset_peak(device)
    before, _ = held_and_peak(device)
    start = time.process_time()
    grown = grow(bridge, **sizes, seed=0)
    wait(device)
    grew = time.process_time()
    _, peak = held_and_peak(device)
    grown.save_pretrained(grown_folder)
    wrote = time.process_time()
    prompts = tokens_of(folder)
    with torch.no_grad():
        batch = [torch.tensor([prompt], device=device) for prompt in prompts]
        logits = [grown.model(tokens)[0].cpu() for tokens in batch]
    torch.save(logits, grown_folder.with_suffix(".pt"))
    return {
        "parameters": sum(p.numel() for p in grown.model.original_model.parameters()),
        "grow, CPU s": grew - start,
        "peak, MiB": (peak - before) / MIB,
        "write, CPU s": wrote - grew,
    }


def report(
    folder: Path, sizes: dict[str, int], scratch: Path, flags: list[str], device: str
) -> str:
    """Return the page with all figures."""
    prompts = tokens_of(folder)
    before = alone(folder, prompts, scratch)
    rows = []
    for name in tqdm(growths(sizes), "growths", leave=False):
        grown_folder = scratch / "grown"
        arguments = json.dumps([str(folder), growths(sizes)[name], str(grown_folder), device])
        command = [sys.executable, "-m", __spec__.name, "--measure", arguments]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        row = json.loads(done.stdout.splitlines()[-1])
        after = alone(grown_folder, prompts, scratch)
        ours = torch.load(grown_folder.with_suffix(".pt"))
        rows.append(
            {"growth": name, "parameters, M": row.pop("parameters") / 1e6}
            | row
            | {
                "file, MiB": (grown_folder / "model.safetensors").stat().st_size / MIB,
                "load, CPU s": after["seconds"],
                "logits, bridge": error(ours, before["logits"]),
                "logits, transformers": error(after["logits"], before["logits"]),
                "same text": after["texts"] == before["texts"],
            }
        )
    config = transformers.AutoConfig.from_pretrained(folder)
    have = dict(
        d_mlp=config.intermediate_size,
        n_heads=config.num_attention_heads,
        d_head=config.head_dim,
        d_model=config.hidden_size,
        n_layers=config.num_hidden_layers,
    )
    return PAGE.format(
        growth=", ".join(f"{name} {have[name]} to {size}" for name, size in sizes.items()),
        flag="".join(f" {flag}" for flag in flags),
        model="A tiny LLaMA (--smoke)" if flags else "SmolLM2-135M-Instruct",
        n_prompts=len(prompts),
        n_new=N_NEW,
        machine=machine(device),
        table=table(pd.DataFrame(rows)),
    )


PAGE = """# A real model grown

{model}, float32; {growth}.
Logits: the largest difference from those before growth, over the largest logit, on {n_prompts}
prompts; of the grown bridge, and of transformers alone on the folder that it wrote. Same text: the
{n_new} tokens that transformers alone continues each prompt with are those of the model before
growth. Peak: memory above what the loaded model holds. CPU s: processor time of all threads.
Machine: {machine}, with other work on it.
Made by `python -m analyses.studies.grow_smollm2{flag}`.

{table}
"""


def main(
    out: Out = Path("out/bench"),
    model: Annotated[Path, typer.Option(help="the folder of make smollm2")] = Path("out/smollm2"),
    measured: Annotated[
        str, typer.Option("--measure", help="do one growth, print its figures, and nothing else")
    ] = "",
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write `grow_smollm2.md` and its record."""
    started = time.perf_counter()
    if measured:
        folder, sizes, grown_folder, device = json.loads(measured)
        typer.echo(json.dumps(measure(Path(folder), sizes, Path(grown_folder), device)))
        return
    with TemporaryDirectory() as scratch:
        model = tiny(Path(scratch, "tiny")) if smoke else model
        sizes, flags = (TINY_SIZES, ["--smoke"]) if smoke else (SIZES, [])
        text = report(model, sizes, Path(scratch), flags, device)
    settings = {"device": device, "smoke": smoke}
    leave(__file__, out, {"grow_smollm2.md": text}, started=started, **settings)
    typer.echo(text)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    typer.run(main)
