"""The examples run as their first lines say: in one process, and under torchrun."""

import os
import re
import runpy
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ranks import Answer, Fresh

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("[!_]*.py"))
NEEDS = {  # packages that examples show, and which may be missing; what they warn of is theirs
    "accelerate_loop": ["accelerate"],
    "hf_trainer": ["transformers", "accelerate"],
    "lightning_module": ["pytorch_lightning", "accelerate"],
    "peft_lora": ["peft"],
}
TOLD = {  # what a run must print, besides losses that fall
    "accelerate_loop": r"(loss \d\.\d{4} +){9}",
    "gpt": r"tokens/s\ndrew out/gpt.svg\n",
    "diloco": r"step 38  losses .*, last met by 19204 bytes a rank\n(.*\n)*step 95  losses ",
    "hf_trainer": r"'loss': '3\.\d+'(.*\n)*.*'train_loss': '[23]\.",
    "lightning_module": r"Epoch 19/19 (.*\n)*.*loss:\s+0\.0\d\d",
    "mlp": r"the two arms, as the model sees them:\n([.#]{64}\n){24}",
    "peft_lora": r"loss 4\.\d+ to [23]\.\d+; merged (\d\.\d{3})\d, loaded \1\d\n21 of 49 parameters, 321 KiB: no g",
    "pipe_transformer": r"4 stages x 1 (.*\n)*.*2 stages x 2 +4 of 8 layers (.*\n)*every loss is that of one",
    "pipeline": r"1f1b p=2 m=8: (.*\n)*GPT, 1f1b, 8 micro-batches: step (.*\n)*drew out/pipeline.svg, wrote out/time",
    "refit": r"letter 7: 8% of the first texts, [5-9]\d% of the last\n",
    "tensor_parallel": r"four ranks set out to learn a rhyme,\neach held a part, and all kept time.\n",
    "tokens": r"\d+ tokens of \d+ letters, 2\.\d+ each, in .*tokens.bin\nread back exactly\n",
    "train": r"tokens/s (.*\n)*goes on at step 12, from (.*\n)*it writes: (.*\n)*"
    r"from (?P<first>7\.\d+) to (?P<last>\d\.\d+); resumed to (?P=last)\n",  # of this repository's text, which grows
    "three_d": r"up.weight +\(256, 64\) +\(B, S\(0\)\) +\(128, 64\)\n(.*\n)*July 1969 began on a Tuesday\n",
    "zero": r" 9 o'clock and  5 hours later: 2 o'clock\n11 o'clock and  4 hours later: 3 o'clock\n",
}


CHECKED = {
    "hf_trainer": [],
    "lightning_module": [],
    "peft_lora": [],
    "pipe_transformer": ["--check"],
    "refit": [],
    "tokens": ["--check"],
    "train": ["--check"],
}  # that else take minutes, or print no losses


def said(command: list[str]) -> str:
    """What it printed; it must end well and complain of nothing."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    environment["COLUMNS"] = "200"  # a line of progress is one line, however quick the machine
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def example(path: str, launched: bool, *more: str) -> None:
    """As its command runs it, or a rank's part of what torchrun runs."""
    if not launched:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    os.chdir(ROOT)
    warnings.simplefilter("ignore" if Path(path).stem in NEEDS else "error")
    sys.argv[:] = [path, *CHECKED.get(Path(path).stem, ()), *more]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def check(example: Path, text: str) -> None:
    told = re.search(TOLD[example.stem], text)
    assert told, text
    if "first" in told.groupdict():
        assert float(told["first"]) - float(told["last"]) > 1
    if example.stem in CHECKED:
        return
    losses = [float(loss) for loss in re.findall(r"\b\d\.\d{4,}\b(?! ms)", text)]
    assert losses[-1] < (0.6 if example.stem in ("gpt", "pipeline") else 0.2) * losses[0]


def test_every_example_is_tested() -> None:
    assert {example.stem for example in EXAMPLES} == TOLD.keys()


@pytest.mark.sweep
def test_an_example_runs_by_its_command() -> None:
    """By default they are run where torch is loaded already, which takes longer than most of them."""
    check(ROOT / "examples" / "gpt.py", said([sys.executable, "examples/gpt.py"]))


@pytest.mark.parametrize(  # libraries take seconds to import; what they show is held to one device in test_trainers.py
    "path", [pytest.param(path, marks=[pytest.mark.sweep] * (path.stem in NEEDS), id=path.stem) for path in EXAMPLES]
)
def test_an_example_runs_in_one_process(path: Path, fresh: Fresh) -> None:
    for package in NEEDS.get(path.stem, ()):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed, which {path.name} shows")
    (end,) = fresh(1, example, str(path), False, timeout=120.0, freed=True)
    assert (end.answer, end.code) == (Answer(), 0), end.stderr
    check(path, end.stderr)


@pytest.mark.sweep
def test_an_example_runs_under_torchrun() -> None:
    """The launcher is tests/placement/test_world.py's; each of its processes loads torch anew."""
    path = ROOT / "examples" / "pipeline.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    check(path, said([*launcher, str(path)]))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("pipeline", 2),
        *(
            pytest.param(*row, marks=pytest.mark.sweep)
            for row in [("zero", 4), ("refit", 6), ("diloco", 4), *((name, 4) for name in NEEDS)]
        ),
    ],
)
def test_an_example_runs_on_real_ranks(fresh: Fresh, name: str, size: int) -> None:
    path = ROOT / "examples" / f"{name}.py"
    ends = fresh(size, example, str(path), True, timeout=240.0, freed=True)
    assert [(end.answer, end.code) for end in ends] == [(Answer(), 0)] * size, [end.stderr for end in ends]
    check(path, "".join(end.stderr for end in ends))


@pytest.mark.sweep
def test_training_in_stages_resumes_to_the_same_losses(fresh: Fresh, tmp_path: Path) -> None:
    path, plan = ROOT / "examples" / "train.py", tmp_path / "stages.plan"
    plan.write_text("grid (pipe=2, data=*)\npipe blocks over pipe by 1f1b, 4 micro-batches\n")
    ends = fresh(2, example, str(path), True, "--plan", str(plan), timeout=120.0)
    assert [(end.answer, end.code) for end in ends] == [(Answer(), 0)] * 2, [end.stderr for end in ends]
    check(path, "".join(end.stderr for end in ends))
    assert "bubble" in ends[0].stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(example: Path) -> None:
    source = example.read_text()
    assert len(source.splitlines()) <= (60 if example.stem in NEEDS else 100 if example.stem == "train" else 119)
    assert f"python examples/{example.name}" in source
    assert re.search(rf"torchrun --nproc-per-node [46] examples/{example.name}\b", source)
