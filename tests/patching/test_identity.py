"""Digests that identify functions: equal for equal ones, unequal wherever a value could differ."""

import functools
import importlib
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import attn_only_lens
from attn_only_lens import patching as p
from attn_only_lens import pretrained
from attn_only_lens.engine.identity import Unidentified, identity

# What a user's script might hold; `{…}` are the places at which one script differs from another.
SCRIPT = """
import functools, math
from dataclasses import dataclass, field
import numpy as np, torch
import own_module

TOKEN = {global_}
WEIGHTS = torch.tensor([1.0, {tensor}])
TABLE = {{"a": [1, {nested_value}], "b": {{3, "c"}}}}

def helper(x):
    return x.sum() * TOKEN + len(TABLE)

def outer(scale):
    def inner(logits, shift={default}, *, power={keyword}):
        found = [each * {constant} for each in logits]
        return (lambda x: x + {nested_constant})(sum(found) * scale + helper(logits))
    return inner

@dataclass
class Callable:
    factor: float
    seen: list = field(default_factory=list)
    def __call__(self, logits):
        return self.method(logits) * self.factor
    def method(self, logits):
        return logits.max() + {method}
    @property
    def size(self):
        return self.factor
    @staticmethod
    def of():
        return Callable(1.0)

@torch.no_grad()
def decorated(logits):
    return logits.mean() + {decorated}

@functools.lru_cache
def cached(x):
    return x + {cached}

def uses_much(logits, model=torch.nn.Linear):
    torch.manual_seed(0)
    noise = np.float64({array}) * np.arange(3)
    used = own_module.score(logits) + own_module.LEVEL + noise.sum() + math.pi + cached(3)
    return used + (logits * WEIGHTS).sum() + torch.nn.functional.softmax(logits, -1)[0]

def recursive(logits, depth=3):
    return recursive(logits, depth - {depth}) if depth > 0 else logits.sum()

found = [outer({closure}), functools.partial(helper, {partial}), Callable({state}),
         Callable(2.0).method, decorated, uses_much, recursive]
"""
PLACES = (
    *("global_", "tensor", "nested_value", "default", "keyword", "constant", "nested_constant"),
    *("method", "decorated", "cached", "array", "depth", "closure", "partial", "state"),
)
OWN = "LEVEL = {level}\ndef score(logits):\n    return logits.min() * {score}\n"


def digests(folder, **values):
    """What a script with these numbers in its places amounts to, run anew."""
    own = OWN.format(**{"level": 5, "score": 7} | values)
    (folder / "own_module.py").write_text(own)
    sys.modules.pop("own_module", None)
    sys.path.insert(0, str(folder))
    try:
        space = {"__name__": "a_users_script"}
        text = SCRIPT.format(**dict.fromkeys(PLACES, 1) | values)
        exec(compile(text, "script.py", "exec"), space)
        exec(compile(own, "own_module.py", "exec"), vars(sys.modules["own_module"]))
        return [identity(each) for each in space["found"]]
    finally:
        sys.path.remove(str(folder))


def test_the_same_script_is_the_same(tmp_path):
    assert digests(tmp_path) == digests(tmp_path)
    assert len(set(digests(tmp_path))) == 7


@pytest.mark.parametrize("place", [*PLACES, "level", "score"])
def test_another_number_anywhere_is_another_function(place, tmp_path):
    assert digests(tmp_path) != digests(tmp_path, **{place: 2})


