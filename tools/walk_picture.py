"""Write docs/pictures/walk.png: the page to walk through of a Llama of 32 layers, with an op of it selected.

    python tools/walk_picture.py

It needs playwright, Pillow and a chromium on PATH; the page is that of `python -m sbpflow report`.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import ViewportSize, sync_playwright

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "walk.png"
SIZE = ViewportSize(width=1360, height=1060)
PLAN = """\
grid cuda (pipe=4, data=2, model=2)
cast ** to bf16
cast {grads,states} ** to fp32
pipe model.layers over pipe by 1f1b, 8 micro-batches
take tp_plan over model
input input_ids <- data=S(0)
input labels <- data=S(0)
states **: data=S(0)
"""
ASKED = ["--batch", "16", "--tokens", "1024", "--cluster", "h100x8*2"]


def main() -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with TemporaryDirectory() as folder, sync_playwright() as playing:
        plan, page = Path(folder, "stages.plan"), Path(folder, "step.html")
        plan.write_text(PLAN, encoding="utf-8")
        words = ["-m", "sbpflow", "report", str(plan), "LlamaForCausalLM", *ASKED, "-o", str(page)]
        subprocess.run([sys.executable, *words], check=True)
        shown = playing.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        tab = shown.new_page(viewport=SIZE)
        tab.goto(page.as_uri())
        tab.wait_for_selector("#app.ready .box")
        tab.keyboard.press("/")
        tab.keyboard.type("layers.0.self_attn scaled")
        tab.keyboard.press("Enter")
        tab.wait_for_timeout(1000)  # until the graph stands still
        tab.screenshot(path=PICTURE)
        shown.close()
    Image.open(PICTURE).convert("RGB").quantize(256).save(PICTURE, optimize=True)  # a third of its bytes


if __name__ == "__main__":
    main()
