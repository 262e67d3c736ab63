"""Where there is no CUDA device these tests are not collected; nothing else of the suite needs one."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
