"""For programs that call a mesh: requests go to the nearest healthy region, then to the next.

The mesh itself imports nothing of this package, and the package only the standard library. It
works with any SDK that takes a base URL.

    regions = Regions(urls, lambda url: OpenAI(base_url=url, api_key="unused", max_retries=0))
    answer = regions.call(lambda client: client.chat.completions.create(…))
"""

from mesh.client.regions import AsyncRegions, Regions

__all__ = ["AsyncRegions", "Regions"]
