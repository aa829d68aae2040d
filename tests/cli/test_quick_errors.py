"""Tests of errors: those of arguments come before torch is imported, and all are one message."""

import subprocess
import sys
from pathlib import Path

import pytest
from common import run_cli

from attn_only_lens import load, patching, save
from attn_only_lens.cli.common import CHOICES
from attn_only_lens.engine.directions import ABLATIONS, DIRECTIONS
from attn_only_lens.engine.sites import PARTS
from attn_only_lens.models.source_folder import DTYPES
from attn_only_lens.storage import Document
from attn_only_lens.versions import HAS_HOOKED_TRANSFORMER

PROMPTS = "--clean a --corrupted b --answer c --wrong d"
WRONG = {
    "demo --out /proc/x": "/proc/x cannot be written",
    "explain small-english --clean a --out x.html": "--corrupted",
    f"explain small-english {PROMPTS} --out /proc/x.html": "/proc/x.html cannot be written",
    f"explain small-english {PROMPTS} --device cuda:x --out x.html": "got --device cuda:x; expect",
    f"explain small-english {PROMPTS} --out FOLDER.html": "FOLDER.html cannot be written: it is a",
    f"explain small-english {PROMPTS} --resamples 20 --out x.html": "got 1 prompt pairs; expected",
    "explain small-english --clean= --clean a --corrupted b --answer c --answer d --answer e "
    "--wrong f --top 0 --out x.html": "got --top 0; expected a whole number, 1 or more - --clean: "
    "got ''; expected a text - got 1 --corrupted for 2 --clean; expected as many - got 3 --answer",
    "explain small-english --clean 1,2 --corrupted 1,a --answer 3,4 --wrong 5 --token-ids "
    "--out x.html": "--corrupted: got '1,a'; expected whole numbers of 0 or more",
    "explain small-english --pairs FOLDER.csv --out x.html": "more fields than the header",
    "circuit small-english --clean a --answer c --out x.html": "--answer and --wrong",
    f"circuit small-english {PROMPTS} --out x.json --save-circuit a/../x.json": "x.json for --out "
    "and for --save-circuit; expected another path",
    f"evaluate small-english x.json {PROMPTS} --metric kl": "neither --answer nor --wrong",
    f"evaluate small-english /nope.json {PROMPTS}": "/nope.json is missing",
    f"patch small-english {PROMPTS} --layers 1 --sites L1H1 --out x.csv": "names contain the layer",
    f"patch small-english {PROMPTS} --sites L5H --out x.csv": "--sites: got L5H; expected neurons,",
    f"patch small-english {PROMPTS} --part pattern --direction zero --out x.csv": "got --part "
    "pattern with --direction zero; expected --part z",
    "patch small-english --clean a --answer b --wrong c --out x.csv": "no corrupted prompt with "
    "--direction denoise",
    f"patch small-english {PROMPTS} --out no-folder/x.csv": "no-folder",
    "pattern small-english --prompt a --out x.html": "--names or --layer",
    "pattern small-english --prompt \udcff --layer 0 --out x.html": "that is not valid Unicode",
    "picture README.md --out x.html": "'README.md'; expected a name that ends in .parquet",
    "atlas small-english --texts Makefile --layers a --out x": "--layers",
    "compare small-english grown --clean Makefile --metric loss --answer a --out x": "neither",
    "compare small-english /no --null /no --clean Makefile --metric loss --out x": "folder /no",
    "grow small-english small-english": "different folders",
    "grow small-english x": "give either sizes",
    "verify small-english": "which MODEL will read",
}
if HAS_HOOKED_TRANSFORMER:
    WRONG["convert small-english x --gate bilinear --text a --tokens-file b"] = "pass either --text"
else:
    WRONG["convert small-english x"] = "needs HookedTransformer"
    WRONG["verify small-english --text a --hooked"] = "--hooked needs HookedTransformer"
PATTERN = ["pattern", "small-english", "--prompt", "The keys", "--layer", "0", "--out", "page.html"]
RUN = """
import io, sys
from contextlib import redirect_stderr
from attn_only_lens.cli import app
for command in {commands!r}:
    with redirect_stderr(io.StringIO()) as said:
        try:
            app(command.split())
        except SystemExit as end:
            code = end.code
    print(repr((code, " ".join(said.getvalue().split()), "torch" in sys.modules)))
"""


