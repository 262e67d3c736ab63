"""python -m tools.played_card python script.py     runs a command whose torch finds cards that are played"""

import os
import sys

from .build import environment

os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **environment()})
