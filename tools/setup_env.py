"""Make .venv with all that `make demo` and `make test` need; standard library only, safe to run again."""

import importlib.util
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
PIP = (str(PYTHON), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check")

# --index-url leaves the user's find-links and extra indexes in force; short waits, as it may be out of reach.
CPU_INDEX = ("--index-url", "https://download.pytorch.org/whl/cpu", "--timeout", "15", "--retries", "1")


def main() -> None:
    """Write the stamp `.ready` last, so that an interrupted run is taken up again."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(need for need in project["dependencies"] if need.startswith("torch"))
    extras = ["dev", "docs"] if shutil.which("dot") else ["dev", "docs", "draw"]

    (VENV / ".ready").unlink(missing_ok=True)
    if not succeeds([str(PYTHON), "-m", "pip", "--version"]):
        # --clear: what lies there may belong to an interpreter that is gone.
        step(
            f"making .venv with Python {sys.version.split()[0]}",
            [sys.executable, "-m", "venv", "--clear", str(VENV)],
        )
    # --no-deps: torch's own needs come from the usual index, in the last step.
    if has_gpu():
        print("setup: a GPU is here, so torch is the CUDA build", flush=True)
    elif not step(
        "installing torch, CPU build (200 MB)",
        [*PIP, "--no-deps", newest_cpu_build(torch) or torch, *CPU_INDEX],
        may_fail=True,
    ):
        print("setup: no CPU build within reach, so torch is the default build, which may be large", flush=True)
    step(
        f"installing sbpflow and its needs ({', '.join(extras)})",
        [*PIP, "--editable", f"{ROOT}[{','.join(extras)}]"],
    )
    step(
        f"installing libraries of models for tests ({', '.join(project['optional-dependencies']['models'][:3])})",
        [*PIP, *libraries(project["optional-dependencies"]["models"])],
        may_fail=True,
    )
    (VENV / ".ready").touch()


def libraries(needs: Sequence[str]) -> list[str]:
    """How pip installs them beside the torch that is here, which they leave as it is; tests skip what is missing."""
    asked = "import torch; print(torch.__version__)"
    torch = subprocess.run([str(PYTHON), "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    pinned = [need if need != "torchvision" else torchvision_of(torch) for need in needs]
    index = ("--extra-index-url", *CPU_INDEX[1:]) if torch.endswith("+cpu") else ()
    return ["--no-deps", "--upgrade", "--target", str(VENV / "libraries"), *pinned, *index]


def torchvision_of(torch: str) -> str:
    """`torchvision==0.28.*` for torch 2.13: each is built for one torch, and they have counted together since 2.0."""
    major, minor, *_ = release(torch)
    assert major == 2
    return f"torchvision==0.{minor + 15}.*"


def has_gpu() -> bool:
    """Whether an NVIDIA GPU answers; containers without nvidia-smi show it by the torch they bring."""
    if shutil.which("nvidia-smi"):
        return succeeds(["nvidia-smi", "--list-gpus"])
    probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return importlib.util.find_spec("torch") is not None and succeeds([sys.executable, "-c", probe])


def newest_cpu_build(need: str) -> str | None:
    """`torch==2.15.0+cpu`, the newest within `need` that is marked as a CPU build; None where none is, as on macOS.

    A range would take the highest number of all indexes in force, which may be a CUDA build of gigabytes.
    """
    pip = (str(PYTHON), "-m", "pip", "--disable-pip-version-check", "index", "versions", "torch", *CPU_INDEX)
    listed = subprocess.run(pip, capture_output=True, text=True, check=False).stdout
    line = next((line for line in listed.splitlines() if line.startswith("Available versions:")), "")
    return newest_marked(line.partition(":")[2].split(","), need)


def newest_marked(versions: Sequence[str], need: str) -> str | None:
    """Of versions from the newest on, the first with `+cpu` in a range such as `torch>=2.11,<2.16`."""
    low, high = (release(bound) for bound in need.removeprefix("torch>=").split(",<"))
    marked = (v.strip() for v in versions if v.strip().endswith("+cpu"))
    return next((f"torch=={v}" for v in marked if low <= release(v) < high), None)


def release(version: str) -> tuple[int, ...]:
    """The numbers by which versions compare: (2, 13, 0) of `2.13.0+cpu`, without what letters make of the last."""
    return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())


def succeeds(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def step(title: str, command: Sequence[str], *, may_fail: bool = False) -> bool:
    """Run a command in silence, a sign of life every 15 s; its own words are shown if it ends the run."""
    print(f"setup: {title}", flush=True)
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while True:
            try:
                said, _ = process.communicate(timeout=15)
                break
            except subprocess.TimeoutExpired:
                print(f"setup: ... {time.monotonic() - start:.0f} s", flush=True)
    if process.returncode and not may_fail:
        sys.exit(f"{said}\nsetup: failed: {' '.join(command)}")
    return process.returncode == 0


if __name__ == "__main__":
    main()
