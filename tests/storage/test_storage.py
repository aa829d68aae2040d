"""Tests of files and folders with flipped bits, killed processes and malicious manifests."""

import builtins
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from bridges import boot, exposed_copy
from drawn_transcoders import drawn
from random_sweeps import sweep, values
from safetensors import SafetensorError
from sealed_files import digest_again, flips, mutated, rewrite
from tiny_tokenizer import tiny_tokenizer
from typing_extensions import TypedDict

from attn_only_lens import Contrast, Work, load, save, transcoders, viz
from attn_only_lens import patching as p
from attn_only_lens.circuits import attribution_graph
from attn_only_lens.errors import AttnOnlyLensError, CheckpointError
from attn_only_lens.growth.comparison.results import _FRAMES, Comparison
from attn_only_lens.models.checkpoint import MANIFEST
from attn_only_lens.models.source_folder import load_source
from attn_only_lens.storage import atomic, atomic_folder, atomic_write
from attn_only_lens.storage.chunks import ChunkStore
from attn_only_lens.storage.documents import Document

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings from TransformerLens and transformers


# Documents

ANYTHING = Document("attn_only_lens.Anything", 1, TypedDict("Anything", {"value": Any}))
NOT_WRITTEN = (2**63, -(2**63) - 1, 10**400, float("nan"), float("inf"), "\ud800", {"\udfff": 1})
WRITTEN = (2**63 - 1, -(2**63), -0.5, 1e-300, 5e-324, "é\0\u2028日", "\U0001f600", 23 * "7", None)


def test_whatever_is_written_can_be_read(tmp_path):
    path = tmp_path / "document.json"
    for value in (*WRITTEN, *NOT_WRITTEN):
        for whole in (value, [value], {"key": [True, value]}):
            if value in NOT_WRITTEN:
                with pytest.raises(CheckpointError):
                    ANYTHING.write(path, value=whole)
                assert not path.exists()
            else:
                ANYTHING.write(path, value=whole)
                assert ANYTHING.read(path)["value"] == whole
                path.unlink()


# A process that ends while it writes


def write(folder, text):
    with atomic_folder(folder, ("a", "b"), "a") as new:
        (new / "a").write_text(text)
        (new / "b").mkdir()
        (new / "b" / "c").write_text(text)


def text_in(folder):
    """Return the text that a reader sees; a set of texts would show a mixture of versions."""
    folder = atomic.open_folder(folder)
    texts = {(folder / "a").read_text(), (folder / "b" / "c").read_text()}
    assert sorted(path.name for path in folder.rglob("*")) == ["a", "b", "c"]
    return texts.pop() if len(texts) == 1 else texts


class Death(BaseException):
    """Like SIGKILL, no code catches this exception."""