def test_errors_of_arguments_come_before_torch(tmp_path):
    for name in ("FOLDER.html", "FOLDER.json"):
        (tmp_path / name).mkdir()
    (tmp_path / "FOLDER.csv").write_text("clean,corrupted,answer,wrong\na,b,c,d,e\n")
    commands = [command.replace("FOLDER", f"{tmp_path}/FOLDER") for command in WRONG]
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(commands=commands)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    for (command, expected), line in zip(WRONG.items(), done.stdout.splitlines(), strict=True):
        code, said, slow = eval(line)
        assert code == 2, (command, said)
        assert expected in said, command
        assert not slow, command


CLEAN, CORRUPTED = ("--clean", "w3 w5 w7"), ("--corrupted", "w3 w6 w7")
ANSWERS, PAGE = ("--answer", "w13", "--wrong", "w17"), ("--out", "page.html")
PAIR = (*CLEAN, *CORRUPTED, *ANSWERS)
SWEEP = ("--out", "sweep.csv")
OF_A_MODEL = {
    "the model has layers 0 to 1": ("patch", "MODEL", *PAIR, *SWEEP, "--sites", "L9N3"),
    "has no tokenizer; give token IDs and --token-ids": ("patch", "TOY", *PAIR, *SWEEP),
    "the same number of tokens": ("circuit", "MODEL", *CLEAN, *ANSWERS, *PAGE, "--corrupted", "w3"),
    "has format None": ("picture", "no.json", *PAGE),
    "--bars for": ("picture", "no.json", *PAGE, "--bars", 3),
    "has format 'attn_only_lens.CircuitGraph';": ("evaluate", "MODEL", "graph.json", *PAIR),
    "cannot run on these prompts: - prompts: tokens: got values": (
        *("pattern", "MODEL", "--prompt", "0,99", "--token-ids", "--layer", 1, *PAGE),
    ),
    "expected a text in each row for clean": ("evaluate", "MODEL", "no.json", "--pairs", "no.csv"),
    "got --pairs and --answer": ("evaluate", "MODEL", "no.json", "--pairs", "no.csv", *ANSWERS),
    "none.csv cannot be read": ("evaluate", "MODEL", "no.json", "--pairs", "none.csv"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(folder, tmp_path_factory):
    """Return folders of a model with a tokenizer, and of one without."""
    toy = save(load("modular-addition"), tmp_path_factory.mktemp("models") / "toy")
    return {"MODEL": folder, "TOY": toy}


@pytest.mark.parametrize("message", OF_A_MODEL)
def test_errors_are_one_message_and_nothing_is_written(folders, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("no.json").write_text("{}")
    Path("no.csv").write_text("clean,corrupted,answer,wrong\n,w3 w6,w13,w17\n")
    Document("attn_only_lens.CircuitGraph", 3, dict).write(Path("graph.json"))
    before = sorted(Path().iterdir())
    result = run_cli(*(folders.get(word, word) for word in OF_A_MODEL[message]))
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert sorted(Path().iterdir()) == before


def test_choices_of_options_are_those_of_functions():
    functions = {
        "metric": [name for name in CHOICES["metric"] if callable(getattr(patching, name))],
        "dtype": DTYPES,
        "part": PARTS,
        "direction": (*DIRECTIONS, *ABLATIONS),
    }
    for option, names in functions.items():
        assert sorted(CHOICES[option]) == sorted(names), option


@pytest.mark.parametrize(
    ("arguments", "stderr"), [(["--help"], subprocess.PIPE), (PATTERN, subprocess.STDOUT)]
)
def test_a_reader_that_ends_first_is_no_error(arguments, stderr, tmp_path):
    """The pipe is closed before the command prints anything, and before it writes its file."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from attn_only_lens.cli import app; app()", *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=stderr,
    )
    process.stdout.close()
    said = "" if process.stderr is None else process.communicate()[1].decode()
    assert process.wait() == 0, said
    assert "rror" not in said
    assert (tmp_path / "page.html").is_file() == (arguments == PATTERN)
