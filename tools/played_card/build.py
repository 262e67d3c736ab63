"""Builds the played card with the compiler of this machine, once for each torch and each state of its sources.

library() -> Path      the shared library, built where it is not there yet (a minute); NoCompiler where none is found
environment() -> dict  what a process is started with so that its torch finds the cards

Beside it lies played_nccl, a module of Python's for what torch.distributed asks of NCCL.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["NoCompiler", "environment", "library"]

HERE = Path(__file__).resolve().parent
UNITS = ("streams", "memory", "device", "kernels", "capture")


class NoCompiler(RuntimeError):
    """This machine has no C++ compiler, or none of Python's headers."""


def library() -> Path:
    made = HERE.parents[1] / "out" / "played_card" / f"card-{digest()}.so"
    if not made.is_file():
        build(made)
    return made


def environment(cards: int = 4, seed: int = 0) -> dict[str, str]:
    """Says to Python that it loads the card before anything else, in this process and in those that it starts."""
    paths = [str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    said = {"PLAYED_CARD": str(library()), "PLAYED_CARDS": str(cards), "PLAYED_SEED": str(seed)}
    return {**said, "PYTHONPATH": os.pathsep.join(paths)}


def torch_home() -> Path:
    """Where torch is installed, which is asked without loading it."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    return Path(str(found.origin)).parent


def digest() -> str:
    said = [(torch_home() / "version.py").read_bytes(), sys.version.encode()]
    said += [path.read_bytes() for path in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])]
    return hashlib.sha256(b"".join(said)).hexdigest()[:16]


def nccl(card: Path) -> Path:
    """The module that goes with a library."""
    return card.parent / card.stem / "played_nccl.so"


def build(made: Path) -> None:
    headers, compiler = sysconfig.get_paths()["include"], shutil.which("g++") or shutil.which("clang++")
    if compiler is None or not Path(headers, "Python.h").is_file():
        raise NoCompiler("a played card needs a C++ compiler and the headers of Python")
    torch = torch_home()
    includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}", f"-I{headers}"]
    work = made.with_suffix(f".{os.getpid()}")
    work.mkdir(parents=True, exist_ok=True)
    objects = [str(work / f"{unit}.o") for unit in UNITS]

    def compiled(unit: str) -> None:
        command = [compiler, "-O1", "-std=c++20", "-fPIC", "-w", *includes, "-c", str(HERE / f"{unit}.cpp")]
        ran([*command, "-o", str(work / f"{unit}.o")])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compiled, (*UNITS, "nccl")))
    links = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    ran([compiler, "-shared", *objects, *links, "-o", str(work / "card.so")])
    ran(
        [
            compiler,
            "-shared",
            str(work / "nccl.o"),
            *links,
            "-ltorch",
            "-ltorch_python",
            "-o",
            str(work / "played_nccl.so"),
        ]
    )
    nccl(made).parent.mkdir(exist_ok=True)
    os.replace(work / "played_nccl.so", nccl(made))  # whoever builds beside us has the same
    os.replace(work / "card.so", made)
    shutil.rmtree(work)


def ran(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{ended.stderr}")
