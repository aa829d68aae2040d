"""Load a model, or a result from a file; the file's format says which result it is."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attn_only_lens._load_model import load_model
from attn_only_lens.circuits.circuit import read_circuit
from attn_only_lens.circuits.graph import read_graph
from attn_only_lens.engine.contrast import read_contrast
from attn_only_lens.engine.metrics import AnyMetric
from attn_only_lens.errors import CheckpointError, InputError
from attn_only_lens.growth import COMPARISON, read_comparison, read_provenance
from attn_only_lens.models.source_folder import CONFIG
from attn_only_lens.neurons.statistics import HeadStatistics, NeuronStatistics
from attn_only_lens.patching.results import Paths, Sweep
from attn_only_lens.storage import read_json
from attn_only_lens.storage.atomic import AnyPath, as_path
from attn_only_lens.storage.documents import format_of
from attn_only_lens.storage.tables import table_format
from attn_only_lens.storage.tensors import tensors_format

_READERS: dict[str, Callable[[Path], Any]] = {
    "Circuit": read_circuit,
    "CircuitGraph": read_graph,
    "Comparison": lambda path: read_comparison(path.parent),
    "Grown": read_provenance,
    "HeadStatistics": HeadStatistics.read,
    "NeuronStatistics": NeuronStatistics.read,
    "Paths": Paths.read,
    "Sweep": Sweep.read,
}
_FORMATS: dict[str, Callable[[Path], Any]] = {
    ".json": lambda path: format_of(read_json(path)),
    ".csv": table_format,
    ".parquet": table_format,
    ".safetensors": tensors_format,
}
# What files for other programs lack, by their keys.
_EXPORTS = {
    ("links", "metadata", "nodes", "qParams"): "for Neuronpedia's viewers, which lacks the values "
    "of the corrupted run and the kinds of edges",
    ("cfg", "edges", "nodes"): "for MIB, which lacks positions, single neurons and the metric",
}
_FOLDERS = (COMPARISON, "explanation.csv")
_EXPLANATION = ("contrast.json", "circuit.json", "graph.json", "attribution.parquet")
_EXPECTED = (
    "a contrast, a sweep, paths, a circuit, a graph, statistics, a comparison or a provenance"
)
_PROBLEM = "this cannot be loaded"


def load(
    source: AnyPath,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    hooked: bool = False,
    metric: AnyMetric | None = None,
) -> Any:
    """Load a model, by its name or from a folder, or a result from its file.

        small-english, modular-addition      the models that ship with this package
        gpt2, EleutherAI/pythia-70m          from the Hugging Face hub: a TransformerBridge
        a Hugging Face folder                config.json and safetensors: a TransformerBridge
        a folder that grown.save_pretrained  or the command `grow` wrote: a TransformerBridge or a
                                             HookedTransformer, as it was saved
        a folder that `save` wrote           the saved model, with its neuron-heads if it had them
        a folder of a HookedTransformer      config.json with the fields of its configuration, and
                                             model.safetensors (transformer-lens 3.9)
        a file that a result's `save` wrote  the contrast, sweep, circuit, graph or statistics; or
                                             the comparison, which is a folder
        provenance.json in a grown folder    the provenance, as in `grown.provenance`

    If a folder has the given name, the folder is loaded, not the model with this name. Weights are
    read only from safetensors files, and code in the folder is never run. The network is used only
    for hub models that are not yet in the local cache.

    Texts get a BOS token if the tokenizer has one and TransformerLens prepends it for the model
    family (GPT-2, LLaMA and Gemma, but not Qwen, Phi and GPT-NeoX).

    A bridge has the original weights, as with `TransformerBridge.boot_transformers`; to fold and
    centre them, call its method `enable_compatibility_mode`. A `HookedTransformer` loaded by name
    has folded and centred weights, as with `HookedTransformer.from_pretrained`.

    Args:
        source: a name, a folder or a file.
        device: the device of the model; by default the CPU.
        dtype: the floating-point type; by default the type that `save` stored, otherwise float32.
        hooked: load a model given by name as a HookedTransformer, which `convert` requires (only
            with transformer-lens 3.9).
        metric: for a contrast, its metric, if that is your own function; the file has only its
            name.

    Returns:
        The result; or the model, with its tokenizer if it has one. If `save` wrote the model, its
        neuron-heads, its settings, and its tied and frozen parameters are restored.

    Raises:
        UnsupportedCallError: the model is a HookedTransformer, but transformer-lens 4 is installed,
            which has no HookedTransformer.
        CheckpointError: there is no such model or file; the file or folder is damaged, changed or
            newer than this package, or holds something else; weights are missing, unexpected or
            quantised; the tokenizer has more tokens than the model; or the device or dtype is
            unknown.
        InputError: the metric is missing or has another name than the file's; or options of models
            were passed for a result.

    Example:
        >>> import tempfile, torch
        >>> from attn_only_lens import expose_neuron_heads, load, save
        >>> exposed = expose_neuron_heads(load("modular-addition")).model
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     folder = save(exposed, f"{parent}/added")
        ...     load(folder, dtype="float64").W_in.dtype
        torch.float64
    """
    if not (isinstance(source, str | os.PathLike) and _is_result(source)):
        if metric is not None:
            reason = f"got metric={metric!r} for a model; expected it for the file of a contrast"
            raise InputError([reason], _PROBLEM)
        return load_model(source, device=device, dtype=dtype, hooked=hooked)
    options = {"device": device, "dtype": dtype, "hooked": hooked or None}
    InputError.raise_if(
        [
            f"got {name}={value!r} for {source}, which holds no model; expected no such option"
            for name, value in options.items()
            if value is not None
        ],
        _PROBLEM,
    )
    return _read_result(as_path(source), metric)


def _is_result(path: AnyPath) -> bool:
    """Return whether a path is one of a result: by its ending or, for a folder, by its files."""
    if os.path.isdir(path):
        return any(os.path.exists(os.path.join(path, name)) for name in _FOLDERS)
    suffix = Path(path).suffix
    if os.path.isfile(path) and suffix not in (*_FORMATS, ".gguf"):
        expected = f"expected a name that ends in {', '.join(_FORMATS)}, or the folder of a model"
        raise CheckpointError(f"{path} is a file; {expected}")
    return suffix in _FORMATS


def _read_result(path: Path, metric: AnyMetric | None) -> Any:
    """Read a file or a folder that a result's method `save` wrote."""
    if os.path.exists(path / COMPARISON):
        return read_comparison(path)
    if os.path.isdir(path):
        files = ", ".join(_EXPLANATION)
        raise CheckpointError(f"{path} holds an explanation; load one of its files: {files}")
    if not os.path.exists(path):
        raise CheckpointError(f"{path} is missing; expected the file of {_EXPECTED}")
    stored = _FORMATS[path.suffix](path)
    kind = str(stored).removeprefix("attn_only_lens.")
    if kind == "Contrast":
        return read_contrast(path, metric)
    if metric is not None:
        raise InputError([f"got metric={metric!r} for {path}, which is no contrast"], _PROBLEM)
    keys = sorted(read_json(path)) if stored is None and path.suffix == ".json" else ()
    if lacking := _EXPORTS.get(tuple(keys)):
        also = "save the result without format=, too, to load it again"
        raise CheckpointError(f"{path} is a file {lacking}; {also}")
    if kind not in _READERS:
        hint = ", which transcoders.load reads" * (kind == "Transcoder")
        whole = any(os.path.exists(path.parent / name) for name in (COMPARISON, CONFIG))
        folder = f". It is a part of {path.parent}: load that folder" * whole
        raise CheckpointError(f"{path} has format {stored!r}{hint}; expected {_EXPECTED}{folder}")
    return _READERS[kind](path)
