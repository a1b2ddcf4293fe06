"""How many files and sockets this process may have open: what the system lets it, not less.

Shells and service managers start programs with a soft limit of 1,024 for the sake of `select`,
which nothing here uses, and a hard one that is far higher. Children inherit what is raised here.
"""

import resource

DESCRIPTORS_MAX = 1 << 20  # Linux' own default for the hard limit; some containers give a billion


def raise_limit() -> int:
    """Raise the soft limit to the hard one; the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # macOS names a hard limit that its kernel does not grant
            return soft
        return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft
