"""Where there is no CUDA device these tests are not collected, unless one asks for that; nothing else needs one."""

import os

import torch

collect_ignore_glob = [] if torch.cuda.is_available() or os.environ.get("SBPFLOW_COLLECT_GPU") else ["test_*.py"]
