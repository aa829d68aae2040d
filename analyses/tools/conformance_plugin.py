"""A pytest plugin that runs TransformerLens' own tests on our models (`conformance.py`).

    pytest -p analyses.tools.conformance_plugin --models exposed --outcomes FILE [--only FILE] tests

Every TransformerBridge or HookedTransformer that a test makes is changed before the test sees it:

    stock       the model is left unchanged
    exposed     the model is exposed, with a hook on every neuron-head hook point, also for results
    converted   a HookedTransformer is converted; the methods in `PROCESSING`, which a converted
                model refuses, are replaced by what their errors advise: process the source, and
                convert it again

A model that cannot be exposed or converted is left unchanged. For every test, one line of JSON says
how the test ended, how many models it had (also in its fixtures and its module), how many of these
were changed and why others were not, how often a changed model ran, how often a neuron-head hook
fired, how often it fired in the test itself, and which replaced methods were called. Tests have no
network and a time limit, and all start with the same seed.
"""

import functools
import gc
import json
import random
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens import convert, expose_neuron_heads
from attn_only_lens.errors import AttnOnlyLensError, UnsupportedModelError
from attn_only_lens.heads.host import POINTS, has_neuron_heads, host_of
from attn_only_lens.models.in_place import exposed_heads
from attn_only_lens.models.two_blocks import AttentionOnlyTransformer
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER, HookedTransformer

SECONDS = {"stock": 120, "exposed": 1800, "converted": 1800}
PROCESSING = ("init_weights", "load_and_process_state_dict", "process_weights_")


@dataclass
class Built:
    """Counts of the models that a piece of code made, and of their runs.

    Attributes:
        models: the number of TransformerBridges and HookedTransformers.
        ours: how many of these models were exposed or converted.
        ran: how often an exposed or converted model ran as a whole.
        fired: how often a neuron-head hook fired.
        refused: why other models were not exposed or converted.
        replaced: the replaced methods that were called.
    """

    models: int = 0
    ours: int = 0
    ran: int = 0
    fired: int = 0
    refused: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)

    def add(self, more: "Built") -> None:
        """Add the counts of other code."""
        self.models += more.models
        self.ours += more.ours
        self.ran += more.ran
        self.fired += more.fired
        self.refused += more.refused
        self.replaced += more.replaced


def pytest_addoption(parser: Any) -> None:
    """Add the command-line options."""
    group = parser.getgroup("conformance")
    group.addoption("--models", choices=sorted(SECONDS), required=True)
    group.addoption("--outcomes", type=Path, required=True, help="a line of JSON a test goes here")
    group.addoption("--only", type=Path, help="node ids of the tests to run, one a line")


def pytest_configure(config: Any) -> None:
    """Register the plugin."""
    config.pluginmanager.register(Conformance(config), "conformance")