def interrupt(monkeypatch, step, after, dies):
    """Raise at the given disk call: at this one only, or at it and all later ones."""
    calls = itertools.count()

    def broken(call):
        def instead(*args, **kwargs):
            now = next(calls)
            hit = now >= step if dies else now == step
            if hit and not (after and now == step):
                raise Death
            try:
                return call(*args, **kwargs)
            finally:
                if hit:
                    raise Death

        return instead

    for module, names in (
        (os, ("replace", "rename", "mkdir", "rmdir", "unlink", "fsync", "open")),
        (shutil, ("rmtree",)),
        (atomic, ("_lock",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, broken(getattr(module, name)))
    return calls


@pytest.mark.parametrize(("dies", "after"), [(True, False), (True, True), (False, False)])
def test_a_folder_is_the_old_or_the_new_one_at_whatever_call_it_ends(
    dies, after, tmp_path, monkeypatch
):
    folder, seen = tmp_path / "folder", []
    for step in itertools.count():
        write(folder, "old")
        with monkeypatch.context() as patch:
            calls = interrupt(patch, step, after, dies)
            try:
                write(folder, "new")
            except Death:
                pass
            else:
                assert next(calls) <= step, "somebody has caught it"
                break
        if not dies:  # code that catches errors must restore the folder
            assert folder.is_dir()
        seen.append(text_in(folder))
        write(folder, "next")
        assert text_in(folder) == "next"
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert seen[0] == "old"
    assert seen[-1] == "new"
    assert len(seen) > 8


@pytest.mark.parametrize("dies", [True, False])
def test_a_file_is_the_old_or_the_new_one_at_whatever_call_it_ends(dies, tmp_path, monkeypatch):
    path = tmp_path / ("x" * 255)  # the longest possible name
    for step in itertools.count():
        atomic.write_text(path, "old")
        with monkeypatch.context() as patch:
            interrupt(patch, step, True, dies)
            try:
                atomic.write_text(path, "new")
            except Death:
                pass
            else:
                break
        assert path.read_text() in ("old", "new")
        atomic.write_text(path, "next")
        assert path.read_text() == "next"
        assert list(tmp_path.iterdir()) == [path]


KILLED = """
import os, signal, sys, types
package = types.ModuleType("attn_only_lens")
package.__path__ = [sys.argv[1]]
sys.modules["attn_only_lens"] = package  # without all that it imports
from pathlib import Path
from attn_only_lens.storage import atomic_folder
with atomic_folder(Path(sys.argv[2]), ("a", "b"), "a") as new:
    (new / "a").write_text("never")
    print("writing", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_writing_removes_what_a_killed_one_left_and_no_living_one(tmp_path):
    folder = tmp_path / "folder"
    write(folder, "old")
    package = str(Path(atomic.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, package, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "writing\n"
        (hidden,) = (path for path in tmp_path.iterdir() if path != folder)
        write(folder, "first")  # this process is still alive
        assert (hidden / "new" / "a").read_text() == "never"
        process.communicate("\n")
    assert process.returncode == -9
    assert hidden.exists()
    write(tmp_path / "another", "text")  # another name
    assert hidden.exists()
    write(folder, "second")
    assert text_in(folder) == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "folder"]


def test_what_only_looks_like_a_leftover_stays(tmp_path):
    folder = tmp_path / "folder"
    foreign = tmp_path / f"{atomic._hidden_prefix(folder)}{16 * 'a'}"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    write(folder, "text")
    assert (foreign / "thesis.tex").exists()


def test_without_locks_nothing_is_removed_and_everything_written(tmp_path, monkeypatch):
    """Windows and some network file systems have no locks."""
    monkeypatch.setattr(atomic, "fcntl", None)
    write(tmp_path / "folder", "old")
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **how: None)
    write(tmp_path / "folder", "new")
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 2
    assert text_in(tmp_path / "folder") == "new"


# Flipped bits


@cache
def bridge():
    model = exposed_copy(boot("llama", torch.float32))
    with tempfile.TemporaryDirectory() as words:
        model.tokenizer = tiny_tokenizer(41, words)
    return model


def store(folder):
    return ChunkStore(folder, {"metric": "kl", "value": 0.25})


def loaded(path):
    sweep = load(path)
    return {**vars(sweep), "rows": sweep.to_frame()}


def chunks(folder):
    for i in range(2):
        store(folder).put(f"chunk-{i}", {"value": values(i)["value"].to_numpy()})


def chunks_in(folder):
    return {str(i): torch.from_numpy(store(folder).get(f"chunk-{i}")["value"]) for i in range(2)}


@cache
def graph():
    contrast = Contrast(torch.tensor([[5, 7]]), None, p.logit_diff(7, 8))
    return attribution_graph(bridge(), contrast, top=3)


def transcoders_in(folder):
    (transcoder,) = transcoders.load(folder).values()
    return {"settings": repr(transcoder), **transcoder.tensors()}


def comparison():
    frame = pd.DataFrame(
        {"name": ["L0N3", None], "kept": [3, 5], "cosine": [0.1, float("nan")], "kind": ["a", "b"]}
    )
    about = {"model": "tiny", "metric": "kl", "n_prompts": 3, "values": [0.5, 0.1]}
    return Comparison(**{name: frame.copy() for name in _FRAMES}, tokens=("a", "é"), about=about)


KINDS = {
    "bridge": (lambda folder: save(bridge(), folder), lambda folder: load(folder).state_dict()),
    "sweep.csv": (lambda f: sweep().save(f / "s.csv"), lambda f: loaded(f / "s.csv")),
    "sweep.parquet": (lambda f: sweep().save(f / "s.parquet"), lambda f: loaded(f / "s.parquet")),
    "chunks": (chunks, chunks_in),
    "graph": (
        lambda f: graph().save(f / "g.json"),
        lambda f: vars(load(f / "g.json")),
    ),
    "transcoders": (
        lambda folder: transcoders.save(folder, {3: drawn(7, activation="topk")}),
        transcoders_in,
    ),
    "comparison": (
        lambda folder: comparison().save(folder),
        lambda folder: vars(load(folder)),
    ),
}


def same(first, second):
    assert first.keys() == second.keys()
    for key, value in first.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, second[key]), key
        elif isinstance(value, pd.DataFrame):
            pd.testing.assert_frame_equal(value, second[key], check_exact=True)
        else:
            assert value == second[key], key


def files_in(folder):
    return {x: (x.stat().st_ino, x.read_bytes()) for x in folder.rglob("*") if x.is_file()}


@contextmanager
def longest_file(size):
    """Let every write fail that would make a file longer than this many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_that_fails_keeps_the_old_files(kind, tmp_path):
    make, read = KINDS[kind]
    folder = tmp_path / "folder"
    make(folder)
    whole, before = read(folder), files_in(tmp_path)
    for size in {0, *(len(content) - 1 for _, content in before.values())}:
        with longest_file(size), pytest.raises(CheckpointError):
            make(folder)
        after = files_in(tmp_path)
        assert after.keys() == before.keys()
        if kind not in ("chunks", "comparison"):  # which replace one file after another
            assert after == before
        same(read(folder), whole)


@pytest.mark.parametrize("kind", [OSError, SafetensorError, Exception])
def test_the_error_of_a_full_disk_says_what_to_do(kind, tmp_path, monkeypatch):
    """safetensors and tokenizers raise no OSError."""

    def full(number):
        raise kind("No space left on device (os error 28)")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"a\.json cannot be written: .*; free some space"):
        graph().save(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_refused_or_changes_nothing(kind, tmp_path):
    make, read = KINDS[kind]
    folder = tmp_path / "folder"
    make(folder)
    whole = read(folder)
    refused = 0
    for change in flips(folder):
        try:
            same(read(folder), whole)
        except AttnOnlyLensError:
            refused += 1
        except AssertionError as error:
            raise AssertionError(f"{change}: {error}") from error
    assert refused > 20
    same(read(folder), whole)


def test_a_comparison_comes_back(tmp_path):
    stored, table = comparison(), tmp_path / "folder" / "new.csv"
    same(vars(load(stored.save(tmp_path / "folder"))), vars(stored))
    stored.about["faithfulness"] = [float("nan")]
    assert load(stored.save(tmp_path / "folder")).about["faithfulness"] == [None]
    another = comparison()
    another.new.loc[0, "kept"] = 4
    another.save(tmp_path / "other")
    for name in ("new.csv", "new.csv.json"):  # an intact table from another comparison
        shutil.copy(tmp_path / "other" / name, table.with_name(name))
    with pytest.raises(AttnOnlyLensError, match=r"new\.csv was changed"):
        load(tmp_path / "folder")


# Malicious manifests


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a saved bridge of each kind."""
    folder = tmp_path_factory.mktemp("saved")
    kinds = {"llama": "plain", "native": "plain", "processed": "processed"}
    return {
        name: save(
            exposed_copy(boot(name.replace("processed", "llama"), torch.float32, state)),
            folder / name,
        )
        for name, state in kinds.items()
    }


@pytest.mark.parametrize(
    ("name", "file"),
    [("llama", MANIFEST), ("native", "config.json"), ("processed", "config.json")],
)
def test_any_manifest_leads_to_an_error_or_to_the_same_tensors(name, file, folders):
    folder = folders[name]
    path = folder / file
    text, tensors = path.read_text(), load(folder).state_dict()
    manifest = (folder / MANIFEST).read_text()
    outcomes = set()
    try:
        for seed in range(12):
            changed, what = mutated(json.loads(text), seed)
            for sealed in (False, True):
                path.write_text(json.dumps(changed))
                started_at = time.process_time()
                try:
                    if sealed and file == MANIFEST:
                        rewrite(path)
                    elif sealed:
                        digest_again(folder / MANIFEST, file)
                    state = load(folder).state_dict()
                    outcomes.add("loaded" if sealed else "unharmed")
                    same(state, tensors)
                except (CheckpointError, RecursionError) as error:
                    outcomes.add(type(error).__name__)
                except BaseException as error:
                    raise AssertionError(f"{what}: {error!r}") from error
                assert time.process_time() - started_at < 5, what  # usually a fraction of a second
    finally:
        path.write_text(text)
        (folder / MANIFEST).write_text(manifest)
    assert {"CheckpointError", "loaded"} <= outcomes <= {"CheckpointError", "loaded", "unharmed"}


HUGE = 10**6
WORSE = {
    "layers": ("llama", {"num_hidden_layers": HUGE * 1000, "layer_types": None}),
    "words": ("processed", {"vocab_size": HUGE * 1000}),
    "native layers": ("native", {"n_layers": HUGE}),
    "a native context": ("native", {"n_ctx": HUGE * 1000}),
    "a negative eps": ("llama", {"rms_norm_eps": -1e-5}),
    "rotations by nothing": ("llama", {"rope_parameters": {"rope_theta": 0}}),
    "a negative scale": ("native", {"attn_scale": -2.0}),
}


@pytest.mark.parametrize("case", WORSE)
def test_sizes_are_held_against_the_weights_before_anything_is_built(case, folders, tmp_path):
    name, changes = WORSE[case]
    folder = shutil.copytree(folders[name], tmp_path / name)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    digest_again(folder / MANIFEST, config.name)
    started_at = time.process_time()
    with pytest.raises(CheckpointError):
        load(folder)
    assert time.process_time() - started_at < 5


@pytest.mark.parametrize("name", ["../secret", "/secret", "link", "\0"])
def test_no_file_outside_of_the_folder_is_opened(name, folders, tmp_path):
    folder = shutil.copytree(folders["llama"], tmp_path / "folder")
    secret = tmp_path / "secret"
    weights = folder / "model.safetensors"
    shutil.copy(weights, secret)
    name = str(secret) if name == "/secret" else name
    if name == "link":
        weights.unlink()
        weights.symlink_to(secret)
    else:
        rewrite(
            folder / MANIFEST,
            lambda whole: whole["files"].update({name: whole["files"]["model.safetensors"]}),
        )
    secret.chmod(0)
    with pytest.raises(CheckpointError, match="names a file"):
        load(folder)


def test_links_out_of_any_other_folder_are_not_followed(tmp_path):
    for kind, name in (("chunks", "chunk-0.safetensors"), ("comparison", "new.csv")):
        make, read = KINDS[kind]
        folder = tmp_path / kind
        make(folder)
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
        with pytest.raises(AttnOnlyLensError, match="outside of that folder"):
            read(folder)


def test_a_tokenizer_runs_no_code_and_asks_nothing(tmp_path, monkeypatch):
    model = exposed_copy(boot("llama", torch.float32))
    model.tokenizer = tiny_tokenizer(41, tmp_path / "tokenizer")
    folder = save(model, tmp_path / "saved")
    questions = []
    monkeypatch.setattr(builtins, "input", lambda *prompt: questions.append(prompt) or "y")
    settings = folder / "tokenizer_config.json"
    text = settings.read_text()
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass")
    outside = tmp_path / "vocabulary"
    outside.write_text("{}")
    for changes, match in (
        ({"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}, "never run"),
        ({"tokenizer_file": str(outside)}, "outside its folder"),
    ):
        settings.write_text(json.dumps(json.loads(text) | changes))
        digest_again(folder / MANIFEST, settings.name)
        with pytest.raises(CheckpointError, match=match):
            load(folder)
    assert not questions
    assert not ran.exists()


# Invalid paths


def resume(path):
    contrast = Contrast(torch.tensor([5, 7]), torch.tensor([5, 11]), p.logit_diff(7, 8))
    p.activation_patch(bridge(), contrast, sites="L0N3", work=Work(resume=path))


ENDINGS = (".csv", ".json", ".parquet", ".safetensors", "/provenance.json")
TAKES = {
    "save": lambda path: save(bridge(), path),
    "load": load,
    "load_source": load_source,
    "resume": resume,
}
TAKES_FILE = {
    **{f"load {end}": lambda path, end=end: load(f"{path}{end}") for end in ENDINGS},
    "write a graph": lambda path: graph().save(path),
    "draw": lambda path: viz.write("<p>", f"{path}.html"),
}


@pytest.mark.parametrize("name", [*TAKES, *TAKES_FILE])
def test_a_path_to_something_else_is_one_of_our_errors(name, tmp_path):
    text, folder, ring = (tmp_path / name for name in ("text", "folder", "ring"))
    text.write_text("a file")
    (folder / "text").mkdir(parents=True)
    ring.symlink_to(ring)
    odd = ["", text / "below" / "it", ring / "below", tmp_path / ("x" * 300), f"{tmp_path}/a\0b"]
    odd += [text, ring, 3.5, b"name"] if name in TAKES else [folder] * name.startswith("write")
    for path in odd:
        with pytest.raises(AttnOnlyLensError):
            (TAKES | TAKES_FILE)[name](path)
    assert text.read_text() == "a file"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "ring", "text"]


def test_a_writer_leaves_links_alone(tmp_path):
    """A writer replaces a link and leaves its target alone, which others may own."""
    (tmp_path / "theirs").write_text("years of work")
    (tmp_path / "part").symlink_to(tmp_path / "theirs")
    with atomic_write(tmp_path / "part") as new:
        new.write_text("ours")
    assert (tmp_path / "theirs").read_text() == "years of work"
    assert (tmp_path / "part").read_text() == "ours"
