"""Ten tasks of a newcomer, each done by copying from the page that docs/index.md names for it."""

import json
import re
from pathlib import Path

from tests.newcomer.desk import DOCS, Desk, Page, printed


def test_install(desk: Desk) -> None:
    page = Page("install.md")
    assert "sbpflow" in desk.does(page.command("pip install sbpflow"))
    assert "torch" in desk.does(page.command("sbpflow doctor"))
    first, _ = page.blocks("python")
    desk.keep("first.py", first)
    assert desk.does("python first.py").splitlines() == printed(first)
    where = desk.does("python -c 'import sbpflow; print(sbpflow.__file__)'")
    assert where.startswith(str(desk.home / "venv"))


def test_two_hosts(desk: Desk) -> None:
    page = Page("hosts.md")
    script, losses = page.blocks("python")
    desk.keep("train.py", script)
    lines = [page.command(f"--nnodes 2 --node-rank {number}") for number in range(2)]
    one, other = (desk.begins(line.replace("node1", "127.0.0.1")) for line in lines)
    out, more = (each.communicate(timeout=300)[0] for each in (one, other))
    assert (one.returncode, other.returncode) == (0, 0), out + more
    assert [line for line in out.splitlines() if line.startswith("step")] == printed(losses)


def test_train_on_four_ranks(desk: Desk) -> None:
    """Each of four processes prints the losses of one that plays four ranks."""
    page = Page("install.md")
    _, train = page.blocks("python")
    desk.keep("train.py", train)
    told = desk.does(page.told("torchrun --nproc-per-node 4 train.py"))  # lines of processes may run together
    assert re.findall(r"\d\.\d{4}", told) == printed(train)[0].split() * 4


def test_read_a_plan(desk: Desk) -> None:
    page = plan_and_model(desk)
    assert "ZeRO-1" in desk.does(page.told("python -m sbpflow.examples zero1"))
    told = desk.does(page.command("check my.plan mine.py:build"))
    assert "ok   expect 1 all_reduce over tensor forward: 1 all_reduce" in told
    assert re.search(r"parameters .*, gradients .*, states .*, activations ", told)
    explained = desk.does(page.command("explain my.plan mine.py:build"))
    assert re.search(r"all_reduce", explained)
    assert "mine.py:5" in explained  # the line of the loss


def test_write_a_plan(desk: Desk) -> None:
    """One in a program, one in a file; a line that is wrong is shown."""
    page = plan_and_model(desk)
    block, *_ = page.blocks("python", under="Running a plan")
    desk.keep("run.py", "import sbpflow as flow", block)
    assert desk.does("python run.py").splitlines() == printed(block)
    desk.keep("my.plan", page.block("text", "0: tensor=S(0)").replace("S(1)", "S(2)"))
    assert "my.plan, line 3: " in desk.does(page.command("check my.plan mine.py:build"), code=2)


def test_find_why_a_step_is_slow(desk: Desk) -> None:
    block, *_ = Page("debugging.md").blocks("python", under="It is slow")
    desk.keep("slow.py", "import sbpflow as flow", block, "print(found)")
    told = desk.does("python slow.py")
    assert "busiest queue: device 1 on rank 1" in told
    assert "rank 1 works for " in told
    assert "another cut of the layers" in told
    assert json.loads((desk.folder / "step.json").read_text())["traceEvents"]


def test_fit_a_model_into_less_memory(desk: Desk) -> None:
    """The plan that is found stays within what the one that was written takes too much of, and trains."""
    page = plan_and_model(desk)
    assert "wrote small.plan" in desk.does(page.command("--memory 0.04"))
    told = desk.does(page.command("diff my.plan small.plan") + " --json")
    written, found = map(int, re.findall(r'^ +"memory": (\d+),$', told, re.MULTILINE))
    assert written > 0.04 * 2**30 >= found
    train = page.block("py", 'plan="small.plan"')
    desk.keep("train.py", train)
    assert desk.does("python train.py").splitlines() == printed(train)
    told = desk.does(page.told("torchrun --nproc-per-node 4 train.py"))
    losses = printed(train)[0].split()
    assert sorted(re.findall(r"\d\.\d{4}", told)) == sorted(losses * 4)  # lines of processes may run together
    plan = desk.folder / "small.plan"
    plan.write_text(re.sub(r"(?<=expect memory <= )\d+", "1000", plan.read_text()))
    assert "line 9: this does not hold: the fullest rank takes 40 MiB" in desk.does("python train.py", code=1)


def plan_and_model(desk: Desk) -> Page:
    """The files that the page of plans shows."""
    page = Page("plans.md")
    desk.keep("mine.py", page.block("python", "def build"))
    desk.keep("my.plan", page.block("text", "0: tensor=S(0)"))
    return page


def test_save_and_resume_elsewhere(desk: Desk) -> None:
    """Two processes save; one, which plays four ranks by another plan, goes on to the same loss."""
    page = Page("checkpoints.md")
    model, save, resume, *_ = page.blocks("python")
    desk.keep("save.py", model, save)
    desk.keep("resume.py", model, resume)
    told = desk.does(page.told("torchrun --nproc-per-node 2"))
    assert re.findall(r"\d\.\d{5}", told) == printed(save) * 2
    assert desk.does("python resume.py").splitlines() == printed(resume)
    assert printed(resume)[-1:] == printed(save)


def test_an_op_of_ones_own(desk: Desk) -> None:
    blocks = Page("reference/rules.md").blocks("python")[:4]
    desk.keep("gate.py", *blocks)
    assert desk.does("python gate.py").splitlines() == [line for block in blocks for line in printed(block)]


def test_port_a_script_of_fsdp2(desk: Desk) -> None:
    blocks = Page("moving/fsdp.md").blocks("python")
    desk.keep("ported.py", *blocks)
    assert desk.does("python ported.py").splitlines() == [line for block in blocks for line in printed(block)]


def test_the_front_page_names_the_page_of_each_task() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    table = (DOCS / "index.md").read_text(encoding="utf-8").partition("Ten tasks")[2].partition("```")[0]
    listed = re.findall(r"^\| .* \| \[.*\]\(([\w/.]+)", table, re.MULTILINE)
    assert len(listed) == 10
    assert {*listed} == {*re.findall(r'Page\("(.*?)"\)', source)}
