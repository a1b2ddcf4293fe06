"""Any OpenAI-compatible server of which nothing but the API is known.

There is no page to read. The queue stays unknown, what runs is what the agent handed over
(`counts_own`), and a small cap on outstanding requests stands in for the engine's own word.
"""

from agents.adapters.page import Page
from agents.core.reading import NOTHING_KNOWN, EngineReading


def read(page: Page) -> EngineReading:
    """Nothing: such a server has no page of its own words."""
    return NOTHING_KNOWN
