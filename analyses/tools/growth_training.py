"""Growth during training: a schedule, and a training loop that resumes from checkpoints.

A checkpoint holds the parameters and the optimizer's state, but not the architecture. To resume,
the schedule is first repeated on the initial model, and then the checkpoint's tensors are loaded.
So a checkpoint holds only tensors and text, and loading it executes no code.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer
from tqdm import tqdm

from attn_only_lens.arguments import as_plain, is_count
from attn_only_lens.errors import CheckpointError, GrowthError
from attn_only_lens.growth.expansion.expansion import Expansion
from attn_only_lens.growth.expansion.initialise import Initialiser
from attn_only_lens.growth.expansion.provenance import Provenance
from attn_only_lens.growth.models._grow import Grown, grow
from attn_only_lens.storage import Document, atomic_write, read_tensors, write_tensors

_PROBLEM = "this training cannot go on"


class _Checkpoint(TypedDict):
    done: int
    grown: int
    schedule: list[tuple[int, str]]
    optimizer: str
    seed: int
    init: str
    groups: list[dict[str, Any]]
    numbers: dict[str, dict[str, float | None]]
    tensors: str


_DOCUMENT = Document("attn_only_lens.Training", 2, _Checkpoint)


@dataclass
class Training:
    """A plain loop of PyTorch, in which the model grows at the steps of a schedule.

    Take `training.model` and `training.optimizer` anew in every step: growth replaces both.

    Attributes:
        model: the current model; the initial one is trained in place until it first grows.
        optimizer: torch's `SGD`, `Adam` or `AdamW`.
        schedule: expansions by the step before which they happen.
        init: the initialiser of free entries; by default the distribution of the initial weights.
        seed: the seed of the initialization.
        done: the number of finished steps.
        history: all growths so far.

    Example:
        >>> import torch
        >>> from attn_only_lens import growth, pretrained
        >>> from attn_only_lens.growth import Training
        >>> model, tokens = pretrained.modular_addition(), pretrained.modular_addition_tokens()[:7]
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> training = Training(model, optimizer, {2: growth.AddNeurons(3), 3: growth.AddHeads(1)})
        >>> for step in training.steps(5):
        ...     loss = -training.model(tokens)[:, -1].log_softmax(-1)[:, 0].mean()
        ...     training.optimizer.zero_grad()
        ...     loss.backward()
        ...     training.optimizer.step()
        >>> training.model.cfg.d_mlp, training.model.cfg.n_heads, training.done
        (515, 5, 5)
        >>> training.provenance.new_heads
        ('L0H4',)
    """

    model: Any
    optimizer: Optimizer
    schedule: Mapping[int, Expansion]
    init: Initialiser | None = None
    seed: int = 0
    done: int = 0
    history: tuple[Grown, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Mapping):
            got = type(self.schedule).__name__
            expected = "a dictionary from steps to expansions, {200: AddNeurons(3)}"
            reason = f"got a schedule of type {got}; expected {expected}"
            raise GrowthError([reason], _PROBLEM)
        self.schedule = {as_plain(step): value for step, value in self.schedule.items()}
        odd = [step for step in self.schedule if not is_count(step)]
        reasons = [f"got step {step!r}; expected 0 or more" for step in odd]
        reasons += [
            f"got {expansion!r} before step {step!r}; expected an expansion, such as AddNeurons(3)"
            for step, expansion in self.schedule.items()
            if not isinstance(expansion, Expansion)
        ]
        if reasons:
            raise GrowthError(reasons, _PROBLEM)

    @property
    def provenance(self) -> Provenance | None:
        """Provenance of the initial model's parts; None before the first growth."""
        provenance: Provenance | None = None
        for grown in self.history:
            provenance = (
                grown.provenance if provenance is None else provenance.then(grown.provenance)
            )
        return provenance

    def steps(self, until: int, progress: bool = False) -> Iterator[int]:
        """Yield the remaining steps, after growing the model as scheduled before each.

        A step counts as done when the loop's body ends, and not if it is interrupted.

        Args:
            until: the total number of steps.
            progress: whether to show a bar.

        Raises:
            GrowthError: `until` is not an integer of 0 or more; or an expansion does not fit the
                model. The model and the optimizer then stay as they were before that expansion.
        """
        if not is_count(until):
            raise GrowthError([f"got until={until!r}; expected 0 or more steps"], _PROBLEM)
        for step in tqdm(
            range(self.done, until), "steps", until, initial=self.done, disable=not progress
        ):
            self._grow_before(step)
            yield step
            self.done = step + 1

    def save(self, path: str | Path) -> None:
        """Write parameters, the optimizer's state and the number of steps; all or nothing."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        tensors = {f"model/{name}": p.detach().clone() for p, name in names.items()}
        numbers: dict[str, dict[str, float | None]] = {}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"{key}/{names[parameter]}"] = value.clone()
                else:
                    numbers.setdefault(key, {})[names[parameter]] = value
        with atomic_write(path) as new:
            write_tensors(
                new,
                tensors,
                _DOCUMENT,
                done=self.done,
                grown=len(self.history),
                schedule=self._schedule_text(),
                optimizer=type(self.optimizer).__qualname__,
                seed=self.seed,
                init=_identified(self.init),
                groups=[_settings(group, names) for group in self.optimizer.param_groups],
                numbers=numbers,
            )

    def resume(self, path: str | Path) -> None:
        """Continue from a checkpoint, on a training made in the same way as the one that wrote it.

        The schedule may have additional later steps.

        Raises:
            CheckpointError: the file is damaged, or belongs to another model, optimizer or
                schedule; this training then does not change.
        """
        tensors, header = read_tensors(path, _DOCUMENT)
        if reasons := self._reasons_against(header):
            raise CheckpointError(_message(path, reasons))
        resumed = Training(self.model, self.optimizer, self.schedule, self.init, self.seed)
        for step, _ in self._schedule_text()[: header["grown"]]:
            resumed._grow_before(step)
        groups = header["groups"]
        if reasons := _reasons_against_numbers(resumed, tensors, groups, header["numbers"]):
            raise CheckpointError(_message(path, reasons))
        named = dict(resumed.model.named_parameters())
        resumed.optimizer.state.clear()
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            if kind == "model":
                with torch.no_grad():
                    named[name].copy_(tensor)
            else:
                value = tensor if kind == "step" else tensor.to(named[name].device)
                resumed.optimizer.state[named[name]][kind] = value
        for kind, values in header["numbers"].items():
            for name, value in values.items():
                resumed.optimizer.state[named[name]][kind] = value
        for group, settings in zip(resumed.optimizer.param_groups, groups, strict=True):
            group.update({key: _as_was(settings[key]) for key in settings if key != "params"})
        self.model, self.optimizer, self.history = resumed.model, resumed.optimizer, resumed.history
        self.done = header["done"]

    def _reasons_against(self, header: Mapping[str, Any]) -> list[str]:
        """Return every reason why a checkpoint with this header does not fit this training."""
        reasons = []
        if self.done or self.history:
            reasons.append(f"it stands at step {self.done}; expected a training at its start")
        stored, ours = header["schedule"], self._schedule_text()
        done, n_grown = header["done"], header["grown"]
        if done < 0 or not 0 <= n_grown <= len(stored):
            reasons.append(f"it says that {done} steps are done and that it grew {n_grown} times")
        if stored[:n_grown] != ours[:n_grown]:
            reasons.append(
                f"the file's model grew by {stored[:n_grown]}; expected {ours[:n_grown]}"
            )
        if missed := [step for step, _ in ours[n_grown:] if step < done]:
            reasons.append(f"the schedule grows it before steps {missed}, and {done} are done")
        if header["seed"] != self.seed:
            reasons.append(f"its seed was {header['seed']}; expected {self.seed}")
        if header["init"] != _identified(self.init):
            reasons.append("its new entries were made by another init; expected the same function")
        if header["optimizer"] != type(self.optimizer).__qualname__:
            reasons.append(f"its optimizer was {header['optimizer']}")
        return reasons

    def _grow_before(self, step: int) -> None:
        if step not in self.schedule or step in self._grown_at:
            return
        seed = self.seed + len(self.history)
        grown = grow(self.model, self.schedule[step], init=self.init, seed=seed)
        optimizer = grown.optimizer(self.optimizer, self.model)
        self.model, self.optimizer = grown.model, optimizer
        self.history = (*self.history, grown)

    @property
    def _grown_at(self) -> list[int]:
        """Return the steps of the schedule at which the model has grown."""
        return sorted(self.schedule)[: len(self.history)]

    def _schedule_text(self) -> list[list[Any]]:
        return [[step, repr(self.schedule[step])] for step in sorted(self.schedule)]


def _identified(init: Initialiser | None) -> str:
    """Return the initialiser as text; only its type if it does not describe itself."""
    text = repr(init)
    return type(init).__qualname__ if " at 0x" in text else text


def _settings(group: dict[str, Any], names: Mapping[Any, str]) -> dict[str, Any]:
    """Return settings and parameters of a group, as JSON."""
    plain = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    as_numbers = {k: v.item() if isinstance(v, Tensor) else v for k, v in plain.items()}
    return as_numbers | {"params": [names[parameter] for parameter in group["params"]]}


def _as_was(value: Any) -> Any:
    """Return a setting in torch's form, with tuples for lists, because JSON has no tuples."""
    return tuple(value) if isinstance(value, list) else value