class Conformance:
    """The pytest hooks that change models and count events while the tests run."""

    def __init__(self, config: Any) -> None:
        self.models: str = config.getoption("--models")
        self.outcomes = config.getoption("--outcomes").open("w", encoding="utf-8")
        only = config.getoption("--only")
        self.only = set(only.read_text("utf-8").splitlines()) if only else None
        self.building: list[Built] = [Built()]  # the innermost one is last
        self.of_module: dict[str, Built] = {}
        self.sources: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by converted model
        self.depth = 0
        self.phases: dict[str, Any] = {}
        self.body = Built()  # counts in the running test, without its fixtures
        self._watch()
        _cut_off()

    # Models

    def _watch(self) -> None:
        for cls in (TransformerBridge, HookedTransformer)[: 1 + HAS_HOOKED_TRANSFORMER]:
            self._wrap(cls, "__init__", self.made, lambda args, made: args[0])
            self._wrap(cls, "forward", self.ran, lambda args, made: args[0])
        if HAS_HOOKED_TRANSFORMER:  # it first makes a model, and then loads weights into it
            self._wrap(HookedTransformer, "from_pretrained", self.made, lambda args, made: made)
            for name in PROCESSING:
                self._process(name)

    def _wrap(
        self, owner: type, name: str, see: Callable[[Any], None], model_of: Callable[..., Any]
    ) -> None:
        """Call `see` with the model after a call, but not after calls nested in it."""
        plain = owner.__dict__[name]
        inner = plain.__func__ if isinstance(plain, classmethod) else plain

        @functools.wraps(inner)
        def outer(*args: Any, **how: Any) -> Any:
            self.depth += 1
            try:
                made = inner(*args, **how)
            finally:
                self.depth -= 1
            if not self.depth:
                see(model_of(args, made))
            return made

        setattr(owner, name, classmethod(outer) if isinstance(plain, classmethod) else outer)

    def made(self, model: Any) -> None:
        """Change a model that a test has made, and count it."""
        built = self.building[-1]
        built.models += 1
        if self.models == "stock":
            return
        self.depth += 1  # models that are made in this call do not count
        try:
            self._make_ours(model)
            built.ours += 1
        except UnsupportedModelError as error:
            built.refused += error.reasons
        except AttributeError as error:  # a stand-in, which tests make without `__init__`
            built.refused.append(f"{type(error).__name__}: {error}")
        finally:
            self.depth -= 1

    def ran(self, model: Any) -> None:
        """Count a run of a model, which may have been made earlier."""
        built = self.building[-1]
        built.models += 1
        if has_neuron_heads(model):
            built.ours += 1
            built.ran += 1

    def _make_ours(self, model: Any) -> None:
        if self.models == "converted":
            if isinstance(model, TransformerBridge):
                raise UnsupportedModelError(["a TransformerBridge is exposed, not converted"])
            source = type(model).__new__(type(model))
            vars(source).update(vars(model))
            self._convert(model, source)
        else:
            expose_neuron_heads(model)
            for heads in exposed_heads(model):
                heads.results = True
                self._hook(heads)

    def _convert(self, model: Any, source: Any) -> None:
        become(model, convert(source))
        self.sources[model] = source
        for layer in host_of(model).neurons:
            self._hook(layer)

    def _process(self, name: str) -> None:
        """Replace a method that a converted model refuses by one that processes its source."""

        def process(model: Any, *args: Any, **how: Any) -> Any:
            self.building[-1].replaced.append(name)
            self.depth += 1
            try:
                result = getattr(self.sources[model], name)(*args, **how)
                self._convert(model, self.sources[model])
            finally:
                self.depth -= 1
            return result

        setattr(AttentionOnlyTransformer, name, process)

    def _hook(self, heads: Any) -> None:
        for point in POINTS:
            getattr(heads, f"hook_{point}").register_forward_hook(Fired(self))

    # Tests

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Keep only the tests in `--only`."""
        if self.only is not None:
            left_out = [item for item in items if item.nodeid not in self.only]
            items[:] = [item for item in items if item.nodeid in self.only]
            config.hook.pytest_deselected(items=left_out)

    def pytest_collection_finish(self) -> None:
        """Exclude existing objects from the tests' frequent garbage collections."""
        gc.freeze()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: Any) -> Iterator[None]:
        """Count models that a module makes at import for each of its tests."""
        with self._built() as built:
            report = yield
        if built.models:
            self.of_module.setdefault(collector.nodeid, Built()).add(built)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """Count models of a fixture for each test that uses it."""
        with self._built() as built:
            value = yield
        fixturedef.built = built
        return value

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """Run a test, and write its line."""
        self.phases, self.body = {}, Built()
        seed()
        with self._built() as built:
            result = yield
        for definition in item._fixtureinfo.name2fixturedefs.values():
            for fixture in definition:
                built.add(getattr(fixture, "built", Built()))
        for name, module in self.of_module.items():
            if item.nodeid.startswith(f"{name}::"):
                built.add(module)
        line = outcome(self.phases) | {
            "test": item.nodeid,
            "models": built.models,
            "ours": built.ours,
            "refused": sorted(Counter(built.refused)),
            "ran": built.ran,
            "fired": built.fired,
            "fired_in_body": self.body.fired,
            "replaced": sorted(set(built.replaced)),
        }
        self.outcomes.write(json.dumps(line) + "\n")
        self.outcomes.flush()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: Any) -> Iterator[None]:
        """Set a time limit for the setup."""
        with limited(SECONDS[self.models]):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        """Set a time limit for the test."""
        with self._built() as self.body, limited(SECONDS[self.models]):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[Any]:
        """Store the report of each phase."""
        report = yield
        self.phases[report.when] = (report, call.excinfo)
        return report

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the last line, which is missing if a run did not finish."""
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self.outcomes.write(json.dumps({"finished": True}) + "\n")
        self.outcomes.close()

    @contextmanager
    def _built(self) -> Iterator[Built]:
        self.building.append(Built())
        try:
            yield self.building[-1]
        finally:
            self.building[-2].add(self.building.pop())


class Fired:
    """A hook that changes nothing and counts. It can be copied and pickled with a model."""

    plugin: Conformance | None = None

    def __init__(self, plugin: Conformance) -> None:
        type(self).plugin = plugin

    def __call__(self, module: object, args: object, output: object) -> None:
        """Count one call."""
        if self.plugin is not None:
            self.plugin.building[-1].fired += 1


def become(model: Any, replacement: Any) -> None:
    """Turn an object into another object, for all references; do not use the other one again."""
    model.__class__ = type(replacement)
    vars(model).clear()
    vars(model).update(vars(replacement))


def outcome(phases: dict[str, Any]) -> dict[str, Any]:
    """Return how a test ended, from its first phase that did not pass."""
    for when in ("setup", "call", "teardown"):
        report, excinfo = phases.get(when, (None, None))
        if report is not None and (report.outcome != "passed" or hasattr(report, "wasxfail")):
            ended = "xfail" if hasattr(report, "wasxfail") else report.outcome
            if ended == "failed" and excinfo is not None:
                return {"outcome": ended} | error_of(excinfo)
            return {"outcome": ended}
    return {"outcome": "passed"}


def error_of(excinfo: Any) -> dict[str, Any]:
    """Return an error's type and message, and whether this package raised it or its cause."""
    error = excinfo.value
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    ours = [error for error in chain if isinstance(error, AttnOnlyLensError)]
    shown = ours[0] if ours else error
    return {"error": type(shown).__name__, "refusal": bool(ours), "message": str(shown)}


def seed() -> None:
    """Set the same seeds for each test, independent of earlier tests."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the generator that tests use
    torch.manual_seed(0)


class TimedOut(BaseException):
    """A test took too long. This is no `Exception`, so tests do not catch it."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimedOut after some seconds."""

    def stop(*_: object) -> None:
        raise TimedOut(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _cut_off() -> None:
    def refuse(self: object, address: object) -> None:
        raise OSError(f"no test reaches the network; this one tried {address}")

    socket.socket.connect = refuse  # type: ignore[method-assign, assignment]
