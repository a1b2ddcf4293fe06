"""Looking for garbage seldom, and still finding it."""

import subprocess
import sys

PROGRAM = """
import gc, weakref
from infra.process import NEW_MAX, collect_seldom

class Node:
    def __init__(self):
        self.me = self

collect_seldom()
print(gc.get_threshold()[0] == NEW_MAX, gc.get_freeze_count() > 1000)
first = weakref.ref(Node())
alive = [[] for _ in range(NEW_MAX // 2)]
print(first() is None)
alive += [[] for _ in range(NEW_MAX)]
print(first() is None)
"""


def test_what_was_imported_is_left_out_and_cycles_are_found_after_many_new_objects():
    # A process of its own: this one's collector must stay as it is.
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "False", "True"]
