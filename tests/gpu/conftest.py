"""Where there is no CUDA device these tests are not collected, unless one asks for that; nothing else needs one."""

import os

import torch

# A test leaves no process behind, and inductor would leave those that compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
collect_ignore_glob = [] if torch.cuda.is_available() or os.environ.get("SBPFLOW_COLLECT_GPU") else ["test_*.py"]
