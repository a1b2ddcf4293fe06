"""When a process that serves looks for garbage in cycles: seldom.

Requests leave no cycles behind, so reference counts free all that they leave. Python's default of
700 new containers is reached by a few dozen requests under way, all of them alive, and looking
through them again and again was a sixth to a quarter of the CPU time of a request. What is left to
find comes with the growth of tables, which is slow.
"""

import gc

# Containers made and not freed before a look: some 500 requests under way, 10 MB if all were
# garbage. Older generations are looked at after so many looks at the one before.
NEW_MAX = 50_000
LOOKS = (20, 20)


def look_seldom() -> None:
    """Once, when all is imported: that is left out from now on, the rest is seldom looked at."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_MAX, *LOOKS)