def _reasons_against_numbers(
    training: Training,
    tensors: Mapping[str, Tensor],
    groups: list[dict[str, Any]],
    numbers: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Return every reason why tensors of a checkpoint do not fit model and optimizer."""
    named = dict(training.model.named_parameters())
    kinds = {f"model/{name}": (tuple(p.shape), p.dtype) for name, p in named.items()}
    shapes = {k: (tuple(t.shape), t.dtype) for k, t in tensors.items() if k.startswith("model/")}
    odd = {key.removeprefix("model/") for key, _ in kinds.items() ^ shapes.items()}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if kind != "model" and (name not in named or tensor.shape not in ((), named[name].shape)):
            odd.add(f"{kind} of {name}")
    odd |= {
        f"{kind} of {name}" for kind, of_kind in numbers.items() for name in of_kind.keys() - named
    }
    reasons = [f"it has other parameters: {', '.join(sorted(odd)[:5])} …"] if odd else []
    names = {parameter: name for name, parameter in named.items()}
    ours = [
        [names.get(p, "") for p in group["params"]] for group in training.optimizer.param_groups
    ]
    if ours != [group.get("params") for group in groups]:
        sizes = [len(part) for part in ours]
        reasons.append(
            f"its optimizer had other groups; expected groups of {sizes} parameters, in the same "
            "order"
        )
    return reasons


def _message(path: str | Path, reasons: list[str]) -> str:
    return "\n  - ".join([f"training cannot go on from {path}:", *reasons])
