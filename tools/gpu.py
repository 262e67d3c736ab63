"""Everything that only a card can show, in one command of at most nine minutes, most valuable first.

    make gpu                                      # or, where nothing can be installed: tools/gpu.sh
    python tools/gpu.py [--device cpu] [--only NAME ...] [--out DIR] [--quick] [--list]

Each part is a process with its own limit; none stops another. Writes gpu.json with all that was found and gpu.md with
the table of docs/evidence/benchmarks.md. With --device cpu every part goes the way it would go on a card, in small.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NINE_MINUTES = 540


@dataclass(frozen=True)
class Part:
    """A process: its name, the seconds it may take, the arguments of Python, whether it prints times, and the further
    arguments by which it goes its way on a CPU where it does not take --device."""

    name: str
    limit: int
    arguments: tuple[str, ...]
    times: bool = True
    on_cpu: tuple[str, ...] = ()


def part(name: str, limit: int) -> Part:
    return Part(name, limit, ("-m", "benchmarks.gpu", name))


MEASURED = str(ROOT / "out" / "card.toml")
ORDINARY = ("-m", "tools.card_tests", "tests/nn/tensors", "tests/nn/eager", "tests/nn/test_default_device.py")
MARK = "SBPFLOW_GPU_PART"  # in the environment of a part and of all that it starts


def tests(name: str, limit: int, *which: str) -> Part:
    files = [f"tests/gpu/test_{each}_cuda.py" for each in which]
    # Plugins that a machine may have, of which some import what warns.
    without = [word for each in ("cacheprovider", "benchmark", "anyio", "jaxtyping") for word in ("-p", f"no:{each}")]
    arguments = ("-m", "pytest", "-v", "--tb=short", *without, *files)
    return Part(name, limit, arguments, times=False, on_cpu=("--collect-only", "-q"))


PARTS = (
    tests("recorded", 50, "recorded"),
    tests("training", 100, "training"),  # over NCCL by ranks that share the card
    Part("doctor", 40, ("-m", "sbpflow", "doctor", "--measure", "--save", MEASURED), times=False),
    Part("models", 140, ("-m", "benchmarks.predicted.models", MEASURED)),
    tests("moves", 90, "boxing", "actors"),
    part("graph", 60),
    part("boxing", 30),
    part("pipeline", 30),
)
MORE = (  # by name alone: they are seldom of news
    part("eager", 30),
    part("examples", 80),
    Part("ordinary", 120, ORDINARY, times=False, on_cpu=("--collect-only", "-q")),  # some fail for what they are
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in (*PARTS, *MORE)], metavar="NAME")
    parser.add_argument("--out", type=Path, default=ROOT / "out", metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="few rounds of little: whether all runs")
    parser.add_argument("--list", action="store_true", help="the parts and their limits, and nothing else")
    options = parser.parse_args()
    chosen = [each for each in (*PARTS, *MORE) if each.name in options.only] if options.only else list(PARTS)
    if options.list:
        print("\n".join(f"{each.name:10} {each.limit:4} s  python {' '.join(each.arguments)}" for each in chosen))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"device": options.device, "python": sys.version.split()[0], "parts": {}}
    for each in chosen:
        print(f"{each.name}: at most {each.limit} s", flush=True)
        found["parts"][each.name] = told = run(each, options.device, options.quick)
        print(f"  {told['state']} after {told['seconds']:.0f} s", flush=True)
        # Written after every part: the machine may be gone before the last.
        (options.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (options.out / "gpu.md").write_text(table(found), encoding="utf-8")
    print(table(found), end="")
    return any(told["state"] != "well" for told in found["parts"].values())


def run(each: Part, device: str, quick: bool) -> dict[str, Any]:
    """How a part went: its state (well, failed or out of time), seconds, what it found, and the end of what it said."""
    more = ["--device", device, *["--quick"] * quick] if each.times else each.on_cpu if device == "cpu" else ()
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment |= {MARK: f"{os.getpid()} {each.name}", **({"SBPFLOW_COLLECT_GPU": "1"} if device == "cpu" else {})}
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *each.arguments, *more],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said, state = process.communicate(timeout=each.limit)[0], "well"
    except subprocess.TimeoutExpired:
        ended(environment[MARK])
        said, state = process.communicate()[0], "out of time"
    if process.returncode and state == "well":
        state = "failed"
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")] if each.times else []
    if state == "well" and ((each.times and not rows) or any(broken(row) for row in rows)):
        state = "failed"
    seconds = time.monotonic() - start
    return {"state": state, "seconds": round(seconds, 1), "found": rows, "said": said[-20_000:]}


def ended(mark: str) -> None:
    """End a part and all that it started: a rank that is left waits on the card, and takes it from the next part."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def broken(row: dict[str, dict[str, Any]]) -> bool:
    """Whether a way has an error where its times should be."""
    return any(isinstance(x, str) and not x.replace(".", "").isdigit() for ways in row.values() for x in ways.values())


def table(found: dict[str, Any]) -> str:
    """Markdown: a row for each part, and one for each way of what is timed, beside the first of them."""
    lines = ["| part | what | way | median | least | beside the first |", "|---|---|---|--:|--:|--:|"]
    for name, told in found["parts"].items():
        lines.append(f"| **{name}** | {told['state']} | | {told['seconds']:.0f} s | | |")
        for row in told["found"]:
            for what, ways in row.items():
                first = next((median(x) for x in ways.values() if isinstance(x, list)), None)
                for way, times in ways.items():
                    if isinstance(times, str):
                        lines.append(f"| {name} | {what} | {way} | {times} | | |")
                    else:
                        beside = f"{median(times) / first:.2f}" if first else ""
                        lines.append(
                            f"| {name} | {what} | {way} | {median(times):.1f} us | {min(times):.1f} us | {beside} |"
                        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