def test_another_process_finds_the_same(tmp_path):
    """With hashes of its own, by which it orders sets."""
    here = digests(tmp_path)
    lines = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(tmp_path)]}",
        "from pathlib import Path; from test_identity import digests",
        f"print(*digests(Path({str(tmp_path)!r})))",
    )
    found = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={"PYTHONPATH": str(Path(attn_only_lens.__file__).parents[1]), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == here


def test_metrics_of_the_package_are_told_apart():
    model = pretrained.modular_addition()
    metrics = [
        *(p.logit_diff(7, 8), p.logit_diff(8, 7), p.logit_diff([7, 8], 9), p.probability(7)),
        *(p.log_probability(7), p.kl(), p.loss(), p.custom(torch.sum), p.custom(torch.mean)),
        *(p.custom(lambda logits: (logits @ model.W_U.T).sum()), p.custom(np.mean)),
        p.custom(torch.nn.Linear(3, 1)),
        p.logit_diff(torch.tensor([11]), 8),
    ]
    found = [identity(metric.bound) for metric in metrics]
    assert len(set(found)) == len(found)
    assert found[0] == identity(p.logit_diff(7, 8).bound)
    with torch.no_grad():
        model.W_U[0, 0] += 1
    assert identity(metrics[-4].bound) != found[-4]


def test_a_state_that_changes_is_another_function():
    @dataclass
    class Counter:
        n: int = 0

        def __call__(self, logits):
            self.n += 1
            return logits.sum() * self.n

    counter = Counter()
    before = identity(counter)
    assert identity(Counter()) == before
    counter(torch.ones(2))
    assert identity(counter) != before


def test_a_users_module_is_the_users_whatever_it_is_called(tmp_path, monkeypatch):
    """One that has the name of a module of Python's own, and the program itself."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", torch.__file__, raising=False)
    found = set()
    for number in (2, 3):
        text = f"def score(logits): return helper(logits)\ndef helper(x): return x * {number}"
        space = {"__name__": "__main__"}
        exec(text, space)
        found.add(identity(space["score"]))
        (tmp_path / "this.py").write_text(text)
        monkeypatch.delitem(sys.modules, "this", raising=False)
        module = importlib.import_module("this")
        exec(text, vars(module))  # a file that is as new as its compiled form is not read again
        found.add(identity(module.score))
    assert len(found) == 2, "one of each text, wherever it lies"


def test_what_cannot_be_identified_is_refused_with_what_it_is(tmp_path):
    generator = (i for i in range(3))
    with Path(__file__).open() as file:
        for fn, match in (
            (lambda logits: file.name, "file.*TextIOWrapper"),
            (lambda logits: next(generator), "generator"),
            (functools.partial(math.fsum, generator), "generator"),
            (lambda logits: torch.empty(2, device="meta") + logits, None),
        ):
            if match is None:
                identity(fn)  # made anew in each call
                continue
            with pytest.raises(Unidentified, match=match):
                identity(fn)
    with pytest.raises(Unidentified, match="without plain bytes"):
        identity(torch.empty(2, device="meta"))
    sys.path.insert(0, str(tmp_path))
    try:
        (tmp_path / "own_module_2.py").write_text("LEVEL = 3")
        import own_module_2

        with pytest.raises(Unidentified, match="the whole of own_module_2"):
            identity(lambda logits: getattr(own_module_2, "LEV" + "EL"))
        assert identity(lambda logits: own_module_2.LEVEL)
    finally:
        sys.path.remove(str(tmp_path))

    def imports(logits):
        import own_module_2

        return own_module_2.LEVEL

    with pytest.raises(Unidentified, match="imports own_module_2 as it runs"):
        identity(imports)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda logits: logits * globals()["LEVEL"], "globals"),
        (lambda logits: logits * eval("LEVEL"), "eval"),
        (lambda logits: logits * float(os.environ["LEVEL"]), r"os\.environ"),
        (lambda logits: logits * float(os.getenv("LEVEL")), r"os\.getenv"),
        (lambda logits: logits * float(open("level").read()), "open"),  # noqa: SIM115
    ],
    ids=["globals", "eval", "environ", "getenv", "open"],
)
def test_what_may_read_anything_is_refused(function, what):
    with pytest.raises(Unidentified, match=f"uses {what}, which may read anything"):
        identity(function)
    assert identity(lambda path: os.path.join(path, "level"))
