"""A release up to the upload: wheel and sdist from what is committed, checked as a package index and a user see them.

    python -m tools.release --source https://HOST/OWNER/sbpflow

README's links are relative, so that they are right in a checkout and at any forge. A package index has no tree beside
it, so in what is built they point to the release's tag at the forge. Nothing is tagged or uploaded: the lines for that
are printed.
"""

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

from tools.pythons import NAMES, all_tried

__all__ = ["LINK", "absolute", "faults", "versions"]

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)(\[[^\]]*\])\(([^)\s]+)\)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="where the repository is to be read, https://HOST/OWNER/NAME")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    asked = parser.parse_args()
    said = versions(ROOT)
    if len(set(said.values())) > 1 or git("status", "--porcelain"):
        left = git("status", "--short").decode()
        sys.exit(f"release: versions are {said}, and all has to be committed:\n{left}")
    if "(unreleased)" in (ROOT / "CHANGELOG.md").read_text():
        sys.exit("release: CHANGELOG.md says (unreleased): write the day there")
    version = said["pyproject.toml"]
    with tempfile.TemporaryDirectory() as home:
        tree = Path(home) / "tree"
        with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
            archive.extractall(tree, filter="tar")
        readme = tree / "README.md"
        readme.write_text(absolute(readme.read_text(), tree, asked.source.rstrip("/"), f"v{version}"))
        subprocess.run([sys.executable, "-m", "build", "--no-isolation", "-o", str(asked.out), str(tree)], check=True)
        wheel = asked.out / f"sbpflow-{version}-py3-none-any.whl"
        if found := faults(wheel):
            sys.exit("release: " + "\n".join(found))
        told = dict(all_tried(wheel, [sys.executable, *NAMES]))
    print(*(f"{name}: {said}" for name, said in told.items()), sep="\n")
    if any(said.startswith("FAILED") for said in told.values()):
        sys.exit("release: the wheel does not run")
    print(
        f"checked {wheel.name}: metadata, README, content, and what it does in fresh environments\n"
        f"what is left is yours:\n  git tag -s v{version} -m v{version} && git push origin v{version}\n"
        f"  twine upload {asked.out}/sbpflow-{version}*"
    )


def absolute(readme: str, tree: Path, source: str, tag: str) -> str:
    """README with the links of a forge in the place of relative ones; one to nothing is an error."""

    def turned(link: re.Match[str]) -> str:
        picture, words, to = link.groups()
        path, _, place = to.partition("#")
        if "://" in to or not path:
            return link[0]
        if not (tree / path).exists():
            raise FileNotFoundError(f"README.md links to {path}, which is not there")
        kind = "raw" if picture else "tree" if (tree / path).is_dir() else "blob"
        return f"{picture}{words}({source}/{kind}/{tag}/{path}{place and '#' + place})"

    return LINK.sub(turned, readme)


def versions(tree: Path) -> dict[str, str]:
    """The version that each file says, by file."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"]
    cited = re.search(r"^version: (\S+)$", (tree / "CITATION.cff").read_text(), re.MULTILINE)
    changed = re.search(r"^## (\S+)", (tree / "CHANGELOG.md").read_text(), re.MULTILINE)
    return {
        "pyproject.toml": project,
        "CITATION.cff": cited[1] if cited else "none",
        "CHANGELOG.md": changed[1] if changed else "none",
    }


def faults(wheel: Path) -> list[str]:
    """The faults for which an index would refuse a wheel, or show it wrongly; and files beside the package."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (at,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(archive.read(at), validate=True)  # raises on what no index takes
    found = []
    if metadata.description_content_type != "text/markdown":
        found.append(f"the description is {metadata.description_content_type}, and no index would render it")
    links = [hit[3] for hit in LINK.finditer(metadata.description or "")]
    found += [f"README links to {to}, which is nowhere on an index" for to in links if "://" not in to]
    found += [
        f"{name} lies beside the package" for name in names if not re.match(r"sbpflow(-[^/]+\.dist-info)?/", name)
    ]
    return found


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True).stdout


if __name__ == "__main__":
    main()
