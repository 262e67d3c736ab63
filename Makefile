# `make demo` and `make test` need only Python >= 3.11: the first run makes .venv, later ones start at once.
# PYTHON=python3.13 picks another interpreter for .venv.

# An environment may ask Python to keep no compiled files, and each process of a test would compile all modules anew.
export PYTHONDONTWRITEBYTECODE :=

RUN := .venv/bin/python
PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3)

.PHONY: demo test docs lint style sweep rest quick bench gpu hosts clean

demo: .venv/.ready
	@$(RUN) -m sbpflow demo
	@echo; $(RUN) examples/gpt.py --check
	@echo; $(RUN) examples/pipeline.py --check
	@echo; echo "to open: out/*.svg in a browser (pipeline.svg is the boxing graph), out/timeline.json at https://ui.perfetto.dev"

# mypy goes on beside the tests; those that run alone come behind it, as one of them reads what it has learnt of torch.
test: style
	@echo "tests: pytest, doctests, the README's code; beside them mypy"
	@mkdir -p .mypy_cache; $(RUN) -m mypy > .mypy_cache/found 2>&1 & types=$$!; trap 'kill $$types 2> /dev/null' INT TERM; \
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n 2 --dist worksteal -m "not alone" --doctest-modules tests sbpflow; \
	tests=$$?; wait $$types; types=$$?; cat .mypy_cache/found; [ $$tests = 0 ] && [ $$types = 0 ]
	@$(RUN) -m pytest -q -m alone $$(grep -rl "mark.alone" tests --include='test_*.py')

# The site of docs/, for a browser: out/site/index.html. A link that leads nowhere is an error.
docs: .venv/.ready
	@$(RUN) -m sphinx -b html -q -W --keep-going -d out/doctrees docs out/site
	@echo "to open: out/site/index.html"

lint: style
	@echo "lint: mypy"
	@$(RUN) -m mypy

style: .venv/.ready
	@echo "style: ruff format, ruff check"
	@$(RUN) -m ruff format --check -q .
	@$(RUN) -m ruff check -q .

sweep: .venv/.ready
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -q --sweep -n 2 --dist worksteal -m "sweep and not alone" tests

# What the sweep leaves out: other rows of the tables of families, other seeds, and what `make quick` runs.
rest: .venv/.ready
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -q --rest -n 2 --dist worksteal -m rest tests

# Every script of benchmarks/ runs at all, in its quick form.
quick: .venv/.ready
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -q --rest -n 2 --dist worksteal -m rest tests/test_benchmarks.py

bench: .venv/.ready
	@$(RUN) benchmarks/boxing.py

# Hosts that are played take the processor in turn: one test after the other, then the table.
hosts: .venv/.ready
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -q -m hosts tests
	@OMP_NUM_THREADS=1 $(RUN) -m benchmarks.hosts

gpu: .venv/.ready
	@$(RUN) tools/gpu.py

clean:
	rm -rf .venv build dist out *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/.ready: pyproject.toml tools/setup_env.py Makefile
	@for py in $(PYTHONS); do \
	    if $$py -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        exec $$py tools/setup_env.py; \
	    fi; \
	done; \
	echo "setup: no Python >= 3.11 with venv among: $(PYTHONS) (on Debian: apt install python3 python3-venv)" >&2; \
	exit 1
